"""Folders made by somebody else: links that lead out of them, the Hub's cache, absurd claims, missing tensors."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, BertConfig

import fips
from fips.checkpoint.folder import all_files
from fips.checkpoint.source import open_source
from fips.errors import FipsError
from fips.models.skeleton import build_skeleton
from tests.command import tree
from tests.families import edit_config, write_model

IDS = torch.arange(3, 35)[None]


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def link_out(folder: Path, name: str, *, relative: bool = False) -> Path:
    """Puts a file outside of its folder and a link to it inside."""
    outside = folder.parent / "outside" / name
    outside.parent.mkdir(exist_ok=True)
    (folder / name).rename(outside)
    (folder / name).symlink_to(Path("..") / "outside" / name if relative else outside)
    return folder


def in_cache(folder: Path, home: Path) -> Path:
    """The folder as the Hub's cache keeps it: blobs, and a snapshot of links to them."""
    snapshot = home / "models--someone--model" / "snapshots" / "0123abcd"
    blobs = home / "models--someone--model" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(folder.iterdir())):
        shutil.copy(path, blobs / str(number))
        (snapshot / path.name).symlink_to(Path("../../blobs") / str(number))
    return snapshot


@pytest.mark.parametrize("relative", [True, False])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_source_with_a_link_that_leads_out(name: str, relative: bool, llama: Path, settings, tmp_path: Path) -> None:
    folder = link_out(Path(shutil.copytree(llama, tmp_path / "model")), name, relative=relative)
    before = tree(tmp_path)
    with pytest.raises(FipsError, match=rf"{name} is a link to .*outside of the model folder"):
        fips.compress(folder, tmp_path / "out", settings(steps=0))
    assert tree(tmp_path) == before


@pytest.mark.parametrize("name", ["model-00001-of", "model.safetensors.index.json"])
def test_a_sharded_source_with_a_link_that_leads_out(name: str, tmp_path: Path) -> None:
    folder = write_model("llama", tmp_path / "model", shard="40KB")
    link_out(folder, next(p.name for p in folder.iterdir() if p.name.startswith(name)))
    with pytest.raises(FipsError, match="outside of the model folder"):
        open_source(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_compressed_folder_with_a_link_that_leads_out(name: str, compressed: Path, tmp_path: Path) -> None:
    folder = link_out(Path(shutil.copytree(compressed, tmp_path / "model")), name)
    for call in (fips.load, fips.inspect, lambda f: fips.export(f, tmp_path / "out")):
        with pytest.raises(FipsError, match="outside of the model folder"):
            call(folder)
    assert any("outside of the model folder" in problem for problem in fips.verify(folder).problems)


def test_side_files_that_lead_out_are_not_exported(compressed: Path, tmp_path: Path) -> None:
    folder = link_out(Path(shutil.copytree(compressed, tmp_path / "model")), "tokenizer.json")
    with pytest.raises(FipsError, match="outside of the model folder"):
        fips.export(folder, tmp_path / "out")
    assert not fips.verify(folder, load=False).ok


def test_links_inside_a_folder_and_to_a_folder(llama: Path, settings, compressed: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(llama, tmp_path / "model"))
    (folder / "model.safetensors").rename(folder / "weights")
    (folder / "model.safetensors").symlink_to("weights")
    (tmp_path / "link").symlink_to(folder)
    fips.compress(tmp_path / "link", tmp_path / "out", settings())
    ours = (tmp_path / "out" / "model.safetensors").read_bytes()
    assert ours == (compressed / "model.safetensors").read_bytes()


def test_the_hubs_cache_works(llama: Path, settings, compressed: Path, tmp_path: Path) -> None:
    fips.compress(in_cache(llama, tmp_path / "a"), tmp_path / "out", settings())
    ours = (tmp_path / "out" / "model.safetensors").read_bytes()
    assert ours == (compressed / "model.safetensors").read_bytes()
    assert not [path for path in (tmp_path / "out").iterdir() if path.is_symlink()]
    cached = in_cache(compressed, tmp_path / "b")
    assert torch.equal(logits(fips.load(cached)), logits(fips.load(compressed)))
    assert fips.verify(cached, in_cache(llama, tmp_path / "c")).ok
    fips.export(cached, tmp_path / "dense")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "dense")), logits(fips.load(compressed)))


def test_a_link_out_of_the_hubs_cache(llama: Path, tmp_path: Path) -> None:
    snapshot = in_cache(llama, tmp_path / "hub")
    (snapshot / "tokenizer.json").unlink()
    (tmp_path / "secret").write_text("not the model's")
    (snapshot / "tokenizer.json").symlink_to(tmp_path / "secret")
    with pytest.raises(FipsError, match=r"tokenizer\.json is a link to"):
        open_source(snapshot).side_files()


def test_a_link_in_the_place_of_the_hubs_blobs(llama: Path, tmp_path: Path) -> None:
    """It would let a folder name the place that its links may lead to."""
    snapshot = in_cache(llama, tmp_path / "hub")
    blobs = snapshot.parents[1] / "blobs"
    blobs.rename(tmp_path / "home")
    (tmp_path / "home" / "id_rsa").write_text("secret")
    blobs.symlink_to(tmp_path / "home")
    (snapshot / "notes.txt").symlink_to("../../blobs/id_rsa")
    with pytest.raises(FipsError, match="outside of the model folder"):
        open_source(snapshot)
    with pytest.raises(FipsError, match="outside of the model folder"):
        all_files(snapshot)


