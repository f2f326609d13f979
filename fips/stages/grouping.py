"""Which blocks share a basis."""

from collections.abc import Sequence
from dataclasses import dataclass

from fips.config import CompressionConfig
from fips.errors import ConfigError
from fips.linalg.budget import GroupPlan, check_smaller
from fips.models.sites import Site
from fips.stages.candidates import candidate_plans


@dataclass(frozen=True)
class Group:
    """Consecutive blocks and the matrices in them that share one basis.

    Attributes:
        name: "blocks_<first>_<last>".
        first: First block number.
        last: Last block number.
        sites: Its matrices; empty when nothing in these blocks is compressed.
        plans: Shapes that compete for it, the expected one first; empty without sites.
    """

    name: str
    first: int
    last: int
    sites: tuple[Site, ...]
    plans: tuple[GroupPlan, ...]

    @property
    def plan(self) -> GroupPlan | None:
        """The expected rank and non-zeros; None without sites."""
        return self.plans[0] if self.plans else None

    def require_plan(self) -> GroupPlan:
        """The plan of a group that has matrices.

        Raises:
            ValueError: If it has none; callers skip such groups.
        """
        if self.plan is None:
            raise ValueError(f"group {self.name} has no matrix")
        return self.plan


def group_blocks(
    sites: Sequence[Site], stages: Sequence[int], size: int, groups: Sequence[tuple[int, int]] | None
) -> list[tuple[int, int]]:
    """Ranges of consecutive blocks of one stage and one width.

    Args:
        sites: All matrices of the model.
        stages: Stage of every block.
        size: Blocks per group; a new stage or width starts a new group.
        groups: Explicit (first, last) ranges instead.

    Raises:
        ConfigError: If explicit ranges overlap, leave a gap, exceed the model, or cross a change of stage or width.
    """
    widths = {site.block: site.d for site in sites}
    if groups is not None:
        _check_cover(groups, len(stages))
        for first, last in groups:
            _check_width(first, last, widths)
            if stages[first] != stages[last]:
                raise ConfigError(f"groups: {first}-{last} joins blocks of different stages; split it there.")
        return list(groups)
    ranges: list[tuple[int, int]] = []
    for block, stage in enumerate(stages):
        first = ranges[-1][0] if ranges else 0
        same = {widths[b] for b in range(first, block + 1) if b in widths}
        if not ranges or block - first >= size or len(same) > 1 or stage != stages[first]:
            ranges.append((block, block))
        else:
            ranges[-1] = (first, block)
    return ranges


def _check_cover(groups: Sequence[tuple[int, int]], blocks: int) -> None:
    expected = 0
    for first, last in sorted(groups):
        if first < expected:
            raise ConfigError(f"groups: block {first} is in two groups.")
        if first > expected:
            raise ConfigError(f"groups: no group holds block {expected}; every block must be in one.")
        expected = last + 1
    if expected > blocks:
        raise ConfigError(f"groups: block {expected - 1} does not exist; the model has blocks 0 to {blocks - 1}.")
    if expected < blocks:
        raise ConfigError(f"groups: no group holds block {expected}; the model has blocks 0 to {blocks - 1}.")
    if list(groups) != sorted(groups):
        raise ConfigError("groups: list the groups in the order of their blocks.")


def _check_width(first: int, last: int, widths: dict[int, int]) -> None:
    found = sorted({widths[b] for b in range(first, last + 1) if b in widths})
    if len(found) > 1:
        raise ConfigError(f"groups: {first}-{last} joins blocks of different width ({found}); split it there.")


def plan_groups(
    sites: Sequence[Site], ranges: Sequence[tuple[int, int]], config: CompressionConfig, itemsize: int
) -> list[Group]:
    """Groups with rank and non-zeros for the settings, each checked to be smaller than its dense matrices.

    Raises:
        ConfigError: If the budget leaves no rank or a packed group would not be smaller.
    """
    groups = []
    for first, last in ranges:
        name = f"blocks_{first}_{last}"
        members = tuple(s for s in sites if first <= s.block <= last)
        plans = candidate_plans(members[0].d, [s.f for s in members], config, itemsize) if members else ()
        if members and not plans:
            raise ConfigError(f"target_size is {config.target_size}; it is too small for any basis of {name}.")
        smaller = _smaller(plans, itemsize, name)
        groups.append(Group(name, first, last, members, smaller))
    return groups


def _smaller(plans: tuple[GroupPlan, ...], itemsize: int, name: str) -> tuple[GroupPlan, ...]:
    """Plans whose packed form is smaller than the dense matrices; an error if there is none."""
    smaller = tuple(p for p in plans if p.packed_bytes(itemsize) < p.dense_bytes(itemsize))
    if plans and not smaller:
        check_smaller(plans[0], itemsize, name)
    return smaller
