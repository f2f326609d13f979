"""compress(): the order of the steps, written once."""

import os
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fips.checkpoint.card import write_card
from fips.checkpoint.format import REPORT_NAME
from fips.checkpoint.pack import PackedGroup, pack_group
from fips.checkpoint.reload import stored_tensors, verify_written, weight_files
from fips.checkpoint.save import CheckpointWriter, file_digest, write_json
from fips.checkpoint.source import open_source
from fips.checkpoint.workdir import check_output, check_space, output_folder
from fips.config import CompressionConfig
from fips.data.texts import DEFAULT_DATASET, Text, check_file, looks_like_file, read_dataset, read_text
from fips.data.windows import resolve_bos
from fips.errors import CalibrationError, SourceError
from fips.evaluate.footprint import compressed_sizes
from fips.models.sites import to_canonical
from fips.models.skeleton import materialized
from fips.models.trace import BlockView
from fips.plan import Plan, make_plan, versions
from fips.progress import Progress
from fips.report import CompressionReport, GroupReport
from fips.resources import peak_memory
from fips.stages.calibration import Calibration, sample_tokens, sequence_length, windows_of
from fips.stages.factorize import factorize
from fips.stages.grouping import Group
from fips.stages.reconstruct import Reconstruction, reconstruct
from fips.stages.stream import Stream, advance, start_stream


