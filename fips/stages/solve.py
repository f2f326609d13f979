"""Factorizes a group from its second moments: exact full-batch solves instead of gradient steps on activations."""

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from fips.config import CompressionConfig
from fips.linalg.quadratic import Quadratic
from fips.linalg.solve import Effort, alternate, initial_basis
from fips.models.sites import Site
from fips.stages.factorize import FactorizedGroup, factorize
from fips.stages.grouping import Group
from fips.stages.moments import GroupMoments, MetricCache, corrected_bias
from fips.stages.reconstruct import Reconstruction, prune_once


def solve_group(
    group: Group,
    weights: Mapping[str, Tensor],
    biases: Mapping[str, Tensor],
    moments: GroupMoments,
    config: CompressionConfig,
    progress: Callable[[int, float], None],
) -> Reconstruction:
    """Sparse V and dense U of a group by alternating second-order solves (docs/method.md, section 2).

    Args:
        group: The group and its plan.
        weights: Module name → W, (d, f), float32.
        biases: Module name → bias, where there is one.
        moments: Second moments of the group's inputs.
        config: Settings.
        progress: Called after every alternation.
    """
    plan = group.require_plan()
    metrics = MetricCache()
    matrices = {
        s.name: metrics.quadratic(s, weights[s.name], moments.of[s.name], has_bias=s.name in biases)
        for s in group.sites
    }
    pruned = prune_once(factorize(group, weights, biases), plan.keep)
    before = _errors(matrices, pruned)
    effort = Effort(rounds=config.rounds)
    keep = split_evenly(plan.keep, [s.f for s in group.sites])
    start = initial_basis(list(matrices.values()), plan.rank)
    solution = alternate(list(matrices.values()), start, keep, effort, progress)
    projections = dict(zip(matrices, solution.V, strict=True))
    solved = FactorizedGroup(solution.U, projections, dict(biases))
    after = _errors(matrices, solved)
    best = solved if sum(after.values()) <= sum(before.values()) else pruned
    corrected = _with_biases(group.sites, best, weights, moments)
    dead = {n: int((~m.alive).sum()) for n, m in moments.of.items() if not m.alive.all()}
    return Reconstruction(corrected, before, after if best is solved else before, dead)


def split_evenly(keep: int, widths: Sequence[int]) -> list[int]:
    """Non-zeros per matrix in proportion to its inner size; they sum up to `keep` exactly."""
    total, used, shares = sum(widths), 0, []
    for i in range(len(widths)):
        share = keep * sum(widths[: i + 1]) // total - used
        shares.append(share)
        used += share
    return shares


def _errors(matrices: Mapping[str, Quadratic], factors: FactorizedGroup) -> dict[str, float]:
    return {n: m.relative_error(factors.basis, factors.projections[n]) for n, m in matrices.items()}


def _with_biases(
    sites: Sequence[Site], factors: FactorizedGroup, weights: Mapping[str, Tensor], moments: GroupMoments
) -> FactorizedGroup:
    biases = {
        s.name: corrected_bias(
            s, factors.biases[s.name], weights[s.name], factors.basis @ factors.projections[s.name], moments.of[s.name]
        )
        for s in sites
        if s.name in factors.biases
    }
    return FactorizedGroup(factors.basis, factors.projections, biases)
