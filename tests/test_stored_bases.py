"""Checkpoints whose groups store all of U, only what follows an identity, or nothing: every way of loading them."""

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel

import fips
from fips.checkpoint.format import describe, parse
from fips.checkpoint.pack import pack_group
from fips.errors import FormatError
from fips.inspection import sizes_of
from tests.families import edit_config, write_model
from tests.packed import COLUMNS, D, F, sites, write_packed

IDS = torch.arange(3, 35)[None]
KINDS = {"mixed": ("whole", "more", "alone"), "all alone": ("alone",) * 3}
CASES = [(family, kinds) for family in ("llama", "gpt2") for kinds in KINDS]


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], tuple[Path, list[Any]]]:
    """Family and kinds → folder and what was packed. Do not change them; copy them."""
    found = {}
    for family, kinds in CASES:
        root = tmp_path_factory.mktemp("bases")
        dense = write_model(family, root / "dense", tied=False)
        found[family, kinds] = (root / "out", write_packed(family, dense, root / "out", KINDS[kinds]))
    return found


@pytest.fixture(params=CASES, ids=["-".join(case) for case in CASES])
def case(request: pytest.FixtureRequest, written) -> tuple[str, str]:
    return request.param


@pytest.fixture
def folder(case: tuple[str, str], written) -> Path:
    return written[case][0]


@pytest.fixture
def damaged(written, tmp_path: Path) -> Path:
    """A copy of the mixed tiny Llama, to be damaged."""
    return Path(shutil.copytree(written["llama", "mixed"][0], tmp_path / "damaged"))


def test_both_runtimes_hold_the_weights_that_were_packed(case: tuple[str, str], folder: Path, written) -> None:
    dense, packed = fips.load(folder), fips.load(folder, runtime="packed")
    for site, group in written[case][1]:
        assert torch.equal(dense.get_submodule(site.name).weight, group.weight(site))
        layer = packed.get_submodule(site.name)
        assert layer.basis().shape == (D, group.info.columns)
        if group.bias(site) is not None:
            assert torch.equal(dense.get_submodule(site.name).bias, group.bias(site))
    assert torch.equal(logits(packed), logits(dense))
    assert len(list(packed.fips_bases.parameters())) == sum(kind != "alone" for kind in KINDS[case[1]])


def test_saved_again_it_is_the_same_checkpoint(folder: Path, tmp_path: Path) -> None:
    fips.load(folder, runtime="packed").save_pretrained(tmp_path)
    ours, again = (load_file(f / "model.safetensors") for f in (folder, tmp_path))
    assert ours.keys() == again.keys()
    assert all(torch.equal(ours[n], again[n]) and ours[n].dtype == again[n].dtype for n in ours)
    configs = [json.loads((f / "config.json").read_text())["quantization_config"] for f in (folder, tmp_path)]
    assert configs[0] == configs[1]


def test_saved_again_in_another_dtype_or_without_the_head(folder: Path, tmp_path: Path) -> None:
    """The description keeps its dtype and names; where no basis is stored the values tell the dtype."""
    half = fips.load(folder, runtime="packed", dtype=torch.float16)
    half.save_pretrained(tmp_path / "half")
    found = fips.inspect(tmp_path / "half")
    assert {group["dtype"] for group in found.groups} == {"float16"}
    assert found.sizes == sizes_of(tmp_path / "half")
    assert torch.equal(logits(fips.load(tmp_path / "half", runtime="packed")), logits(half))
    packed = fips.FipsConfig(runtime="packed")
    headless = AutoModel.from_pretrained(folder, quantization_config=packed)
    headless.save_pretrained(tmp_path / "headless")
    assert fips.inspect(tmp_path / "headless").sizes.matrix_bytes == fips.inspect(folder).sizes.matrix_bytes
    again = AutoModel.from_pretrained(tmp_path / "headless", quantization_config=packed)
    with torch.no_grad():
        assert torch.equal(again(input_ids=IDS).last_hidden_state, headless(input_ids=IDS).last_hidden_state)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_values(dtype: torch.dtype, tmp_path: Path) -> None:
    dense = write_model("llama", tmp_path / "dense", dtype=dtype)
    written = write_packed("llama", dense, tmp_path / "out", KINDS["mixed"], dtype)
    model = fips.load(tmp_path / "out")
    assert model.dtype == dtype
    for site, group in written:
        assert torch.equal(model.get_submodule(site.name).weight, group.weight(site))
    assert torch.equal(logits(fips.load(tmp_path / "out", runtime="packed")), logits(model))


def test_a_deep_copy_is_independent(folder: Path) -> None:
    model = fips.load(folder, runtime="packed")
    before, twin = logits(model), copy.deepcopy(model)
    assert torch.equal(logits(twin), before)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize("runtime", ["dense", "packed"])
