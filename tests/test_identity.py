"""Groups whose basis begins with an identity that is not stored, alone and beside groups that store all of U."""

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM

import fips
from fips import stream_groups
from fips.checkpoint.format import basis_key
from fips.checkpoint.pack import pack_group
from fips.config import CompressionConfig
from fips.errors import FormatError
from fips.linalg.budget import plan_bytes, plan_group
from fips.models.layers import rebuild
from fips.models.sites import Site
from fips.stages import grouping
from tests.families import write_model

D, F, IDS = 32, 80, torch.arange(3, 35)[None]


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def sparse(rank: int) -> torch.Tensor:
    V = torch.randn(rank, F, generator=torch.Generator().manual_seed(rank))
    return V * (V.abs() > 1)


@pytest.mark.parametrize("columns", [0, 5])
def test_the_identity_is_rebuilt_without_being_stored(columns: int) -> None:
    basis, V = torch.randn(D, columns, generator=torch.Generator().manual_seed(1)), sparse(D + columns)
    whole = torch.cat([torch.eye(D), basis], 1)
    torch.testing.assert_close(rebuild(basis, V), whole @ V)
    packed = pack_group("g", [Site("m.a", "a", 0, "down", D, F, False)], basis, {"m.a": V}, {}, torch.bfloat16)
    assert (packed.info.identity, packed.info.rank, packed.info.columns) == (True, D + columns, columns)
    assert (basis_key("g") in packed.tensors) == (columns > 0)
    assert packed.info.packed_bytes() == sum(t.numel() * t.element_size() for t in packed.tensors.values())
    assert packed.info.parameters() == D * columns + int((V != 0).sum())
    rounded = rebuild(basis.bfloat16(), V.bfloat16())
    assert torch.equal(packed.weight(Site("m.a", "a", 0, "down", D, F, False)), rounded)


def test_a_basis_that_fits_no_projection_is_refused() -> None:
    with pytest.raises(FormatError, match="32 x 3 does not fit a projection of 36 rows"):
        rebuild(torch.zeros(D, 3), torch.zeros(D + 4, F))
    with pytest.raises(ValueError, match="3 stored columns"):
        pack_group("g", [Site("m.a", "a", 0, "down", D, F, False)], torch.zeros(D, 3), {"m.a": sparse(D + 4)}, {},
                   torch.float32)  # fmt: skip


def mixed_plans(d: int, widths: list[int], _config: CompressionConfig, itemsize: int):
    """All of U stored, then [I | A], then I alone, group by group."""
    mixed_plans.calls += 1
    dense = plan_group(d, widths, 0.5, 0.75)
    size = dense.packed_bytes(itemsize)
    return ((dense,), (plan_bytes(d, widths, size, itemsize, d + 9),), (plan_bytes(d, widths, size, itemsize, d),))[
        mixed_plans.calls % 3
    ]


@pytest.fixture(params=["llama", "gpt2"])
def mixed(request: pytest.FixtureRequest, tmp_path: Path, settings, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model of four groups: all of U, [I | A] and I alone are among them."""
    mixed_plans.calls = -1
    monkeypatch.setattr(grouping, "candidate_plans", mixed_plans)
    dense = write_model(request.param, tmp_path / "dense")
    report = fips.compress(dense, tmp_path / "out", settings(group_size=1))
    assert {g.basis for g in report.groups} == {"shared", "identity"}
    assert report.verified
    return tmp_path / "out"


def loaded(folder: Path, runtime: str) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=fips.FipsConfig(runtime=runtime))


def test_mixed_groups_load_alike_in_both_runtimes_and_as_copies(mixed: Path) -> None:
    dense, packed = loaded(mixed, "dense"), loaded(mixed, "packed")
    expected = logits(dense)
    assert torch.equal(logits(packed), expected)
    assert torch.equal(logits(copy.deepcopy(packed)), expected)
    assert torch.equal(logits(packed.bfloat16()), logits(loaded(mixed, "packed").bfloat16()))


def test_mixed_groups_survive_being_saved_again(mixed: Path, tmp_path: Path) -> None:
    packed = loaded(mixed, "packed")
    packed.save_pretrained(tmp_path / "again")
    assert load_file(tmp_path / "again" / "model.safetensors").keys() == load_file(mixed / "model.safetensors").keys()
    assert torch.equal(logits(loaded(tmp_path / "again", "dense")), logits(packed))
    headless = AutoModel.from_pretrained(mixed, quantization_config=fips.FipsConfig(runtime="packed"))
    headless.to(torch.float16).save_pretrained(tmp_path / "headless")
    assert fips.inspect(tmp_path / "headless").sizes.matrix_bytes < fips.inspect(mixed).sizes.matrix_bytes


@pytest.fixture(scope="module")
def pruned(llama: Path, calibration: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama, plainly pruned in every group: no basis is stored at all. Do not change it; copy it."""
    out = tmp_path_factory.mktemp("pruned") / "out"
    fips.compress(llama, out, CompressionConfig(
        target_size=0.6, basis="identity", calibration=str(calibration), calibration_tokens=256, sequence_length=32,
        device="cpu",
    ))  # fmt: skip
    return out


def test_a_model_without_any_basis(pruned: Path, tmp_path: Path) -> None:
    assert not [name for name in load_file(pruned / "model.safetensors") if name.startswith("fips_bases")]
    dense, packed = loaded(pruned, "dense"), loaded(pruned, "packed")
    assert torch.equal(logits(dense), logits(packed))
    packed.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(loaded(tmp_path / "again", "packed")), logits(dense))
    found = fips.inspect(pruned)
    assert {g["basis"] for g in found.groups} == {"identity"}
    assert {g["columns"] for g in found.groups} == {0}


def test_plain_pruning_keeps_rows_of_the_dense_matrix(llama: Path, pruned: Path) -> None:
    """With U = I the rebuilt weight has exactly the stored number of non-zeros."""
    name = "model.layers.1.mlp.down_proj"
    W = loaded(pruned, "dense").get_submodule(name).weight
    assert int((W != 0).sum()) == load_file(pruned / "model.safetensors")[f"{name}.weight"].numel()
    share = float((W != 0).float().mean())
    assert share == pytest.approx(0.6 - 1 / 32, abs=0.01)  # float32 values: the mask bit is a 32nd


def test_a_basis_nobody_described_is_refused(pruned: Path, tmp_path: Path) -> None:
    folder = tmp_path / "damaged"
    folder.mkdir()
    for path in pruned.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "fips_bases.blocks_0_3": torch.zeros(D, 2)}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(FormatError, match="does not describe it"):
        AutoModelForCausalLM.from_pretrained(folder)


def test_the_compressed_prefix_sees_pruned_weights(llama: Path, settings, tmp_path: Path,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    seen: list[torch.Tensor] = []
    real = stream_groups._stored_weights

    def keep(*args: object) -> dict[str, torch.Tensor]:
        weights = real(*args)
        seen.extend(w for n, w in weights.items() if n.endswith("up_proj.weight"))
        return weights

    monkeypatch.setattr(stream_groups, "_stored_weights", keep)
    fips.compress(llama, tmp_path / "out", settings(target_size=0.6, basis="identity", inputs="compressed"))
    stored = AutoModelForCausalLM.from_pretrained(tmp_path / "out").get_submodule("model.layers.0.mlp.up_proj").weight
    assert torch.equal(seen[0], stored)
