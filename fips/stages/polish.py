"""Gradient steps on the outputs of the MLPs after the second-order solve, kept only if they help on held-out text."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from fips.config import CompressionConfig
from fips.models.trace import BlockView
from fips.report import finite
from fips.stages.factorize import FactorizedGroup
from fips.stages.objective import TrainableGroup, group_errors
from fips.stages.reconstruct import Batches, Progress, Training, train
from fips.stages.stream import Stream

HELD_OUT = 8  # one batch of so many is held out
LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Polished:
    """What the steps gave.

    Attributes:
        factors: The polished factors, or the ones it began with.
        before: Mean relative error on the held-out batches before: of the MLPs' outputs, or of the linears' with
            objective "linear".
        after: The same after the steps.
        kept: Whether the polished factors were kept.
    """

    factors: FactorizedGroup
    before: float
    after: float
    kept: bool

    def to_dict(self) -> dict[str, object]:
        """What the report keeps of it."""
        return {"held_out_before": finite(self.before), "held_out_after": finite(self.after), "kept": self.kept}


def polish(
    factors: FactorizedGroup,
    views: Sequence[BlockView],
    stream: Stream,
    config: CompressionConfig,
    progress: Progress,
    *,
    dtype: torch.dtype,
) -> Polished:
    """Trains the kept entries of V, the stored columns of U and the biases of a group; no entry is added or removed.

    Args:
        factors: Solved factors.
        views: The group's blocks, materialized.
        stream: Calibration stream at the group's first block, of two batches or more; every eighth batch is held out,
            or the last one.
        config: Settings; `polish` is the number of steps.
        progress: Called with (steps done, current loss).
        dtype: dtype the factors are stored in; errors are those of the rounded factors.
    """
    held = [i for i in range(len(stream.dense)) if i % HELD_OUT == HELD_OUT - 1] or [len(stream.dense) - 1]
    rest = [i for i in range(len(stream.dense)) if i not in held]
    test, data = _part(stream, held), _part(stream, rest)
    before = group_errors(TrainableGroup(factors.rounded(dtype), trainable=False), views, test, config).total()
    model = TrainableGroup(factors, trainable=True)
    model.freeze_masks_()
    scales = group_errors(TrainableGroup(factors, trainable=False), views, data, config)
    settings = Training(config.polish, LEARNING_RATE, 0.0, None)
    trained = train(model, Batches(views, data, config, scales), settings, progress).rounded(dtype)
    after = group_errors(TrainableGroup(trained, trainable=False), views, test, config).total()
    kept = after < before  # false also for NaN
    return Polished(trained if kept else factors, before, after, kept)


def _part(stream: Stream, batches: Sequence[int]) -> Stream:
    """Some batches of a stream."""
    dense = [stream.dense[i] for i in batches]
    compressed = [stream.compressed[i] for i in batches] if stream.separate else dense
    return replace(stream, dense=dense, compressed=compressed, calls=[stream.calls[i] for i in batches])
