"""compress(): the order of the steps, written once."""

import os
import time
from pathlib import Path

from fips.calibrate import calibrate, check_calibration
from fips.checkpoint.card import CARD_NAME, card_text
from fips.checkpoint.folder import file_digest
from fips.checkpoint.format import REPORT_NAME
from fips.checkpoint.origin import origin_of
from fips.checkpoint.plot import draw_groups
from fips.checkpoint.record import side_digests
from fips.checkpoint.reload import stored_tensors, verify_written, weight_files
from fips.checkpoint.save import CheckpointWriter, replace_text, write_json
from fips.checkpoint.source import open_source
from fips.checkpoint.workdir import check_output, check_space, output_folder
from fips.config import CompressionConfig
from fips.metrics.footprint import compressed_sizes
from fips.plan import make_plan, versions
from fips.progress import Progress
from fips.report import CompressionReport
from fips.resources import peak_memory
from fips.stream_groups import Run, compress_groups


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
    """Compresses a language model, text encoder or image model; the checkpoint loads with `from_pretrained`.

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
    source = open_source(model, revision)
    check_output(out, source.folder, overwrite=overwrite)
    plan = make_plan(source, config, trust_remote_code=trust_remote_code)
    check_calibration(plan, config)
    check_space(out, plan.needed_disk())
    source.require_finite(source.infos, plan.cast)
    report = CompressionReport(str(model), revision, config.to_dict(), {}, versions(), plan.device,
                               str(plan.dtype).removeprefix("torch."))  # fmt: skip
    report.origin, report.trust_remote_code = origin_of(source), trust_remote_code
    calibration = calibrate(plan, config, report, progress)
    with output_folder(out, overwrite=overwrite) as folder:
        writer = CheckpointWriter(source, folder, plan.cast)
        compress_groups(Run(plan, config, report, progress), calibration, writer)
        writer.finish(config.max_shard_size)
        progress.note("verifying the written checkpoint bit by bit")
        verify_written(writer)
        report.calibration = calibration.to_dict()
        _finish_report(report, writer, started)
        write_json(folder / REPORT_NAME, report.to_dict())
        replace_text(folder / CARD_NAME, card_text(folder, report.to_dict()))
    return report


def _finish_report(report: CompressionReport, writer: CheckpointWriter, started: float) -> None:
    tensors = {name: info for name, (_, info) in stored_tensors(weight_files(writer.folder)).items()}
    report.sizes = compressed_sizes(writer.groups, tensors)
    files = weight_files(writer.folder)
    report.files = {path.name: file_digest(path) for path in files}
    draw_groups(writer.folder, report.to_dict()["groups"])
    report.side_files = side_digests(writer.folder, report.files)
    report.verified = True
    skipped = report.calibration.get("skipped")
    if skipped:
        report.notes.append(f"{len(skipped)} broken images were left out of the calibration: {', '.join(skipped)}.")
    dead = {name: count for group in report.groups for name, count in group.dead_features.items()}
    if dead:
        worst = max(dead, key=lambda name: dead[name])
        report.notes.append(f"{len(dead)} matrices have input features that no calibration token activates "
                            f"(most: {dead[worst]:,} of {worst}).")  # fmt: skip
    report.peak_memory_bytes = peak_memory()
    report.seconds = time.monotonic() - started
