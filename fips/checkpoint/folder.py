"""The files of a model folder, from wherever it came: JSON that is damaged, links that lead out of it."""

import hashlib
import json
import stat
from pathlib import Path
from typing import Any

from fips.errors import SourceError

WEIGHT_SUFFIXES = {
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx", ".ot", ".tflite", ".pkl",
}  # fmt: skip
_MADE_ANEW = ("config.json", "README.md", "fips_report.json")


def read_json(path: Path) -> Any:
    """A JSON file's value.

    Raises:
        SourceError: If the file cannot be read, is not JSON, or is nested too deeply.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise SourceError(f"{path} is not valid JSON: it is nested too deeply.") from error
    except (ValueError, OSError) as error:  # also bytes that are no text, and numbers of thousands of digits
        raise SourceError(f"{path} is not valid JSON: {error}") from error


def is_file(path: Path) -> bool:
    """Whether there is a regular file; names no file system takes are none."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (OSError, ValueError):
        return False


def require_inside(path: Path, folder: Path) -> None:
    """Refuses a link that leads out of the model folder: what is read or copied must belong to the model.

    The Hub's cache keeps a model's files in `blobs` and links to them from `snapshots/<commit>`; those are its own.

    Raises:
        SourceError: Naming the link and where it leads.
    """
    try:
        target, root = path.resolve(strict=True), folder.resolve()
    except (OSError, RuntimeError) as error:
        raise SourceError(f"{path} leads nowhere: {error}") from error
    homes = [root]
    if root.parent.name == "snapshots" and (root.parents[1] / "blobs").is_dir():
        homes.append((root.parents[1] / "blobs").resolve())
    if not any(target.is_relative_to(home) for home in homes):
        raise SourceError(f"{path} is a link to {target}, outside of the model folder; put the file itself there.")


def all_files(folder: Path) -> list[Path]:
    """Every file of a folder, relative to it; hidden ones and what lies in hidden folders left out.

    Raises:
        SourceError: If one is a link that leads out of the folder.
    """
    found = []
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder)
        if any(part.startswith(".") for part in relative.parts) or not is_file(path):
            continue
        require_inside(path, folder)
        found.append(relative)
    return found


def side_files(folder: Path) -> list[Path]:
    """Every file that holds no weights, relative to the folder; config.json, card and report left out.

    Raises:
        SourceError: If one is a link that leads out of the folder.
    """
    weights = (*WEIGHT_SUFFIXES, ".index.json")
    return [f for f in all_files(folder) if not f.name.endswith(weights) and str(f) not in _MADE_ANEW]


def file_digest(path: Path) -> str:
    """SHA-256 of a file."""
    total = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            total.update(block)
    return total.hexdigest()
