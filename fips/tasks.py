"""Tasks a language model is scored on, validated, and its scores. Standard library only: imported before torch."""

import os
from dataclasses import dataclass

from fips.config import DEVICES, DTYPES, RUNTIMES
from fips.errors import ConfigError


@dataclass(frozen=True)
class TaskConfig:
    """Settings of an evaluation on tasks of lm-eval.

    Attributes:
        tasks: Names of tasks or groups, such as "hellaswag".
        include_path: Folder of yaml files with further tasks. They may run Python code.
        num_fewshot: Examples in every prompt; None is each task's own number.
        limit: Documents per task at most; None is all of them. With a limit scores are only good for a smoke test.
        batch_size: Requests per pass.
        device: Where the models run.
        dtype: dtype the models run in; "auto" takes the checkpoint's, for the baseline too.
        runtime: How a compressed checkpoint is loaded, "dense" or "packed".
        update_card: Whether the result is added to the report and model card of a compressed folder.

    Raises:
        ConfigError: If a value is out of range.
    """

    tasks: tuple[str, ...]
    include_path: str | os.PathLike[str] | None = None
    num_fewshot: int | None = None
    limit: int | None = None
    batch_size: int = 8
    device: str = "auto"
    dtype: str = "auto"
    runtime: str = "dense"
    update_card: bool = False

    def __post_init__(self) -> None:
        """Refuses values that cannot work."""
        names = (self.tasks,) if isinstance(self.tasks, str) else tuple(self.tasks)
        object.__setattr__(self, "tasks", names)
        if not names or not all(isinstance(name, str) and name.strip() for name in names):
            raise ConfigError(f"tasks is {names!r}; expected names of lm-eval's tasks, such as hellaswag.")
        if len(set(names)) != len(names):
            raise ConfigError(f"tasks is {names!r}; expected every name once.")
        for name, least in (("num_fewshot", 0), ("limit", 1), ("batch_size", 1)):
            value = getattr(self, name)
            if value is None and name != "batch_size":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"{name} is {value!r}; expected a whole number from {least} on.")
        for name, allowed in (("device", DEVICES), ("dtype", DTYPES), ("runtime", RUNTIMES)):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; expected one of {', '.join(allowed)}.")


@dataclass(frozen=True)
class TaskResult:
    """One metric of one task.

    Attributes:
        task: Name of the task or group.
        metric: Such as "acc_norm".
        filter: How answers were read from what the model writes; "none" where they are not.
        value: The score.
        stderr: Its standard error over the documents, where lm-eval gives one.
        shots: Examples in every prompt; None for a group whose tasks differ.
        version: Version of the task.
        documents: How many were scored; None for a group.
        more_is_better: Whether a larger score is better; None where lm-eval does not say.
    """

    task: str
    metric: str
    filter: str
    value: float
    stderr: float | None
    shots: int | None
    version: str | None
    documents: int | None
    more_is_better: bool | None

    @property
    def key(self) -> tuple[str, str, str]:
        """What it is compared by."""
        return self.task, self.metric, self.filter

    @property
    def name(self) -> str:
        """For a row of a table."""
        told = [f"{self.shots}-shot"] if self.shots is not None else []
        told += [f"version {self.version}"] if self.version is not None else []
        told += [self.filter] if self.filter != "none" else []
        return f"{self.task} {self.metric}" + (f" ({', '.join(told)})" if told else "")

    def cell(self) -> str:
        """The score, with its standard error where there is one."""
        return f"{self.value:.4f}" + ("" if self.stderr is None else f" ± {self.stderr:.4f}")


def parse_tasks(text: str) -> tuple[str, ...]:
    """Reads a list of tasks such as "hellaswag,arc_easy"."""
    return tuple(part.strip() for part in text.split(","))
