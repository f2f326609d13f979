"""Factorizes a group from its second moments: exact full-batch solves instead of gradient steps on activations."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from fips.config import CompressionConfig
from fips.errors import NumericalError
from fips.linalg.solve import Effort, alternate, initial_basis
from fips.models.layers import rebuild
from fips.models.sites import Site
from fips.stages.factorize import FactorizedGroup, factorize
from fips.stages.grouping import Group
from fips.stages.moments import GroupMoments, MetricCache, corrected_bias, stored_error
from fips.stages.reconstruct import Reconstruction, prune_once


def solve_group(
    group: Group,
    weights: Mapping[str, Tensor],
    biases: Mapping[str, Tensor],
    moments: GroupMoments,
    config: CompressionConfig,
    progress: Callable[[int, float], None],
    *,
    dtype: torch.dtype,
) -> Reconstruction:
    """Sparse V and dense U of a group by alternating second-order solves (docs/method.md, section 2).

    Args:
        group: The group and its plan.
        weights: Module name → W, (d, f), float32.
        biases: Module name → bias, where there is one.
        moments: Second moments of the group's inputs.
        config: Settings.
        progress: Called after every alternation.
        dtype: dtype the factors are stored in; errors and corrected biases are those of the rounded factors.

    Raises:
        NumericalError: If the moments overflow or no alternation gives a finite error.
    """
    plan = group.require_plan()
    metrics = MetricCache()
    matrices = [
        metrics.quadratic(s, weights[s.name], moments.of[s.name], has_bias=s.name in biases) for s in group.sites
    ]
    start = prune_once(factorize(group, weights, biases), plan.keep)
    pruned, before = _as_stored(group.sites, start, weights, moments, dtype)
    keep = split_evenly(plan.keep, [s.f for s in group.sites])
    solution = alternate(matrices, initial_basis(matrices, plan.rank), keep, Effort(rounds=config.rounds), progress)
    if not solution.V:
        raise NumericalError(f"{group.name}: no alternation of the solver gives a finite error; nothing is stored.")
    projections = {s.name: V for s, V in zip(group.sites, solution.V, strict=True)}
    found = FactorizedGroup(solution.U, projections, dict(biases))
    solved, after = _as_stored(group.sites, found, weights, moments, dtype)
    dead = {n: int((~m.alive).sum()) for n, m in moments.of.items() if not m.alive.all()}
    if not sum(after.values()) <= sum(before.values()):
        return Reconstruction(pruned, before, before, dead)
    return Reconstruction(solved, before, after, dead)


def _as_stored(
    sites: Sequence[Site],
    factors: FactorizedGroup,
    weights: Mapping[str, Tensor],
    moments: GroupMoments,
    dtype: torch.dtype,
) -> tuple[FactorizedGroup, dict[str, float]]:
    """Rounded factors with the biases that belong to them, and their relative errors."""
    rounded, biases, errors = factors.rounded(dtype), {}, {}
    for site in sites:
        name, W = site.name, weights[site.name]
        new = rebuild(rounded.basis.to(dtype), rounded.projections[name].to(dtype)).to(W.dtype)
        if name in factors.biases:
            biases[name] = corrected_bias(site, factors.biases[name], W, new, moments.of[name])
        errors[name] = stored_error(site, W, new, moments.of[name], has_bias=name in factors.biases)
    return FactorizedGroup(rounded.basis, rounded.projections, biases), errors


def split_evenly(keep: int, widths: Sequence[int]) -> list[int]:
    """Non-zeros per matrix in proportion to its inner size; they sum up to `keep` exactly."""
    total, used, shares = sum(widths), 0, []
    for i in range(len(widths)):
        share = keep * sum(widths[: i + 1]) // total - used
        shares.append(share)
        used += share
    return shares
