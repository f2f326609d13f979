"""Compressed checkpoints that are damaged or newer: an error that names the thing, never a warning."""

import json
import shutil
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import fips
from fips.checkpoint.format import PackedGroupInfo, describe, dtype_name, parse
from fips.checkpoint.load import load
from fips.checkpoint.reload import stored_tensors
from fips.checkpoint.safetensors_io import Entry, TensorInfo, read_tensor, write_file
from fips.errors import ConfigError, FipsError, FormatError, NumericalError
from tests.command import refused
from tests.families import edit_config

UP = "model.layers.0.mlp.up_proj"
DOWN = "model.layers.0.mlp.down_proj"
BASIS = "fips_bases.blocks_0_1"


@pytest.fixture
def damaged(compressed: Path, tmp_path: Path) -> Path:
    """A copy of the compressed tiny Llama, to be damaged."""
    return Path(shutil.copytree(compressed, tmp_path / "damaged"))


def description(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())["quantization_config"]
    return found


def edit_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def fails(folder: Path, error: type[FipsError], match: str) -> None:
    """Loading fails in every way there is to load."""
    for runtime in ("dense", "packed"):
        with pytest.raises(error, match=match):
            fips.load(folder, runtime=runtime)
        with pytest.raises(error, match=match):
            AutoModelForCausalLM.from_pretrained(folder, quantization_config=fips.FipsConfig(runtime=runtime))
    with pytest.raises(error, match=match):
        AutoModelForCausalLM.from_pretrained(folder)


def test_a_newer_format(damaged: Path, tmp_path: Path, calibration: Path) -> None:
    edit_config(damaged, quantization_config={**description(damaged), "format_version": 2})
    fails(damaged, FormatError, "format_version 2; this fips reads up to 1")
    for command in (["inspect", damaged], ["evaluate", damaged, "--text", calibration, "-q"]):
        refused(*command, code=1, words=["format_version 2", "Update fips"], watched=tmp_path)


def test_a_newer_format_with_new_keys_is_still_called_newer(damaged: Path) -> None:
    edit_config(damaged, quantization_config={**description(damaged), "format_version": 2, "rotation": "hadamard"})
    fails(damaged, FormatError, "format_version 2")


@pytest.mark.parametrize(("path", "value", "match"), [
    ("format_version", None, "format_version None"),
    ("format_version", "1", "format_version '1'"),
    ("format_version", True, "format_version True"),
    ("format_version", 0, "format_version 0"),
    ("groups", [], "no packed group"),
    ("groups", {}, "no packed group"),
    ("groups.0", 3, "name of a group"),
    ("groups.0.name", "", "valid group name"),
    ("groups.0.name", "a.b", "valid group name"),
    ("groups.1.name", "blocks_0_1", "twice"),
    ("groups.0.d", 0, "d of group blocks_0_1 is 0"),
    ("groups.0.rank", "50", "rank of group blocks_0_1"),
    ("groups.0.identity", "yes", "identity of group blocks_0_1 is 'yes'"),
    ("groups.0.identity", 1, "identity of group blocks_0_1 is 1"),
    ("groups.0.identity", False, "fips_bases.blocks_0_1 is stored as"),
    ("groups.0.rank", 8, "identity of group blocks_0_1 is True at rank 8 and width 32"),
    ("groups.0.dtype", "int4", "'int4'"),
    ("groups.0.members", [], "no member"),
    ("groups.0.members", None, "members of group blocks_0_1"),
    ("groups.0.members.0.name", 3, "name of a member of group blocks_0_1"),
    ("groups.0.members.1.name", "model.layers.0.mlp.gate_proj", "twice"),
    ("groups.0.members.0.role", "side", "'side'"),
    ("groups.0.members.0.f", -1, "f of model.layers.0.mlp.gate_proj is -1"),
    ("groups.0.members.0.nnz", -1, "-1 kept values"),
    ("groups.0.members.0.nnz", 10**6, "1000000 kept values"),
    ("groups.0.members.0.nnz", 1.5, "nnz of model.layers.0.mlp.gate_proj"),
    ("new_setting", 1, "new_setting"),
])  # fmt: skip
def test_damaged_descriptions(path: str, value: object, match: str, damaged: Path) -> None:
    found: Any = description(damaged)
    edited = deepcopy(found)
    place = edited
    *parents, last = path.split(".")
    for key in parents:
        place = place[int(key) if key.isdigit() else key]
    place[int(last) if last.isdigit() else last] = value
    edit_config(damaged, quantization_config=edited)
    with pytest.raises(FormatError, match=match):
        AutoModelForCausalLM.from_pretrained(damaged)
    with pytest.raises(FormatError, match=match):
        fips.load(damaged)


def test_a_description_survives_writing_and_reading(compressed: Path) -> None:
    groups = parse(description(compressed))
    assert parse(json.loads(json.dumps(describe(groups)))) == groups


def test_dtypes_that_cannot_be_packed() -> None:
    with pytest.raises(FormatError, match="float64"):
        dtype_name(torch.float64)


@pytest.mark.parametrize("name", [f"{UP}.weight", f"{UP}.mask", BASIS])
def test_a_missing_tensor(name: str, damaged: Path) -> None:
    edit_tensors(damaged, lambda tensors: tensors.pop(name))
    fails(damaged, FormatError, name)


@pytest.mark.parametrize("name", ["fips_bases.blocks_7_8", "fips_bases.other"])
def test_a_tensor_nobody_described(name: str, damaged: Path) -> None:
    edit_tensors(damaged, lambda tensors: tensors.update({name: torch.zeros(3, 3)}))
    fails(damaged, FormatError, name)


