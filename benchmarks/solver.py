"""Errors and wall time of the moments solver on one group of a real model, alternation by alternation.

Usage: python benchmarks/solver.py [--assets assets] [--blocks 8-9] [--budget 0.5] [--sparsity 0.75] [--rounds 10]
           [--tokens 65536] [--stored-identity]

The errors are relative errors of every linear's output (Eq. 1) on the calibration moments, summed over gate, up and
down, each averaged over the blocks; float32 factors. With --stored-identity all of U is learned and stored, as in the
paper; without it the first d columns are the identity and are not stored, so that a budget gives a larger rank.
Needs the assets: python benchmarks/assets.py assets smollm2 text
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch

from fips import CompressionConfig
from fips.calibrate import calibrate
from fips.checkpoint.source import open_source
from fips.config import parse_groups
from fips.linalg.budget import GroupPlan, plan_group
from fips.linalg.solve import Effort, alternate, initial_basis
from fips.models.sites import to_canonical
from fips.models.skeleton import materialized
from fips.plan import Plan, make_plan
from fips.progress import Progress
from fips.report import CompressionReport
from fips.stages.candidates import split_evenly
from fips.stages.moments import MetricCache, collect_moments
from fips.stages.stream import advance, start_stream


def objectives(plan: Plan, tokens: torch.Tensor, first: int, last: int) -> list[Any]:
    """Eq. 1 of every matrix in blocks first to last."""
    blocks: Any = plan.model.get_submodule(plan.blocks_path)
    head = [(plan.views[0].path, plan.views[0].module)]
    with materialized(plan.outside_blocks() + head, plan.names, plan.source.read, "cpu"):
        stream = start_stream(plan.trunk, blocks, tokens, 2, "cpu", separate=False)
    for view in plan.views[:first]:
        with materialized([(view.path, view.module)], plan.names, plan.source.read, "cpu"):
            stream.dense[:] = [advance(stream, [view], batch, None) for batch in range(len(stream.dense))]
    views = plan.views[first : last + 1]
    with materialized([(v.path, v.module) for v in views], plan.names, plan.source.read, "cpu"), torch.no_grad():
        moments = collect_moments(views, stream)
        metrics = MetricCache()
        return [
            metrics.quadratic(site, to_canonical(view.linear(site).weight, transposed=site.transposed),
                              moments.of[site.name], has_bias=False)
            for view in views for site in view.sites
        ]  # fmt: skip


def solve(matrices: list[Any], shape: GroupPlan, rounds: int) -> None:
    """Prints every alternation's error and the seconds so far."""
    started, count = time.monotonic(), [0]

    def show(_step: int, error: float) -> None:
        count[0] += 1
        print(f"round {count[0]}: sum of the errors {3 * error:.4f}, {time.monotonic() - started:.1f} s", flush=True)

    U = initial_basis(matrices, shape.rank)
    keep = split_evenly(shape.keep, shape.widths)
    alternate(matrices, U, keep, Effort(rounds=rounds), show, fixed=shape.d if shape.identity else 0)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--assets", type=Path, default=Path("assets"))
    parser.add_argument("--blocks", default="8-9")
    for name, default in (("budget", 0.5), ("sparsity", 0.75), ("rounds", 10), ("tokens", 65536)):
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--stored-identity", action="store_true", help="Learn and store all of U.")
    args = parser.parse_args()
    config = CompressionConfig(
        calibration=str(args.assets / "text" / "wiki_calib.txt"), calibration_tokens=args.tokens, device="cpu"
    )
    plan = make_plan(open_source(args.assets / "smollm2-135m-instruct"), config)
    report = CompressionReport("", None, {}, {}, {}, "cpu", "float32")
    ((first, last),) = parse_groups(args.blocks)
    matrices = objectives(plan, calibrate(plan, config, report, Progress(-1)).tokens, first, last)
    widths = [m.W.shape[1] for m in matrices]
    shape = plan_group(matrices[0].W.shape[0], widths, args.budget, args.sparsity, identity=not args.stored_identity)
    print(f"rank {shape.rank}, {shape.parameters:,} of {shape.dense_parameters:,} parameters")
    solve(matrices, shape, args.rounds)


if __name__ == "__main__":
    main()
