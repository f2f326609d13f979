"""The examples run as they are shown, each in a process of its own, and stay short enough to be read."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
SMALL = ("--calibration-tokens", "128", "--sequence-length", "32", "--rounds", "1")


def _run(name: str, *arguments: object, cwd: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(EXAMPLES / name), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_example_is_short(example: Path) -> None:
    assert len(example.read_text(encoding="utf-8").splitlines()) <= 60


def test_compress_llm_without_any_data(llama: Path, tmp_path: Path) -> None:
    done = _run("compress_llm.py", llama, "out", "--calibration", "self", "--prompt", "abc", *SMALL, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "MLP matrices on disk" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("abc")
    assert (tmp_path / "out" / "model.safetensors").is_file()


@pytest.mark.parametrize(("example", "arguments"), [("compress_llm.py", ["nowhere/", "out"]), ("demo.py", []),
                                                     ("push.py", ["nowhere", "a/b"])])  # fmt: skip
def test_failure_is_one_line(example: str, arguments: list[str], tmp_path: Path) -> None:
    done = _run(example, *arguments, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("Error: ")
    assert len(done.stderr.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())
