"""Streams the calibration data through the model and compresses one group of real blocks at a time."""

import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace

import torch

from fips.checkpoint.pack import PackedGroup, pack_group
from fips.checkpoint.save import CheckpointWriter
from fips.config import CompressionConfig
from fips.models.sites import to_canonical
from fips.models.skeleton import materialized
from fips.models.trace import BlockView
from fips.plan import Plan
from fips.progress import Progress
from fips.report import CompressionReport, GroupReport
from fips.stages.calibration import Calibration, ImageCalibration
from fips.stages.candidates import alternations
from fips.stages.factorize import factorize
from fips.stages.grouping import Group
from fips.stages.moments import collect_moments
from fips.stages.polish import polish
from fips.stages.reconstruct import Reconstruction, reconstruct
from fips.stages.solve import GroupProblem, solve_group
from fips.stages.stream import Stream, advance, enter_stage, start_stream


@dataclass(frozen=True)
class Run:
    """What every step of a run needs.

    Attributes:
        plan: The model and its groups.
        config: Settings.
        report: Filled as groups are done.
        progress: Where progress goes.
    """

    plan: Plan
    config: CompressionConfig
    report: CompressionReport
    progress: Progress


def compress_groups(run: Run, calibration: Calibration | ImageCalibration, writer: CheckpointWriter) -> None:
    """Streams the calibration data through the model, one group of real blocks at a time."""
    plan, config = run.plan, run.config
    size = max(config.batch_tokens // calibration.tokens_each, 1)
    batches = run.progress.each("first hidden states", calibration.batches(size), -(-calibration.count // size))
    first = [(plan.views[0].path, plan.views[0].module)]
    outside = materialized(plan.outside_blocks() + first, plan.names, plan.source.read, plan.device)
    with closing(run.progress), outside:
        stream = start_stream(plan.trunk, batches, plan.device, separate=config.inputs == "compressed")
    if config.polish and len(stream.dense) == 1:
        run.report.notes.append("polish was left out: with a single batch nothing can be held out.")
    groups = [g for g in plan.groups if g.sites]
    last = groups[-1].last
    run.progress.start_groups(len(groups))
    for group in plan.groups:
        if group.first > last:
            break
        views = plan.views[group.first : group.last + 1]
        modules = [(view.path, view.module) for view in views]
        with closing(run.progress), materialized(modules, plan.names, plan.source.read, plan.device):
            packed, ahead = _compress_group(run, group, views, stream) if group.sites else (None, None)
            if packed is not None:
                writer.add(packed)
            if group.last < last:
                _advance(plan, stream, views, packed, ahead)
        if group.last < last and plan.ends_stage(group.last):
            with materialized(plan.outside_blocks(), plan.names, plan.source.read, plan.device):
                enter_stage(stream, plan.trunk, group.last)


def _compress_group(
    run: Run, group: Group, views: tuple[BlockView, ...], stream: Stream
) -> tuple[PackedGroup, list[torch.Tensor] | None]:
    """Factorizes, reconstructs and packs one group; also the dense hidden states behind it if they were computed."""
    started = time.monotonic()
    label = f"blocks {group.first}-{group.last}"
    result, ahead = _reconstruct(run, group, views, stream, label)
    factors = result.factors
    packed = pack_group(group.name, group.sites, factors.basis, factors.projections, factors.biases, run.plan.dtype)
    entry = _group_report(group, packed, result, time.monotonic() - started)
    run.report.groups.append(entry)
    run.progress.end_group(label, entry.mean_before, entry.mean_after, entry.seconds)
    return packed, ahead


def _reconstruct(
    run: Run, group: Group, views: tuple[BlockView, ...], stream: Stream, label: str
) -> tuple[Reconstruction, list[torch.Tensor] | None]:
    """Runs the chosen solver; without steps the truncated SVD is all there is."""
    config, linears = run.config, {site.name: (site, view.linear(site)) for view in views for site in view.sites}
    weights = {n: to_canonical(linear.weight, transposed=site.transposed) for n, (site, linear) in linears.items()}
    biases = {n: linear.bias for n, (_, linear) in linears.items() if getattr(linear, "bias", None) is not None}
    if config.second_order:
        run.progress.start_group(label, alternations(group.plans, config.rounds) + config.polish)
        result, ahead = _solved(run, group, views, stream, weights, biases)
        if config.polish and len(stream.dense) > 1:
            found = polish(result.factors, views, stream, config, run.progress.step, dtype=run.plan.dtype)
            result = replace(result, factors=found.factors, polish=found.to_dict())
        return result, ahead
    run.progress.start_group(label, config.steps)
    start = factorize(group, weights, biases, group.require_plan().rank)
    del weights
    return reconstruct(group, views, stream, start, config, run.progress.step, dtype=run.plan.dtype), None


def _solved(
    run: Run,
    group: Group,
    views: tuple[BlockView, ...],
    stream: Stream,
    weights: Mapping[str, torch.Tensor],
    biases: Mapping[str, torch.Tensor],
) -> tuple[Reconstruction, list[torch.Tensor]]:
    """Second-order solves; the moments are gone afterwards."""
    objective = run.config.objectives[0]
    seed = None if objective == "linear" else run.config.seed
    moments = collect_moments(views, stream, seed, in_place=not run.config.polish)  # polish runs the blocks again
    problem = GroupProblem.of(group, weights, biases, moments, objective)
    return solve_group(group, problem, run.config, run.progress.step, dtype=run.plan.dtype), moments.ahead


def _advance(
    plan: Plan,
    stream: Stream,
    views: tuple[BlockView, ...],
    packed: PackedGroup | None,
    ahead: list[torch.Tensor] | None,
) -> None:
    """Moves the stream behind the group: the dense path, and the compressed one with the weights as stored."""
    replaced = {view.number: _stored_weights(plan, view, packed) for view in views} if packed else {}
    for batch in range(len(stream.dense)):
        compressed = advance(stream, views, batch, replaced) if stream.separate else None
        stream.dense[batch] = ahead[batch] if ahead is not None else advance(stream, views, batch, None)
        if compressed is not None:
            stream.compressed[batch] = compressed


def _stored_weights(plan: Plan, view: BlockView, packed: PackedGroup) -> dict[str, torch.Tensor]:
    weights = {}
    for site in view.sites:
        name = view.inside(site.name)
        weights[f"{name}.weight"] = packed.weight(site).float().to(plan.device)
        bias = packed.bias(site)
        if bias is not None:
            weights[f"{name}.bias"] = bias.float().to(plan.device)
    return weights


def _group_report(group: Group, packed: PackedGroup, result: Reconstruction, seconds: float) -> GroupReport:
    info = packed.info
    return GroupReport(
        name=group.name, first=group.first, last=group.last, rank=info.rank,
        sparsity={m.name: 1 - m.nnz / (info.rank * m.f) for m in info.members},
        packed_bytes=info.packed_bytes(), ideal_bytes=info.ideal_bytes(), dense_bytes=info.dense_bytes(),
        error_before=result.before, error_after=result.after, dead_features=result.dead, seconds=seconds,
        basis=info.basis, tried=result.tried, polish=result.polish,
    )  # fmt: skip