def test_weights_of_further_modules_are_kept(llama: Path, settings, tmp_path: Path) -> None:
    """As sentence-transformers has them; those of other formats and places are left out."""
    source = Path(shutil.copytree(llama, tmp_path / "source"))
    modules = [{"path": ""}, {"path": "1_Pooling"}, {"path": "2_Dense/"}, {"path": "."}, {"path": "../x"}, 3]
    (source / "modules.json").write_text(json.dumps(modules))
    for name in ("2_Dense/model.safetensors", "2_Dense/config.json", "1_Pooling/config.json", "onnx/model.onnx",
                 "pytorch_model.bin"):  # fmt: skip
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(f"content of {name}")
    report = fips.compress(source, tmp_path / "out", settings(steps=0))
    fips.export(tmp_path / "out", tmp_path / "dense")
    for folder in (tmp_path / "out", tmp_path / "dense"):
        assert (folder / "2_Dense" / "model.safetensors").read_text() == "content of 2_Dense/model.safetensors"
        assert not (folder / "onnx").exists()
        assert not (folder / "pytorch_model.bin").exists()
    assert "2_Dense/model.safetensors" in report.side_files
    assert fips.verify(tmp_path / "out", source, load=False).ok
    (tmp_path / "out" / "2_Dense" / "model.safetensors").write_text("another")
    assert sum("2_Dense" in problem for problem in fips.verify(tmp_path / "out", source, load=False).problems) == 2


def test_more_layers_than_tensors(llama: Path, compressed: Path, tmp_path: Path) -> None:
    """Building a million layers would take the memory and the day."""
    for folder, call in ((llama, fips.inspect), (compressed, fips.load), (compressed, lambda f: fips.export(f, f))):
        copied = Path(shutil.copytree(folder, tmp_path / "copied"))
        edit_config(copied, num_hidden_layers=10**9)
        with pytest.raises(FipsError, match=r"num_hidden_layers 1000000000.*tensors"):
            call(copied)
        shutil.rmtree(copied)


@pytest.mark.parametrize(("values", "words"), [
    ({"vision_config": {"num_hidden_layers": 10**9}}, "num_hidden_layers 1000000000"),
    ({"parts": [{"depths": [2, 2, 10**9, 2]}]}, "depths 1000000006"),
    ({"max_position_embeddings": 2 * 10**10}, "max_position_embeddings 20000000000"),
    ({"num_labels": 10**9}, "num_labels 1000000000"),
])  # fmt: skip
def test_absurd_claims_in_any_part(values: dict[str, Any], words: str, llama: Path, compressed: Path,
                                   tmp_path: Path) -> None:  # fmt: skip
    for number, (folder, call) in enumerate(((llama, fips.inspect), (compressed, fips.load))):
        copied = Path(shutil.copytree(folder, tmp_path / str(number)))
        edit_config(copied, **values)
        with pytest.raises(FipsError, match=words):
            call(copied)


def test_tables_larger_than_any_models_are_not_made() -> None:
    sizes = {"hidden_size": 2, "num_attention_heads": 2, "intermediate_size": 8, "num_hidden_layers": 1}
    build_skeleton(BertConfig(**sizes))
    with pytest.raises(FipsError, match=r"a table of 2,400,000,000 bytes"):
        build_skeleton(BertConfig(**sizes, max_position_embeddings=3 * 10**8))


@pytest.mark.parametrize(("key", "value"), [("architectures", 3), ("architectures", [3]), ("auto_map", "x")])
def test_configs_of_wrong_kinds(key: str, value: object, llama: Path, compressed: Path, tmp_path: Path) -> None:
    for number, (folder, call) in enumerate(((llama, fips.inspect), (compressed, fips.load))):
        copied = Path(shutil.copytree(folder, tmp_path / str(number)))
        edit_config(copied, **{key: value})
        with pytest.raises(FipsError, match=key):
            call(copied)


def test_a_missing_tensor_is_not_made_up(compressed: Path, tmp_path: Path) -> None:
    """Not even one that was never packed, whichever way the model is loaded; a new head may be made for training."""
    for name in ("model.norm.weight", "lm_head.weight", "model.layers.1.self_attn.q_proj.weight"):
        folder = Path(shutil.copytree(compressed, tmp_path / name))
        tensors = load_file(folder / "model.safetensors")
        tensors.pop(name)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        for load in (fips.load, AutoModelForCausalLM.from_pretrained):
            with pytest.raises(FipsError, match=f"{name} is missing"):
                load(folder)
    classifier = AutoModelForSequenceClassification.from_pretrained(compressed, num_labels=2)
    assert classifier.score.weight.shape == (2, 32)


def test_whole_numbers_where_weights_belong(compressed: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(compressed, tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].view(torch.int32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(FipsError, match=r"model.norm.weight is stored as torch.int32"):
        fips.load(folder)
