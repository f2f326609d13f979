"""Gradient steps after the solve: only what helps on held-out batches is kept, and no entry comes or goes."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fips
from fips.checkpoint.source import open_source
from fips.models.sites import to_canonical
from fips.plan import make_plan
from fips.stages import polish as stage
from fips.stages.factorize import FactorizedGroup
from fips.stages.moments import collect_moments
from fips.stages.polish import polish
from fips.stages.solve import GroupProblem, solve_group
from tests.families import write_model
from tests.test_moments import blocks_of_first_group, stream_of


@pytest.fixture(params=["llama", "gpt2"])
def solved(request: pytest.FixtureRequest, tmp_path: Path):
    """Settings, a stream of ten batches, blocks and solved factors of the first group."""
    folder = write_model(request.param, tmp_path / "dense")
    config = fips.CompressionConfig(group_size=2, device="cpu", polish=30, budget=0.4, basis="shared", rounds=2)
    plan = make_plan(open_source(folder), config)
    stream = stream_of(plan)
    stream.dense = [h + 0.1 * i for i in range(4) for h in stream.dense][:10]
    stream.compressed, stream.calls = stream.dense, (stream.calls * 4)[:10]
    views, real = blocks_of_first_group(plan)
    with real:
        sites = [site for view in views for site in view.sites]
        linears = {site.name: view.linear(site) for view in views for site in view.sites}
        weights = {s.name: to_canonical(linears[s.name].weight, transposed=s.transposed) for s in sites}
        biases = {n: m.bias for n, m in linears.items() if getattr(m, "bias", None) is not None}
        problem = GroupProblem.of(plan.groups[0], weights, biases, collect_moments(views, stream, 0), "mlp")
        found = solve_group(plan.groups[0], problem, config, lambda _n, _e: None, dtype=torch.float32)
        yield config, stream, views, found.factors


def test_polish_lowers_the_held_out_error_and_keeps_the_masks(solved, monkeypatch: pytest.MonkeyPatch) -> None:
    config, stream, views, factors = solved
    monkeypatch.setattr(stage, "LEARNING_RATE", 1e-3)
    found = polish(factors, views, stream, config, lambda _n, _e: None, dtype=torch.float32)
    assert found.kept
    assert found.after < 0.98 * found.before
    assert not torch.equal(found.factors.basis, factors.basis)
    for name, V in factors.projections.items():
        assert torch.equal(found.factors.projections[name] == 0, V == 0)


def test_polish_that_makes_it_worse_is_dropped(solved, monkeypatch: pytest.MonkeyPatch) -> None:
    config, stream, views, factors = solved
    monkeypatch.setattr(stage, "LEARNING_RATE", 3.0)
    found = polish(factors, views, stream, config, lambda _n, _e: None, dtype=torch.float32)
    assert not found.kept
    assert not found.after < found.before
    assert found.factors is factors


def test_polish_never_trains_on_what_it_is_judged_on(solved, monkeypatch: pytest.MonkeyPatch) -> None:
    config, stream, views, factors = solved
    trained, judged = [], []
    train, errors = stage.train, stage.group_errors

    def watch_training(model: object, data: object, *rest: object) -> object:
        trained.extend(data.stream.dense)
        return train(model, data, *rest)

    def watch_errors(model: object, blocks: object, part: object, *rest: object) -> object:
        judged.append(part.dense)
        return errors(model, blocks, part, *rest)

    monkeypatch.setattr(stage, "train", watch_training)
    monkeypatch.setattr(stage, "group_errors", watch_errors)
    found = polish(factors, views, stream, replace(config, polish=3), lambda _n, _e: None, dtype=torch.float32)
    held = stream.dense[stage.HELD_OUT - 1]
    before, scales, after = judged
    assert [h is held for h in before] == [h is held for h in after] == [True]
    assert len(trained) == len(stream.dense) - 1
    assert not any(h is held for h in [*trained, *scales])
    assert found.before > 0


def test_a_single_batch_is_never_polished_on(llama: Path, settings, tmp_path: Path) -> None:
    report = fips.compress(llama, tmp_path / "out", settings(polish=2, batch_tokens=256))
    assert all(group.polish is None for group in report.groups)
    assert any("polish was left out" in note for note in report.notes)


def test_plain_pruning_can_be_polished(llama: Path, settings, tmp_path: Path) -> None:
    report = fips.compress(llama, tmp_path / "out", settings(target_size=0.6, basis="identity", polish=2))
    assert report.verified
    for group in report.groups:
        assert group.polish is not None
        assert group.polish["kept"] == (group.polish["held_out_after"] < group.polish["held_out_before"])


def test_an_empty_basis_has_nothing_to_train() -> None:
    from fips.stages.objective import TrainableGroup

    factors = FactorizedGroup(torch.empty(4, 0), {"a": torch.eye(4)}, {})
    assert [p.shape for p in TrainableGroup(factors, trainable=True).parameters()] == [(4, 4)]
