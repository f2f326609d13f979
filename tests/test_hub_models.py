"""Models of the Hub as sources: inspected, loaded and compressed, downloaded by the real client."""

import json
from pathlib import Path

import torch

import fips
from fips.publishing import PushConfig
from tests.command import run, tree
from tests.hub_client import REPO, contents
from tests.hub_state import HubServer
from tests.test_families import logits


def test_a_compressed_model_of_the_hub_is_inspected_and_loaded(hub: HubServer, compressed: Path) -> None:
    fips.push(compressed, REPO, PushConfig(revision="half"))
    assert run("inspect", REPO, "-q").code == 1  # nothing on the default branch
    found = json.loads(run("inspect", REPO, "--revision", "half", "--json", "-q").out)
    assert found["groups"] == fips.inspect(compressed).to_dict()["groups"]
    assert torch.equal(logits(fips.load(REPO, revision="half")), logits(fips.load(compressed)))


def test_a_model_of_the_hub_is_compressed(hub: HubServer, llama: Path, settings, tmp_path: Path) -> None:
    from fips.checkpoint.source import open_source

    card = b"---\nlicense: mit\nlanguage:\n- en\n---\nThe dense model."
    repo = hub.add_repo("bob/dense", {**contents(llama), "README.md": card, "onnx/model.onnx": b"not wanted"})
    repo.refs["v1"] = repo.refs["main"]
    repo.commit("main", {"config.json": b"{}"}, "broken")
    source = open_source("bob/dense", "v1")
    assert (source.name, len(source.infos) > 0) == ("bob/dense", True)
    fips.compress("bob/dense", tmp_path / "out", settings(), revision="v1")
    assert not hub.sent("GET", "model.onnx")
    fips.compress(llama, tmp_path / "local", settings())
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (tmp_path / "local/model.safetensors").read_bytes()
    report = json.loads((tmp_path / "out" / "fips_report.json").read_text())
    assert report["origin"] == {"name": "bob/dense", "hub_id": "bob/dense", "commit": repo.refs["v1"],
                                "task": "text-generation",
                                "metadata": {"license": "mit", "language": ["en"]}}  # fmt: skip
    assert tree(tmp_path / "out").keys() == tree(tmp_path / "local").keys()
    assert fips.push(tmp_path / "out", REPO).commit
