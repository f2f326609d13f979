"""Python code inside a checkpoint runs only when the user says so."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import fips
from fips.checkpoint.source import open_source
from fips.models.kinds import TEXT_ENCODER
from fips.plan import make_plan
from tests.command import QUICK, refused, run
from tests.families import edit_config

_CONFIG = """\
from pathlib import Path
from transformers import LlamaConfig

Path({marker!r}).touch()


class MyConfig(LlamaConfig):
    model_type = "my_llama"
"""
_MODEL = """\
from pathlib import Path
from transformers import LlamaForCausalLM
from .configuration_my import MyConfig

Path({marker!r}).touch()


class MyModel(LlamaForCausalLM):
    config_class = MyConfig
"""


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Exists once the checkpoint's code has run. transformers copies such code to a cache, here one of our own."""
    monkeypatch.setattr(sys, "path", [*sys.path])  # the cache is put there, and stays no longer than the test
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    return tmp_path / "executed"


@pytest.fixture
def source(llama: Path, marker: Path) -> Path:
    """A tiny model whose configuration and model class lie beside the weights."""
    folder = marker.parent / "model"
    shutil.copytree(llama, folder)
    (folder / "configuration_my.py").write_text(_CONFIG.format(marker=str(marker)))
    (folder / "modeling_my.py").write_text(_MODEL.format(marker=str(marker)))
    edit_config(folder, model_type="my_llama", architectures=["MyModel"], auto_map={
        "AutoConfig": "configuration_my.MyConfig", "AutoModelForCausalLM": "modeling_my.MyModel"})  # fmt: skip
    return folder


def argv(source: Path, calibration: Path) -> list[object]:
    return ["compress", source, source.parent / "out", *QUICK, "--calibration", calibration]


def test_code_of_an_unknown_model_type_is_refused_and_not_run(source: Path, marker: Path, calibration: Path) -> None:
    words = ["'my_llama'", "--trust-remote-code"]
    refused(*argv(source, calibration), code=1, words=words, watched=marker.parent)
    refused("inspect", source, code=1, words=words, watched=marker.parent)
    refused("evaluate", source, "--text", calibration, code=1, words=words, watched=marker.parent)
    assert not marker.exists()


def test_a_flag_inside_the_checkpoint_does_not_count(source: Path, marker: Path, calibration: Path) -> None:
    edit_config(source, trust_remote_code=True)
    refused(*argv(source, calibration), code=1, words=["--trust-remote-code"], watched=marker.parent)
    assert not marker.exists()


def test_transformers_own_class_is_preferred_to_untrusted_code(source: Path, marker: Path, calibration: Path) -> None:
    edit_config(source, model_type="llama", architectures=["LlamaForCausalLM"])
    assert run(*argv(source, calibration)).code == 0
    assert not marker.exists()


def test_trusted_code_runs_and_the_result_loads_with_it(source: Path, marker: Path, calibration: Path) -> None:
    result = run(*argv(source, calibration), "--trust-remote-code", "--json")
    assert result.code == 0, result.err
    assert marker.exists()
    assert len(json.loads(result.out)["groups"]) == 2
    model = AutoModelForCausalLM.from_pretrained(source.parent / "out", trust_remote_code=True)
    assert type(model).__name__ == "MyModel"
    assert torch.isfinite(model(input_ids=torch.arange(3, 9)[None]).logits).all()
    push = ["push", source.parent / "out", "alice/small", "--dry-run", "-q"]
    assert "--trust-remote-code" in run(*push).err
    assert run(*push, "--trust-remote-code").code == 0
    assert "--trust-remote-code" in (source.parent / "out" / "README.md").read_text()


def test_a_trusted_encoder_is_no_language_model(source: Path, marker: Path, calibration: Path) -> None:
    edit_config(source, auto_map={
        "AutoConfig": "configuration_my.MyConfig", "AutoModelForMaskedLM": "modeling_my.MyModel",
        "AutoModelForCausalLM": "modeling_my.AnotherModel"})  # fmt: skip
    plan = make_plan(open_source(source), fips.CompressionConfig(), trust_remote_code=True)
    assert plan.reads == TEXT_ENCODER
    assert marker.exists()


def test_trusted_code_that_fails(source: Path, marker: Path, calibration: Path) -> None:
    (source / "configuration_my.py").write_text("raise RuntimeError('not for this machine')")
    refused(*argv(source, calibration), "--trust-remote-code", code=1, words=["not for this machine"], early=True,
            watched=source)  # fmt: skip
