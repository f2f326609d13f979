"""Errors and wall time of the moments solver on one group of a real model, alternation by alternation.

Usage: python benchmarks/solver.py [--assets assets] [--blocks 8-9] [--budget 0.5] [--sparsity 0.75] [--rounds 10]
           [--tokens 65536] [--stored-identity] [--paper-steps 800]

The errors are relative errors of every linear's output (Eq. 1) on the calibration moments, summed over gate, up and
down, each averaged over the blocks; float32 factors. While it runs they are those of the damped moments, which the
solver minimizes; the last line gives them without damping. With --stored-identity all of U is learned and stored, as
in the paper; without it the first d columns are the identity and are not stored, so that a budget gives a larger rank.
With --paper-steps the paper's optimizer runs on the same group, rank and non-zeros, all of U learned by both.
Needs the assets: python benchmarks/assets.py assets smollm2 text
"""

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from fips import CompressionConfig
from fips.calibrate import calibrate
from fips.checkpoint.source import open_source
from fips.config import parse_groups
from fips.linalg.budget import GroupPlan, plan_group
from fips.linalg.solve import Effort, Solution, alternate, initial_basis
from fips.models.sites import to_canonical
from fips.models.skeleton import materialized
from fips.plan import Plan, make_plan
from fips.progress import Progress
from fips.report import CompressionReport
from fips.stages.candidates import split_evenly
from fips.stages.factorize import FactorizedGroup, factorize
from fips.stages.grouping import Group
from fips.stages.moments import MetricCache, collect_moments
from fips.stages.objective import TrainableGroup, group_errors
from fips.stages.reconstruct import reconstruct
from fips.stages.stream import Stream, advance, start_stream


@contextmanager
def group(plan: Plan, tokens: torch.Tensor, first: int, last: int, batch: int) -> Iterator[tuple[Any, Stream]]:
    """Blocks first to last with their real weights, and the calibration stream at the first of them."""
    head = [(plan.views[0].path, plan.views[0].module)]
    with materialized(plan.outside_blocks() + head, plan.names, plan.source.read, "cpu"):
        stream = start_stream(plan.trunk, tokens.split(batch), "cpu", separate=False)
    for view in plan.views[:first]:
        with materialized([(view.path, view.module)], plan.names, plan.source.read, "cpu"):
            stream.dense[:] = [advance(stream, [view], number, None) for number in range(len(stream.dense))]
    views = plan.views[first : last + 1]
    with materialized([(v.path, v.module) for v in views], plan.names, plan.source.read, "cpu"):
        yield views, stream


def weights_of(views: Any) -> dict[str, torch.Tensor]:
    """Module name → W, (d, f)."""
    return {site.name: to_canonical(view.linear(site).weight, transposed=site.transposed)
            for view in views for site in view.sites}  # fmt: skip


def objectives(views: Any, stream: Stream) -> tuple[list[Any], list[Any]]:
    """Eq. 1 of every matrix of the group, damped as the solver has it, and undamped."""
    moments, weights = collect_moments(views, stream), weights_of(views)
    damped, exact = ([metrics.quadratic(site, weights[site.name], moments.of[site.name], has_bias=False)
                      for view in views for site in view.sites]
                     for metrics in (MetricCache(), MetricCache(0.0)))  # fmt: skip
    return damped, exact


def solve(matrices: list[Any], shape: GroupPlan, rounds: int) -> Solution:
    """Prints every alternation's error and the seconds so far."""
    started, count = time.monotonic(), [0]

    def show(_step: int, error: float) -> None:
        count[0] += 1
        print(f"round {count[0]}: sum of the errors {3 * error:.4f}, {time.monotonic() - started:.1f} s", flush=True)

    U = initial_basis(matrices, shape.rank)
    keep = split_evenly(shape.keep, shape.widths)
    return alternate(matrices, U, keep, Effort(rounds=rounds), show, fixed=shape.d if shape.identity else 0)


def against_paper(views: Any, stream: Stream, shape: GroupPlan, rounds: int, steps: int) -> None:
    """The paper's optimizer and the moments solver on the same group, rank and non-zeros, judged by both objectives."""
    paper = CompressionConfig.from_recipe("paper", steps=steps, device="cpu")
    sites = tuple(site for view in views for site in view.sites)
    members = Group("group", views[0].number, views[-1].number, sites, (shape,))
    weights = weights_of(views)
    started = time.monotonic()
    with torch.no_grad():
        solution = solve(objectives(views, stream)[0], shape, rounds)
    ours = time.monotonic() - started
    V = dict(zip(weights, solution.V, strict=True))
    lead = shape.rank - shape.columns
    factors = {"moments": FactorizedGroup(solution.U[:, lead:], V, {})}
    started = time.monotonic()
    start = factorize(members, weights, {}, shape.rank)
    result = reconstruct(members, views, stream, start, paper, lambda _n, _e: None, dtype=torch.float32)
    theirs = time.monotonic() - started
    factors["paper"] = result.factors
    for name, found in factors.items():
        for objective in ("linear", "mlp"):
            config = CompressionConfig(objective=objective)
            error = group_errors(TrainableGroup(found, trainable=False), views, stream, config).total()
            print(f"{name}: mean relative error of the {objective} outputs {error:.5f}")
    print(f"moments {ours:.1f} s, calibration pass included; paper {theirs:.1f} s for {steps} steps; "
          f"ratio {ours / theirs:.4f}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--assets", type=Path, default=Path("assets"))
    parser.add_argument("--blocks", default="8-9")
    for name, default in (("budget", 0.5), ("sparsity", 0.75), ("rounds", 10), ("tokens", 65536)):
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--stored-identity", action="store_true", help="Learn and store all of U.")
    parser.add_argument("--paper-steps", type=int, help="Also run the paper's recipe, so many steps (its own: 800).")
    args = parser.parse_args()
    config = CompressionConfig(
        calibration=str(args.assets / "text" / "wiki_calib.txt"), calibration_tokens=args.tokens, device="cpu"
    )
    plan = make_plan(open_source(args.assets / "smollm2-135m-instruct"), config)
    report = CompressionReport("", None, {}, {}, {}, "cpu", "float32")
    ((first, last),) = parse_groups(args.blocks)
    widths = [site.f for site in plan.sites if first <= site.block <= last]
    identity = not args.stored_identity and args.paper_steps is None
    shape = plan_group(plan.sites[0].d, widths, args.budget, args.sparsity, identity=identity)
    print(f"rank {shape.rank}, {shape.parameters:,} of {shape.dense_parameters:,} parameters")
    tokens = calibrate(plan, config, report, Progress(-1)).tokens
    batch = max((8192 if args.paper_steps else 2048) // tokens.shape[1], 1)
    with group(plan, tokens, first, last, batch) as (views, stream):
        if args.paper_steps is not None:
            against_paper(views, stream, shape, args.rounds, args.paper_steps)
            return
        with torch.no_grad():
            matrices, exact = objectives(views, stream)
            found = solve(matrices, shape, args.rounds)
            errors = [m.relative_error(found.U, V) for m, V in zip(exact, found.V, strict=True)]
            print(f"undamped: sum of the errors {3 * sum(errors) / len(errors):.4f}")


if __name__ == "__main__":
    main()
