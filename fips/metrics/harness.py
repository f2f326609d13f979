"""Scores of a language model on tasks of lm-eval, the evaluation harness of EleutherAI."""

import contextlib
import difflib
import io
import logging
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from fips.errors import CalibrationError, ConfigError
from fips.models.kinds import LANGUAGE_MODEL, reads
from fips.models.sites import trunk_of
from fips.tasks import TaskConfig, TaskResult

_RESAMPLES = 1000  # for the standard errors of metrics that have no formula for it


@dataclass(frozen=True)
class TaskProtocol:
    """Every setting the scores depend on, besides version and shots of each task.

    Attributes:
        tasks: Names as given.
        num_fewshot: Examples in every prompt, where they were set for all tasks.
        limit: Documents per task at most.
        batch_size: Requests per pass.
        dtype: dtype of the model.
        device: Where it ran.
        lm_eval: Version.
        torch: Version.
        transformers: Version.
    """

    tasks: tuple[str, ...]
    num_fewshot: int | None
    limit: int | None
    batch_size: int
    dtype: str
    device: str
    lm_eval: str
    torch: str
    transformers: str

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {**asdict(self), "tasks": list(self.tasks)}

    def line(self) -> str:
        """The protocol for a terminal."""
        limit = "all documents" if self.limit is None else f"the first {self.limit} documents of every task"
        return f"lm-eval {self.lm_eval}, {limit}, {self.dtype} on {self.device}, batch size {self.batch_size}"


@dataclass(frozen=True)
class TaskScores:
    """Scores on tasks.

    Attributes:
        results: One per task and metric.
        protocol: How they were measured.
    """

    results: tuple[TaskResult, ...]
    protocol: TaskProtocol

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {"tasks": [asdict(one) for one in self.results], "protocol": self.protocol.to_dict()}

    def compared(self, baseline: "TaskScores | None") -> dict[str, Any]:
        """What is said of two models together: for every result the model's score less the baseline's."""
        dense = {one.key: one.value for one in baseline.results} if baseline else {}
        return {"differences": [one.value - dense[one.key] for one in self.results] if baseline else None}

    def rows(self, baseline: "TaskScores | None") -> list[list[str]]:
        """Rows of the evaluation's table; the last column is the difference."""
        dense = {one.key: one for one in baseline.results} if baseline else {}
        return [[one.name, one.cell(), dense[one.key].cell(), f"{one.value - dense[one.key].value:+.4f}"] if dense
                else [one.name, one.cell(), "not measured", ""] for one in self.results]  # fmt: skip


class Tasks:
    """Tasks that exist; models are then scored on them.

    Args:
        config: Their names, and how they are run.

    Raises:
        ConfigError: If lm-eval is not installed, or a task is not known.
    """

    def __init__(self, config: TaskConfig) -> None:
        if config.include_path is not None and not Path(config.include_path).is_dir():
            raise ConfigError(f"include_path {config.include_path}: no such folder; expected one with yaml files of "
                              "tasks.")  # fmt: skip
        try:
            from lm_eval.tasks import TaskManager
        except ImportError as error:
            raise ConfigError(f"tasks need lm-eval ({error}): pip install 'fips[lm-eval]'.") from error
        self.config = config
        self.manager = TaskManager(include_path=None if config.include_path is None else str(config.include_path))
        known = self.manager.all_tasks
        for name in config.tasks:
            if name not in known:
                near = ", ".join(difflib.get_close_matches(name, known, 3)) or "none is alike"
                raise ConfigError(f"tasks: lm-eval knows no task {name!r} ({near}); add the folder of a task of your "
                                  "own with --include-path.")  # fmt: skip

    def run(self, model: Any, tokenizer: Any, *, quiet: bool = True) -> TaskScores:
        """Scores a model.

        Args:
            model: A loaded language model.
            tokenizer: Its tokenizer.
            quiet: Whether the bars of lm-eval are kept out.

        Raises:
            ConfigError: If the model is no language model.
            CalibrationError: If lm-eval cannot run a task, for example because its data set cannot be had.
        """
        if reads(trunk_of(model)[1], model) != LANGUAGE_MODEL:
            raise ConfigError(f"{type(model).__name__} is no language model; tasks (--tasks) need one.")
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM

        config = self.config
        try:
            with _muted(quiet=quiet):
                harness = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=config.batch_size)
                found = simple_evaluate(
                    harness, tasks=list(config.tasks), task_manager=self.manager, limit=config.limit,
                    num_fewshot=config.num_fewshot, bootstrap_iters=_RESAMPLES, log_samples=False,
                )  # fmt: skip
        except Exception as error:  # tasks, data sets and metrics raise anything
            first = (str(error).strip().splitlines() or [""])[0]
            raise CalibrationError(f"lm-eval cannot run {', '.join(config.tasks)}: {type(error).__name__}: {first} "
                                   "Data sets that are not on this machine need a network.") from error  # fmt: skip
        return TaskScores(tuple(task_results(found)), _protocol(model, config))


def task_results(found: dict[str, Any]) -> Iterator[TaskResult]:
    """The scores in what `simple_evaluate` gives: {task: {"acc,none": ..., "acc_stderr,none": ..., ...}, ...}."""
    for task, values in found["results"].items():
        for key, value in values.items():
            metric, comma, kind = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = values.get(f"{metric}_stderr,{kind}")
            shots, version = found.get("n-shot", {}).get(task), found.get("versions", {}).get(task)
            yield TaskResult(
                task, metric, kind, float(value), float(error) if isinstance(error, int | float) else None,
                shots if isinstance(shots, int) else None, None if version is None else str(version),
                found.get("n-samples", {}).get(task, {}).get("effective"),
                found.get("higher_is_better", {}).get(task, {}).get(metric),
            )  # fmt: skip


@contextlib.contextmanager
def _muted(*, quiet: bool) -> Iterator[None]:
    """Keeps stdout free for the result, and with `quiet` bars and messages of lm-eval out of stderr."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(sys.stderr), contextlib.ExitStack() as stack:
            if quiet:
                stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
                stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
            yield
    finally:
        logger.setLevel(level)


def _protocol(model: Any, config: TaskConfig) -> TaskProtocol:
    from importlib.metadata import version

    import transformers

    return TaskProtocol(
        tasks=config.tasks, num_fewshot=config.num_fewshot, limit=config.limit, batch_size=config.batch_size,
        dtype=str(model.dtype).removeprefix("torch."), device=next(model.parameters()).device.type,
        lm_eval=version("lm-eval"), torch=torch.__version__, transformers=transformers.__version__,
    )  # fmt: skip
