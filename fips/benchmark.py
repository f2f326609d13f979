"""bench(): speed and memory of a compressed checkpoint in both runtimes, beside its dense source."""

import datetime
import json
import os
import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import fips
from fips import errors
from fips.checkpoint.load import is_compressed
from fips.checkpoint.reload import stored_tensors
from fips.checkpoint.source import locate, read_config, require_depth, weight_paths
from fips.checkpoint.tokenizer import load_config
from fips.config import RUNTIMES
from fips.errors import ConfigError, FipsError, SourceError
from fips.models.kinds import token_places, writes_text
from fips.models.skeleton import build_skeleton
from fips.plan import resolve_device, versions
from fips.progress import Progress
from fips.resources import processor
from fips.timings import Benched, Benchmark, Series
from fips.workload import BenchConfig

_LABELS = {"dense": "rebuilt", "packed": "packed"}  # runtime → what it is called beside the dense checkpoint
_SAME = ("model_type", "hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size")


def bench(
    path: str | os.PathLike[str],
    baseline: str | os.PathLike[str] | None = None,
    config: BenchConfig | None = None,
    *,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> Benchmark:
    """Load time, memory and speed of a compressed checkpoint in both runtimes, and of its dense source.

    Every model runs in a fresh process. A round measures each of them once; there are `repeats` rounds, so that what
    slows the machine for a while does not fall on one model alone. All run in one dtype, on the same random inputs.

    Args:
        path: Folder or Hub id of a compressed checkpoint.
        baseline: The dense checkpoint it was made from; without it the two runtimes are compared.
        config: Batch sizes, lengths, repeats.
        trust_remote_code: Whether Python code in the checkpoints may run.
        progress: Where progress goes; silent by default.

    Raises:
        FipsError: If an input is unusable, or a model cannot be loaded or run.
    """
    config, progress = config or BenchConfig(), progress or Progress(-1)
    config = replace(config, device=resolve_device(config.device))
    folder = _compressed(path)
    dense = None if baseline is None else _dense(baseline)
    _check_fits([folder] if dense is None else [folder, dense], config, trust_remote_code=trust_remote_code)
    jobs = [(_LABELS[runtime], str(path), folder, runtime) for runtime in RUNTIMES]
    if dense is not None:
        jobs.append(("dense", str(baseline), dense, "dense"))
    found: dict[str, list[dict[str, Any]]] = {label: [] for label, *_ in jobs}
    for number in range(config.repeats):
        for label, name, where, runtime in jobs:
            progress.note(f"round {number + 1} of {config.repeats}: {label} ({name})")
            answer = _run({"folder": str(where), "runtime": runtime, "trust_remote_code": trust_remote_code,
                           "threads": torch.get_num_threads(), "config": config.to_dict()}, f"{name} ({label})")
            found[label].append(answer)
            config = replace(config, dtype=answer["dtype"])  # the compressed one's for all that follow
    models = [Benched(label, name, None if label == "dense" else runtime, _merged(found[label]))
              for label, name, _, runtime in jobs]  # fmt: skip
    reference = models[-1:] if dense is not None else []
    return Benchmark((*reference, *models[: len(RUNTIMES)]), config.to_dict(), _machine(found["packed"][0]["device"]))


def _compressed(path: str | os.PathLike[str]) -> Path:
    folder = locate(str(path))
    if not is_compressed(folder):
        raise ConfigError(f"{path} is not compressed by fips; bench compares a compressed checkpoint (PATH) with the "
                          "dense one it was made from (--baseline).")  # fmt: skip
    weight_paths(folder)
    return folder


def _dense(baseline: str | os.PathLike[str]) -> Path:
    folder = locate(str(baseline))
    if is_compressed(folder):
        raise ConfigError(f"baseline {baseline} is compressed by fips; expected the dense checkpoint it was made from.")
    weight_paths(folder)
    return folder


def _check_fits(folders: list[Path], config: BenchConfig, *, trust_remote_code: bool) -> None:
    """Refuses models that have nothing to do with each other, and sequences that a model cannot read."""
    configs = [load_config(folder, trust_remote_code=trust_remote_code) for folder in folders]
    for key in _SAME:
        values = [getattr(c, key, None) for c in configs]
        if values[0] != values[-1]:
            raise ConfigError(f"baseline {folders[-1]} is another model than {folders[0]}: its {key} is {values[-1]}, "
                              f"not {values[0]}; expected the dense checkpoint it was made from.")  # fmt: skip
    limit = getattr(configs[0], "max_position_embeddings", None)
    causal = writes_text(configs[0], trust_remote_code=trust_remote_code)
    if not causal and hasattr(configs[0], "vocab_size"):
        require_depth(read_config(folders[0]), len(stored_tensors(weight_paths(folders[0]))), folders[0])
        configs[0].quantization_config = None
        limit = token_places(build_skeleton(configs[0], trust_remote_code=trust_remote_code))
    needed = config.prompt_length + (config.new_tokens if causal else 0)
    if isinstance(limit, int) and 1 < limit < needed and hasattr(configs[0], "vocab_size"):
        parts = f"prompt_length {config.prompt_length}" + (f" + new_tokens {config.new_tokens}" if causal else "")
        raise ConfigError(f"{parts} is {needed} tokens, but {folders[0]} reads {limit} at most; choose fewer.")


def _run(job: dict[str, Any], name: str) -> dict[str, Any]:
    """Measures one model in a fresh process.

    Raises:
        FipsError: What was raised there, or that the process died.
    """
    code = f"import sys; sys.path[:] = {_search_path()!r}; from fips.benchmark_process import main; main()"
    done = subprocess.run([sys.executable, "-c", code], input=json.dumps(job), capture_output=True, text=True,
                          check=False)  # fmt: skip
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError as error:
        last = (done.stderr.strip().splitlines() or ["nothing on stderr"])[-1]
        why = "it was killed, perhaps for want of memory" if done.returncode < 0 else last
        raise SourceError(f"the benchmark of {name} ended with status {done.returncode}: {why}.") from error
    if "error" in answer:
        kind: type[FipsError] = getattr(errors, answer["kind"], FipsError)
        raise kind(f"{name}: {answer['error']}")
    return answer


def _search_path() -> list[str]:
    """Where this process finds modules, but not in the working folder: that may be a model's, and hold a json.py."""
    here, home = os.path.realpath(os.curdir), os.path.realpath(Path(fips.__file__).parents[1])
    return [path for path in map(os.path.abspath, sys.path) if os.path.realpath(path) != here or here == home]


def _merged(answers: list[dict[str, Any]]) -> tuple[Series, ...]:
    """One series per quantity, with a value per round."""
    rounds = [[Series(**one) for one in answer["series"]] for answer in answers]
    return tuple(replace(same[0], values=tuple(one.values[0] for one in same)) for same in zip(*rounds, strict=True))


def _machine(device: str) -> dict[str, Any]:
    return {"processor": processor(), "cores": os.cpu_count(), "device": device, "system": platform.platform(),
            **versions(), "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat()}  # fmt: skip
