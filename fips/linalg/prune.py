"""Gradual magnitude pruning: how much is pruned when, and which entries go."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PruningSchedule:
    """Sparsity as a function of the step (GMP, Zhu and Gupta 2017; accelerated form of FiPS).

    Attributes:
        kind: "accelerated": 5 % until `start`, a jump to 50 %, then cubic. "zhu-gupta": cubic from 0 at `start`.
        final: Sparsity reached exactly at `end` and kept from there, s_f.
        start: Step t_a at which the cubic part begins.
        end: Step t_e at which `final` is reached.
        interval: Steps between two mask updates.
    """

    kind: str
    final: float
    start: int
    end: int
    interval: int

    @classmethod
    def over(cls, kind: str, final: float, steps: int, interval: int) -> "PruningSchedule":
        """The schedule for a run of `steps`: the cubic part from 10 % (accelerated; else 0) to 75 % of the steps."""
        end = min(round(0.75 * steps), max(steps - 1, 0))  # a run of one or two steps must end sparse too
        return cls(kind, final, min(round(0.1 * steps), end) if kind == "accelerated" else 0, end, interval)

    def sparsity(self, step: int) -> float:
        """s(t) = s_f + (s_a - s_f)·(1 - (t - t_a)/(t_e - t_a))³, with t_e - t_a below the line so that s(t_e) = s_f."""
        before, after = (0.05, 0.5) if self.kind == "accelerated" else (0.0, 0.0)
        if step >= self.end:
            return self.final
        if step < self.start:
            return min(before, self.final)
        start = min(after, self.final)
        left = 1 - (step - self.start) / (self.end - self.start)
        return self.final + (start - self.final) * left**3

    def updates_at(self, step: int) -> bool:
        """Whether the mask is recomputed before this step; once after `end`, the mask is final."""
        return step == self.end or (step < self.end and step % self.interval == 0)


def largest_masks(tensors: Sequence[Tensor], keep: int) -> list[Tensor]:
    """Masks of the `keep` entries of largest magnitude over all tensors together.

    The threshold is found exactly from two histograms of the float32 bit patterns, so nothing is concatenated or
    sorted: the extra memory is one tensor's, not the group's. Entries equal to the threshold are kept in order.

    Args:
        tensors: Tensors of any shapes.
        keep: Entries kept in total.

    Returns:
        Boolean masks of the tensors' shapes with exactly `keep` true entries.
    """
    total = sum(t.numel() for t in tensors)
    if keep >= total:
        return [torch.ones_like(t, dtype=torch.bool) for t in tensors]
    if keep <= 0:
        return [torch.zeros_like(t, dtype=torch.bool) for t in tensors]
    high, above = _select(lambda: ((_bits(t) >> 16) for t in tensors), 1 << 15, keep)
    low, _ = _select(lambda: (_low_half(_bits(t), high) for t in tensors), 1 << 16, keep - above)
    threshold = (high << 16) | low
    ties = keep - sum(int((_bits(t) > threshold).sum()) for t in tensors)
    masks = []
    for t in tensors:
        bits = _bits(t)
        mask = bits > threshold
        equal = (bits == threshold).nonzero()[:ties]
        mask[tuple(equal.T)] = True
        ties -= len(equal)
        masks.append(mask)
    return masks


def _bits(t: Tensor) -> Tensor:
    """Magnitudes as integers that order like the magnitudes."""
    return t.detach().float().abs().contiguous().view(torch.int32)


def _low_half(bits: Tensor, high: int) -> Tensor:
    return bits[(bits >> 16) == high] & 0xFFFF


def _select(parts: Callable[[], Iterable[Tensor]], buckets: int, keep: int) -> tuple[int, int]:
    """Bucket that holds the `keep`-th largest value, and how many values lie in buckets above it."""
    histogram = torch.zeros(buckets, dtype=torch.int64)
    for part in parts():
        histogram += torch.bincount(part.flatten(), minlength=buckets).cpu()
    above = histogram.flip(0).cumsum(0).flip(0)  # entries in this bucket or higher
    bucket = int((above >= keep).nonzero().max())
    return bucket, int(above[bucket] - histogram[bucket])
