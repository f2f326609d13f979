"""Options that several commands share."""

import json
import logging
import os
from collections.abc import Callable
from typing import Any, TypeVar

import click

from fips.config import DEVICES, DTYPES
from fips.progress import Progress

Command = TypeVar("Command", bound=Callable[..., Any])


def output_options(command: Command) -> Command:
    """--json, -v and -q."""
    for option in (
        click.option("-q", "--quiet", is_flag=True, help="No progress and no notes."),
        click.option("-v", "--verbose", is_flag=True, help="Tracebacks on errors, and messages of transformers."),
        click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout instead of a table."),
    ):
        command = option(command)
    return command


def model_options(command: Command) -> Command:
    """--device, --dtype and --trust-remote-code."""
    for option in (
        click.option("--trust-remote-code", is_flag=True, help="Allow Python code that lies in the checkpoint to run."),
        click.option("--dtype", type=click.Choice(DTYPES), default="auto", show_default=True,
                     help="dtype of the stored (compress) or loaded (evaluate) tensors; auto keeps the checkpoint's."),
        click.option("--device", type=click.Choice(DEVICES), default="auto", show_default=True,
                     help="Where the mathematics runs."),
    ):  # fmt: skip
        command = option(command)
    return command


def progress_of(*, quiet: bool, verbose: bool) -> Progress:
    """Progress for the flags; transformers' own bars and warnings are kept out unless -v."""
    if not verbose:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()
        transformers_logging.set_verbosity_error()
        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    return Progress(-1 if quiet else int(verbose))


def show(result: Any, *, as_json: bool) -> None:
    """Prints a result: its table, or its JSON object."""
    click.echo(json.dumps(result.to_dict(), indent=2) if as_json else result.table())
