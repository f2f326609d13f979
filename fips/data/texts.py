"""Reads a text from a file or a Hub data set. One reader for calibration and evaluation."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from fips.errors import CalibrationError

# The papers' calibration and evaluation text, used when nothing else is named and the Hub is reachable.
DEFAULT_DATASET = "Salesforce/wikitext:wikitext-2-raw-v1"
_MAX_ROWS = 50_000
_SUFFIXES = (".txt", ".jsonl")


@dataclass(frozen=True)
class Text:
    """A text and where it comes from.

    Attributes:
        content: The documents joined by blank lines.
        origin: File name or data set id, as recorded in reports.
    """

    content: str
    origin: str

    @property
    def sha256(self) -> str:
        """Hash of the content, UTF-8."""
        return hashlib.sha256(self.content.encode()).hexdigest()


def looks_like_file(name: str) -> bool:
    """Whether a calibration or evaluation argument means a local file rather than a data set id."""
    return name.endswith(_SUFFIXES) or Path(name).exists()


def check_file(path: Path) -> None:
    """Refuses a text file that cannot be used, before any long work.

    Raises:
        CalibrationError: If it is missing, a folder, or of an unknown kind.
    """
    if not path.is_file():
        raise CalibrationError(f"{path}: no such text file.")
    if path.suffix not in _SUFFIXES:
        raise CalibrationError(f"{path}: expected a .txt or .jsonl file.")


def read_text(path: Path, tokenizer: Any) -> Text:
    """Reads a .txt file whole, or the rows of a .jsonl file.

    A row has `text`, or `messages`, which are rendered through the tokenizer's chat template.

    Args:
        path: The file.
        tokenizer: The model's tokenizer, for its chat template.

    Raises:
        CalibrationError: If the file is missing, empty, not UTF-8, or a row is malformed.
    """
    check_file(path)
    try:
        content = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise CalibrationError(f"{path} is not UTF-8 text (byte {error.start}). Convert it first.") from error
    if path.suffix == ".jsonl":
        content = "\n\n".join(_rows(path, content, tokenizer))
    if not content.strip():
        raise CalibrationError(f"{path} holds no text.")
    return Text(content, path.name)


def _rows(path: Path, content: str, tokenizer: Any) -> Iterator[str]:
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise CalibrationError(f"{path}, line {number}: not JSON ({error.msg}).") from error
        yield _render(row, tokenizer, f"{path}, line {number}")


def _render(row: object, tokenizer: Any, where: str) -> str:
    if isinstance(row, dict) and isinstance(row.get("text"), str):
        return str(row["text"])
    if not (isinstance(row, dict) and isinstance(row.get("messages"), list)):
        raise CalibrationError(f"{where}: expected an object with `text`, or with `messages`.")
    if not getattr(tokenizer, "chat_template", None):
        raise CalibrationError(f"{where}: the model's tokenizer has no chat template to render `messages` with.")
    try:
        return str(tokenizer.apply_chat_template(row["messages"], tokenize=False))
    except Exception as error:  # templates are code of the model's author and raise anything
        raise CalibrationError(f"{where}: the chat template refuses these messages: {error}") from error


def read_dataset(name: str, split: str) -> Text:
    """Reads the `text` column of a Hub data set, "owner/name" or "owner/name:config".

    Raises:
        CalibrationError: If the `datasets` package is missing, the data set cannot be read, or has no text.
    """
    if "/" not in name:
        raise CalibrationError(f"{name}: no such file, and not a data set id such as owner/name.")
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise CalibrationError(
            f"{name}: reading a Hub data set needs the extra: pip install 'fips[datasets]'. "
            "Or name a .txt or .jsonl file."
        ) from error
    identifier, _, config = name.partition(":")
    try:
        rows = load_dataset(identifier, config or None, split=split, streaming=True)
        texts = [str(row["text"]) for row in islice(rows, _MAX_ROWS)]
    except Exception as error:  # network, access and schema errors of many libraries
        raise CalibrationError(f"data set {name!r} cannot be read: {error}") from error
    content = "\n\n".join(texts)
    if not content.strip():
        raise CalibrationError(f"data set {name!r} holds no text.")
    return Text(content, f"{name}:{split}")
