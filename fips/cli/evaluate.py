"""`fips evaluate`."""

from typing import Any

import click

from fips.cli.options import model_options, output_options, progress_of, show
from fips.config import BOS_RULES, RUNTIMES, EvaluationConfig
from fips.errors import ConfigError
from fips.tasks import TaskConfig, parse_tasks

_OF_TASKS = ("tasks", "include_path", "num_fewshot", "batch_size")
_OF_OTHERS = ("text", "dataset", "images", "length", "bos")


@click.command("evaluate")
@click.argument("model")
@click.option("--baseline", help="Dense checkpoint, measured under the same protocol.")
@click.option("--text", type=click.Path(path_type=str), help="Text file (.txt or .jsonl).")
@click.option("--dataset", help="Hub data set, owner/name or owner/name:config; test split.")
@click.option("--images", type=click.Path(path_type=str),
              help="For an image model: a folder with a subfolder per class, a .parquet or .arrow file, or a Hub data "
                   "set, such as owner/name@split; test split by default.")  # fmt: skip
@click.option("--tasks", help="Tasks of lm-eval, such as hellaswag,arc_easy, instead of a text; needs the extra.")
@click.option("--include-path", type=click.Path(path_type=str),
              help="Folder of yaml files with further tasks. They may run Python code.")  # fmt: skip
@click.option("--num-fewshot", type=int, help="Examples in every prompt of a task.  [default: each task's own]")
@click.option("--batch-size", type=int, help=f"Requests of tasks per pass.  [default: {TaskConfig.batch_size}]")
@click.option("--limit", type=int, help="Images, texts of a text encoder, or documents of every task, at most.")
@click.option("--length", type=int, default=2048, show_default=True, help="Tokens per window, capped by the model.")
@click.option("--bos", type=click.Choice(BOS_RULES), default="auto", show_default=True,
              help="BOS in every window, before the text, or not; auto asks the tokenizer.")  # fmt: skip
@click.option("--runtime", type=click.Choice(RUNTIMES), default="dense", show_default=True,
              help="How a compressed checkpoint is loaded.")  # fmt: skip
@click.option("--update-card", is_flag=True,
              help="Add the result to the report and the model card of MODEL, a compressed folder.")  # fmt: skip
@model_options
@output_options
def command(model: str, baseline: str | None, **options: Any) -> None:
    """What MODEL (compressed or dense) gives, with its sizes and its protocol.

    Of a language model: perplexity on a text, or scores on tasks. Of an image classifier: top-1 and top-5 on images,
    and how often it agrees with the baseline. Of other models: the cosine of their pooled features to the baseline's.
    """
    trust = options.pop("trust_remote_code")
    shown = {name: options.pop(name) for name in ("as_json", "quiet", "verbose")}
    config = _task_config(options) if options["tasks"] is not None else _evaluation_config(options)
    progress = progress_of(quiet=shown["quiet"], verbose=shown["verbose"])
    from fips.evaluation import evaluate

    show(evaluate(model, baseline, config, trust_remote_code=trust, progress=progress), as_json=shown["as_json"])


def _task_config(options: dict[str, Any]) -> TaskConfig:
    context = click.get_current_context()
    for name in _OF_OTHERS:
        if context.get_parameter_source(name) != click.core.ParameterSource.DEFAULT:
            raise ConfigError(f"--{name} and --tasks exclude each other; give one of them.")
    given = {name: value for name, value in options.items() if name not in _OF_OTHERS and value is not None}
    return TaskConfig(**{**given, "tasks": parse_tasks(options["tasks"])})


def _evaluation_config(options: dict[str, Any]) -> EvaluationConfig:
    for name in _OF_TASKS:
        if options[name] is not None:
            option = "--" + name.replace("_", "-")
            raise ConfigError(f"{option} is a setting of tasks; name some with --tasks, or leave it out.")
    return EvaluationConfig(**{name: value for name, value in options.items() if name not in _OF_TASKS})
