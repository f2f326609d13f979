"""The output folder while it is made: a hidden sibling, renamed into place at the very end."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fips.errors import OutputError


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
    if not _holds_only_a_model(out):
        raise OutputError(f"{out} does not hold a model, or other things beside it; it is not overwritten.")


def _holds_only_a_model(out: Path) -> bool:
    """Whether a folder is what `fips` or `save_pretrained` writes: nothing else may be replaced."""
    try:
        config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    model = isinstance(config, dict) and "model_type" in config and any(out.glob("*.safetensors"))
    return model and not any(path.name.startswith(".git") and path.is_dir() for path in out.iterdir())


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
    if not _holds_only_a_model(out):
        raise OutputError(f"{out} has changed during the run and no longer holds only a model; it is not overwritten.")
    old = work.with_name(work.name + ".old")
    out.rename(old)
    try:
        work.rename(out)
    except BaseException:
        old.rename(out)
        raise
    shutil.rmtree(old, ignore_errors=True)
