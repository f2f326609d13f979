"""Wrong settings, outputs and texts: one clear line, before any long work, and nothing left behind."""

import json
import os
import shutil
import sys
import types
from pathlib import Path

import pytest

import fips
from fips.data.texts import read_dataset
from fips.errors import CalibrationError, ConfigError
from fips.models.sites import Site
from fips.stages.grouping import group_blocks
from tests.command import QUICK, refused
from tests.families import random_text


@pytest.fixture
def compress(llama: Path, calibration: Path, tmp_path: Path):
    """Checks that a compression of the tiny Llama is refused."""

    def check(*options: object, code: int, words: list[str], out: Path | None = None, **more: object) -> str:
        text = [] if "--calibration" in options else ["--calibration", calibration]
        return refused("compress", llama, out or tmp_path / "out", *QUICK, *text, *options, code=code, words=words,
                       watched=tmp_path, **more)  # fmt: skip

    return check


@pytest.mark.parametrize(("options", "words"), [
    (["--budget", "0"], ["budget", "0.0"]),
    (["--budget", "1.5"], ["budget", "1.5"]),
    (["--budget", "nan"], ["budget", "nan"]),
    (["--sparsity", "1"], ["sparsity", "1.0"]),
    (["--sparsity", "-0.1"], ["sparsity", "-0.1"]),
    (["--steps", "-1"], ["steps", "-1"]),
    (["--learning-rate", "0"], ["learning_rate"]),
    (["--weight-decay", "-1"], ["weight_decay"]),
    (["--seed", "-1"], ["seed"]),
    (["--group-size", "0"], ["group_size", "0"]),
    (["--batch-tokens", "0"], ["batch_tokens"]),
    (["--mask-interval", "0"], ["mask_interval"]),
    (["--sequence-length", "1"], ["sequence_length"]),
    (["--calibration-tokens", "31"], ["calibration_tokens", "31", "32"]),
    (["--max-shard-size", "0"], ["size"]),
    (["--max-shard-size", "5 boxes"], ["size", "5 boxes"]),
    (["--groups", "0-x"], ["groups", "0-x"]),
    (["--groups", ""], ["groups"]),
    (["--groups", "2-0"], ["groups", "2-0"]),
    (["--groups", "0,2"], ["groups", "block 1"]),
    (["--groups", "0-1,1-2"], ["groups", "block 1", "two groups"]),
    (["--groups", "0-1,2-3"], ["groups", "block 3", "0 to 2"]),
    (["--groups", "0-1"], ["groups", "block 2"]),
    (["--groups", "2,0-1"], ["groups", "order"]),
    (["--include", "*.gate_proj", "--include", "*.wrong"], ["include", "'*.wrong'", "model.layers.0.mlp.gate_proj"]),
    (["--budget", "0.99"], ["budget", "blocks_0_1"]),
    (["--budget", "0.0001"], ["budget", "0.0001"]),
    (["--schedule", "linear"], ["schedule", "linear"]),
    (["--device", "tpu"], ["device", "tpu"]),
    (["--device", "mps"], ["device", "mps"]),
    (["--colour", "red"], ["--colour"]),
])  # fmt: skip
def test_wrong_settings(options: list[str], words: list[str], compress) -> None:
    compress(*options, code=2, words=words)


def test_a_device_that_is_not_there(compress) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    compress("--device", "cuda", code=2, words=["device", "'cuda'"])


def test_settings_of_the_library_alone() -> None:
    for name in ("objective", "inputs", "schedule", "dtype"):
        with pytest.raises(ConfigError, match=name):
            fips.CompressionConfig(**{name: "wrong"})
    with pytest.raises(ConfigError, match="recipe is 'fast'"):
        fips.CompressionConfig.from_recipe("fast")


def test_a_group_across_a_change_of_width() -> None:
    sites = [Site(f"b.{i}", f"b.{i}", i, "up", d, 64, transposed=True) for i, d in enumerate((16, 16, 32))]
    assert group_blocks(sites, [0, 0, 0], 4, None) == [(0, 1), (2, 2)]
    with pytest.raises(ConfigError, match=r"1-2 joins blocks of different width \(\[16, 32\]\)"):
        group_blocks(sites, [0, 0, 0], 4, [(0, 0), (1, 2)])


def test_outputs_that_cannot_be_written(compress, llama: Path, tmp_path: Path) -> None:
    full, file, link = tmp_path / "full", tmp_path / "file", tmp_path / "link"
    full.mkdir()
    (full / "mine.txt").write_text("mine")
    file.write_text("mine")
    link.symlink_to(tmp_path / "nowhere")
    compress(out=full, code=1, words=["full", "not empty", "--overwrite"])
    compress("--overwrite", out=full, code=1, words=["full", "does not hold a model", "not overwritten"])
    compress(out=file, code=1, words=["file", "not a folder"])
    compress(out=link, code=1, words=["link", "not a folder"])
    compress(out=tmp_path / "no" / "out", code=1, words=[str(tmp_path / "no"), "does not exist"])
    for out in (llama, llama / "out", llama.parent):
        before = sorted(llama.rglob("*"))
        compress("--overwrite", out=out, code=1, words=["overlaps the source"])
        assert sorted(llama.rglob("*")) == before