@pytest.mark.parametrize("edit", [
    lambda t: t.update({f"{UP}.weight": t[f"{UP}.weight"][1:].clone()}),
    lambda t: t.update({f"{UP}.mask": t[f"{UP}.mask"].to(torch.int16)}),
    lambda t: t.update({f"{UP}.mask": t[f"{UP}.mask"][:, 1:].clone()}),
])  # fmt: skip
def test_a_tensor_of_another_shape_or_kind(edit: Callable[[dict[str, torch.Tensor]], object], damaged: Path) -> None:
    edit_tensors(damaged, edit)
    fails(damaged, FormatError, UP)


def test_a_basis_of_another_shape(damaged: Path) -> None:
    edit_tensors(damaged, lambda t: t.update({BASIS: t[BASIS][:, 1:].clone()}))
    fails(damaged, FormatError, BASIS)


def test_a_flipped_mask_bit(damaged: Path) -> None:
    edit_tensors(damaged, lambda tensors: tensors[f"{DOWN}.mask"][2, 5:6].bitwise_xor_(0b100))
    fails(damaged, FormatError, f"{DOWN}.*mask counts")


def test_a_stray_tail_bit(settings, tmp_path: Path) -> None:
    """f = 83 leaves five unused bits at the end of a mask row; one of them replaces a used one."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.families import tokenizer

    config = LlamaConfig(hidden_size=32, intermediate_size=83, num_hidden_layers=2, num_attention_heads=4,
                         num_key_value_heads=2, vocab_size=96, max_position_embeddings=64)  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "dense")
    tokenizer().save_pretrained(tmp_path / "dense")
    fips.compress(tmp_path / "dense", tmp_path / "out", settings(steps=0))
    assert torch.isfinite(fips.load(tmp_path / "out")(input_ids=torch.arange(3, 9)[None]).logits).all()

    def move_a_bit(tensors: dict[str, torch.Tensor]) -> None:
        last = tensors[f"{UP}.mask"][:, -1]
        row = int((last != 0).nonzero()[0])
        bit = int(last[row]) & -int(last[row])
        last[row] = int(last[row]) - bit + 0b1000_0000

    edit_tensors(tmp_path / "out", move_a_bit)
    fails(tmp_path / "out", FormatError, f"{UP}.*beyond its 83 columns")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite(value: float, damaged: Path) -> None:
    edit_tensors(damaged, lambda tensors: tensors[f"{UP}.weight"][3:4].fill_(value))
    fails(damaged, FormatError, f"{UP}.*NaN")


def test_a_truncated_file(damaged: Path, tmp_path: Path) -> None:
    path = damaged / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-50])
    fails(damaged, FormatError, "model.safetensors")
    refused("inspect", damaged, code=1, words=["model.safetensors"], watched=tmp_path)


def test_a_linear_the_model_does_not_have(damaged: Path) -> None:
    edit_config(damaged, num_hidden_layers=2)
    with pytest.raises(FipsError, match=r"model\.layers\.2\.mlp"):
        fips.load(damaged)


def test_a_linear_of_another_shape(damaged: Path) -> None:
    edit_config(damaged, intermediate_size=88)
    with pytest.raises(FipsError, match=r"mlp\.gate_proj.*88"):
        fips.load(damaged)


def test_a_dense_checkpoint_is_not_loaded_as_a_compressed_one(llama: Path) -> None:
    with pytest.raises(FormatError, match="not a checkpoint compressed by fips"):
        load(llama)


def test_an_unknown_runtime(compressed: Path) -> None:
    with pytest.raises(ConfigError, match="'fast'"):
        fips.load(compressed, runtime="fast")


def test_a_tensor_in_two_files(compressed: Path, tmp_path: Path) -> None:
    shutil.copy(compressed / "model.safetensors", tmp_path / "a.safetensors")
    shutil.copy(compressed / "model.safetensors", tmp_path / "b.safetensors")
    with pytest.raises(FormatError, match=r"is stored in a\.safetensors and in b\.safetensors"):
        stored_tensors([tmp_path / "a.safetensors", tmp_path / "b.safetensors"])


def test_a_tensor_that_is_not_what_was_announced(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"x is torch\.int64"):
        write_file(tmp_path / "x", [("x", Entry(TensorInfo(torch.float32, (2,)), lambda: torch.tensor([1, 2])))])
    save_file({"y": torch.zeros(2)}, tmp_path / "y")
    with pytest.raises(FormatError, match="x cannot be read"):
        read_tensor(tmp_path / "y", "x")


def test_factors_that_are_not_finite_are_not_packed() -> None:
    from fips.checkpoint.pack import pack_group
    from fips.models.sites import Site

    site = Site("up", "up", 0, "up", 4, 8, transposed=True)
    with pytest.raises(NumericalError, match="basis of g"):
        pack_group("g", [site], torch.full((4, 2), 1e9), {"up": torch.zeros(2, 8)}, {}, torch.float16)


def test_sizes_of_a_described_group() -> None:
    (group,) = parse({"format_version": 1, "groups": [
        {"name": "g", "d": 4, "rank": 3, "dtype": "bfloat16",
         "members": [{"name": "up", "role": "up", "f": 9, "nnz": 5}]}]})  # fmt: skip
    assert isinstance(group, PackedGroupInfo)
    assert group.packed_bytes() == 2 * (4 * 3 + 5) + 3 * 2  # basis, values, three mask rows of two bytes
    assert group.ideal_bytes() == 2 * (4 * 3 + 5) + 27 // 8
    assert group.dense_bytes() == 2 * 4 * 9
