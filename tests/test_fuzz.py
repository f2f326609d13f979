"""More than a thousand damaged folders: an error of fips or a right model, no other exception, no hang, no code run."""

import contextlib
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fips
from fips.checkpoint.source import open_source
from fips.errors import FipsError
from tests.damage import COMPRESSED, EITHER, Damage
from tests.families import write_model

IDS = torch.arange(3, 35)[None]
CASES = {"compressed": 400, "compressed in shards": 400, "dense": 300, "dense in shards": 300}
SECONDS = 20  # per call; the slowest takes a fraction of one


class TooSlowError(BaseException):
    """Not an Exception, so that nothing on the way can take it for one."""


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Ends a call that hangs. The outer test's own alarm is put back afterwards."""

    def stop(*_: object) -> None:
        raise TooSlowError

    handler = signal.signal(signal.SIGALRM, stop)
    before = signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *before)
        signal.signal(signal.SIGALRM, handler)


def attempt(call: Callable[[], Any], wrong: list[str]) -> tuple[Any, bool]:
    """What a call gives, and whether it ended with an error of fips; anything else is noted as wrong."""
    try:
        with limited():
            return call(), False
    except FipsError as error:
        if not str(error).strip():
            wrong.append("an error without a word")
        return None, True
    except (Exception, TooSlowError) as error:
        wrong.append(f"{type(error).__name__}: {str(error)[:200]}")
        return None, False


def outputs(model: Any) -> torch.Tensor | None:
    try:
        with torch.no_grad():
            found: torch.Tensor = model(input_ids=IDS).logits
            return found
    except Exception:  # a config.json that builds a model which cannot run: as wrong as other outputs
        return None


def judge_compressed(folder: Path, *, loud: bool, right: torch.Tensor, changed: bool) -> list[str]:
    """Every way to open a compressed folder; what is wrong with how that went."""
    wrong: list[str] = []
    recorded = (folder / "fips_report.json").exists()
    attempt(lambda: fips.inspect(folder), wrong)
    result, refused = attempt(lambda: fips.verify(folder, load=False), wrong)
    flagged = refused or (result is not None and not result.ok)
    if result is not None:
        result.table().encode()
        str(result.to_dict())
    model, _ = attempt(lambda: fips.load(folder), wrong)
    if model is not None:
        found = outputs(model)
        same = found is not None and torch.equal(found, right)
        if not same and loud:
            wrong.append("a silently wrong model")
        if not same and recorded and not flagged:
            wrong.append("a wrong model that verify calls whole")
    if recorded and changed and not flagged:
        wrong.append("verify does not notice the damage")
    return wrong


def judge_dense(folder: Path) -> list[str]:
    """A dense folder up to the plan, and every tensor read."""
    wrong: list[str] = []
    attempt(lambda: fips.inspect(folder, fips.CompressionConfig(device="cpu")), wrong)
    source, _ = attempt(lambda: open_source(folder), wrong)
    if source is not None:
        attempt(lambda: source.require_finite(source.infos), wrong)
        attempt(source.side_files, wrong)
    return wrong


def content(folder: Path) -> dict[str, bytes | str]:
    paths = sorted(folder.rglob("*"))
    return {str(p.relative_to(folder)): f"link to {p.readlink()}" if p.is_symlink() else
            p.read_bytes() if p.is_file() else "not a file" for p in paths}  # fmt: skip


@pytest.fixture(scope="module")
def whole(llama: Path, compressed: Path, calibration: Path, tmp_path_factory: pytest.TempPathFactory,
          ) -> dict[str, Path]:  # fmt: skip
    """The folders that are damaged: one file and shards, compressed and dense."""
    from tests.conftest import SETTINGS

    home = tmp_path_factory.mktemp("whole")
    shards = fips.CompressionConfig(**{**SETTINGS, "calibration": str(calibration), "max_shard_size": 40_000})
    fips.compress(llama, home / "packed", shards)
    return {"compressed": compressed, "compressed in shards": home / "packed", "dense": llama,
            "dense in shards": write_model("llama", home / "dense", shard="40KB")}  # fmt: skip


def test_there_are_enough_cases() -> None:
    assert sum(CASES.values()) >= 1000


@pytest.mark.parametrize("base", CASES)
@pytest.mark.filterwarnings("ignore")
def test_damage(base: str, whole: dict[str, Path], tmp_path: Path) -> None:
    packed = base.startswith("compressed")
    right = outputs(fips.load(whole[base])) if packed else None
    intact, kinds = content(whole[base]), COMPRESSED if packed else EITHER
    failures, done = [], 0
    for number in range(CASES[base]):
        kind: Damage = kinds[number % len(kinds)]
        rng = random.Random(f"{base} {number}")
        room = tmp_path / str(number)
        folder = Path(shutil.copytree(whole[base], room / "model"))
        loud = kind(rng, folder)
        changed = content(folder) != intact
        if packed and rng.random() < 0.4:  # what is found without checksums
            (folder / "fips_report.json").unlink()
        wrong = judge_compressed(folder, loud=loud, right=right, changed=changed) if packed else judge_dense(folder)
        if (room / "executed").exists():
            wrong.append("code from the folder was run")
        failures += [f"case {number}, {kind.__name__}: {problem}" for problem in wrong]
        shutil.rmtree(room)
        done += 1
    assert not failures, f"{len(failures)} of {done}:\n" + "\n".join(failures)
    assert done == CASES[base]
