"""`fips verify`: everything that is damaged is found, and nothing that is whole is called damaged."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import fips
from fips.errors import FormatError, SourceError
from fips.verification import Verification
from tests.command import run
from tests.families import FAMILIES, edit_config, write_model

UP = "model.layers.0.mlp.up_proj"
NORM = "model.norm.weight"


@pytest.fixture
def copied(compressed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(compressed, tmp_path / "copied"))


def edit_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def status(result: Verification) -> dict[str, str]:
    return {check.name: check.status for check in result.checks}


def unrecorded(folder: Path) -> Path:
    """Without the report, so that only what the other checks find counts."""
    (folder / "fips_report.json").unlink()
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_whole(family: str, settings, tmp_path: Path) -> None:
    dense = write_model(family, tmp_path / "dense")
    report = fips.compress(dense, tmp_path / "out", settings(steps=0))
    result = fips.verify(tmp_path / "out", dense)
    assert result.ok, result.problems
    assert set(status(result).values()) == {"ok"}
    assert result.weight_errors.keys() == {f"{n}.weight" for g in report.groups for n in g.sparsity}


def test_weight_errors_are_those_of_the_loaded_model(compressed: Path, llama: Path) -> None:
    result = fips.verify(compressed, llama)
    model, source = fips.load(compressed), load_file(llama / "model.safetensors")
    for name, error in result.weight_errors.items():
        difference = (model.get_parameter(name) - source[name]).norm() / source[name].norm()
        assert error == pytest.approx(difference.item(), rel=1e-5)
    found = result.to_dict()
    assert found["max_weight_error"] == max(result.weight_errors.values())
    assert (found["ok"], found["problems"], found["against"]) == (True, [], str(llama))
    assert json.loads(json.dumps(found)) == found
    assert f"{found['max_weight_error']:.4f}" in result.table()


def test_another_dtype_and_shards(llama: Path, settings, tmp_path: Path) -> None:
    fips.compress(llama, tmp_path / "out", settings(steps=0, dtype="bfloat16", max_shard_size=20_000))
    result = fips.verify(tmp_path / "out", llama)
    assert result.ok, result.problems


def test_without_a_report_or_with_an_older_one(copied: Path) -> None:
    path = copied / "fips_report.json"
    report = json.loads(path.read_text())
    del report["side_files"]
    path.write_text(json.dumps(report))
    (copied / "notes.txt").write_text("mine")
    result = fips.verify(copied)
    assert result.ok
    assert "only the weights" in result.table()
    result = fips.verify(unrecorded(copied), load=False)
    assert result.ok
    assert status(result) == {"structure": "ok", "checksums": "skipped", "values": "ok", "load": "skipped"}
    assert "nothing is recorded" in result.table()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_one_bit_of_any_file(name: str, copied: Path) -> None:
    raw = bytearray((copied / name).read_bytes())
    raw[-1] ^= 1
    (copied / name).write_bytes(raw)
    result = fips.verify(copied, load=False)
    assert any(name in problem and "SHA-256" in problem for problem in result.problems)


def test_files_that_are_missing_or_new(copied: Path) -> None:
    (copied / "tokenizer.json").unlink()
    (copied / "adapter_config.json").write_text("{}")
    (copied / ".hidden").write_text("of the file system")
    found = fips.verify(copied, load=False).problems
    assert len(found) == 2
    assert "tokenizer.json is recorded in fips_report.json but missing" in found[0]
    assert "adapter_config.json is not among the files" in found[1]


def test_files_that_cannot_be_read_and_links(copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them is one problem, and the rest is looked at."""
    (tmp_path / "secret").write_text("mine")
    (copied / "a.txt").symlink_to(tmp_path / "secret")
    (copied / "generation_config.json").write_text("{}")
    (copied / "README.md").unlink()
    (copied / "README.md").symlink_to("nowhere")
    real = Path.open

    def broken(self: Path, *args: Any, **kwargs: Any) -> Any:
        if self.name == "tokenizer.json" and "rb" in args:
            raise OSError(5, "Input/output error")
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", broken)
    text = "\n".join(fips.verify(copied, load=False).problems)
    for words in ("a.txt is a link to", "a.txt is not among the files", "tokenizer.json cannot be read: ",
                  "generation_config.json is not what was written", "README.md leads nowhere"):  # fmt: skip
        assert words in text


def test_a_damaged_report(copied: Path) -> None:
    for text in (
        "{",
        "[]",
        "{}",
        '{"files": {}}',
        '{"files": {"a": 1}}',
        '{"files": {"a": "b"}, "side_files": 1}',
        "[" * 100_000,
    ):
        (copied / "fips_report.json").write_text(text)
        result = fips.verify(copied, load=False)
        assert status(result)["checksums"] == "failed"
        assert status(result)["values"] == "ok"


