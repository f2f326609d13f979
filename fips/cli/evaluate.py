"""`fips evaluate`."""

from typing import Any

import click

from fips.cli.options import model_options, output_options, progress_of, show
from fips.config import BOS_RULES, RUNTIMES, EvaluationConfig


@click.command("evaluate")
@click.argument("model")
@click.option("--baseline", help="Dense checkpoint, measured under the same protocol.")
@click.option("--text", type=click.Path(path_type=str), help="Text file (.txt or .jsonl).")
@click.option("--dataset", help="Hub data set, owner/name or owner/name:config; test split.")
@click.option("--images", type=click.Path(path_type=str),
              help="For an image model: a folder with a subfolder per class, a .parquet or .arrow file, or a Hub data "
                   "set id.")  # fmt: skip
@click.option("--limit", type=int, help="Images, or texts of a text encoder, at most.")
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

    Of a language model: perplexity on a text. Of an image classifier: top-1 and top-5 on images, and how often it
    agrees with the baseline. Of other models: the cosine of their pooled features to the baseline's.
    """
    trust = options.pop("trust_remote_code")
    shown = {name: options.pop(name) for name in ("as_json", "quiet", "verbose")}
    config = EvaluationConfig(**options)
    progress = progress_of(quiet=shown["quiet"], verbose=shown["verbose"])
    from fips.evaluation import evaluate

    show(evaluate(model, baseline, config, trust_remote_code=trust, progress=progress), as_json=shown["as_json"])
