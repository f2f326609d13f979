"""fips_report.json after the compression: reading it, checking files against it, and adding an evaluation to it."""

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from fips.checkpoint.card import CARD_NAME, card_text
from fips.checkpoint.folder import all_files, file_digest, is_file, read_json, require_inside
from fips.checkpoint.format import REPORT_NAME
from fips.checkpoint.origin import hub_place
from fips.checkpoint.save import json_text, replace_text
from fips.errors import ConfigError, FormatError, OutputError, SourceError

_SIZES = ("parameters", "matrix_bytes", "checkpoint_bytes")


def read_report(folder: Path) -> dict[str, Any]:
    """The report of a compressed checkpoint.

    Raises:
        FipsError: If it is missing, damaged, or says that the checkpoint was not verified.
    """
    path = folder / REPORT_NAME
    if not is_file(path):
        raise FormatError(f"{folder} has no {REPORT_NAME}; expected a folder written by `fips compress`.")
    require_inside(path, folder)
    try:
        report = read_json(path)
    except SourceError as error:
        raise FormatError(f"{path} is damaged ({error}); compress the model again.") from error
    files = report.get("files") if isinstance(report, dict) else None
    if not isinstance(files, dict) or not files or report.get("verified") is not True:
        raise FormatError(f"{path} lists no verified weights; expected the report of a finished `fips compress`.")
    return dict(report)


def side_digests(folder: Path, weights: Collection[str]) -> dict[str, str]:
    """SHA-256 of every file beside the weights; the card and the report, which may grow, are left out."""
    skipped = {*weights, CARD_NAME, REPORT_NAME}
    return {file.as_posix(): file_digest(folder / file) for file in all_files(folder) if file.as_posix() not in skipped}


def recordable(folder: Path) -> dict[str, Any]:
    """The report of a folder whose report and card can be written again.

    Raises:
        FipsError: If there is no report or card of a kind that can, or the folder is the Hub's cache.
    """
    if hub_place(folder)[0] is not None:
        raise ConfigError(f"{folder} is the Hub's cache, not a folder of your own, and its card is not changed; "
                          "download the model into a folder and name that.")  # fmt: skip
    report = read_report(folder)
    if (folder / REPORT_NAME).is_symlink():
        raise FormatError(f"{folder / REPORT_NAME} is a link; put the file itself there.")
    try:
        card_text(folder, report)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(f"{folder / REPORT_NAME} lacks what the model card is made of ({error!r}).") from error
    return report


def record_evaluation(folder: str | os.PathLike[str], evaluation: dict[str, Any]) -> None:
    """Adds an evaluation to a checkpoint's report and model card; an earlier one of the same protocol is replaced.

    Args:
        folder: Folder written by `fips compress`.
        evaluation: `Evaluation.to_dict()` of that checkpoint.

    Raises:
        FipsError: If the folder has no report, the evaluation is of another checkpoint, or it cannot be written.
    """
    folder = Path(folder)
    report = recordable(folder)
    sizes = {key: evaluation["sizes"][key] for key in _SIZES}
    recorded = {key: (report.get("sizes") or {}).get(key) for key in _SIZES}
    if sizes != recorded:
        raise ConfigError(f"the evaluation is of a checkpoint of {sizes['checkpoint_bytes']:,} bytes, {folder} has "
                          f"{recorded['checkpoint_bytes'] or 0:,}; evaluate {folder} itself.")  # fmt: skip
    found = {**_named(evaluation), "baseline": _named(evaluation["baseline"]) if evaluation["baseline"] else None}
    others = [e for e in report.get("evaluations", []) if e["protocol"] != found["protocol"]]
    report["evaluations"] = [*others, found]
    texts = {REPORT_NAME: json_text(report), CARD_NAME: card_text(folder, report)}  # both, before either is replaced
    try:
        for name, text in texts.items():
            replace_text(folder / name, text)
    except OSError as error:
        raise OutputError(f"{folder}: the evaluation cannot be recorded: {error}") from error


def _named(measured: dict[str, Any]) -> dict[str, Any]:
    """A measurement whose model is a Hub id or a folder's name, not a place on one machine."""
    path = Path(measured["model"])
    return {**measured, "model": path.resolve().name if path.exists() else measured["model"]}
