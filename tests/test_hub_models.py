"""Models of the Hub as sources: inspected, loaded and compressed, downloaded by the real client."""

import json
import shutil
from pathlib import Path

import torch

import fips
from fips.checkpoint.folder import file_digest
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


def test_a_published_model_is_verified_and_exported(
    hub: HubServer, compressed: Path, llama: Path, tmp_path: Path
) -> None:
    """With every file that its report names, of whatever kind, and from any branch."""
    out = Path(shutil.copytree(compressed, tmp_path / "out"))
    report = json.loads((out / "fips_report.json").read_text())
    for name in ("fips_groups.png", "USE [1].policy", "assets/a.yaml"):
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text(name)
        report["side_files"][name] = file_digest(out / name)
    (out / "fips_report.json").write_text(json.dumps(report))
    fips.push(out, REPO, PushConfig(revision="half"))
    done = run("verify", REPO, "--revision", "half", "--no-load", "-q")
    assert (done.code, done.err) == (0, ""), done.out
    assert run("export", REPO, tmp_path / "dense", "--revision", "half", "-q").code == 0
    assert (tmp_path / "dense" / "assets" / "a.yaml").read_text() == "assets/a.yaml"
    assert run("verify", llama, "--revision", "half", "-q").code == 1


def test_a_model_of_the_hub_is_compressed(hub: HubServer, llama: Path, settings, tmp_path: Path) -> None:
    from fips.checkpoint.source import open_source

    card = b"---\nlicense: mit\nlanguage:\n- en\n---\nThe dense model."
    repo = hub.add_repo(
        "bob/dense",
        {**contents(llama), "README.md": card, "onnx/model.onnx": b"not wanted", "USE_POLICY.md": b"wanted"},
    )
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
    assert tree(tmp_path / "out").keys() == {*tree(tmp_path / "local"), "USE_POLICY.md"}
    assert fips.push(tmp_path / "out", REPO).commit
