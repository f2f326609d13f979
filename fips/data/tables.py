"""Images that lie in a column of a parquet file, an arrow file, or a Hub data set."""

import json
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from fips.data.labels import Label, NumberedName
from fips.errors import BrokenImageError, CalibrationError

_IMAGE_COLUMNS = ("image", "img")
_LABEL_COLUMNS = ("label", "labels", "fine_label")


@dataclass(frozen=True)
class Table:
    """A column of images that is read row by row.

    Attributes:
        rows: How many there are.
        labels: One per row, or None.
        cell: Gives a row's image as it is stored: bytes, or a mapping with `bytes` and `path`.
        why_unlabelled: What keeps a column of labels from being used, as the rest of a sentence.
    """

    rows: int
    labels: tuple[Label, ...] | None
    cell: Callable[[int], Any]
    why_unlabelled: str = ""

    def read(self, index: int, name: str) -> bytes:
        """Encoded bytes of one image.

        Raises:
            BrokenImageError: If the row cannot be read or holds none.
        """
        try:
            value = self.cell(index)
            if isinstance(value, dict):
                stored, path = value.get("bytes"), value.get("path")
                value = Path(path).read_bytes() if stored is None and path else stored
        except Exception as error:  # damaged files: errors of the operating system, of Arrow and of `datasets`
            raise BrokenImageError(f"{name} cannot be read: {error}") from error
        if not isinstance(value, bytes):
            raise BrokenImageError(f"{name} holds no encoded image.")
        return value


def open_file(path: Path) -> Table:
    """Opens a .parquet file, or an .arrow file of either kind.

    Raises:
        CalibrationError: If pyarrow is missing, the file cannot be read, or has no column of images.
    """
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise CalibrationError(f"{path}: reading it needs the extra: pip install 'fips[datasets]'.") from error
    try:
        schema, rows, column, cell_of = (_open_parquet if path.suffix == ".parquet" else _open_arrow)(path)
    except Exception as error:  # Arrow's errors are of many kinds
        raise CalibrationError(f"{path} is not a readable {path.suffix} file: {error}") from error
    name = _column(schema.names, _IMAGE_COLUMNS)
    if name is None or not _holds_images(schema.field(name).type):
        columns = ", ".join(f"{field.name} ({field.type})" for field in schema)
        raise CalibrationError(
            f"{path}: expected a column `image` or `img` of encoded images (bytes, or bytes and path). "
            f"It has: {columns}."
        )
    label = _column(schema.names, _LABEL_COLUMNS)
    values = None if label is None else column(label)
    why = _why_unlabelled(values or [])
    labels = None if not values or why else _named(values, _class_names(schema.metadata, str(label)), str(path))
    return Table(rows, labels, cell_of(name), why)


def open_dataset(name: str, split: str) -> Table:
    """Opens a Hub data set, "owner/name" or "owner/name:config", whose split is downloaded whole.

    Raises:
        CalibrationError: If `datasets` is missing, the data set cannot be read, or has no column of images.
    """
    try:
        from datasets import Image, load_dataset
    except ImportError as error:
        raise CalibrationError(
            f"{name}: reading a Hub data set needs the extra: pip install 'fips[datasets]'. "
            "Or name a folder of images or a .parquet file."
        ) from error
    identifier, _, config = name.partition(":")
    try:
        rows = load_dataset(identifier, config or None, split=split)
        columns = list(rows.column_names)
        image, label = _column(columns, _IMAGE_COLUMNS), _column(columns, _LABEL_COLUMNS)
        values = None if label is None else list(rows[label])
        encoded = None if image is None else rows.select_columns([image]).cast_column(image, Image(decode=False))
    except Exception as error:  # network, access and schema errors of many libraries
        raise CalibrationError(f"{name!r} is no folder here, and as a data set it cannot be read: {error} "
                               "(Another split: owner/name@split.)") from error  # fmt: skip
    if encoded is None:
        raise CalibrationError(
            f"data set {name!r}: expected a column `image` or `img` of images. It has: {', '.join(columns)}."
        )
    classes = None if label is None else getattr(rows.features[label], "names", None)
    why = _why_unlabelled(values or [])
    labels = None if not values or why else _named(values, classes, f"data set {name!r}")
    return Table(len(encoded), labels, lambda index: encoded[index][image],
                 why and f"{why} (another split: owner/name@split)")  # fmt: skip


def _column(names: Sequence[str], known: tuple[str, ...]) -> str | None:
    return next((name for name in known if name in names), None)


def _holds_images(kind: Any) -> bool:
    import pyarrow as pa

    if pa.types.is_struct(kind):
        return any(kind.field(position).name == "bytes" for position in range(kind.num_fields))
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _open_parquet(path: Path) -> tuple[Any, int, Callable[[str], list[Any]], Callable[[str], Callable[[int], Any]]]:
    from pyarrow.parquet import ParquetFile

    file = ParquetFile(path, memory_map=True)
    groups = [file.metadata.row_group(k).num_rows for k in range(file.metadata.num_row_groups)]
    starts = [0, *accumulate(groups)]

    def cell_of(name: str) -> Callable[[int], Any]:
        held: tuple[int, Any] = (-1, None)  # one group at a time: indices come in ascending order

        def cell(index: int) -> Any:
            nonlocal held
            group = bisect_right(starts, index) - 1
            if held[0] != group:
                held = group, file.read_row_group(group, columns=[name]).column(name)
            return held[1][index - starts[group]].as_py()

        return cell

    return file.schema_arrow, starts[-1], lambda name: file.read([name]).column(name).to_pylist(), cell_of


def _open_arrow(path: Path) -> tuple[Any, int, Callable[[str], list[Any]], Callable[[str], Callable[[int], Any]]]:
    import pyarrow as pa

    try:
        table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
    except pa.ArrowInvalid:  # what `datasets` writes is a stream
        table = pa.ipc.open_stream(pa.memory_map(str(path))).read_all()
    return (table.schema, table.num_rows, lambda name: table.column(name).to_pylist(),
            lambda name: lambda index: table.column(name)[index].as_py())  # fmt: skip


def _class_names(metadata: dict[bytes, bytes] | None, column: str) -> list[str] | None:
    """Class names that `datasets` writes beside the schema."""
    try:
        features = json.loads((metadata or {})[b"huggingface"])["info"]["features"]
        names = features[column]["names"]
    except (KeyError, TypeError, ValueError):
        return None
    return names if isinstance(names, list) else None


def _why_unlabelled(values: list[Any]) -> str:
    """What keeps values from being one label per row; calibration does without them, accuracy cannot."""
    missing = sum(value is None or value == -1 for value in values)  # -1: how `datasets` marks an unlabelled row
    if missing:
        return f": {missing:,} of its {len(values):,} rows have no label"
    odd = next((value for value in values if not isinstance(value, (int, str))), 0)
    return "" if isinstance(odd, (int, str)) else f": a label of it is a {type(odd).__name__}, not an integer or a name"


def _named(values: list[Any], classes: Sequence[str] | None, where: str) -> tuple[Label, ...]:
    """Labels of the rows, by class name where the classes have names."""
    if classes is None or isinstance(values[0], str):
        return tuple(values)
    if not all(0 <= value < len(classes) for value in values):
        raise CalibrationError(f"{where}: a label is {max(values)}, but only {len(classes)} classes are named.")
    names = [NumberedName(name, number, len(classes)) for number, name in enumerate(classes)]
    return tuple(names[value] for value in values)
