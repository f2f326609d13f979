"""What `compress` writes: side files, sizes, shards, dtypes, names on disk, identical bytes for identical runs."""

import json
import shutil
import sys
import types
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import fips
from fips.checkpoint.folder import file_digest
from fips.data.texts import DEFAULT_DATASET
from tests.families import edit_config, random_text, write_model

IDS = torch.arange(3, 35)[None]


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def header(path: Path) -> tuple[dict[str, Any], int]:
    """Header of a safetensors file and where its data start, read without any library."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), 8 + length


def test_files_are_readable_by_the_library_and_tensors_are_aligned(compressed: Path) -> None:
    path = compressed / "model.safetensors"
    entries, start = header(path)
    assert entries.pop("__metadata__") == {"format": "pt"}
    assert start % 8 == 0
    sizes = {"F32": 4, "BF16": 2, "F16": 2, "U8": 1}
    assert all((start + e["data_offsets"][0]) % sizes[e["dtype"]] == 0 for e in entries.values())
    spans = sorted(e["data_offsets"] for e in entries.values())
    assert spans[0][0] == 0
    assert all(a[1] == b[0] for a, b in pairwise(spans))
    assert start + spans[-1][1] == path.stat().st_size
    assert load_file(path).keys() == entries.keys()
    with safe_open(path, "pt") as file:
        assert set(file.keys()) == set(entries)


def test_stored_tensors_follow_the_format(compressed: Path, llama: Path) -> None:
    stored, source = (load_file(f / "model.safetensors") for f in (compressed, llama))
    description = json.loads((compressed / "config.json").read_text())["quantization_config"]
    assert (description["quant_method"], description["format_version"]) == ("fips", 1)
    packed: set[str] = set()
    for group in description["groups"]:
        basis = f"fips_bases.{group['name']}"
        assert group["identity"]
        assert stored[basis].shape == (group["d"], group["rank"] - group["d"])
        packed.add(basis)
        for member in group["members"]:
            values, mask = stored[f"{member['name']}.weight"], stored[f"{member['name']}.mask"]
            packed |= {f"{member['name']}.weight", f"{member['name']}.mask"}
            assert values.shape == (member["nnz"],)
            assert mask.dtype == torch.uint8
            assert mask.shape == (group["rank"], -(-member["f"] // 8))
            assert sum(bin(byte).count("1") for byte in mask.flatten().tolist()) == member["nnz"]
            assert (values != 0).all()
    kept = set(stored) - packed
    assert kept == {n for n in source if ".mlp." not in n}
    assert all(torch.equal(stored[n], source[n]) for n in kept)


def test_every_size_in_the_report_is_what_lies_on_disk(compressed: Path) -> None:
    report = json.loads((compressed / "fips_report.json").read_text())
    stored = load_file(compressed / "model.safetensors")
    size = {name: tensor.numel() * tensor.element_size() for name, tensor in stored.items()}
    packed = {n for n in stored if n.startswith("fips_bases.") or ".mlp." in n}
    sizes = report["sizes"]
    assert sizes["matrix_bytes"] == sum(size[n] for n in packed)
    assert sizes["checkpoint_bytes"] == sum(size.values())
    assert sizes["parameters"] == sum(int((stored[n] != 0).sum()) for n in packed if not n.endswith(".mask"))
    assert sizes["dense_parameters"] == 9 * 32 * 80
    assert sizes["dense_matrix_bytes"] == 9 * 32 * 80 * 4
    saved = sizes["dense_matrix_bytes"] - sizes["matrix_bytes"]
    assert sizes["dense_checkpoint_bytes"] - sizes["checkpoint_bytes"] == saved > 0
    assert sizes["parameter_share"] <= 0.5
    assert sizes["checkpoint_share"] < 1
    for group in report["groups"]:
        blocks = [f"model.layers.{b}.mlp." for b in range(group["first"], group["last"] + 1)]
        names = [n for n in stored if n == f"fips_bases.{group['name']}" or n.startswith(tuple(blocks))]
        assert group["packed_bytes"] == sum(size[n] for n in names)
        assert group["ideal_bytes"] <= group["packed_bytes"] < group["dense_bytes"]
        for name, share in group["sparsity"].items():
            assert share == pytest.approx(1 - stored[f"{name}.weight"].numel() / (group["rank"] * 80))
    names = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert names <= set(report["side_files"])
    assert report["files"] == {"model.safetensors": file_digest(compressed / "model.safetensors")}
    assert report["side_files"] == {name: file_digest(compressed / name) for name in report["side_files"]}
    assert report["verified"] is True
    assert report["calibration"]["tokens"] == 256
    assert report["settings"]["group_size"] == 2
    assert report["versions"]["torch"] == torch.__version__
    card = (compressed / "README.md").read_text()
    assert f"{sizes['parameter_share']:.3f}" in card


def test_side_files_are_copied_byte_for_byte(llama: Path, settings, tmp_path: Path) -> None:
    source = Path(shutil.copytree(llama, tmp_path / "source"))
    (source / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}\r\n{% endfor %}")
    (source / "notes.txt").write_bytes(b"\xff\x00 any bytes \r\n")
    (source / "generation_config.json").write_text('{"do_sample": true,   "temperature": 0.3}')
    (source / "sub" / "deeper").mkdir(parents=True)
    (source / "sub" / "deeper" / "vocab.json").write_text("{}")
    (source / ".git").mkdir()
    (source / ".git" / "config").write_text("not a part of the model")
    (source / "README.md").write_text("the dense model's card")
    (source / "pytorch_model.bin").write_bytes(b"the same weights once more")
    fips.compress(source, tmp_path / "out", settings(steps=0))
    copied = ["chat_template.jinja", "notes.txt", "generation_config.json", "sub/deeper/vocab.json", "tokenizer.json",
              "tokenizer_config.json"]  # fmt: skip
    for name in copied:
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes(), name
    written = {str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*") if p.is_file()}
    made = {"config.json", "model.safetensors", "README.md", "fips_report.json"}
    assert written - {"fips_groups.png"} == {*copied, *made}  # the picture: only where there is matplotlib
    assert "dense model's card" not in (tmp_path / "out" / "README.md").read_text()
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template is not None
    configs = [json.loads((f / "config.json").read_text()) for f in (source, tmp_path / "out")]
    assert {k: v for k, v in configs[1].items() if k != "quantization_config"} == configs[0]


def test_shards(llama: Path, compressed: Path, settings, tmp_path: Path) -> None:
    fips.compress(llama, tmp_path / "out", settings(max_shard_size=20_000))
    shards = sorted((tmp_path / "out").glob("*.safetensors"))
    whole = load_file(compressed / "model.safetensors")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    count = len(shards)
    assert [s.name for s in shards] == [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    assert count > 2
    held = {name: shard for shard in shards for name in load_file(shard)}
    assert index["weight_map"] == {name: shard.name for name, shard in held.items()}
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in whole.values())
    for shard in shards:
        tensors = load_file(shard)
        assert len(tensors) == 1 or sum(t.numel() * t.element_size() for t in tensors.values()) <= 20_000
        assert all(torch.equal(tensor, whole[name]) for name, tensor in tensors.items())
    for runtime in ("dense", "packed"):
        model = fips.load(tmp_path / "out", runtime=runtime)
        assert torch.equal(logits(model), logits(fips.load(compressed, runtime=runtime)))
    report = json.loads((tmp_path / "out" / "fips_report.json").read_text())
    assert {s.name: file_digest(s) for s in shards}.items() <= report["files"].items()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_half_precision_source_keeps_its_dtype(dtype: torch.dtype, settings, tmp_path: Path) -> None:
    dense = write_model("llama", tmp_path / "dense", dtype=dtype)
    report = fips.compress(dense, tmp_path / "out", settings())
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert {t.dtype for n, t in stored.items() if not n.endswith(".mask")} == {dtype}
    assert report.dtype == str(dtype).removeprefix("torch.")
    models = [fips.load(tmp_path / "out", runtime=r) for r in ("dense", "packed")]
    assert all(model.dtype == dtype for model in models)
    torch.testing.assert_close(logits(models[0]), logits(models[1]), rtol=0.05, atol=0.05)


def test_another_dtype_than_the_sources(llama: Path, settings, tmp_path: Path) -> None:
    fips.compress(llama, tmp_path / "out", settings(dtype="bfloat16"))
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert {t.dtype for n, t in stored.items() if not n.endswith(".mask")} == {torch.bfloat16}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16


def test_norms_kept_in_float32_stay_so(settings, tmp_path: Path) -> None:
    dense = write_model("llama", tmp_path / "dense", dtype=torch.bfloat16)
    tensors = load_file(dense / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float()
    save_file(tensors, dense / "model.safetensors", metadata={"format": "pt"})
    fips.compress(dense, tmp_path / "out", settings(steps=0))
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert stored["model.norm.weight"].dtype == torch.float32
    assert stored["fips_bases.blocks_0_1"].dtype == torch.bfloat16


@pytest.mark.parametrize(("family", "prefix"), [("gpt2", "transformer."), ("llama", "model.")])
def test_names_without_the_base_models_prefix(family: str, prefix: str, settings, tmp_path: Path) -> None:
    """The first GPT-2 checkpoints are stored this way. Names on disk stay as they are."""
    dense = write_model(family, tmp_path / "dense", tied=True)
    fips.compress(dense, tmp_path / "reference", settings())
    tensors = load_file(dense / "model.safetensors")
    bare = {n.removeprefix(prefix): t for n, t in tensors.items()}
    if family == "gpt2":  # such files also hold the causal mask as a buffer
        bare |= {f"h.{i}.attn.bias": torch.ones(64, 64).tril()[None, None] for i in range(3)}
    save_file(bare, dense / "model.safetensors", metadata={"format": "pt"})
    fips.compress(dense, tmp_path / "out", settings())
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert not [n for n in stored if n.startswith(prefix)]
    assert set(bare) - set(stored) == set()
    for runtime in ("dense", "packed"):
        ours, reference = (fips.load(tmp_path / f, runtime=runtime) for f in ("out", "reference"))
        assert torch.equal(logits(ours), logits(reference))


def test_a_sharded_source(compressed: Path, settings, tmp_path: Path) -> None:
    dense = write_model("llama", tmp_path / "dense", shard="40KB")
    assert len(list(dense.glob("*.safetensors"))) > 2
    fips.compress(dense, tmp_path / "out", settings())
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (compressed / "model.safetensors").read_bytes()
    assert not (tmp_path / "out" / "model.safetensors.index.json").exists()


def test_equal_runs_give_equal_bytes_and_seeds_matter(llama: Path, compressed: Path, settings, tmp_path: Path) -> None:
    digests = []
    for seed, name in ((0, "a"), (1, "b")):
        fips.compress(llama, tmp_path / name, settings(seed=seed))
        digests.append(file_digest(tmp_path / name / "model.safetensors"))
    assert digests[0] == file_digest(compressed / "model.safetensors")
    assert digests[1] != digests[0]


def test_calibration_by_the_model_itself_is_repeatable(llama: Path, settings, tmp_path: Path) -> None:
    reports = [fips.compress(llama, tmp_path / name, settings(calibration="self", seed=seed))
               for name, seed in (("a", 0), ("b", 0), ("c", 1))]  # fmt: skip
    weights = [report.files["model.safetensors"] for report in reports]
    assert weights[0] == weights[1] != weights[2]
    assert reports[0].calibration == reports[1].calibration != reports[2].calibration
    assert reports[0].calibration["origin"] == "self"
    assert reports[0].calibration["tokens"] == 256


def test_a_source_whose_config_names_its_dtype_the_old_way(llama: Path, settings, tmp_path: Path) -> None:
    source = Path(shutil.copytree(llama, tmp_path / "source"))
    edit_config(source, dtype=None, torch_dtype="float32")
    fips.compress(source, tmp_path / "out", settings(steps=0, dtype="bfloat16"))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert "torch_dtype" not in config


def test_calibration_that_nobody_named(llama: Path, settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Hub text where it can be had, else the model's own; the report says which."""
    monkeypatch.setitem(sys.modules, "datasets", None)
    report = fips.compress(llama, tmp_path / "self", settings(calibration=None, steps=0))
    assert report.calibration["origin"] == "self"
    assert any("sampled from the model itself" in note for note in report.notes)
    rows = [{"text": random_text(100, seed=s)} for s in range(9)]
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=lambda *_, **__: rows))
    report = fips.compress(llama, tmp_path / "hub", settings(calibration=None, steps=0))
    assert report.calibration["origin"] == f"{DEFAULT_DATASET}:train"
    assert any(DEFAULT_DATASET in note for note in report.notes)


def test_few_calibration_tokens_are_remarked(llama: Path, settings, tmp_path: Path) -> None:
    few, enough = (fips.compress(llama, tmp_path / str(n), settings(calibration_tokens=n, steps=0)) for n in (64, 96))
    assert any("64 calibration tokens are fewer than the 80 features" in note for note in few.notes)
    assert not any("features of a matrix" in note for note in enough.notes)
