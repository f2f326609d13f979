"""One model of a benchmark, measured in a process of its own, which `benchmark.py` starts.

A job comes as JSON on stdin; what was measured, or the error, goes as JSON to stdout.
"""

import contextlib
import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from fips.checkpoint.load import load_any
from fips.checkpoint.tokenizer import load_config
from fips.errors import FipsError
from fips.metrics.speed import speeds, synchronize, touch
from fips.models.kinds import model_class
from fips.resources import reset_peak, resident_memory
from fips.timings import BYTES, SECONDS, Series
from fips.workload import BenchConfig


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Loads a model, runs it, and tells time and memory.

    Args:
        job: `folder`, `runtime`, `trust_remote_code`, `threads`, and `config` (of a `BenchConfig`, without "auto" as
            its device).

    Returns:
        `series`, `dtype` of the model, `device`: its name.

    Raises:
        FipsError: If the model cannot be loaded or run.
    """
    config = BenchConfig(**job["config"])
    torch.set_num_threads(job["threads"])
    trust = {"trust_remote_code": job["trust_remote_code"]}
    model_class(load_config(Path(job["folder"]), **trust), **trust)  # its code is imported before anything is measured
    memory = _Memory(config.device)
    started = time.perf_counter()
    model = load_any(Path(job["folder"]), job["runtime"], config.dtype, **trust)
    model = model.to(config.device).eval()
    synchronize(config.device)
    seconds = time.perf_counter() - started
    loading = memory.read()
    touch(model)
    gc.collect()
    loaded = memory.read()
    memory.reset_peak()
    rates = speeds(model, config)
    running = memory.read()
    tensors = {t.data_ptr(): t.untyped_storage().nbytes() for t in (*model.parameters(), *model.buffers())}
    series = [Series("load time", None, SECONDS, (seconds,)),
              Series("weights", None, BYTES, (sum(tensors.values()),)),
              Series("memory of the loaded model", None, BYTES, (loaded[0],)),
              Series("peak memory while loading", None, BYTES, (loading[1],)),
              Series("peak memory while running", None, BYTES, (running[1],)), *rates]  # fmt: skip
    cuda = config.device == "cuda"
    return {"series": [vars(one) for one in series], "dtype": str(model.dtype).removeprefix("torch."),
            "device": torch.cuda.get_device_name() if cuda else config.device}  # fmt: skip


class _Memory:
    """Memory beyond what the process had when this was made: of the device where it has its own, else resident."""

    def __init__(self, device: str) -> None:
        self.cuda = device == "cuda"
        self.fresh = True
        if self.cuda:
            torch.zeros(1, device=device)  # starts CUDA
        self.before = (0, 0)
        self.reset_peak()
        now = self.read()[0]
        self.before = (now, now)

    def read(self) -> tuple[int, int]:
        """Bytes now, and at most since `reset_peak`; 0 where the system does not tell, or does not reset the peak."""
        if self.cuda:
            return torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        now, peak = resident_memory() or (0, 0)
        return max(now - self.before[0], 0), max(peak - self.before[1], 0) if self.fresh else 0

    def reset_peak(self) -> None:
        """Starts the peak anew."""
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        else:
            self.fresh = reset_peak()


def _answer(job: dict[str, Any]) -> dict[str, Any]:
    try:
        return measure(job)
    except FipsError as error:
        return {"error": str(error), "kind": type(error).__name__}
    except Exception as error:  # models, torch and accelerators raise anything
        return {"error": f"{type(error).__name__}: {error}", "kind": "FipsError"}


def main() -> None:
    """Answers one job. What models and libraries print goes to stderr, so that stdout holds the answer alone."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    job = json.loads(sys.stdin.read())
    with contextlib.redirect_stdout(sys.stderr):
        answer = _answer(job)
    sys.stdout.write(json.dumps(answer))
