"""What a benchmark found, as numbers, a table and sentences. Standard library only."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fips.report import format_table, human_bytes

BYTES = "bytes"
SECONDS = "s"
_NOTICE = 1.05  # a smaller difference from the reference is not worth a sentence
_RESTLESS = 1.25  # largest over smallest of the repeats, from which on the machine was not quiet


@dataclass(frozen=True)
class Series:
    """One quantity of one model, once per repeat.

    Attributes:
        what: Such as "load time" or "decode".
        batch: Sequences, texts or images per pass; None where there is none.
        unit: "s", "bytes", or what is done per second, such as "tokens/s".
        values: One per repeat.
    """

    what: str
    batch: int | None
    unit: str
    values: tuple[float, ...]

    @property
    def name(self) -> str:
        """For a row of a table."""
        return self.what if self.batch is None else f"{self.what}, batch {self.batch}"

    @property
    def more_is_better(self) -> bool:
        """Of rates more is better; of seconds and bytes less."""
        return self.unit not in (BYTES, SECONDS)

    @property
    def median(self) -> float:
        """Median over the repeats."""
        return statistics.median(self.values)

    @property
    def spread(self) -> float:
        """Largest over smallest value of the repeats; 1 when they are equal."""
        return max(self.values) / min(self.values) if min(self.values) > 0 else 1.0

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {"what": self.what, "batch": self.batch, "unit": self.unit, "median": self.median,
                "min": min(self.values), "max": max(self.values), "values": list(self.values)}  # fmt: skip

    def cell(self) -> str:
        """Median, with smallest and largest where they differ visibly."""
        if not any(self.values):
            return "not measured"
        middle, low, high = (_shown(value, self.unit) for value in (self.median, min(self.values), max(self.values)))
        if low == high:
            return middle
        same_unit = low.split()[-1] == high.split()[-1]
        return f"{middle} ({low.split()[0] if same_unit else low}-{high})"


@dataclass(frozen=True)
class Benched:
    """One model, measured.

    Attributes:
        label: "dense", "rebuilt" (the dense runtime of a compressed model) or "packed".
        model: Its path or Hub id.
        runtime: How it was loaded; None for a dense checkpoint.
        series: Everything that was measured.
    """

    label: str
    model: str
    runtime: str | None
    series: tuple[Series, ...]

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {"label": self.label, "model": self.model, "runtime": self.runtime,
                "series": [one.to_dict() for one in self.series]}  # fmt: skip

    def ratios(self, reference: "Benched") -> list[float | None]:
        """Every median over the reference's; None where that is 0."""
        pairs = zip(self.series, reference.series, strict=True)
        return [ours.median / theirs.median if theirs.median else None for ours, theirs in pairs]


@dataclass(frozen=True)
class Benchmark:
    """Models that were measured in turn, under the same settings, on one machine.

    Attributes:
        models: The reference first: the dense baseline, or without one the compressed model's dense runtime.
        settings: What was run.
        machine: Where and when: processor, device, threads, versions, date.
    """

    models: tuple[Benched, ...]
    settings: dict[str, Any]
    machine: dict[str, Any]

    @property
    def reference(self) -> Benched:
        """The model that ratios are taken over."""
        return self.models[0]

    def to_dict(self) -> dict[str, Any]:
        """As JSON values; `ratios` are in the order of `series`, each over the reference's median."""
        ratios = {m.label: m.ratios(self.reference) for m in self.models[1:]}
        return {"models": [m.to_dict() for m in self.models], "reference": self.reference.label, "ratios": ratios,
                "sentences": self.sentences(), "settings": self.settings, "machine": self.machine}  # fmt: skip

    def table(self) -> str:
        """For a terminal: one row per quantity, sentences, and what the numbers depend on."""
        head = ["median (smallest-largest)", self.reference.label]
        for model in self.models[1:]:
            head += [model.label, "ratio"]
        rows = []
        for i, first in enumerate(self.reference.series):
            row = [f"{first.name} [{first.unit}]" if first.more_is_better else first.name, first.cell()]
            for model in self.models[1:]:
                ratio = model.ratios(self.reference)[i]
                row += [model.series[i].cell(), "" if ratio is None else f"{ratio:.2f}"]
            rows.append(row)
        named = [f"{m.label}: {m.model}" + (f", {m.runtime} runtime" if m.runtime else "") for m in self.models]
        told = ", ".join(f"{key} {value}" for key, value in self.machine.items())
        run = ", ".join(f"{key} {_plain(value)}" for key, value in self.settings.items())
        return "\n".join([format_table(head, rows), "", *self.sentences(), "", *named, f"run: {run}",
                          f"machine: {told}"])  # fmt: skip

    def sentences(self) -> list[str]:
        """What is slower or takes more memory than the reference, said plainly, and how steady the numbers are."""
        told = [line for model in self.models[1:] for line in _worse(model, self.reference)]
        if not told:
            told = [f"Nothing is slower or takes more memory than {self.reference.label} by more than "
                    f"{100 * (_NOTICE - 1):.0f} %."]  # fmt: skip
        worst = max((one.spread for model in self.models for one in model.series if one.unit != BYTES), default=1.0)
        if worst > _RESTLESS:
            told.append(f"Repeats differ by up to a factor of {worst:.1f}: the machine was busy, or the passes are "
                        "short; take the ratios with care.")  # fmt: skip
        return told


def _worse(model: Benched, reference: Benched) -> list[str]:
    """One sentence per quantity in which a model is worse than the reference, and one for those that are not clear."""
    told, unclear = [], []
    for ours, theirs in zip(model.series, reference.series, strict=True):
        if not ours.median or not theirs.median:
            continue
        factor = theirs.median / ours.median if ours.more_is_better else ours.median / theirs.median
        if factor < _NOTICE:
            continue
        at = "" if ours.batch is None else f" at batch {ours.batch}"
        if max(min(ours.values), min(theirs.values)) <= min(max(ours.values), max(theirs.values)):
            unclear.append(ours.what + at)
        elif ours.unit == BYTES:
            how = f"{factor:.1f} times the memory of" if factor >= 2 else f"{_percent(factor)} more memory than"
            told.append(f"{model.label} takes {how} {reference.label} ({ours.name}).")
        elif factor >= 2:
            told.append(f"{model.label}: {ours.what}{at} is {factor:.1f} times slower than {reference.label}.")
        else:
            told.append(f"{model.label}: {ours.what}{at} takes {_percent(factor)} more time than {reference.label}.")
    if unclear:
        told.append(f"{model.label}: worse than {reference.label} in the median, but with repeats that overlap: "
                    f"{', '.join(unclear)}.")  # fmt: skip
    return told


def _percent(factor: float) -> str:
    return f"{100 * (factor - 1):.0f} %"


def _shown(value: float, unit: str) -> str:
    if unit == BYTES:
        return human_bytes(value)
    if unit == SECONDS:
        return f"{value:.2f} s"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _plain(value: object) -> str:
    return "/".join(map(str, value)) if isinstance(value, Sequence) and not isinstance(value, str) else str(value)
