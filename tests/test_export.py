"""`fips export`: a compressed checkpoint as a dense one, equal bit for bit, that needs no fips."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM

import fips
from fips.checkpoint import workdir
from fips.checkpoint.dense import PackedCheckpoint
from fips.checkpoint.export import _card as export_card
from fips.checkpoint.folder import file_digest
from fips.errors import ConfigError, FormatError, OutputError, SourceError
from tests.command import run, tree
from tests.families import FAMILIES, edit_config, write_model
from tests.packed import write_packed

IDS = torch.arange(3, 35)[None]
UP = "model.layers.0.mlp.up_proj"


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def same(folder: Path, compressed: Path) -> None:
    """The export's logits are those of the compressed model, and its names and shapes those of a dense one."""
    expected = logits(fips.load(compressed))
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(folder)), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family: str, settings, tmp_path: Path) -> None:
    dense = write_model(family, tmp_path / "dense")
    fips.compress(dense, tmp_path / "packed", settings(steps=0))
    result = fips.export(tmp_path / "packed", tmp_path / "out")
    same(tmp_path / "out", tmp_path / "packed")
    source, ours = (load_file(f / "model.safetensors") for f in (dense, tmp_path / "out"))
    assert {n: (t.shape, t.dtype) for n, t in ours.items()} == {n: (t.shape, t.dtype) for n, t in source.items()}
    packed = json.loads((tmp_path / "packed" / "config.json").read_text())["quantization_config"]["groups"]
    members = {f"{m['name']}.weight" for g in packed for m in g["members"]}
    assert all(torch.equal(ours[n], source[n]) for n in ours if n not in members and not n.endswith(".bias"))
    assert (result.rebuilt, result.tensors) == (len(members), len(source))
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == json.loads((dense / "config.json").read_text())


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_way_to_store_a_basis(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    dense = write_model(family, tmp_path / "dense", dtype=dtype)
    packed = write_packed(family, dense, tmp_path / "packed", ("whole", "more", "alone"), dtype)
    result = fips.export(tmp_path / "packed", tmp_path / "out")
    same(tmp_path / "out", tmp_path / "packed")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    for site, group in packed:
        assert torch.equal(stored[f"{site.disk_name}.weight"], group.weight(site))
    assert result.dense_bytes == sum(t.numel() * t.element_size() for t in stored.values())


def test_a_square_matrix_of_gpt2_keeps_its_orientation(settings, tmp_path: Path) -> None:
    """With d = f no shape tells how a weight is stored."""
    from transformers import GPT2Config

    from tests.families import tokenizer

    torch.manual_seed(0)
    config = GPT2Config(n_embd=32, n_inner=32, n_layer=2, n_head=4, vocab_size=96, n_positions=64)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "dense")
    tokenizer().save_pretrained(tmp_path / "dense")
    fips.compress(tmp_path / "dense", tmp_path / "packed", settings(steps=0))
    fips.export(tmp_path / "packed", tmp_path / "out")
    same(tmp_path / "out", tmp_path / "packed")


@pytest.mark.parametrize("family", ["llama", "gemma", "gpt2"])
@pytest.mark.parametrize("tied", [True, False])
def test_ties_stay_as_they_were(family: str, tied: bool, settings, tmp_path: Path) -> None:
    dense = write_model(family, tmp_path / "dense", tied=tied)
    fips.compress(dense, tmp_path / "packed", settings(steps=0))
    fips.export(tmp_path / "packed", tmp_path / "out")
    assert load_file(dense / "model.safetensors").keys() == load_file(tmp_path / "out" / "model.safetensors").keys()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == tied
    same(tmp_path / "out", tmp_path / "packed")


