"""`fips compress`."""

from collections.abc import Callable
from typing import Any

import click

from fips.cli.options import Command, model_options, output_options, progress_of, show
from fips.config import (
    BASES,
    DEFAULT_BUDGET,
    DEFAULT_SPARSITY,
    INPUTS,
    OBJECTIVES,
    RECIPES,
    SCHEDULES,
    SOLVERS,
    CompressionConfig,
    parse_groups,
    parse_size,
)
from fips.report import human_bytes

_DEFAULT = CompressionConfig()


def _setting(name: str, help_text: str, **kwargs: Any) -> Callable[[Command], Command]:
    """An option whose default comes from the recipe: it stays None unless given."""
    default = {"budget": DEFAULT_BUDGET}.get(name, getattr(_DEFAULT, name, None))
    default = human_bytes(default) if name == "max_shard_size" and default else default
    shown = f"  [default: {default}]" if default is not None else ""
    return click.option("--" + name.replace("_", "-"), name, default=None, help=help_text + shown, **kwargs)


@click.command("compress")
@click.argument("model")
@click.argument("out", type=click.Path(path_type=str))
@click.option("--revision", help="Branch, tag or commit of a Hub id.")
@click.option("--recipe", type=click.Choice(RECIPES), default="default", show_default=True,
              help="paper: the hyperparameters of arXiv 2411.09816; single options still override.")  # fmt: skip
@_setting("budget", "Share of the MLP parameters kept: stored values of U and V.", type=float)
@_setting("target_size", "Share of the MLP matrices' bytes kept, instead of a budget; rank and sparsity are then "
          "chosen for every group.", type=float)  # fmt: skip
@_setting("sparsity", f"Share of zeros in V; {DEFAULT_SPARSITY} with a budget.", type=float)
@_setting("basis", "Moments solver: one basis for a group (shared), plain pruning without a basis (identity), or the "
          "better of the two (auto).", type=click.Choice(BASES))  # fmt: skip
@_setting("group_size", "Consecutive blocks that share one basis.", type=int)
@_setting("groups", "Explicit groups of blocks, such as 0-1,2-5,6-9, instead of equal ones.", type=str)
@click.option("--include", multiple=True, help="Compress only matrices whose name matches this glob; repeatable.")
@_setting("calibration", "Text (.txt; .jsonl with `text` or `messages`), Hub data set id, or `self`: the model "
          "samples its own. Without it: a Hub text when online, else self. For an image model: a folder of images, a "
          ".parquet or .arrow file, or a Hub data set id.", type=str)  # fmt: skip
@_setting("calibration_tokens", "Tokens of calibration text.", type=int)
@_setting("calibration_images", "Calibration images, of every class equally many where they are labelled.", type=int)
@click.option("--augment", is_flag=True, default=None,
              help="Flip and crop calibration images at random; too few ones are each used in several ways.")
@_setting("sequence_length", "Tokens per calibration sequence, capped by the model's maximum.", type=int)
@_setting("solver", "moments: second-order solves on the activations' second moments; gradient: the paper's AdamW.",
          type=click.Choice(SOLVERS))  # fmt: skip
@_setting("rounds", "Moments solver: alternations at most.", type=int)
@_setting("polish", "Moments solver: gradient steps per group after the solve, kept where held-out error falls.",
          type=int)  # fmt: skip
@_setting("objective", "What is reconstructed: the output of the MLP, of the whole block, or of every linear (Eq. 1). "
          "Default: block with the moments solver, mlp for gradient steps.",
          type=click.Choice(OBJECTIVES))  # fmt: skip
@_setting("inputs", "Calibration activations: of the dense model, or of the compressed prefix.",
          type=click.Choice(INPUTS))  # fmt: skip
@_setting("schedule", "Gradient solver: gradual pruning schedule.", type=click.Choice(SCHEDULES))
@_setting("steps", "Gradient solver: steps per group. 0, with either solver: truncated SVD.", type=int)
@_setting("batch_tokens", "Tokens per batch, in whole sequences.", type=int)
@_setting("learning_rate", "Gradient solver: peak learning rate of AdamW; cosine decay.", type=float)
@_setting("weight_decay", "Gradient solver: weight decay of AdamW.", type=float)
@_setting("mask_interval", "Gradient solver: steps between two mask updates.", type=int)
@_setting("seed", "Seed of every random draw.", type=int)
@_setting("max_shard_size", "Largest weights file, such as 5GB.", type=str)
@model_options
@click.option("--overwrite", is_flag=True, help="Replace a model that lies at OUT.")
@output_options
def command(model: str, out: str, recipe: str, **options: Any) -> None:
    """Compress MODEL (a folder or Hub id) into the new folder OUT.

    What shrinks is the file: OUT stores sparse projections, and a basis per group of blocks, in place of the MLP
    matrices, and loads with from_pretrained after `import fips`. Loaded the default way it runs at the dense model's
    speed and memory.
    """
    run = {name: options.pop(name) for name in ("revision", "overwrite", "trust_remote_code")}
    shown = {name: options.pop(name) for name in ("as_json", "quiet", "verbose")}
    given = {name: value for name, value in options.items() if value not in (None, ())}
    for name, parse in (("groups", parse_groups), ("max_shard_size", parse_size)):
        if name in given:
            given[name] = parse(given[name])
    config = CompressionConfig.from_recipe(recipe, **given)
    progress = progress_of(quiet=shown["quiet"], verbose=shown["verbose"])
    from fips.pipeline import compress

    show(compress(model, out, config, **run, progress=progress), as_json=shown["as_json"])
