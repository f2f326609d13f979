"""verify(): whether a compressed checkpoint is whole, is what was written, belongs to its source, and loads."""

import gc
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from fips.checkpoint.checks import (
    checksum_problems,
    covers_all,
    has_report,
    load_problems,
    recorded_digests,
    source_problems,
    value_problems,
    weight_errors,
)
from fips.checkpoint.dense import PackedCheckpoint, description_of, examine
from fips.checkpoint.source import Source, locate, open_source, read_config
from fips.errors import FipsError
from fips.progress import Progress
from fips.report import finite, format_table

_SHOWN = 20  # problems of one check in the table; to_dict() has all of them


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: "structure", "checksums", "values", "source", "weights" or "load".
        status: "ok", "failed" or "skipped".
        detail: What was compared, or why nothing was.
        problems: Everything that was found, one sentence each.
    """

    name: str
    status: str
    detail: str
    problems: tuple[str, ...] = ()


@dataclass
class Verification:
    """What was found.

    Attributes:
        model: The compressed checkpoint.
        against: The dense checkpoint it was compared with.
        checks: In the order they were made.
        weight_errors: Matrix → relative error of the rebuilt weight, in the Frobenius norm; only with a source.
    """

    model: str
    against: str | None
    checks: list[Check] = field(default_factory=list)
    weight_errors: dict[str, float] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether no check failed."""
        return all(check.status != "failed" for check in self.checks)

    @property
    def problems(self) -> list[str]:
        """Every problem of every check."""
        return [problem for check in self.checks for problem in check.problems]

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        errors = {name: finite(error) for name, error in self.weight_errors.items()}
        return {"model": self.model, "against": self.against, "ok": self.ok,
                "checks": [{**asdict(check), "problems": list(check.problems)} for check in self.checks],
                "problems": self.problems, "weight_errors": errors,
                "max_weight_error": finite(max(self.weight_errors.values(), default=0.0))}  # fmt: skip

    def table(self) -> str:
        """For a terminal: one row per check, then what is wrong, then the errors of the weights."""
        rows = [f"{check.name:<10}  {check.status:<7}  {check.detail}" for check in self.checks]
        parts = [f"{self.model}: {'whole' if self.ok else 'DAMAGED'}", "\n".join(rows)]
        for check in self.checks:
            lines = [f"{check.name}: {problem}" for problem in check.problems[:_SHOWN]]
            if len(check.problems) > _SHOWN:
                lines.append(f"{check.name}: {len(check.problems) - _SHOWN} more; --json lists all")
            parts += ["\n".join(lines)] if lines else []
        if self.weight_errors:
            parts.append(format_table(["matrix", "weight error"], _error_rows(self.weight_errors)))
        return "\n\n".join(parts)


def verify(
    path: str | os.PathLike[str],
    against: str | os.PathLike[str] | None = None,
    *,
    revision: str | None = None,
    load: bool = True,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> Verification:
    """Looks for damage in a compressed checkpoint, and finds all of it, not only the first.

    Args:
        path: Folder written by `compress`, or the Hub id of one.
        against: The dense checkpoint it was made from: what was not compressed must be equal bit by bit, and of what
            was the relative error of the weights is given.
        revision: Branch, tag or commit of a Hub id at `path`.
        load: Whether the model is loaded at the end, which takes the memory of the dense one. Everything else holds
            one tensor at a time.
        trust_remote_code: Whether Python code in the checkpoint may run.
        progress: Where progress goes; silent by default.

    Raises:
        FipsError: If there is no compressed checkpoint at `path`, or no usable source at `against`.
    """
    progress, folder = progress or Progress(-1), locate(str(path), revision)
    if not has_report(folder):
        description_of(folder, read_config(folder))
    source = open_source(against) if against is not None else None
    result = Verification(str(path), None if against is None else str(against))
    opened, found = examine(folder, trust_remote_code=trust_remote_code)
    result.checks.append(_check("structure", "config.json, index and headers", map(str, found)))
    progress.note("comparing checksums")
    result.checks.append(_checksums(folder))
    if opened is not None:
        progress.note("reading every tensor")
        result.checks.append(_check("values", f"{len(opened.stored)} tensors, masks counted", value_problems(opened)))
    if opened is not None and source is not None:
        progress.note(f"comparing with {against}")
        kept = f"{len(opened.kept())} tensors, side files and settings"
        result.checks.append(_check("source", kept, source_problems(opened, source)))
    if found:
        return _skip(result, "the structure is damaged", source=source is not None)
    if opened is not None and source is not None:
        result.checks.append(_weights(opened, source, result.weight_errors))
    if not load:
        return _skip(result, "not asked for", source=False)
    progress.note("loading the model")
    problems = load_problems(folder, trust_remote_code=trust_remote_code)
    result.checks.append(_check("load", "from_pretrained", problems))
    gc.collect()
    return result


def _skip(result: Verification, reason: str, *, source: bool) -> Verification:
    """Adds the checks that were not made."""
    made = {check.name for check in result.checks}
    names = ["values", *(["source", "weights"] if source else []), "load"]
    result.checks += [Check(name, "skipped", reason) for name in names if name not in made]
    return result


def _check(name: str, detail: str, problems: Iterable[str]) -> Check:
    """A check of these problems; an error that ends the search is one of them."""
    found: list[str] = []
    try:
        found.extend(map(_printable, problems))
    except (FipsError, OSError) as error:
        found.append(_printable(str(error)))
    return Check(name, "failed" if found else "ok", detail, tuple(found))


def _checksums(folder: Path) -> Check:
    if not has_report(folder):
        return Check("checksums", "skipped", "no fips_report.json: nothing is recorded to compare with")
    try:
        recorded = recorded_digests(folder)
    except FipsError as error:
        return _check("checksums", "fips_report.json", [str(error)])
    some = "" if covers_all(recorded) else "; an older report, which records only the weights"
    return _check("checksums", f"{len(recorded)} files{some}", checksum_problems(folder, recorded))


def _weights(opened: PackedCheckpoint, source: Source, errors: dict[str, float]) -> Check:
    check = _check("weights", "", weight_errors(opened, source, errors))
    worst = max(errors, key=lambda name: errors[name], default="")
    detail = f"{len(errors)} matrices" + (f", largest relative error {errors[worst]:.4f} of {worst}" if worst else "")
    return replace(check, detail=detail)


def _error_rows(errors: dict[str, float]) -> list[list[str]]:
    return [[_printable(name), f"{error:.4f}"] for name, error in [*errors.items(), ("max", max(errors.values()))]]


def _printable(text: str) -> str:
    """Names come from files: one line, without control characters or halves of letters."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in " ".join(text.split()))
