"""What a compression did, as numbers: one object, printed as a table or as JSON. Standard library only."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Sizes:
    """The three sizes that are always given together, each with its dense counterpart at the same dtype.

    Attributes:
        parameters: Non-zeros of U and all V; for a dense model the parameters of its MLP matrices.
        dense_parameters: Parameters of the replaced matrices.
        matrix_bytes: Bytes on disk of values, masks and bases.
        dense_matrix_bytes: Bytes of the replaced matrices.
        checkpoint_bytes: Bytes of all tensors of the checkpoint.
        dense_checkpoint_bytes: Bytes of all tensors of the dense checkpoint.
    """

    parameters: int
    dense_parameters: int
    matrix_bytes: int
    dense_matrix_bytes: int
    checkpoint_bytes: int
    dense_checkpoint_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """All values and the three shares kept."""
        return {
            **dataclasses.asdict(self),
            "parameter_share": self.parameters / self.dense_parameters,
            "matrix_share": self.matrix_bytes / self.dense_matrix_bytes,
            "checkpoint_share": self.checkpoint_bytes / self.dense_checkpoint_bytes,
        }

    def rows(self) -> list[list[str]]:
        """Table rows: what, compressed, dense, share kept."""
        pairs = (
            ("MLP parameters (non-zeros)", self.parameters, self.dense_parameters, _count),
            ("MLP matrices on disk", self.matrix_bytes, self.dense_matrix_bytes, human_bytes),
            ("checkpoint", self.checkpoint_bytes, self.dense_checkpoint_bytes, human_bytes),
        )
        return [[what, show(ours), show(dense), f"{ours / dense:.3f}"] for what, ours, dense, show in pairs]


@dataclass(frozen=True)
class GroupReport:
    """One group after compression.

    Attributes:
        name: Group name.
        first: First block.
        last: Last block.
        rank: Columns of U.
        sparsity: On-disk name of a linear → share of zeros in its V.
        packed_bytes: Bytes of values, masks and basis.
        ideal_bytes: Values, basis and exactly one bit per mask entry.
        dense_bytes: Bytes of the replaced matrices at the same dtype.
        error_before: Output → relative squared error on the calibration text of truncated SVD with as many parameters,
            pruned once and rounded to the stored dtype.
        error_after: Output → the same of what was stored. With the moments solver the outputs are every linear's.
        dead_features: Matrix → input features no calibration token activates.
        seconds: Wall time.
        basis: "shared", or "identity" when U = I and nothing of it is stored.
        tried: Plans that the moments solver tried: basis, rank, sparsity, error and alternations of each, and on how
            many matrices; of those tried on all of them the one with the smallest error was stored.
        polish: Held-out errors of the MLPs' outputs before and after the gradient steps that followed the solve, and
            whether they were kept. `error_after` is from before these steps.
    """

    name: str
    first: int
    last: int
    rank: int
    sparsity: dict[str, float]
    packed_bytes: int
    ideal_bytes: int
    dense_bytes: int
    error_before: dict[str, float]
    error_after: dict[str, float]
    dead_features: dict[str, int]
    seconds: float
    basis: str = "shared"
    tried: list[dict[str, Any]] = field(default_factory=list)
    polish: dict[str, Any] | None = None

    @property
    def mean_before(self) -> float:
        """Mean of `error_before`."""
        return sum(self.error_before.values()) / max(len(self.error_before), 1)

    @property
    def mean_after(self) -> float:
        """Mean of `error_after`."""
        return sum(self.error_after.values()) / max(len(self.error_after), 1)


@dataclass
class CompressionReport:
    """Everything a reader needs to judge and repeat a compression.

    Attributes:
        source: What was compressed.
        revision: Revision of a Hub id.
        settings: Every setting, as given; what was resolved is in the other fields.
        calibration: Origin, hash, tokens, windows, length and BOS rule of the calibration text.
        groups: One entry per compressed group.
        sizes: The three sizes.
        versions: fips, torch, transformers, safetensors, Python.
        device: Where the mathematics ran.
        dtype: dtype of the stored factors.
        seconds: Wall time of the whole run.
        peak_memory_bytes: Largest resident memory of the process.
        files: Weights file → SHA-256.
        side_files: Every other file → SHA-256, but for the model card and the report itself.
        origin: What is known of the source: name, Hub id, commit, task, and what its model card says.
        verified: Whether the written folder was read back and compared bit by bit.
        trust_remote_code: Whether Python code of the source was allowed to run.
        notes: What the user should know: dead features, few tokens, chosen calibration.
    """

    source: str
    revision: str | None
    settings: dict[str, Any]
    calibration: dict[str, Any]
    versions: dict[str, str]
    device: str
    dtype: str
    groups: list[GroupReport] = field(default_factory=list)
    sizes: Sizes | None = None
    seconds: float = 0.0
    peak_memory_bytes: int = 0
    files: dict[str, str] = field(default_factory=dict)
    side_files: dict[str, str] = field(default_factory=dict)
    origin: dict[str, Any] = field(default_factory=dict)
    verified: bool = False
    trust_remote_code: bool = False
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON values."""
        return {**dataclasses.asdict(self), "sizes": self.sizes.to_dict() if self.sizes else None}

    def table(self) -> str:
        """The report for a terminal."""
        groups = [
            [f"{g.first}-{g.last}", g.basis, str(g.rank), f"{_mean(g.sparsity):.3f}", f"{g.mean_before:.4f}",
             f"{g.mean_after:.4f}", f"{g.packed_bytes / g.dense_bytes:.3f}", f"{g.seconds:.0f}"]
            for g in self.groups
        ]  # fmt: skip
        head = ["blocks", "basis", "rank", "sparsity", "error SVD", "error", "bytes kept", "seconds"]
        text = format_table(head, groups)
        if self.sizes:
            text += "\n\n" + format_table(["size", "compressed", f"dense ({self.dtype})", "kept"], self.sizes.rows())
        return text + "".join(f"\nnote: {note}" for note in self.notes)


def finite(value: float) -> float | None:
    """The value, or None where JSON has no number for it."""
    return value if math.isfinite(value) else None


def _mean(values: dict[str, float]) -> float:
    return sum(values.values()) / max(len(values), 1)


def _count(number: float) -> str:
    return f"{number:,.0f}"


def human_bytes(count: float) -> str:
    """Bytes as MB or GB (powers of ten)."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.2f} MB"


def format_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A plain aligned table: first column left, the others right."""
    widths = [max(len(line[i]) for line in (head, *rows)) for i in range(len(head))]
    lines = [head, ["-" * w for w in widths], *rows]
    return "\n".join(
        "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
        for line in lines
    ).rstrip()
