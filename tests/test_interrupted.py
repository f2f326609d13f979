"""What lies at OUT after an interruption, a failure, or an earlier model: the old whole or the new whole."""

import errno
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import fips
from fips.checkpoint.plot import PLOT_NAME
from fips.checkpoint.workdir import output_folder
from fips.errors import NumericalError, OutputError
from tests.command import QUICK, refused, tree
from tests.families import write_model


def begin(llama: Path, calibration: Path, out: Path, *options: str) -> subprocess.Popen[str]:
    """Starts a run that would take very long, and returns when it has begun to write."""
    argv = [llama, out, *QUICK, "--recipe", "paper", "--steps", "1000000", "--calibration", calibration, *options]
    # A test run in the background ignores Ctrl-C, and so would its children.
    process = subprocess.Popen([sys.executable, "-m", "fips", "compress", *map(str, argv)], text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))  # fmt: skip
    deadline = time.monotonic() + 120
    while not any(p.name.startswith(".") for p in out.parent.iterdir()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return process


@pytest.mark.parametrize("kill", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_nothing(kill: signal.Signals, llama: Path, calibration: Path, tmp_path: Path,
                                           ) -> None:  # fmt: skip
    process = begin(llama, calibration, tmp_path / "out")
    process.send_signal(kill)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Interrupted" in err
    assert "Traceback" not in err
    assert out == ""
    assert not list(tmp_path.iterdir())


def test_an_interrupted_overwrite_leaves_the_old_model(llama: Path, compressed: Path, calibration: Path, tmp_path: Path,
                                                       ) -> None:  # fmt: skip
    shutil.copytree(compressed, tmp_path / "out")
    before = tree(tmp_path)
    process = begin(llama, calibration, tmp_path / "out", "--overwrite")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert tree(tmp_path) == before


def test_overwriting_replaces_the_folder_whole(llama: Path, compressed: Path, settings, tmp_path: Path) -> None:
    out = tmp_path / "out"
    fips.compress(llama, out, settings(max_shard_size=20_000))
    (out / "vocab.txt").write_text("of the old model")
    assert (out / "model.safetensors.index.json").exists()
    assert len(list(out.glob("*.safetensors"))) > 2
    fips.compress(llama, out, settings(), overwrite=True)
    assert {p.name for p in out.rglob("*")} == {p.name for p in compressed.rglob("*")} - {PLOT_NAME}
    assert (out / "model.safetensors").read_bytes() == (compressed / "model.safetensors").read_bytes()
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_failed_overwrite_leaves_the_old_model(llama: Path, compressed: Path, settings, tmp_path: Path) -> None:
    source = Path(shutil.copytree(llama, tmp_path / "source"))
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"].mul_(1e6)  # too large for float16, which is only noticed when it is written
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    shutil.copytree(compressed, tmp_path / "out")
    before = tree(tmp_path)
    with pytest.raises(NumericalError, match=r"lm_head\.weight"):
        fips.compress(source, tmp_path / "out", settings(dtype="float16"), overwrite=True)
    assert tree(tmp_path) == before


def test_an_empty_folder_may_be_filled(llama: Path, settings, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    fips.compress(llama, tmp_path / "out", settings(steps=0))
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_disk_that_fills_up_on_the_way(llama: Path, calibration: Path, tmp_path: Path,
                                         monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("fips.checkpoint.save.write_shards", full)
    refused("compress", llama, tmp_path / "out", *QUICK, "--calibration", calibration, code=1, early=False,
            words=["out cannot be written", "No space left on device"], watched=tmp_path)  # fmt: skip


def test_an_old_folder_comes_back_when_the_new_one_cannot_be_put_in_place(tmp_path: Path,
                                                                         monkeypatch: pytest.MonkeyPatch,
                                                                         ) -> None:  # fmt: skip
    out = tmp_path / "out"
    out.mkdir()
    (out / "old").write_text("old")
    real = Path.rename

    def rename(self: Path, target: Path) -> Path:
        if Path(target) == out and not self.name.endswith(".old"):
            raise OSError("disk failure")
        return real(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(OutputError, match="out cannot be written: disk failure"), output_folder(out) as folder:
        (folder / "new").write_text("new")
    assert tree(tmp_path) == {"out": b"", "out/old": b"old"}


def test_an_input_feature_that_is_never_active_is_named_in_the_report(llama: Path, settings, tmp_path: Path) -> None:
    source = Path(shutil.copytree(llama, tmp_path / "source"))
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.gate_proj.weight"][[3, 40]] = 0  # act(0) · up = 0: two dead inputs of down_proj
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    report = fips.compress(source, tmp_path / "out", settings())
    assert any("2 of model.layers.1.mlp.down_proj" in note for note in report.notes)
    dead = {name: count for group in report.groups for name, count in group.dead_features.items()}
    assert dead == {"model.layers.1.mlp.down_proj": 2}
    assert json.loads((tmp_path / "out" / "fips_report.json").read_text())["notes"] == report.notes
    logits = fips.load(tmp_path / "out")(input_ids=torch.arange(3, 20)[None]).logits
    assert torch.isfinite(logits).all()


def test_a_model_of_zeros_compresses(settings, tmp_path: Path) -> None:
    """Every direction is degenerate and every activation of the MLP dead."""
    source = write_model("llama", tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        if ".mlp." in name:
            tensor.zero_()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    report = fips.compress(source, tmp_path / "out", settings())
    assert report.verified
    ids = torch.arange(3, 20)[None]
    from transformers import AutoModelForCausalLM

    dense, ours = (AutoModelForCausalLM.from_pretrained(p)(input_ids=ids).logits for p in (source, tmp_path / "out"))
    torch.testing.assert_close(ours, dense)
