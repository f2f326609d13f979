"""The contract of the architecture table: every family compresses, saves, loads, and gives the same logits."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import fips
from fips.checkpoint.source import open_source
from fips.linalg.packing import unpack
from fips.models.archs import ARCHITECTURES
from fips.plan import make_plan
from tests.families import FAMILIES, write_model

IDS = torch.arange(3, 35)[None]


def rebuilt(dense: Path, out: Path, load: Any = AutoModelForCausalLM.from_pretrained) -> Any:
    """The source model with W = U V written into it by hand, from the stored tensors."""
    model = load(dense)
    stored = load_file(out / "model.safetensors")
    plan = make_plan(open_source(dense), fips.CompressionConfig(group_size=2, device="cpu"))
    sites = {site.disk_name: site for site in plan.sites}
    for group in json.loads((out / "config.json").read_text())["quantization_config"]["groups"]:
        A = stored.get(f"fips_bases.{group['name']}", torch.empty(group["d"], 0)).float()
        lead = group["d"] if group["identity"] else 0
        for member in group["members"]:
            site = sites[member["name"]]
            V = unpack(stored[f"{site.disk_name}.weight"], stored[f"{site.disk_name}.mask"], site.f).float()
            linear = model.get_submodule(site.name)
            W = V[:lead] + A @ V[lead:] if lead else A @ V
            with torch.no_grad():
                linear.weight.copy_(W.T if site.transposed else W)
                if f"{site.disk_name}.bias" in stored:
                    linear.bias.copy_(stored[f"{site.disk_name}.bias"])
    return model.eval()


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS.to(next(model.parameters()).device)).logits


def test_every_row_of_the_table_has_a_tiny_model() -> None:
    assert set(FAMILIES) <= set(ARCHITECTURES)  # the others: tests/test_vision_families.py


@pytest.mark.parametrize("family", FAMILIES)
def test_compress_save_load_gives_the_saved_logits(family: str, tmp_path: Path, settings) -> None:
    dense = write_model(family, tmp_path / "dense")
    out = tmp_path / "out"
    report = fips.compress(dense, out, settings())
    assert report.verified
    expected = logits(rebuilt(dense, out))
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert torch.equal(logits(loaded), expected)
    assert type(loaded.get_submodule(_first(dense))) is type(
        AutoModelForCausalLM.from_pretrained(dense).get_submodule(_first(dense))
    )
    packed = fips.load(out, runtime="packed")
    torch.testing.assert_close(logits(packed), expected, rtol=1e-4, atol=1e-5)
    assert loaded.generate(IDS[:, :4], max_new_tokens=3, do_sample=False).shape == (1, 7)


def _first(dense: Path) -> str:
    return make_plan(open_source(dense), fips.CompressionConfig(device="cpu")).sites[0].name


@pytest.mark.parametrize("family", FAMILIES)
def test_all_sites_are_found_and_reading_then_writing_changes_nothing(family: str, tmp_path: Path) -> None:
    from fips.models.sites import from_canonical, to_canonical

    dense = write_model(family, tmp_path / "dense")
    plan = make_plan(open_source(dense), fips.CompressionConfig(device="cpu"))
    per_block = len(ARCHITECTURES[family][0].up) + len(ARCHITECTURES[family][0].down)
    assert len(plan.sites) == 3 * per_block
    for site in plan.sites:
        weight = plan.source.read(f"{site.disk_name}.weight")
        W = to_canonical(weight, transposed=site.transposed)
        assert W.shape == (site.d, site.f)
        assert site.d == 32
        assert torch.equal(from_canonical(W, transposed=site.transposed), weight)


@contextmanager
def keeping_everything() -> Iterator[None]:
    """Every group gets r = d, s = 0; the check that it is smaller is bypassed."""
    from fips.linalg.budget import GroupPlan
    from fips.stages import candidates, grouping

    whole = lambda d, widths, budget, sparsity: GroupPlan(d, tuple(widths), d, d * sum(widths))  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(candidates, "plan_group", whole)
        patch.setattr(grouping, "_smaller", lambda plans, *_: plans)
        yield


@pytest.mark.parametrize("family", FAMILIES)
def test_full_rank_without_zeros_gives_the_source_logits(family: str, tmp_path: Path, settings) -> None:
    dense = write_model(family, tmp_path / "dense")
    with keeping_everything():
        fips.compress(dense, tmp_path / "out", settings(steps=0))
    expected = logits(AutoModelForCausalLM.from_pretrained(dense))
    found = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out"))
    assert (found - expected).norm() <= 1e-4 * expected.norm()
