"""Prunes V gradually while U, V and the biases of a group are trained to reconstruct the dense outputs (Eq. 1)."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from fips.config import CompressionConfig
from fips.linalg.prune import PruningSchedule, largest_masks
from fips.models.trace import BlockView
from fips.stages.factorize import FactorizedGroup
from fips.stages.grouping import Group
from fips.stages.objective import GroupErrors, TrainableGroup, block_terms, group_errors, trace_group
from fips.stages.stream import Stream

Progress = Callable[[int, float], None]


@dataclass(frozen=True)
class Reconstruction:
    """A reconstructed group.

    Attributes:
        factors: U, sparse V and biases.
        before: Relative output errors of the start: truncated SVD, pruned once to the same number of non-zeros.
        after: Relative output errors of the result.
        dead: Matrix name → input features that no calibration token ever activates.
        tried: Plans the moments solver tried, as JSON values.
        polish: What gradient steps after the solve gave, as JSON values; None without them.
    """

    factors: FactorizedGroup
    before: dict[str, float]
    after: dict[str, float]
    dead: dict[str, int]
    tried: list[dict[str, object]] = field(default_factory=list)
    polish: dict[str, object] | None = None


def prune_once(factors: FactorizedGroup, keep: int) -> FactorizedGroup:
    """Keeps the `keep` largest entries over all V of a group."""
    masks = largest_masks(list(factors.projections.values()), keep)
    pruned = {n: V * M for (n, V), M in zip(factors.projections.items(), masks, strict=True)}
    return FactorizedGroup(factors.basis, pruned, factors.biases)


def reconstruct(
    group: Group,
    views: Sequence[BlockView],
    stream: Stream,
    start: FactorizedGroup,
    config: CompressionConfig,
    progress: Progress,
    *,
    dtype: torch.dtype,
) -> Reconstruction:
    """Joint reconstruction of one group.

    Args:
        group: The group and its plan.
        views: Its blocks, materialized with the dense weights.
        stream: Calibration stream at the group's first block.
        start: Unpruned factors.
        config: Settings.
        progress: Called with (steps done, current loss).
        dtype: dtype the factors are stored in; the errors are those of the rounded factors.

    Returns:
        The result; the pruned start itself if training did not lower the error.
    """
    keep = group.require_plan().keep
    pruned = prune_once(start, keep).rounded(dtype)
    before = group_errors(TrainableGroup(pruned, trainable=False), views, stream, config)
    if config.steps == 0:
        return Reconstruction(pruned, before.relative(), before.relative(), before.dead)
    settings = Training(config.steps, config.learning_rate, config.weight_decay, _schedule(config, keep, start))
    model = TrainableGroup(start, trainable=True)
    trained = train(model, Batches(views, stream, config, before), settings, progress).rounded(dtype)
    after = group_errors(TrainableGroup(trained, trainable=False), views, stream, config)
    if after.total() > before.total() or not math.isfinite(after.total()):
        return Reconstruction(pruned, before.relative(), before.relative(), before.dead)
    return Reconstruction(trained, before.relative(), after.relative(), before.dead)


@dataclass(frozen=True)
class Batches:
    """What a step is computed from.

    Attributes:
        views: The group's blocks.
        stream: Calibration stream at its first block.
        config: Settings.
        before: Errors of the start; their energies scale the loss.
    """

    views: Sequence[BlockView]
    stream: Stream
    config: CompressionConfig
    before: GroupErrors


def _schedule(config: CompressionConfig, keep: int, start: FactorizedGroup) -> PruningSchedule:
    total = sum(V.numel() for V in start.projections.values())
    return PruningSchedule.over(config.schedule, 1 - keep / total, config.steps, config.mask_interval)


@dataclass(frozen=True)
class Training:
    """How factors are trained.

    Attributes:
        steps: Optimizer steps.
        rate: Peak learning rate of AdamW; cosine decay to a thousandth.
        decay: Its weight decay.
        schedule: When and how far V is pruned; None leaves its masks alone.
    """

    steps: int
    rate: float
    decay: float
    schedule: PruningSchedule | None


def train(model: TrainableGroup, data: Batches, settings: Training, progress: Progress) -> FactorizedGroup:
    """Trains U, V and biases of a group jointly, V pruned by the schedule on the way."""
    total = sum(V.numel() for V in model.V.values())
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.rate, weight_decay=settings.decay)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, settings.steps, eta_min=settings.rate / 1000)
    generator = torch.Generator().manual_seed(data.config.seed + data.views[0].number)
    batches = _batches(len(data.stream.dense), generator)
    for step in range(settings.steps):
        if settings.schedule is not None and settings.schedule.updates_at(step):
            model.prune_(total - round(settings.schedule.sparsity(step) * total))
        loss = _backward(model, data, next(batches))
        model.mask_gradients_()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        model.mask_()
        decay.step()
        progress(1, loss)
    return model.factors()


def _backward(model: TrainableGroup, data: Batches, batch: int) -> float:
    """Accumulates the gradients of one batch, block by block, and returns the mean relative error."""
    loss = 0.0
    for view, dense, ours in trace_group(model, data.views, data.stream, batch, data.config):
        terms = block_terms(model, view, data.stream.calls[batch][view.number], (dense, ours), data.config)
        part = torch.stack([t.residual / data.before.scale(name) for name, t in terms.items()]).sum()
        part = part / len(data.before.energy)
        torch.autograd.backward(part)
        loss += float(part.detach())
    return loss


def _batches(count: int, generator: torch.Generator) -> Iterator[int]:
    """Batch numbers, every batch once per epoch in random order."""
    while True:
        yield from torch.randperm(count, generator=generator).tolist()
