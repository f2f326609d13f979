"""Factorizes a group from its second moments: exact full-batch solves instead of gradient steps on activations."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fips.config import CompressionConfig
from fips.errors import NumericalError
from fips.linalg.budget import GroupPlan, plan_group
from fips.linalg.quadratic import DAMPING, Quadratic
from fips.models.layers import rebuild
from fips.models.sites import Site
from fips.stages.candidates import Trial, choose
from fips.stages.factorize import FactorizedGroup, factorize
from fips.stages.grouping import Group
from fips.stages.moments import GroupMoments, MetricCache, corrected_bias, stored_error
from fips.stages.reconstruct import Reconstruction, prune_once


@dataclass(frozen=True)
class GroupProblem:
    """What the solver minimizes.

    Attributes:
        sites: The group's matrices.
        weights: Module name → W, (d, f), float32.
        biases: Module name → bias, where there is one.
        moments: Second moments of the inputs.
        channels: Module name → weights of the matrix's outputs in the error, (outputs,); missing means 1.
    """

    sites: Sequence[Site]
    weights: Mapping[str, Tensor]
    biases: Mapping[str, Tensor]
    moments: GroupMoments
    channels: dict[str, Tensor]

    @classmethod
    def of(
        cls,
        group: Group,
        weights: Mapping[str, Tensor],
        biases: Mapping[str, Tensor],
        moments: GroupMoments,
        objective: str,
    ) -> "GroupProblem":
        """The problem of a group; outputs are weighed as the objective says."""
        weighed = {"linear": (), "mlp": ("up",), "block": ("up", "down")}[objective]
        channels = {site.name: moments.channels(site) for site in group.sites if site.role in weighed}
        return cls(group.sites, weights, biases, moments, {n: c for n, c in channels.items() if c is not None})

    def weighed(self, site: Site, W: Tensor) -> Tensor:
        """A (d, f) matrix whose outputs, its columns (up-type) or rows (down-type), are multiplied by their weights."""
        c = self.channels.get(site.name)
        if c is None:
            return W
        return W * (c.to(W.dtype) if site.role == "up" else c.to(W.dtype)[:, None])

    def matrices(self, damping: float = DAMPING[0]) -> list[Quadratic]:
        """The objectives.

        Weighing the outputs of an up-type matrix is the same as scaling the columns of W and V. Of a down-type matrix,
        whose outputs are the rows of U, the weights are its left moment.
        """
        metrics = MetricCache(damping)
        found = []
        for site in self.sites:
            m = metrics.quadratic(
                site, self.weights[site.name], self.moments.of[site.name], has_bias=site.name in self.biases
            )
            if site.role == "up":
                m = replace(m, W=self.weighed(site, m.W))
            elif site.name in self.channels:
                m = replace(m, left=self.channels[site.name].to(m.W.dtype).square().diag())
            found.append(m)
        return found

    def sample(self) -> list[int]:
        """Positions of the matrices of the group's middle block."""
        blocks = sorted({site.block for site in self.sites})
        middle = blocks[len(blocks) // 2]
        return [i for i, site in enumerate(self.sites) if site.block == middle]

    def projections(self, V: Sequence[Tensor]) -> dict[str, Tensor]:
        """Module name → V as it is stored: solved columns divided by the channels' weights."""
        return {s.name: v / self.channels[s.name] if s.role == "up" and s.name in self.channels else v
                for s, v in zip(self.sites, V, strict=True)}  # fmt: skip

    def as_stored(self, factors: FactorizedGroup, dtype: torch.dtype) -> tuple[FactorizedGroup, dict[str, float]]:
        """Rounded factors with the biases that belong to them, and their relative errors."""
        rounded, biases, errors = factors.rounded(dtype), {}, {}
        for site in self.sites:
            name, W, moments = site.name, self.weights[site.name], self.moments.of[site.name]
            new = rebuild(rounded.basis.to(dtype), rounded.projections[name].to(dtype)).to(W.dtype)
            if name in factors.biases:
                biases[name] = corrected_bias(site, factors.biases[name], W, new, moments)
            errors[name] = stored_error(site, self.weighed(site, W), self.weighed(site, new), moments,
                                        has_bias=name in factors.biases)  # fmt: skip
        return FactorizedGroup(rounded.basis, rounded.projections, biases), errors


def solve_group(
    group: Group,
    problem: GroupProblem,
    config: CompressionConfig,
    progress: Callable[[int, float], None],
    *,
    dtype: torch.dtype,
) -> Reconstruction:
    """Sparse V and dense U of a group by alternating second-order solves (docs/method.md, section 2).

    Args:
        group: The group and its candidate plans.
        problem: What is minimized.
        config: Settings.
        progress: Called after every alternation.
        dtype: dtype the factors are stored in; errors and corrected biases are those of the rounded factors.

    Raises:
        NumericalError: If the moments overflow or no alternation gives a finite error.
    """
    winner, trials = _choose_damped(group, problem, config.rounds, progress)
    start = prune_once(*_truncated_svd(group, winner.plan, problem))
    pruned, before = problem.as_stored(start, dtype)
    U = winner.solution.U[:, winner.plan.rank - winner.plan.columns :].contiguous()
    found = FactorizedGroup(U, problem.projections(winner.solution.V), dict(problem.biases))
    solved, after = problem.as_stored(found, dtype)
    dead = {n: int((~m.alive).sum()) for n, m in problem.moments.of.items() if not m.alive.all()}
    if config.basis != "identity" and not sum(after.values()) <= sum(before.values()):
        return Reconstruction(pruned, before, before, dead, trials)
    return Reconstruction(solved, before, after, dead, trials)


def _choose_damped(
    group: Group, problem: GroupProblem, rounds: int, progress: Callable[[int, float], None]
) -> tuple[Trial, list[dict[str, object]]]:
    """The winner and every trial; where a decomposition or all alternations fail, once more with more damping."""
    trials: list[dict[str, object]] = []
    for damping in DAMPING:
        try:
            winner, tried = choose(problem.matrices(damping), group.plans, rounds, progress, problem.sample())
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined] # not in its __all__
            continue
        trials += [{**t, "damping": damping} for t in tried]
        if winner.solution.V:
            return winner, trials
    raise NumericalError(f"{group.name}: no alternation of the solver gives a finite error; nothing is stored.")


def _truncated_svd(group: Group, plan: GroupPlan, problem: GroupProblem) -> tuple[FactorizedGroup, int]:
    """Truncated SVD with as many parameters as the plan, U stored whole, and the non-zeros it may keep."""
    svd = plan_group(plan.d, plan.widths, plan.parameters / plan.dense_parameters, plan.sparsity)
    return factorize(group, problem.weights, problem.biases, svd.rank), svd.keep
