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
    if root.parent.name == "snapshots":
        homes.append(root.parents[1] / "blobs")  # not resolved: a link in its place would name any folder
    if not any(target.is_relative_to(home) for home in homes):
        raise SourceError(f"{path} is a link to {target}, outside of the model folder; put the file itself there.")


def listed_files(folder: Path) -> list[Path]:
    """Every file of a folder, relative to it, also links; hidden ones and what lies in hidden folders left out."""
    found = [path.relative_to(folder) for path in sorted(folder.rglob("*")) if is_file(path)]
    return [file for file in found if not any(part.startswith(".") for part in file.parts)]


def all_files(folder: Path) -> list[Path]:
    """The same.

    Raises:
        SourceError: If one is a link that leads out of the folder.
    """
    found = listed_files(folder)
    for file in found:
        require_inside(folder / file, folder)
    return found


def module_folders(folder: Path) -> list[str]:
    """Subfolders that modules.json of sentence-transformers names: they hold modules, often with weights, of their own.

    Raises:
        SourceError: If that file is damaged.
    """
    if not is_file(folder / "modules.json"):
        return []
    modules = read_json(folder / "modules.json")
    paths = [m.get("path") for m in modules if isinstance(m, dict)] if isinstance(modules, list) else []
    return [path for path in paths if isinstance(path, str) and Path(path) != Path()]


def side_files(folder: Path) -> list[Path]:
    """Every file but the model's weights, relative to the folder; config.json, card and report left out.

    Weights of sentence-transformers' further modules, which stay as they are, are among them.

    Raises:
        SourceError: If one is a link that leads out of the folder.
    """
    weights = (*WEIGHT_SUFFIXES, ".index.json")
    modules = [Path(path) for path in module_folders(folder)]
    return [f for f in all_files(folder) if str(f) not in _MADE_ANEW
            and (not f.name.endswith(weights) or any(module in f.parents for module in modules))]  # fmt: skip


def file_digest(path: Path) -> str:
    """SHA-256 of a file."""
    total = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            total.update(block)
    return total.hexdigest()
