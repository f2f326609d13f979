"""The command line inside this process: what it prints, and how it ends."""

import contextlib
import io
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from fips import pipeline
from fips.cli.main import main

# A quick run of a tiny model, the same whatever solves: truncated SVD. Later options win over earlier ones.
QUICK = ["--device", "cpu", "--group-size", "2", "--calibration-tokens", "256", "--sequence-length", "32",
         "--batch-tokens", "64", "--steps", "0"]  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """Exit code, stdout and stderr."""

    code: int
    out: str
    err: str


def run(*argv: object) -> Outcome:
    """Runs `fips` with these arguments. Errors that are no FipsError escape, as they would show a traceback."""
    out, err = io.StringIO(), io.StringIO()
    code: object = 0
    handler = signal.getsignal(signal.SIGTERM)
    try:
        argv_patch = patch.object(sys, "argv", ["fips", *map(str, argv)])
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), argv_patch:
            main()
    except SystemExit as stop:
        code = stop.code or 0
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert isinstance(code, int)
    return Outcome(code, out.getvalue(), err.getvalue())


def tree(folder: Path) -> dict[str, bytes]:
    """Every path below a folder, hidden ones too, with the content of files."""
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else b"" for p in folder.rglob("*")}


def refused(*argv: object, code: int, words: list[str], watched: Path, early: bool = True) -> str:
    """Runs `fips` and checks that it ends with one clear line and leaves no trace under `watched`.

    Early refusals come before the output folder is begun. Returns the message.
    """
    before = tree(watched)
    with patch("fips.pipeline.output_folder", wraps=pipeline.output_folder) as begun:
        result = run(*argv)
    lines = [line for line in result.err.splitlines() if line.strip() and not line.startswith(("Usage:", "Try "))]
    assert lines, "nothing on stderr"
    assert lines[-1].startswith("Error: ")
    assert "Traceback" not in result.err
    assert (result.code, result.out) == (code, "")
    for word in words:
        assert word in lines[-1]
    if early:
        assert len(lines) == 1
        assert not begun.called
    assert tree(watched) == before
    return lines[-1]