@pytest.mark.parametrize(("edit", "check", "words"), [
    (lambda t: t[f"{UP}.weight"][3:5].fill_(float("nan")), "values", [f"{UP}.weight", "2 NaN"]),
    (lambda t: t[NORM][1:2].fill_(float("inf")), "values", [NORM, "1 NaN"]),
    (lambda t: t[f"{UP}.mask"][2, 5:6].bitwise_xor_(4), "values", [f"{UP}.mask", "counts"]),
    (lambda t: t.pop(NORM), "structure", [NORM]),
    (lambda t: t.pop(f"{UP}.mask"), "structure", [f"{UP}.mask", "missing"]),
    (lambda t: t.update({NORM: torch.zeros(9)}), "structure", [NORM, "[9]", "[32]"]),
    (lambda t: t.update({NORM: torch.zeros(32, dtype=torch.int32)}), "structure", [NORM, "int32"]),
    (lambda t: t.update({f"{UP}.weight": t[f"{UP}.weight"].half()}), "structure", [f"{UP}.weight", "float16"]),
    (lambda t: t.update({f"{UP}.weight": t[f"{UP}.weight"].int()}), "structure", [f"{UP}.weight", "int32"]),
    (lambda t: t.update({"fips_bases.other": torch.zeros(3)}), "structure", ["fips_bases.other"]),
])  # fmt: skip
def test_damaged_tensors_without_a_record(edit: Any, check: str, words: list[str], copied: Path) -> None:
    edit_tensors(unrecorded(copied), edit)
    result = fips.verify(copied, load=False)
    assert status(result)[check] == "failed"
    assert any(all(word in problem for word in words) for problem in result.problems), result.problems


def test_everything_is_found_not_only_the_first(copied: Path, llama: Path) -> None:
    def damage(tensors: dict[str, torch.Tensor]) -> None:
        tensors.pop(f"{UP}.mask")
        tensors["model.layers.1.mlp.up_proj.weight"][:1] = float("nan")
        tensors["model.layers.2.self_attn.q_proj.weight"][0, 0] += 1

    edit_tensors(copied, damage)
    (copied / "tokenizer_config.json").write_text("{}")
    result = fips.verify(copied, llama)
    text = " | ".join(result.problems)
    for words in (f"{UP}.mask is missing", "layers.1.mlp.up_proj.weight holds 1 NaN", "q_proj.weight differs",
                  "tokenizer_config.json differs", "tokenizer_config.json is not what was written"):  # fmt: skip
        assert words in text
    assert (status(result)["weights"], status(result)["load"]) == ("skipped", "skipped")


def test_a_config_that_does_not_fit(copied: Path) -> None:
    for values, words in (({"vocab_size": 97}, "asks for [97, 32]"), ({"num_hidden_layers": 4}, "layers.3"),
                          ({"num_hidden_layers": 10**9}, "10"), ({"architectures": ["NoSuchModel"]}, "NoSuchModel"),
                          ({"architectures": ["Trainer"]}, "Trainer")):  # fmt: skip
        folder = Path(shutil.copytree(copied, copied.parent / f"with-{'-'.join(values)}-{words[:3]}"))
        edit_config(unrecorded(folder), **values)
        result = fips.verify(folder, load=False)
        assert any(words in problem for problem in result.problems), result.problems


def test_against_another_source(compressed: Path, tmp_path: Path) -> None:
    other = write_model("llama", tmp_path / "other", tied=True)
    (other / "more.txt").write_text("not copied")
    result = fips.verify(compressed, other, load=False)
    text = " | ".join(result.problems)
    assert "lm_head.weight is not in other" in text
    assert "more.txt of other is missing" in text
    assert "tie_word_embeddings is False; other has True" in text
    edited = write_model("qwen2", tmp_path / "qwen2")
    assert not fips.verify(compressed, edited, load=False).ok


def test_the_load_check_notices_what_only_loading_shows(copied: Path) -> None:
    edit_config(unrecorded(copied), hidden_act="no_such_activation")
    result = fips.verify(copied)
    assert any("no_such_activation" in problem for problem in result.problems)


def test_a_model_of_another_kind(compressed: Path, tmp_path: Path) -> None:
    """The class comes from `architectures`: a trunk that was saved alone is whole."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(compressed, quantization_config=fips.FipsConfig(runtime="packed"))
    model.save_pretrained(tmp_path / "trunk")
    assert fips.verify(tmp_path / "trunk").ok


def test_what_cannot_be_verified(llama: Path, compressed: Path, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="not a checkpoint compressed by fips"):
        fips.verify(llama)
    with pytest.raises(SourceError, match="no such folder"):
        fips.verify(tmp_path / "nothing")
    with pytest.raises(SourceError, match="already compressed"):
        fips.verify(compressed, compressed)


def test_the_command(copied: Path, llama: Path) -> None:
    done = run("verify", copied, "--against", llama, "-q")
    assert (done.code, done.err) == (0, "")
    assert "whole" in done.out
    assert "largest relative error" in done.out
    (copied / "README.md").write_text("another card")  # whoever publishes may write into it
    (copied / "config.json").write_text((copied / "config.json").read_text() + "\n")
    (copied / "a\x1b[31m\udcff.txt").write_text("")
    done = run("verify", copied, "--no-load", "-q")
    assert (done.code, done.err) == (1, "")
    assert "DAMAGED" in done.out
    assert "config.json is not what was written" in done.out
    assert "\x1b" not in done.out
    done.out.encode()
    done = run("verify", copied, "--no-load", "--json", "-q")
    assert done.code == 1
    found = json.loads(done.out)
    assert found["ok"] is False
    assert len(found["problems"]) == 2
    for number in range(25):
        (copied / f"{number}.txt").write_text("")
    assert "7 more; --json lists all" in run("verify", copied, "--no-load", "-q").out
