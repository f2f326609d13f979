"""What the solvers minimize in blocks with a layer scale (DINOv2) and in blocks that end in a norm (BERT)."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fips
from fips import stream_groups
from fips.models.blocks import Call
from fips.models.sites import Site
from fips.models.trace import BlockView, trace_sensitivity
from tests.test_vision_kinds import quick
from tests.vision_kinds import load_dense, write_images, write_kind

PATHS = {"dinov2": "encoder.layer", "bert classifier": "bert.encoder.layer"}
LINEARS = {"dinov2": ("mlp.fc1", "mlp.fc2"), "bert classifier": ("intermediate.dense", "output.dense")}
each_kind = pytest.mark.parametrize("kind", PATHS)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("images") / "train", 6)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: write_kind(kind, tmp_path_factory.mktemp("kind") / "dense") for kind in PATHS}


def view_of(kind: str, block: nn.Module) -> BlockView:
    up, down = LINEARS[kind]
    sites = (
        Site(f"b.{up}", f"b.{up}", 0, "up", 32, 80, True),
        Site(f"b.{down}", f"b.{down}", 0, "down", 32, 80, False),
    )
    return BlockView(0, "b", block, sites)


def finite_differences(block: nn.Module, linear: nn.Module, hidden: Tensor, step: float = 1e-4) -> Tensor:
    """Σ over tokens of ‖∂out/∂y_k‖² for the outputs y of a linear, by moving one output of one token at a time."""
    moved: list[tuple[int, int, float]] = []

    def move(_module: Any, _args: Any, output: Tensor) -> Tensor:
        token, channel, distance = moved[-1]
        output = output.clone()
        output[0, token, channel] += distance
        return output

    handle = linear.register_forward_hook(move)
    found = torch.zeros(32, dtype=torch.float64)
    for token in range(hidden.shape[1]):
        for channel in range(32):
            ends = []
            for distance in (step, -step):
                moved.append((token, channel, distance))
                out = block(hidden)
                ends.append(out[0] if isinstance(out, tuple) else out)
            found[channel] += ((ends[0] - ends[1]) / (2 * step)).square().sum()
    handle.remove()
    return found


@each_kind
@torch.no_grad()
def test_the_sensitivity_of_down_matrices_is_the_jacobian(kind: str, dense: dict[str, Path]) -> None:
    block = load_dense(dense[kind]).get_submodule(PATHS[kind])[1].double().requires_grad_(requires_grad=False)
    view = view_of(kind, block)
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(1, 2, 32, generator=generator, dtype=torch.float64)
    expected = finite_differences(block, view.linear(view.sites[1]), hidden)
    copies = 3000  # every copy draws signs of its own
    _, squares = trace_sensitivity(view, Call((), {}, None), hidden.expand(copies, -1, -1), generator)
    found = squares[view.sites[1].name].double() / copies
    assert expected.max() > 1.5 * expected.min()
    torch.testing.assert_close(found, expected, rtol=0.15, atol=0)
    if kind == "dinov2":  # out = ... + λ y: exact in every draw
        torch.testing.assert_close(found, 2 * block.layer_scale2.lambda1.double().square(), rtol=1e-5, atol=0)


@contextmanager
def collected() -> Iterator[list[Tensor]]:
    """The calibration batches of a run."""
    batches: list[Tensor] = []
    real = stream_groups.start_stream

    def start(trunk: Any, given: Any, *args: Any, **kwargs: Any) -> Any:
        batches.extend(given)
        return real(trunk, batches, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream_groups, "start_stream", start)
        yield batches


def blocks_with_inputs(kind: str, model: Any, batches: list[Tensor]) -> list[tuple[nn.Module, list[Tensor]]]:
    """Every block of the dense model with what enters it on the calibration data."""
    found = [(block, []) for block in model.get_submodule(PATHS[kind])]
    handles = [
        block.register_forward_pre_hook(lambda _m, args, kept=kept: kept.append(args[0])) for block, kept in found
    ]
    with torch.no_grad():
        for batch in batches:
            model(batch)
    for handle in handles:
        handle.remove()
    return found


def inside(kind: str, block: nn.Module, hidden: list[Tensor]) -> tuple[dict[str, Tensor], Tensor]:
    """Inputs of the linears of a block, (tokens, ·), and what the block gives."""
    seen: dict[str, list[Tensor]] = {name: [] for name in LINEARS[kind]}
    handles = [
        block.get_submodule(name).register_forward_pre_hook(
            lambda _m, args, kept=kept: kept.append(args[0].flatten(0, 1))
        )
        for name, kept in seen.items()
    ]
    with torch.no_grad():
        outs = [block(h) for h in hidden]
    for handle in handles:
        handle.remove()
    outs = [out[0] if isinstance(out, tuple) else out for out in outs]
    return {name: torch.cat(kept) for name, kept in seen.items()}, torch.cat([out.flatten(0, 1) for out in outs])


def relative(difference: Tensor, whole: Tensor) -> float:
    return float(difference.double().square().sum() / whole.double().square().sum())


def by_hand(kind: str, model: Any, ours: Any, batches: list[Tensor], objective: str, solver: str) -> dict[str, float]:
    """The errors of a run, from the weights that were stored: those of every linear that can be told, or of blocks."""
    errors = {}
    stored = ours.get_submodule(PATHS[kind])
    for number, (block, hidden) in enumerate(blocks_with_inputs(kind, model, batches)):
        path = f"{PATHS[kind]}.{number}"
        inputs, out = inside(kind, block, hidden)
        if solver == "gradient" and objective == "block":
            _, changed = inside(kind, stored[number], hidden)
            errors[path] = relative(out - changed, out - torch.cat([h.flatten(0, 1) for h in hidden]))
            continue
        for name, x in inputs.items():
            a, b = block.get_submodule(name), stored[number].get_submodule(name)
            if solver == "moments":  # the bias takes up the mean
                x = x - x.mean(0)
                a, b = x @ a.weight.T, x @ b.weight.T
                if objective == "block" and kind == "dinov2" and name == "mlp.fc2":
                    weights = block.layer_scale2.lambda1.square()
                    weights = (weights / weights.mean() + 1e-2).sqrt()
                    a, b = a * weights, b * weights
            elif objective == "linear":
                a, b = x @ a.weight.T, b(x) - a.bias
            if isinstance(a, Tensor) and (objective == "linear" or name == "mlp.fc2"):
                errors[f"{path}.{name}"] = relative(a - b, a)
    return errors


@each_kind
@pytest.mark.parametrize("solver", ["moments", "gradient"])
@pytest.mark.parametrize("objective", ["block", "mlp", "linear"])
def test_reported_errors_are_those_of_what_is_stored(
    kind: str, solver: str, objective: str, dense: dict[str, Path], images: Path, calibration: Path, tmp_path: Path
) -> None:
    more = {"steps": 30, "learning_rate": 3e-3, "mask_interval": 5} if solver == "gradient" else {"rounds": 3}
    settings = quick(kind, images, calibration, solver=solver, objective=objective, **more)
    with collected() as batches:
        report = fips.compress(dense[kind], tmp_path / "out", settings)
    after = {name: error for group in report.groups for name, error in group.error_after.items()}
    before = {name: error for group in report.groups for name, error in group.error_before.items()}
    assert after.keys() == before.keys()
    assert len(after) == (3 if solver == "gradient" and objective != "linear" else 6)
    assert sum(after.values()) < 0.9 * sum(before.values())
    model, ours = load_dense(dense[kind]), load_dense(tmp_path / "out")
    expected = by_hand(kind, model, ours, batches, objective, solver)
    assert expected or objective == "mlp" or kind == "bert classifier"
    for name, error in expected.items():
        assert after[name] == pytest.approx(error, rel=2e-3), name


@each_kind
def test_the_objectives_differ_and_block_is_best_for_the_block(
    kind: str, dense: dict[str, Path], images: Path, calibration: Path, tmp_path: Path
) -> None:
    """Judged by the output of the blocks, gradient steps on it do better than gradient steps on the linears."""
    errors = {}
    for objective in ("linear", "block"):
        settings = quick(kind, images, calibration, solver="gradient", objective=objective, steps=60,
                         learning_rate=3e-3, mask_interval=10, budget=0.4)  # fmt: skip
        with collected() as batches:
            fips.compress(dense[kind], tmp_path / objective, settings)
        model, ours = load_dense(dense[kind]), load_dense(tmp_path / objective)
        errors[objective] = sum(by_hand(kind, model, ours, batches, "block", "gradient").values())
    assert errors["block"] < errors["linear"]
