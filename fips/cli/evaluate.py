"""`fips evaluate`."""

from typing import Any

import click

from fips.cli.options import model_options, output_options, progress_of, show

# Repeated from fips.data.windows and fips.checkpoint.load, which import torch; a test compares them.
_BOS_RULES = ("auto", "every", "first", "none")
_RUNTIMES = ("dense", "packed")


@click.command("evaluate")
@click.argument("model")
@click.option("--baseline", help="Dense checkpoint, measured under the same protocol.")
@click.option("--text", type=click.Path(path_type=str), help="Text file (.txt or .jsonl).")
@click.option("--dataset", help="Hub data set, owner/name or owner/name:config; test split.")
@click.option("--length", type=int, default=2048, show_default=True, help="Tokens per window, capped by the model.")
@click.option("--bos", type=click.Choice(_BOS_RULES), default="auto", show_default=True,
              help="BOS in every window, before the text, or not; auto asks the tokenizer.")  # fmt: skip
@click.option("--runtime", type=click.Choice(_RUNTIMES), default="dense", show_default=True,
              help="How a compressed checkpoint is loaded.")  # fmt: skip
@model_options
@output_options
def command(model: str, as_json: bool, quiet: bool, verbose: bool, **options: Any) -> None:  # noqa: FBT001
    """Perplexity of MODEL (compressed or dense) on a text, with its sizes and its protocol."""
    progress = progress_of(quiet=quiet, verbose=verbose)
    from fips.evaluation import evaluate

    show(evaluate(model, **options, progress=progress), as_json=as_json)