@pytest.mark.parametrize("where", ["nothing", "bases", "all"])
def test_an_offloaded_model_is_right_or_refused(where: str, runtime: str, case: tuple[str, str], folder: Path,
                                                tmp_path: Path) -> None:  # fmt: skip
    trunk = "transformer" if case[0] == "gpt2" else "model"
    places = {trunk: "disk" if where == "all" else "cpu", "lm_head": "cpu",
              "fips_bases": "cpu" if where == "nothing" else "disk"}  # fmt: skip
    expected = logits(fips.load(folder))
    try:
        found = logits(fips.load(folder, runtime=runtime, device_map=places, offload_folder=tmp_path))
    except fips.FipsError as error:
        assert runtime == "dense"
        assert where != "nothing"
        assert "offload" in str(error) or "basis" in str(error)
    else:
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_sizes_are_those_on_disk(case: tuple[str, str], folder: Path) -> None:
    found, stored = fips.inspect(folder), load_file(folder / "model.safetensors")
    description = json.loads((folder / "config.json").read_text())["quantization_config"]
    groups = parse(description)
    assert describe(groups) == description
    names = {name for group in groups for name in group.tensors()}
    assert found.sizes.matrix_bytes == sum(stored[n].numel() * stored[n].element_size() for n in names)
    assert found.sizes.parameters == sum(stored[n].numel() for n in names if not n.endswith(".mask"))
    for group, kind in zip(groups, KINDS[case[1]], strict=True):
        assert (group.identity, group.columns) == (kind != "whole", COLUMNS[kind])
        assert (f"fips_bases.{group.name}" in stored) == bool(group.columns)
        values = group.d * group.columns + sum(m.nnz for m in group.members)
        assert group.packed_bytes() == 4 * values + sum(group.rank * -(-m.f // 8) for m in group.members)
        assert group.ideal_bytes() == 4 * values + len(group.members) * group.rank * F // 8


def test_inspect_says_what_is_stored_of_every_basis(case: tuple[str, str], folder: Path) -> None:
    found, kinds = fips.inspect(folder), KINDS[case[1]]
    assert [group["identity"] for group in found.groups] == [kind != "whole" for kind in kinds]
    assert [group["columns"] for group in found.groups] == [COLUMNS[kind] for kind in kinds]
    labels = {"whole": "shared", "more": "shared", "alone": "identity"}
    rows = [line.split() for line in found.table().splitlines() if ".mlp." in line]
    for group, kind in zip(found.groups, kinds, strict=True):
        assert {labels[kind] in row for row in rows if group["name"] in row} == {True}


def described(**values: object) -> Callable[[Path], None]:
    """Sets values of a group in config.json; None removes one."""

    def edit(folder: Path) -> None:
        description = json.loads((folder / "config.json").read_text())["quantization_config"]
        group = description["groups"][values["group"]]
        group |= {k: v for k, v in values.items() if k != "group"}
        for key in [k for k, v in group.items() if v is None]:
            del group[key]
        edit_config(folder, quantization_config=description)

    return edit


def stored(edit: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def edit_file(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        edit(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return edit_file


WHOLE, MORE, ALONE = (f"fips_bases.blocks_{i}_{i}" for i in range(3))


@pytest.mark.parametrize(("damage", "match"), [
    (described(group=0, identity=True), rf"{WHOLE} is stored as .*\[32, 40\]; config.json describes .*\[32, 8\]"),
    (described(group=1, identity=None), rf"{MORE} is stored as .*\[32, 7\]; config.json describes .*\[32, 39\]"),
    (described(group=2, identity=None), f"{ALONE} is missing"),  # what a reader without the identity makes of it
    (described(group=2, rank=33), f"{ALONE} is missing"),
    (described(group=1, rank=32), r"mask is stored as .*\[39, 10\]; config.json describes .*\[32, 10\]"),
    (stored(lambda t: t.update({ALONE: torch.zeros(D, 1)})), f"{ALONE} is stored but config.json does not describe"),
    (stored(lambda t: t.update({ALONE: torch.eye(D)})), f"{ALONE} is stored but config.json does not describe"),
    (stored(lambda t: t.pop(MORE)), f"{MORE} is missing"),
    (stored(lambda t: t.update({MORE: torch.cat([torch.eye(D), t[MORE]], 1)})), f"{MORE} is stored as"),
    (stored(lambda t: t[MORE][3:4].fill_(float("nan"))), "NaN"),
])  # fmt: skip
def test_a_basis_that_is_not_as_described(damage: Callable[[Path], None], match: str, damaged: Path) -> None:
    damage(damaged)
    for runtime in ("dense", "packed"):
        with pytest.raises(FormatError, match=match):
            fips.load(damaged, runtime=runtime)


@pytest.mark.parametrize(("values", "match"), [
    ({"group": 1, "identity": "yes"}, "identity of group blocks_1_1 is 'yes'"),
    ({"group": 1, "identity": 1}, "identity of group blocks_1_1 is 1"),
    ({"group": 1, "rank": 31}, "rank 31"),
])  # fmt: skip
def test_damaged_descriptions_of_an_identity(values: dict[str, object], match: str, damaged: Path) -> None:
    described(**values)(damaged)
    for read in (fips.load, fips.inspect):
        with pytest.raises(FormatError, match=match):
            read(damaged)


def test_an_older_description_has_no_identity(damaged: Path) -> None:
    expected = logits(fips.load(damaged))
    described(group=0, identity=None)(damaged)
    assert "identity" not in json.loads((damaged / "config.json").read_text())["quantization_config"]["groups"][0]
    assert torch.equal(logits(fips.load(damaged)), expected)


def test_one_basis_serves_projections_of_one_rank() -> None:
    members = sites("llama", 0)[:2]
    V = {members[0].name: torch.ones(D, F), members[1].name: torch.ones(2 * D, F)}
    with pytest.raises(ValueError, match=r"32 stored columns of width 32 do not make a basis for V of \[32, 64\] rows"):
        pack_group("g", members, torch.zeros(D, D), V, {}, torch.float32)