def test_a_parent_that_is_not_writable(compress, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() == 0:  # root may write everywhere
        monkeypatch.setattr("fips.checkpoint.workdir.os.access", lambda path, mode: path != tmp_path.resolve())
    else:
        tmp_path.chmod(0o555)
    compress(code=1, words=[str(tmp_path), "not writable"])
    tmp_path.chmod(0o755)


def test_a_disk_without_room(compress, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: shutil._ntuple_diskusage(10**9, 10**9, 1000))
    compress(code=1, words=["1,000 free", "bytes needed"])


@pytest.mark.parametrize(("name", "content", "words"), [
    ("missing.txt", None, ["missing.txt", "no such text file"]),
    ("notes.md", b"words", ["notes.md", ".txt or .jsonl"]),
    ("empty.txt", b"", ["empty.txt", "no text"]),
    ("blank.txt", b" \n\n ", ["blank.txt", "no text"]),
    ("latin.txt", "caf\u00e9".encode("latin-1") * 100, ["latin.txt", "not UTF-8", "byte 3"]),
    ("short.txt", b"too short", ["short.txt", "fewer tokens than one sequence of 32"]),
    ("empty.jsonl", b"\n\n", ["empty.jsonl", "no text"]),
    ("broken.jsonl", b'{"text": "a"}\n{"text": ', ["broken.jsonl, line 2", "not JSON"]),
    ("list.jsonl", b'["text"]', ["list.jsonl, line 1", "`messages`"]),
    ("number.jsonl", b'{"text": "a"}\n\n{"text": 3}', ["number.jsonl, line 3", "`text`"]),
    ("chat.jsonl", json.dumps({"messages": [{"role": "user", "content": "a"}]}).encode(),
     ["chat.jsonl, line 1", "no chat template"]),
])  # fmt: skip
def test_texts_that_cannot_calibrate(name: str, content: bytes | None, words: list[str], compress,
                                     tmp_path: Path) -> None:  # fmt: skip
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    compress("--calibration", path, code=1, words=words)


def test_a_folder_is_no_text(compress, tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    words = ["texts", "is a language model; name a .txt or .jsonl file"]
    compress("--calibration", tmp_path / "texts", code=1, words=words)


def test_messages_that_the_chat_template_refuses(llama: Path, tmp_path: Path) -> None:
    source, text = tmp_path / "chat", tmp_path / "chat.jsonl"
    shutil.copytree(llama, source)
    (source / "chat_template.jinja").write_text("{{ raise_exception('only users may speak') }}")
    text.write_text(json.dumps({"messages": [{"role": "system", "content": "a"}]}))
    refused("compress", source, tmp_path / "out", *QUICK, "--calibration", text, code=1,
            words=["chat.jsonl, line 1", "only users may speak"], watched=tmp_path)  # fmt: skip


def test_a_data_set_without_the_package(compress, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    compress("--calibration", "owner/words", code=1, words=["owner/words", "fips[datasets]"])


def test_data_sets_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[dict[str, str]] = [{"text": " "}, {"text": "\n"}]
    asked: list[tuple[object, ...]] = []

    def load_dataset(*args: object, **kwargs: object) -> list[dict[str, str]]:
        asked.append((*args, kwargs["split"]))
        return rows

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(CalibrationError, match="'owner/words:en' holds no text"):
        read_dataset("owner/words:en", "train")
    assert asked == [("owner/words", "en", "train")]
    rows[0] = {"sentence": "a"}
    with pytest.raises(CalibrationError, match="'owner/words' cannot be read"):
        read_dataset("owner/words", "test")
    rows[:] = [{"text": "a"}, {"text": "b"}]
    assert read_dataset("owner/words", "test").content == "a\n\nb"


@pytest.mark.parametrize(("options", "code", "words"), [
    ([], 2, ["text", "data set"]),
    (["--text", "TEXT", "--dataset", "owner/words"], 2, ["text", "data set"]),
    (["--text", "TEXT", "--length", "1"], 2, ["length", "1"]),
    (["--text", "TEXT", "--bos", "often"], 2, ["bos", "often"]),
    (["--text", "TEXT", "--runtime", "fast"], 2, ["runtime", "fast"]),
    (["--text", "missing.txt"], 1, ["missing.txt", "no such text file"]),
    (["--text", "SHORT"], 1, ["short.txt", "fewer tokens than one window of 64"]),
    (["--text", "TEXT", "--baseline", "./missing"], 1, ["./missing", "no such folder"]),
    (["--dataset", "owner/words"], 1, ["owner/words"]),
])  # fmt: skip
def test_evaluations_that_cannot_be_done(options: list[str], code: int, words: list[str], llama: Path, tmp_path: Path,
                                         ) -> None:  # fmt: skip
    (tmp_path / "text.txt").write_text(random_text(200))
    (tmp_path / "short.txt").write_text(random_text(30))
    files = {"TEXT": str(tmp_path / "text.txt"), "SHORT": str(tmp_path / "short.txt")}
    refused("evaluate", llama, "--device", "cpu", "-q", *[files.get(o, o) for o in options], code=code, words=words,
            watched=tmp_path)  # fmt: skip


def test_a_bos_that_the_tokenizer_does_not_have(llama: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(llama, model)
    path = model / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "bos_token": None}))
    (tmp_path / "text.txt").write_text(random_text(200))
    refused("evaluate", model, "--text", tmp_path / "text.txt", "--bos", "every", "--device", "cpu", "-q", code=2,
            words=["bos", "'every'", "no BOS"], watched=tmp_path)  # fmt: skip
