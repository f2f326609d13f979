"""The output folder while it is made: a hidden sibling, renamed into place at the very end."""

import fnmatch
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fips.checkpoint.folder import file_digest, is_file, read_json
from fips.errors import OutputError, SourceError

# Files that `fips` and `save_pretrained` of models, tokenizers and processors write, whatever the report says.
_WRITTEN = (
    "config.json", "generation_config.json", "README.md", "fips_report.json", "fips_groups.png", ".gitattributes",
    "model*.safetensors", "model.safetensors.index.json", "pytorch_model*.bin", "pytorch_model.bin.index.json",
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "vocab.txt", "merges.txt", "*.model", "chat_template.jinja", "chat_template.json", "*processor_config.json",
)  # fmt: skip


def check_output(out: Path, source: Path, *, overwrite: bool) -> None:
    """Refuses an output path that cannot or must not be written, before any work.

    Raises:
        OutputError: If it is a file, holds something, or overlaps the source.
    """
    resolved, origin = out.resolve(), source.resolve()
    if resolved == origin or resolved in origin.parents or origin in resolved.parents:
        raise OutputError(f"{out} overlaps the source {source}; choose a folder outside it.")
    if not out.parent.resolve().is_dir():
        raise OutputError(f"{out.parent} does not exist; create it first.")
    if not os.access(out.parent.resolve(), os.W_OK):
        raise OutputError(f"{out.parent} is not writable.")
    if not os.path.lexists(out):
        return
    if out.is_mount() or resolved == Path.cwd() or resolved in Path.cwd().parents:
        raise OutputError(f"{out} is a mount point or holds the current folder; name a new folder inside it.")
    if not out.is_dir() or out.is_symlink():
        raise OutputError(f"{out} exists and is not a folder.")
    if not any(out.iterdir()):
        return
    if not overwrite:
        raise OutputError(f"{out} is not empty. Choose another folder, or replace it with --overwrite.")
    _require_only_a_model(out, source)


def _require_only_a_model(out: Path, like: Path) -> None:
    """Refuses to replace a folder that is not what `fips` or `save_pretrained` writes.

    Args:
        out: The folder.
        like: Another one whose files lie in its replacement; the same file in both is not lost.

    Raises:
        OutputError: Naming what else is there.
    """
    config = _json(out / "config.json")
    if "model_type" not in config or not any(out.glob("*.safetensors")):
        raise OutputError(f"{out} does not hold a model; it is not overwritten.")
    report = _json(out / "fips_report.json")
    recorded = {name for key in ("files", "side_files") if isinstance(report.get(key), dict) for name in report[key]}
    found = []
    for path in sorted(out.rglob("*")):
        name = path.relative_to(out).as_posix()
        if path.is_dir() and not path.is_symlink():
            known = not path.name.startswith(".")  # a .git, say
        else:
            known = name in recorded or (path.parent == out and any(fnmatch.fnmatch(name, p) for p in _WRITTEN))
        if not known and not _same(path, like / name):
            found.append(name)
    if found:
        more = f" and {len(found) - 5} more" if len(found) > 5 else ""
        raise OutputError(f"{out} holds {', '.join(found[:5])}{more} beside a model; it is not overwritten. Move that "
                          "elsewhere, or choose another folder.")  # fmt: skip


def _json(path: Path) -> dict[str, Any]:
    try:
        found = read_json(path)
    except SourceError:
        return {}
    return found if isinstance(found, dict) else {}


def _same(path: Path, other: Path) -> bool:
    return is_file(path) and is_file(other) and file_digest(path) == file_digest(other)


def check_space(out: Path, needed: int) -> None:
    """Refuses to start without room for the result.

    Raises:
        OutputError: Naming the bytes needed and free.
    """
    free = shutil.disk_usage(out.parent.resolve()).free
    if free < needed:
        raise OutputError(f"{out.parent}: {needed:,} bytes needed, {free:,} free. Free some disk or choose another.")


@contextmanager
def output_folder(out: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A hidden sibling of `out` to write into; it becomes `out` when the block ends without an error.

    Whatever happens before, `out` stays as it was and the sibling is removed.

    Args:
        out: The folder to make.
        overwrite: Whether an old model there is replaced. Otherwise `out` must still be absent or empty at the end.

    Raises:
        OutputError: If the disk is full or fails, or something has appeared at `out` in the meantime.
    """
    work = Path(tempfile.mkdtemp(prefix=f".{out.name}.fips-", dir=out.parent.resolve()))
    work.chmod(0o755)
    try:
        yield work
        _sync(work)
        _publish(work, out, overwrite=overwrite)
    except OSError as error:
        raise OutputError(f"{out} cannot be written: {error}") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _sync(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _publish(work: Path, out: Path, *, overwrite: bool) -> None:
    """Puts the finished folder in place; an old model is moved aside first and comes back if that fails.

    Renaming a folder onto an empty one replaces it; onto one that holds something it fails and changes nothing.
    """
    if not (overwrite and out.exists() and any(out.iterdir())):
        work.rename(out)
        return
    try:
        _require_only_a_model(out, work)
    except OutputError as error:
        raise OutputError(f"{out} has changed during the run: {error}") from error
    old = work.with_name(work.name + ".old")
    out.rename(old)
    try:
        work.rename(out)
    except BaseException:
        old.rename(out)
        raise
    shutil.rmtree(old, ignore_errors=True)
