"""The contract of image models and text encoders: every family compresses, saves, loads, and gives the same outputs."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

import fips
from fips.checkpoint.source import open_source
from fips.models.archs import ARCHITECTURES
from fips.models.blocks import cross_stage, record_calls, returned_tuple_length, run_block
from fips.models.sites import trunk_of
from fips.plan import make_plan
from tests import families
from tests.vision_families import FAMILIES, TEXT, inputs_of, write_images, write_model


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("images") / "train")


@pytest.fixture
def chosen(images: Path, calibration: Path):
    """Settings for a family."""

    def make(name: str, **overrides: Any) -> fips.CompressionConfig:
        if name in TEXT:
            data = {"calibration": str(calibration), "calibration_tokens": 256, "sequence_length": 32}
        else:
            data = {"calibration": str(images), "calibration_images": 9}
        return fips.CompressionConfig(**{"group_size": 2, "batch_tokens": 64, "rounds": 2, "device": "cpu", **data,
                                         **overrides})  # fmt: skip

    return make


def load(folder: Path, name: str) -> Any:
    return getattr(transformers, FAMILIES[name].architecture).from_pretrained(folder).eval()


@torch.no_grad()
def outputs(model: Any, name: str) -> torch.Tensor:
    """Logits of a classifier, hidden states of everything else."""
    batch = inputs_of(name, model)
    if name not in TEXT and "logits" in (found := trunk_free(model, batch)):
        return found["logits"]
    return trunk_of(model)[1](**batch).last_hidden_state


def trunk_free(model: Any, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return dict(model(**batch)) if "ForImage" in type(model).__name__ else {}


def test_every_row_of_the_table_has_a_tiny_model() -> None:
    assert {family.row for family in FAMILIES.values()} | set(families.FAMILIES) == set(ARCHITECTURES)


@pytest.mark.parametrize("name", FAMILIES)
def test_compress_save_load_gives_the_saved_outputs(name: str, chosen, tmp_path: Path) -> None:
    dense = write_model(name, tmp_path / "dense")
    report = fips.compress(dense, tmp_path / "out", chosen(name))
    assert report.verified
    sites = make_plan(open_source(dense), chosen(name)).sites
    assert len(sites) == 2 * FAMILIES[name].blocks
    assert {s.d for s in sites} == ({16, 32, 64} if name.startswith("swin") else {32})
    # By hand: W = U V into the dense model.
    by_hand, loaded = load(dense, name), fips.load(tmp_path / "out")
    assert type(loaded) is type(by_hand)
    packed = fips.load(tmp_path / "out", runtime="packed")
    for site in sites:
        layer = packed.get_submodule(site.name)
        U, V = layer.basis(), layer.projection()
        W = V[: site.d] + U @ V[site.d :] if V.shape[0] > U.shape[1] else U @ V
        linear = by_hand.get_submodule(site.name)
        linear.weight.data = (W.T if site.role == "up" else W).contiguous()
        linear.bias.data = layer.bias.data
    expected = outputs(by_hand, name)
    assert torch.equal(outputs(loaded, name), outputs(load(tmp_path / "out", name), name))
    torch.testing.assert_close(outputs(loaded, name), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(outputs(packed, name), expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(outputs(load(dense, name), name), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", FAMILIES)
def test_full_rank_without_zeros_gives_the_source_s_outputs(name: str, chosen, tmp_path: Path) -> None:
    """A budget that keeps everything (r = d, s = 0); the size check is bypassed, as such a plan is refused."""
    from fips.linalg.budget import GroupPlan
    from fips.stages import candidates, grouping

    dense = write_model(name, tmp_path / "dense")
    whole = lambda d, widths, budget, sparsity: GroupPlan(d, tuple(widths), d, d * sum(widths))  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(candidates, "plan_group", whole)
        patch.setattr(grouping, "_smaller", lambda plans, *_: plans)
        fips.compress(dense, tmp_path / "out", chosen(name, steps=0, rounds=6))
    expected = outputs(load(dense, name), name)
    found = outputs(load(tmp_path / "out", name), name)
    assert (found - expected).norm() <= 1e-4 * expected.norm()


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_blocks_run_alone_give_what_the_model_gives(name: str, chosen, tmp_path: Path) -> None:
    """Bit for bit, also where a Swin merges patches between two stages."""
    dense = write_model(name, tmp_path / "dense")
    plan, model = make_plan(open_source(dense), chosen(name)), load(dense, name)
    plan.model.load_state_dict(model.state_dict(), assign=True)
    trunk = plan.trunk
    (batch,) = inputs_of(name, model).values()
    seen: list[torch.Tensor] = []
    keep = lambda _m, _a, out: seen.append(out[0] if isinstance(out, tuple) else out)  # noqa: E731
    handles = [block.module.register_forward_hook(keep) for block in trunk.blocks]
    trunk.module(**inputs_of(name, model))
    for handle in handles:
        handle.remove()
    tuples = returned_tuple_length(trunk, batch)
    hidden, calls = record_calls(trunk, batch, tuples=tuples)
    for number, block in enumerate(trunk.blocks):
        hidden = run_block(block.module, calls[number], hidden)
        assert torch.equal(hidden, seen[number])
        if plan.ends_stage(number):
            hidden = cross_stage(trunk, batch.shape, number, hidden, tuples=tuples)


def test_no_group_crosses_a_stage(chosen, tmp_path: Path) -> None:
    dense = write_model("swin", tmp_path / "dense")
    plan = make_plan(open_source(dense), chosen("swin", group_size=4))
    assert [(g.first, g.last, g.sites[0].d) for g in plan.groups] == [(0, 1, 16), (2, 3, 32), (4, 4, 64)]
    with pytest.raises(fips.FipsError, match="1-2 joins blocks of different"):
        make_plan(open_source(dense), chosen("swin", groups=((0, 0), (1, 2), (3, 4))))


def test_inputs_of_the_compressed_prefix_cross_stages_too(chosen, tmp_path: Path) -> None:
    """The last group is judged on what the compressed model really gives it."""
    from fips import stream_groups

    dense, entering = write_model("swin", tmp_path / "dense"), []
    real = stream_groups.enter_stage

    def enter(stream: Any, *rest: Any) -> None:
        real(stream, *rest)
        entering.append((stream.dense[0].clone(), stream.compressed[0].clone()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream_groups, "enter_stage", enter)
        fips.compress(dense, tmp_path / "out", chosen("swin", inputs="compressed", budget=0.3))
    assert len(entering) == 2
    for dense_state, compressed_state in entering:
        assert dense_state.shape == compressed_state.shape
        assert not torch.equal(dense_state, compressed_state)


@pytest.mark.parametrize("name", ["clip", "siglip"])
def test_the_other_tower_stays_as_it_is(name: str, chosen, tmp_path: Path) -> None:
    dense = write_model(name, tmp_path / "dense")
    fips.compress(dense, tmp_path / "out", chosen(name))
    before, after = (load_file(f / "model.safetensors") for f in (dense, tmp_path / "out"))
    text = [n for n in before if n.startswith("text_model.")]
    assert text
    assert all(torch.equal(before[n], after[n]) for n in text)
    assert (tmp_path / "out" / "preprocessor_config.json").read_bytes() == (
        dense / "preprocessor_config.json").read_bytes()  # fmt: skip


@pytest.mark.parametrize("name", ["vit backbone", "bert"])
def test_a_checkpoint_without_its_pooler(name: str, chosen, tmp_path: Path) -> None:
    """Many on the Hub have none; what it is made of then is random in every load, before and after."""
    dense = write_model(name, tmp_path / "dense")
    from safetensors.torch import save_file

    tensors = {n: t for n, t in load_file(dense / "model.safetensors").items() if "pooler" not in n}
    save_file(tensors, dense / "model.safetensors", metadata={"format": "pt"})
    assert fips.compress(dense, tmp_path / "out", chosen(name)).verified
    assert not any("pooler" in n for n in load_file(tmp_path / "out" / "model.safetensors"))
