"""Parameter budget to rank, and exact sizes of a plan. Letters as in docs/method.md."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fips.errors import ConfigError

_LEAST = 2  # non-zeros per column of U that a plan has at least


class StoredBasis:
    """How much of a basis U, (d, rank), is stored; shared by the plan of a group and its description on disk."""

    d: int
    rank: int
    identity: bool

    @property
    def columns(self) -> int:
        """Stored columns of U."""
        return self.rank - self.d if self.identity else self.rank

    @property
    def basis(self) -> str:
        """"identity" when nothing of U is stored, else "shared"."""
        return "shared" if self.columns else "identity"


@dataclass(frozen=True)
class GroupPlan(StoredBasis):
    """Shape of one factorized group before anything is computed.

    Attributes:
        d: Model width.
        widths: Inner size f of every matrix of the group.
        rank: Columns of U.
        keep: Non-zeros over all V of the group.
        identity: Whether the first d columns of U are the identity, which is not stored.
    """

    d: int
    widths: tuple[int, ...]
    rank: int
    keep: int
    identity: bool = False

    @property
    def sparsity(self) -> float:
        """Share of zeros in V, s."""
        return 1 - self.keep / (self.rank * sum(self.widths))

    @property
    def parameters(self) -> int:
        """Stored values of U and non-zeros of all V: what the parameter budget counts."""
        return self.d * self.columns + self.keep

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


def plan_group(
    d: int, widths: Sequence[int], budget: float, sparsity: float, *, identity: bool = False
) -> GroupPlan:
    """Rank and non-zeros that use the budget of a group and never exceed it.

    FiPS, section 3: r = floor(b·F·d / (F·(1-s) + d)) with F the sum of all inner sizes. The kept share is
    exact for any f, also where matrices of a group differ. With the identity among the atoms, d² values of U are not
    stored: r = floor((b·F·d + d²) / (F·(1-s) + d)).

    Args:
        d: Model width.
        widths: Inner size f of every matrix of the group.
        budget: Share of parameters kept, b.
        sparsity: Share of zeros in V, s.
        identity: Whether U begins with the identity where the budget allows d columns or more.

    Raises:
        ConfigError: If the budget leaves no rank at all.
    """
    total = sum(widths)
    free = d * d if identity else 0
    # A hair of slack so that an exactly representable plan (b chosen for a whole rank) does not lose one to rounding.
    rank = math.floor((budget * total * d + free) / (total * (1 - sparsity) + d) + 1e-9)
    if identity and rank <= d:
        return plan_group(d, widths, budget, sparsity)
    if rank < 1:
        raise ConfigError(f"budget is {budget}; at width {d} it leaves no basis column. Use a larger budget.")
    return GroupPlan(d, tuple(widths), rank, math.floor((1 - sparsity) * rank * total + 1e-9), identity)


def plan_identity(d: int, widths: Sequence[int], budget: float) -> GroupPlan:
    """Plain pruning with a parameter budget: U = I, nothing of it stored, floor(b·F·d) non-zeros.

    Raises:
        ConfigError: If the budget leaves next to nothing.
    """
    keep = math.floor(budget * d * sum(widths) + 1e-9)
    if keep <= _LEAST * d:
        raise ConfigError(f"budget is {budget}; it keeps {keep} entries at width {d}. Use a larger budget.")
    return GroupPlan(d, tuple(widths), d, keep, identity=True)


def plan_bytes(d: int, widths: Sequence[int], size: int, itemsize: int, rank: int) -> GroupPlan | None:
    """The plan of a given rank that fills a number of bytes: what U and the masks leave goes to the values of V.

    Args:
        d: Model width.
        widths: Inner size f of every matrix of the group.
        size: Bytes of values, masks and stored basis together.
        itemsize: Bytes per value.
        rank: Columns of U; from d on the first d are the identity and are not stored.

    Returns:
        The plan, or None when basis and masks leave next to nothing for the values.
    """
    empty = GroupPlan(d, tuple(widths), rank, 0, identity=rank >= d)
    keep = min((size - empty.packed_bytes(itemsize)) // itemsize, rank * sum(widths))
    return GroupPlan(d, tuple(widths), rank, keep, empty.identity) if keep > _LEAST * rank else None


def plan_size(d: int, widths: Sequence[int], size: int, itemsize: int, sparsity: float) -> GroupPlan:
    """The largest rank at a given sparsity whose basis, masks and values fit into a number of bytes.

    With more than d columns the first d are the identity and are not stored.

    Raises:
        ConfigError: If not even one column fits.
    """
    total = sum(widths)

    def of(rank: int) -> GroupPlan:
        keep = math.floor((1 - sparsity) * rank * total + 1e-9)
        return GroupPlan(d, tuple(widths), rank, keep, identity=rank > d)

    # Bytes grow with the rank, but for one drop where the identity begins; that part is tried first.
    for low, high in ((d + 1, 64 * d), (1, d)):
        if low <= high and of(low).packed_bytes(itemsize) <= size:
            while low < high:
                middle = (low + high + 1) // 2
                fits = of(middle).packed_bytes(itemsize) <= size
                low, high = (middle, high) if fits else (low, middle - 1)
            return of(low)
    raise ConfigError(f"target size of {size:,} bytes at width {d} leaves no basis column. Use a larger one.")


def check_smaller(plan: GroupPlan, itemsize: int, group: str) -> None:
    """Refuses a plan whose packed form is not smaller than the dense matrices.

    Raises:
        ConfigError: Naming the group and both sizes.
    """
    packed, dense = plan.packed_bytes(itemsize), plan.dense_bytes(itemsize)
    if packed >= dense:
        raise ConfigError(
            f"budget: group {group} would take {packed:,} bytes (values, masks and basis of rank {plan.rank}), "
            f"not less than its dense {dense:,}. Use a smaller budget"
            + (", or a lower sparsity (fewer mask bits)." if plan.columns else ".")
        )
