"""Parameter budget to rank, and exact sizes of a plan. Letters as in docs/method.md."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fips.errors import ConfigError


@dataclass(frozen=True)
class GroupPlan:
    """Shape of one factorized group before anything is computed.

    Attributes:
        d: Model width.
        widths: Inner size f of every matrix of the group.
        rank: Columns of U.
        keep: Non-zeros over all V of the group.
    """

    d: int
    widths: tuple[int, ...]
    rank: int
    keep: int

    @property
    def parameters(self) -> int:
        """Non-zeros of U and all V: what the parameter budget counts."""
        return self.d * self.rank + self.keep

    @property
    def dense_parameters(self) -> int:
        """Parameters of the replaced matrices."""
        return self.d * sum(self.widths)

    def packed_bytes(self, itemsize: int) -> int:
        """Bytes of U, the values and the masks on disk, `itemsize` bytes per value."""
        return self.parameters * itemsize + sum(mask_bytes(self.rank, f) for f in self.widths)

    def dense_bytes(self, itemsize: int) -> int:
        """Bytes of the replaced matrices at the same dtype."""
        return self.dense_parameters * itemsize


def mask_bytes(rank: int, f: int) -> int:
    """Bytes of one mask: one bit per entry of V, rows padded to whole bytes."""
    return rank * ((f + 7) // 8)


def plan_group(d: int, widths: Sequence[int], budget: float, sparsity: float) -> GroupPlan:
    """Rank and non-zeros that use the budget of a group and never exceed it.

    FiPS, section 3: r = floor(b·F·d / (F·(1-s) + d)) with F the sum of all inner sizes. The kept share is
    exact for any f, also where matrices of a group differ.

    Args:
        d: Model width.
        widths: Inner size f of every matrix of the group.
        budget: Share of parameters kept, b.
        sparsity: Share of zeros in V, s.

    Raises:
        ConfigError: If the budget leaves no rank at all.
    """
    total = sum(widths)
    # A hair of slack so that an exactly representable plan (b chosen for a whole rank) does not lose one to rounding.
    rank = math.floor(budget * total * d / (total * (1 - sparsity) + d) + 1e-9)
    if rank < 1:
        raise ConfigError(f"budget is {budget}; at width {d} it leaves no basis column. Use a larger budget.")
    return GroupPlan(d, tuple(widths), rank, math.floor((1 - sparsity) * rank * total + 1e-9))


def check_smaller(plan: GroupPlan, itemsize: int, group: str) -> None:
    """Refuses a plan whose packed form is not smaller than the dense matrices.

    Raises:
        ConfigError: Naming the group and both sizes.
    """
    packed, dense = plan.packed_bytes(itemsize), plan.dense_bytes(itemsize)
    if packed >= dense:
        raise ConfigError(
            f"budget: group {group} would take {packed:,} bytes (values, masks and basis of rank {plan.rank}), "
            f"not less than its dense {dense:,}. Use a smaller budget, or a lower sparsity (fewer mask bits)."
        )