def test_it_loads_without_fips(compressed: Path, tmp_path: Path) -> None:
    fips.export(compressed, tmp_path / "out")
    code = (
        "import sys, torch\nsys.modules['fips'] = None\ntorch.set_num_threads(1)\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        f"model = AutoModelForCausalLM.from_pretrained({str(tmp_path / 'out')!r})\n"
        f"AutoTokenizer.from_pretrained({str(tmp_path / 'out')!r})\n"
        f"torch.save(model(input_ids=torch.arange(3, 35)[None]).logits, {str(tmp_path / 'logits.pt')!r})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert torch.equal(torch.load(tmp_path / "logits.pt"), logits(fips.load(compressed)))


def test_side_files_config_card_and_shards(compressed: Path, llama: Path, tmp_path: Path) -> None:
    packed = Path(shutil.copytree(compressed, tmp_path / "packed"))
    (packed / "chat_template.jinja").write_bytes(b"{{ any }}\r\n")
    (packed / "sub").mkdir()
    (packed / "sub" / "notes.txt").write_bytes(b"\xff\x00")
    result = fips.export(packed, tmp_path / "out", max_shard_size=20_000)
    for name in ("chat_template.jinja", "sub/notes.txt", "tokenizer.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (packed / name).read_bytes()
    assert not (tmp_path / "out" / "fips_report.json").exists()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == json.loads((llama / "config.json").read_text())
    card = (tmp_path / "out" / "README.md").read_text()
    assert "dense form" in card
    assert "AutoModelForCausalLM" in card
    shards = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(shards) > 2
    assert all(s.stat().st_size < 25_000 or len(load_file(s)) == 1 for s in shards)
    same(tmp_path / "out", compressed)
    files = {str(p.relative_to(tmp_path / "out")): p for p in (tmp_path / "out").rglob("*") if p.is_file()}
    assert result.files == {name: file_digest(path) for name, path in files.items()}
    fips.export(packed, tmp_path / "again", max_shard_size=20_000)
    assert {n: b for n, b in tree(tmp_path / "again").items() if n != "README.md"} == {
        n: b for n, b in tree(tmp_path / "out").items() if n != "README.md"
    }


def test_license_and_class_in_the_card(compressed: Path, tmp_path: Path) -> None:
    """The license of a model goes on with it; without `architectures` the class is transformers' default."""
    packed = Path(shutil.copytree(compressed, tmp_path / "packed"))
    (packed / "README.md").write_text("---\nlicense: apache-2.0\nlanguage: [en]\ntags: [fips]\n---\n# Small\n")
    edit_config(packed, architectures=None)
    fips.export(packed, tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert yaml.safe_load(card.split("---")[1]) == {
        "library_name": "transformers", "license": "apache-2.0", "language": ["en"]
    }  # fmt: skip
    assert "AutoModelForCausalLM.from_pretrained" in card
    opened = PackedCheckpoint(packed, {"model_type": "vit"}, (), {}, {})
    assert "from transformers import AutoModel\n" in export_card(opened, "x")


def test_a_config_of_another_dtype_than_the_values(compressed: Path, tmp_path: Path) -> None:
    """What transformers loads by default counts: the factors are read in the dtype that config.json names."""
    for name in ("bfloat16", "float16"):
        packed = Path(shutil.copytree(compressed, tmp_path / f"packed-{name}"))
        edit_config(packed, dtype=name)
        fips.export(packed, tmp_path / name)
        same(tmp_path / name, packed)
        assert load_file(tmp_path / name / "model.safetensors")[f"{UP}.weight"].dtype == getattr(torch, name)


def test_a_packed_model_that_was_saved_again(compressed: Path, tmp_path: Path) -> None:
    fips.load(compressed, runtime="packed", dtype=torch.bfloat16).save_pretrained(tmp_path / "half")
    fips.export(tmp_path / "half", tmp_path / "out")
    same(tmp_path / "out", tmp_path / "half")
    headless = AutoModel.from_pretrained(compressed, quantization_config=fips.FipsConfig(runtime="packed"))
    headless.save_pretrained(tmp_path / "headless")
    fips.export(tmp_path / "headless", tmp_path / "trunk")
    found = AutoModel.from_pretrained(tmp_path / "trunk")
    with torch.no_grad():
        expected = fips.load(compressed).model(input_ids=IDS).last_hidden_state
        assert torch.equal(found(input_ids=IDS).last_hidden_state, expected)


def refused(match: str, error: type[Exception], *args: Path, **kwargs: Any) -> None:
    parent = args[1].parent
    before = tree(parent)
    with pytest.raises(error, match=match):
        fips.export(*args, **kwargs)
    assert tree(parent) == before


def test_refusals(compressed: Path, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    refused("not a checkpoint compressed by fips", FormatError, llama, out)
    refused("no such folder", SourceError, tmp_path / "nothing", out)
    refused("max_shard_size is 0", ConfigError, compressed, out, max_shard_size=0)
    out.mkdir()
    (out / "mine.txt").write_text("keep")
    refused("not empty", OutputError, compressed, out)
    refused("does not hold a model", OutputError, compressed, out, overwrite=True)
    monkeypatch.setattr(workdir.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(9, 9, 0))
    refused("bytes needed", OutputError, compressed, tmp_path / "new")


def test_an_old_export_is_replaced_whole(compressed: Path, tmp_path: Path) -> None:
    fips.export(compressed, tmp_path / "out", max_shard_size=20_000)
    fips.export(compressed, tmp_path / "out", overwrite=True)
    assert not list((tmp_path / "out").glob("*.index.json"))
    same(tmp_path / "out", compressed)


@pytest.mark.parametrize(("edit", "match"), [
    (lambda t: t.pop(f"{UP}.mask"), f"{UP}.mask is missing"),
    (lambda t: t[f"{UP}.mask"][2, 5:6].bitwise_xor_(4), f"{UP}.*mask counts"),
    (lambda t: t[f"{UP}.weight"][3:4].fill_(float("nan")), f"{UP}.*NaN"),
    (lambda t: t.pop("model.norm.weight"), "model.norm.weight"),
    (lambda t: t.update({"model.norm.weight": torch.zeros(9)}), r"model.norm.weight has the shape \[9\].*\[32\]"),
])  # fmt: skip
def test_damaged_folders(edit: Any, match: str, compressed: Path, tmp_path: Path) -> None:
    packed = Path(shutil.copytree(compressed, tmp_path / "packed"))
    tensors = load_file(packed / "model.safetensors")
    edit(tensors)
    save_file(tensors, packed / "model.safetensors", metadata={"format": "pt"})
    refused(match, fips.FipsError, packed, tmp_path / "out")


def test_a_disk_that_does_not_keep_what_was_written(compressed: Path, tmp_path: Path,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    from fips.checkpoint import export

    write = export.write_shards

    def write_and_damage(folder: Path, *args: Any) -> int:
        size = write(folder, *args)
        path = folder / "model.safetensors"
        raw = bytearray(path.read_bytes())
        raw[-5] ^= 1
        path.write_bytes(raw)
        return size

    monkeypatch.setattr(export, "write_shards", write_and_damage)
    refused("reads back differently", FormatError, compressed, tmp_path / "out")


def test_the_command(compressed: Path, tmp_path: Path) -> None:
    done = run("export", compressed, tmp_path / "out", "--max-shard-size", "20KB", "-q", "--json")
    assert (done.code, done.err) == (0, "")
    assert json.loads(done.out)["rebuilt"] == 9
    done = run("export", compressed, tmp_path / "out")
    assert done.code == 1
    assert "--overwrite" in done.err
    done = run("export", compressed, tmp_path / "out", "--overwrite")
    assert "dense export of" in done.out
    assert run("export", compressed, tmp_path / "x", "--max-shard-size", "none").code == 2
