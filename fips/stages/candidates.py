"""Plans a group may be factorized with, and the choice among them: rank, sparsity, and whether it pays to store U."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fips.config import CompressionConfig
from fips.errors import ConfigError
from fips.linalg.budget import GroupPlan, plan_bytes, plan_group, plan_identity, plan_size
from fips.linalg.quadratic import Quadratic
from fips.linalg.solve import Effort, Solution, alternate, initial_basis
from fips.report import finite

# Ranks tried for a target size, relative to d; the search starts at the one that was best on the models measured.
RANKS = (0.4, 0.7, 1.1, 1.35, 1.65, 2.0, 2.4)
EXPECTED_RANK = 1.65
SPARSITIES = (0.2, 0.95)  # where a plan makes sense
TRIAL_ROUNDS = 2
IDENTITY_ROUNDS = 2  # nothing but the entries of V changes there, and they settle at once


@dataclass(frozen=True)
class Trial:
    """A plan and what came of it.

    Attributes:
        plan: The plan.
        solution: Its factors.
        matrices: How many of the group's matrices it was solved on.
    """

    plan: GroupPlan
    solution: Solution
    matrices: int

    def to_dict(self) -> dict[str, object]:
        """What the report keeps of it."""
        return {
            "basis": self.plan.basis,
            "rank": self.plan.rank,
            "sparsity": self.plan.sparsity,
            "error": finite(self.solution.error),
            "rounds": self.solution.rounds,
            "matrices": self.matrices,
        }


def candidate_plans(d: int, widths: Sequence[int], config: CompressionConfig, itemsize: int) -> tuple[GroupPlan, ...]:
    """The plans that compete for one group; the one that is expected to win comes first.

    With a target size they are of equal stored bytes, with a budget of equal parameters; masks of another rank then
    take other bytes.

    Args:
        d: Model width.
        widths: Inner size f of every matrix of the group.
        config: Settings: budget or target size, sparsity, basis.
        itemsize: Bytes per stored value.

    Raises:
        ConfigError: If the budget leaves no rank, or the target size no shared basis where one was asked for.
    """
    if not config.second_order:
        return (plan_group(d, widths, config.effective_budget, config.effective_sparsity),)
    if config.target_size is not None:
        return _of_size(d, widths, config, itemsize)
    budget = config.effective_budget
    if config.basis == "identity":
        return (plan_identity(d, widths, budget),)
    shared = plan_group(d, widths, budget, config.effective_sparsity, identity=True)
    if config.basis == "shared":
        return (shared,)
    return shared, plan_identity(d, widths, budget)


def _of_size(d: int, widths: Sequence[int], config: CompressionConfig, itemsize: int) -> tuple[GroupPlan, ...]:
    size = int((config.target_size or 0) * d * sum(widths) * itemsize)
    identity = plan_bytes(d, widths, size, itemsize, d)
    shared: list[GroupPlan] = []
    if config.basis != "identity" and config.sparsity is not None:
        shared = [plan_size(d, widths, size, itemsize, config.sparsity)]
    elif config.basis != "identity":
        plans = [plan_bytes(d, widths, size, itemsize, max(round(ratio * d), 1)) for ratio in RANKS]
        fitting = [p for p in plans if p is not None and SPARSITIES[0] <= p.sparsity <= SPARSITIES[1]]
        shared = sorted(fitting, key=lambda p: abs(p.rank - EXPECTED_RANK * d))
    if config.basis == "shared":
        if not shared:
            raise ConfigError(f"target_size is {config.target_size}; no shared basis fits at width {d}. Use a larger "
                              "one, or basis identity.")  # fmt: skip
        return tuple(shared)
    return (*shared, *([identity] if identity else []))


def choose(
    matrices: Sequence[Quadratic],
    plans: Sequence[GroupPlan],
    rounds: int,
    progress: Callable[[int, float], None],
    sample: Sequence[int] = (),
) -> tuple[Trial, list[dict[str, object]]]:
    """Solves a group with the plan that gives the smallest error.

    Shared bases of several ranks are compared on a few of the matrices first, walking from the expected rank to its
    better neighbors; only the best one is solved on the whole group. Plain pruning is solved beside it.

    Args:
        matrices: Objectives of the group.
        plans: Candidates, see `candidate_plans`.
        rounds: Alternations at most.
        progress: Called after every alternation of the whole group.
        sample: Positions of the matrices that ranks are compared on; all of them when empty.

    Returns:
        The winner, and what there is to say of every trial, the winner's included.
    """
    shared = [p for p in plans if p.columns]
    tried: list[dict[str, object]] = []
    if len(shared) > 1:
        trials = _walk(matrices, shared, sample or range(len(matrices)))
        tried = [t.to_dict() for t in trials]
        shared = [min(trials, key=lambda t: t.solution.error).plan]
        del trials
    best: Trial | None = None
    for plan in [*shared, *(p for p in plans if not p.columns)]:
        limit = rounds if plan.columns else min(rounds, IDENTITY_ROUNDS)
        trial = _solve(matrices, plan, limit, range(len(matrices)), progress)
        tried.append(trial.to_dict())
        if best is None or trial.solution.error < best.solution.error:
            best = trial
    if best is None:
        raise ValueError("choose() without a plan")
    return best, tried


def alternations(plans: Sequence[GroupPlan], rounds: int) -> int:
    """Alternations of the whole group that `choose` runs at most."""
    shared, identity = (rounds if any(p.columns for p in plans) else 0), any(not p.columns for p in plans)
    return shared + (min(rounds, IDENTITY_ROUNDS) if identity else 0)


def _walk(matrices: Sequence[Quadratic], plans: Sequence[GroupPlan], sample: Sequence[int]) -> list[Trial]:
    """The first plan on the sampled matrices, then its neighbors in rank as long as the error falls."""
    order = sorted(plans, key=lambda p: p.rank)
    start = order.index(plans[0])
    trials = {start: _solve(matrices, plans[0], TRIAL_ROUNDS, sample)}
    for step in (-1, 1):
        at = start
        while 0 <= at + step < len(order):
            trials[at + step] = _solve(matrices, order[at + step], TRIAL_ROUNDS, sample)
            if trials[at + step].solution.error >= trials[at].solution.error:
                break
            at += step
        if at != start:
            break
    return list(trials.values())


def _solve(
    matrices: Sequence[Quadratic],
    plan: GroupPlan,
    rounds: int,
    sample: Sequence[int],
    progress: Callable[[int, float], None] = lambda _n, _e: None,
) -> Trial:
    """Alternates on some of the matrices, each with its own share of the non-zeros."""
    keep = split_evenly(plan.keep, plan.widths)
    chosen = [matrices[i] for i in sample]
    solution = alternate(
        chosen, initial_basis(chosen, plan.rank), [keep[i] for i in sample], Effort(rounds=rounds), progress,
        fixed=plan.d if plan.identity else 0,
    )  # fmt: skip
    return Trial(plan, solution, len(chosen))


def split_evenly(keep: int, widths: Sequence[int]) -> list[int]:
    """Non-zeros per matrix in proportion to its inner size; they sum up to `keep` exactly."""
    total, used, shares = sum(widths), 0, []
    for i in range(len(widths)):
        share = keep * sum(widths[: i + 1]) // total - used
        shares.append(share)
        used += share
    return shares
