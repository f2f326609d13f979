"""What `fips verify` looks at: checksums, values, and the source. Every function finds all there is to find."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from fips.checkpoint.card import CARD_NAME
from fips.checkpoint.dense import PackedCheckpoint
from fips.checkpoint.folder import WEIGHT_SUFFIXES, file_digest, is_file, listed_files, read_json, require_inside
from fips.checkpoint.format import REPORT_NAME
from fips.checkpoint.pack import digest
from fips.checkpoint.source import Source
from fips.checkpoint.tokenizer import load_config
from fips.errors import FipsError, FormatError, NumericalError, SourceError
from fips.linalg.packing import unpack_mask
from fips.models.kinds import model_class
from fips.models.skeleton import may_lack

_CHANGED_BY_COMPRESSION = {"quantization_config", "dtype", "torch_dtype"}


def has_report(folder: Path) -> bool:
    """Whether a folder has a compression report."""
    return is_file(folder / REPORT_NAME)


def recorded_digests(folder: Path) -> dict[str, str]:
    """File → SHA-256 as the compression report has them; the card and the report itself, which may grow, have none.

    Raises:
        FipsError: If the report is damaged.
    """
    require_inside(folder / REPORT_NAME, folder)
    report = read_json(folder / REPORT_NAME)
    files = report.get("files") if isinstance(report, dict) else None
    if not isinstance(files, dict) or not files:
        raise FormatError(f"{REPORT_NAME} records no checksums; it is damaged.")
    side = report.get("side_files", {})
    recorded = {**files, **side} if isinstance(side, dict) else {"side_files": side}
    if not all(isinstance(value, str) for value in recorded.values()):
        raise FormatError(f"{REPORT_NAME} records checksums that are no texts; it is damaged.")
    return recorded


def covers_all(recorded: dict[str, str]) -> bool:
    """Whether a report records every file of its folder; older ones record the weights only."""
    return "config.json" in recorded


def checksum_problems(folder: Path, recorded: dict[str, str]) -> Iterator[str]:
    """Files that are missing, changed or not recorded."""
    present = {file.as_posix() for file in listed_files(folder)} - {REPORT_NAME, CARD_NAME}
    for name in sorted(present | {CARD_NAME} & {file.name for file in folder.iterdir()}):
        try:
            require_inside(folder / name, folder)
            if name in recorded and file_digest(folder / name) != recorded[name]:
                yield f"{name} is not what was written: its SHA-256 differs from the one in {REPORT_NAME}."
        except SourceError as error:
            yield str(error)
        except OSError as error:
            yield f"{name} cannot be read: {error}"
    yield from (f"{name} is recorded in {REPORT_NAME} but missing." for name in recorded if name not in present)
    weights = tuple(WEIGHT_SUFFIXES)
    for name in sorted(present - recorded.keys()):
        if covers_all(recorded) or name.endswith(weights):
            yield f"{name} is not among the files that were written."


def value_problems(opened: PackedCheckpoint) -> Iterator[str]:
    """Tensors that cannot be read, are not finite, or whose mask and values do not belong together."""
    masks = {f"{m.name}.mask": m for group in opened.groups for m in group.members}
    for name in opened.stored:
        try:
            tensor = opened.read(name)
            if tensor.is_floating_point() and not torch.isfinite(tensor).all():
                bad = int((~torch.isfinite(tensor)).sum())
                raise NumericalError(f"{name} holds {bad:,} NaN or infinite values.")
            if name in masks and tensor.dtype == torch.uint8:
                kept, stored = int(unpack_mask(tensor, masks[name].f).sum()), masks[name].nnz
                if kept != stored:
                    raise FormatError(f"{name} counts {kept:,} entries; config.json describes {stored:,} values.")
        except FipsError as error:
            yield f"{name}: {error}" if name not in str(error) else str(error)


def source_problems(opened: PackedCheckpoint, source: Source) -> Iterator[str]:
    """Tensors, side files and config values that are neither compressed nor those of the source."""
    members = {m.name for group in opened.groups for m in group.members}
    solved = {f"{name}.{part}" for name in members for part in ("weight", "bias")}
    kept = opened.kept()
    for name in source.infos:
        if name in solved:
            continue
        if name not in kept:
            yield f"{name} is in {source.name} but not in the checkpoint."
        elif digest(source.read(name).to(kept[name].info.dtype)) != digest(kept[name].load()):
            yield f"{name} differs from that of {source.name}."
    yield from (f"{name} is not in {source.name}." for name in kept if name not in source.infos)
    for file in source.side_files():
        if not is_file(opened.folder / file):
            yield f"{file.as_posix()} of {source.name} is missing."
        elif file_digest(opened.folder / file) != file_digest(source.folder / file):
            yield f"{file.as_posix()} differs from that of {source.name}."
    for key in sorted((source.config.keys() | opened.config.keys()) - _CHANGED_BY_COMPRESSION):
        if repr(source.config.get(key)) != repr(opened.config.get(key)):  # NaN is not equal to itself
            yield f"config.json: {key} is {opened.config.get(key)!r}; {source.name} has {source.config.get(key)!r}."


def weight_errors(opened: PackedCheckpoint, source: Source, errors: dict[str, float]) -> Iterator[str]:
    """Compares every rebuilt matrix with the source's.

    Args:
        opened: The compressed checkpoint.
        source: The dense one.
        errors: Matrix → ‖W - W₀‖ / ‖W₀‖ is added here.

    Yields:
        Matrices that cannot be compared.
    """
    for name, entry in opened.rebuilt().items():
        found = source.infos.get(name)
        if found is None or found.shape != entry.info.shape:
            shape = "absent" if found is None else f"of the shape {list(found.shape)}"
            yield f"{name} has the shape {list(entry.info.shape)} when rebuilt; in {source.name} it is {shape}."
            continue
        try:
            original = source.read(name).float()
            distance = torch.linalg.vector_norm(entry.load().float() - original)
            errors[name] = float(distance / torch.linalg.vector_norm(original).clamp_min(1e-30))
        except FipsError as error:
            yield str(error)


def load_problems(folder: Path, *, trust_remote_code: bool = False) -> Iterator[str]:
    """Loads the folder as its config.json says, dense, and finds what transformers had to make up."""
    try:
        stated = load_config(folder, trust_remote_code=trust_remote_code)
        kind = model_class(stated, trust_remote_code=trust_remote_code)
        model, report = kind.from_pretrained(folder, trust_remote_code=trust_remote_code, output_loading_info=True)
    except FipsError as error:
        yield str(error)
        return
    except Exception as error:  # loading runs code of many models and raises anything
        yield f"transformers cannot load it: {type(error).__name__}: {error}"
        return
    missing: Any = [name for name in report["missing_keys"] if not may_lack(model, name)]
    yield from (f"{name} was not found while loading and has random values." for name in sorted(missing))