def compress(
    model: str | os.PathLike[str],
    out: str | os.PathLike[str],
    config: CompressionConfig | None = None,
    *,
    revision: str | None = None,
    overwrite: bool = False,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> CompressionReport:
    """Compresses a decoder language model and writes a checkpoint that loads with `from_pretrained`.

    Args:
        model: Checkpoint folder or Hub id.
        out: New folder; it appears only when everything is written and verified.
        config: Settings.
        revision: Branch, tag or commit of a Hub id.
        overwrite: Whether `out` may hold an older model, which is then replaced whole.
        trust_remote_code: Whether Python code in the checkpoint may run.
        progress: Where progress goes; silent by default.

    Returns:
        What was done, also written to `fips_report.json`.

    Raises:
        FipsError: One of its children; nothing is left at `out` then.
    """
    config, progress, out = config or CompressionConfig(), progress or Progress(-1), Path(out)
    started = time.monotonic()
    if config.calibration is not None and looks_like_file(config.calibration):
        check_file(Path(config.calibration))
    source = open_source(model, revision)
    check_output(out, source.folder, overwrite=overwrite)
    plan = make_plan(source, config, trust_remote_code=trust_remote_code)
    check_space(out, plan.needed_disk())
    source.require_finite(source.infos)
    report = CompressionReport(str(model), revision, config.to_dict(), {}, versions(), plan.device,
                               str(plan.dtype).removeprefix("torch."))  # fmt: skip
    calibration = _calibrate(plan, config, report, progress)
    with output_folder(out) as folder:
        writer = CheckpointWriter(source, folder, plan.cast)
        _compress_groups(plan, config, calibration, writer, report, progress)
        writer.finish(config.max_shard_size)
        progress.note("verifying the written checkpoint bit by bit")
        verify_written(writer, plan.model, plan.names)
        _finish_report(report, writer, started)
        write_json(folder / REPORT_NAME, report.to_dict())
        write_card(folder, report)
    return report


def _calibrate(
    plan: Plan, config: CompressionConfig, report: CompressionReport, progress: Progress
) -> Calibration:
    """Calibration tokens of the chosen text, or the model's own."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(plan.source.folder)
    except Exception as error:  # tokenizer files of many kinds, and as many errors
        raise SourceError(f"{plan.source.name}: no usable tokenizer beside the weights: {error}") from error
    bos = resolve_bos("auto", tokenizer)
    length = sequence_length(config.sequence_length, plan.model.config)
    count = max(config.calibration_tokens // length, 1)
    text = _calibration_text(config, tokenizer, report)
    if text is not None:
        windows = windows_of(text, tokenizer, length, count, bos, torch.Generator().manual_seed(config.seed))
        calibration = Calibration(windows, text.origin, text.sha256, bos)
    else:
        progress.note(f"sampling {count * length:,} calibration tokens from the model itself")
        dense = AutoModelForCausalLM.from_pretrained(plan.source.folder).to(plan.device).eval()
        tokens = sample_tokens(dense, tokenizer, length, count, config.seed)
        calibration = Calibration.sampled(tokens, bos)
    report.calibration = calibration.to_dict()
    widest = max(site.f for site in plan.sites)
    if calibration.tokens.numel() < widest:
        report.notes.append(f"{calibration.tokens.numel():,} calibration tokens are fewer than the {widest:,} "
                            "features of a matrix; more tokens give a better result.")  # fmt: skip
    return calibration


def _calibration_text(config: CompressionConfig, tokenizer: object, report: CompressionReport) -> Text | None:
    """The text that was asked for; a Hub text when nothing was and it can be had; None for "self"."""
    if config.calibration == "self":
        return None
    if config.calibration is not None:
        if looks_like_file(config.calibration):
            return read_text(Path(config.calibration), tokenizer)
        return read_dataset(config.calibration, "train")
    try:
        text = read_dataset(DEFAULT_DATASET, "train")
        report.notes.append(f"calibrated on {DEFAULT_DATASET}, as no calibration was named.")
        return text
    except CalibrationError:
        report.notes.append("calibrated on text sampled from the model itself: none was named, and "
                            f"{DEFAULT_DATASET} is not available here.")  # fmt: skip
        return None


def _compress_groups(
    plan: Plan,
    config: CompressionConfig,
    calibration: Calibration,
    writer: CheckpointWriter,
    report: CompressionReport,
    progress: Progress,
) -> None:
    """Streams the calibration text through the model, one group of real blocks at a time."""
    blocks = plan.model.get_submodule(plan.blocks_path)
    batch = max(config.batch_tokens // calibration.tokens.shape[1], 1)
    first = [(plan.views[0].path, plan.views[0].module)]
    with materialized(plan.outside_blocks() + first, plan.names, plan.source.read, plan.device):
        stream = start_stream(plan.trunk, blocks, calibration.tokens, batch, plan.device,
                              separate=config.inputs == "compressed")  # fmt: skip
    groups = [g for g in plan.groups if g.sites]
    last = groups[-1].last
    progress.start_groups(len(groups))
    for group in plan.groups:
        if group.first > last:
            break
        views = plan.views[group.first : group.last + 1]
        modules = [(view.path, view.module) for view in views]
        with materialized(modules, plan.names, plan.source.read, plan.device):
            packed = _compress_group(plan, group, views, stream, config, report, progress) if group.sites else None
            if packed is not None:
                writer.add(packed)
            if group.last < last:
                _advance(plan, stream, views, packed)


def _compress_group(
    plan: Plan,
    group: Group,
    views: tuple[BlockView, ...],
    stream: Stream,
    config: CompressionConfig,
    report: CompressionReport,
    progress: Progress,
) -> PackedGroup:
    """Factorizes, reconstructs and packs one group."""
    started = time.monotonic()
    label = f"blocks {group.first}-{group.last}"
    progress.start_group(label, config.steps)
    linears = {site.name: (site, view.linear(site)) for view in views for site in view.sites}
    weights = {n: to_canonical(linear.weight, transposed=site.transposed) for n, (site, linear) in linears.items()}
    biases = {n: linear.bias for n, (_, linear) in linears.items() if getattr(linear, "bias", None) is not None}
    start = factorize(group, weights, biases)
    del weights
    result = reconstruct(group, views, stream, start, config, progress.step)
    factors = result.factors
    packed = pack_group(group.name, group.sites, factors.basis, factors.projections, factors.biases, plan.dtype)
    report.groups.append(_group_report(group, packed, result, time.monotonic() - started))
    entry = report.groups[-1]
    progress.end_group(label, entry.mean_before, entry.mean_after, entry.seconds)
    return packed


def _advance(plan: Plan, stream: Stream, views: tuple[BlockView, ...], packed: PackedGroup | None) -> None:
    """Moves the stream behind the group: the dense path, and the compressed one with the weights as stored."""
    replaced = {view.number: _stored_weights(plan, view, packed) for view in views} if packed else {}
    for batch in range(len(stream.dense)):
        compressed = advance(stream, views, batch, replaced) if stream.separate else None
        stream.dense[batch] = advance(stream, views, batch, None)
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
    )  # fmt: skip


def _finish_report(report: CompressionReport, writer: CheckpointWriter, started: float) -> None:
    files = weight_files(writer.folder)
    tensors = {name: info for name, (_, info) in stored_tensors(files).items()}
    report.sizes = compressed_sizes(writer.groups, tensors)
    report.files = {path.name: file_digest(path) for path in files}
    report.verified = True
    dead = {name: count for group in report.groups for name, count in group.dead_features.items()}
    if dead:
        worst = max(dead, key=lambda name: dead[name])
        report.notes.append(f"{len(dead)} matrices have input features that no calibration token activates "
                            f"(most: {dead[worst]:,} of {worst}).")  # fmt: skip
    report.peak_memory_bytes = peak_memory()
    report.seconds = time.monotonic() - started
