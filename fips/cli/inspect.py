"""`fips inspect`."""

from typing import Any

import click

from fips.cli.options import output_options, progress_of, show
from fips.config import (
    BASES,
    DEFAULT_BUDGET,
    DEFAULT_SPARSITY,
    DTYPES,
    RECIPES,
    SOLVERS,
    CompressionConfig,
    parse_groups,
)


@click.command("inspect")
@click.argument("path")
@click.option("--revision", help="Branch, tag or commit of a Hub id.")
@click.option("--budget", type=float,
              help=f"For a dense checkpoint, as in compress: share of the MLP parameters kept.  [default: "
                   f"{DEFAULT_BUDGET}]")  # fmt: skip
@click.option("--target-size", type=float, help="As in compress: share of the MLP matrices' bytes kept.")
@click.option("--sparsity", type=float, help=f"As in compress: share of zeros in V; {DEFAULT_SPARSITY} with a budget.")
@click.option("--recipe", type=click.Choice(RECIPES), default="default", show_default=True,
              help="As in compress: the paper's recipe stores the whole basis.")  # fmt: skip
@click.option("--solver", type=click.Choice(SOLVERS), help="As in compress: moments (default) or gradient.")
@click.option("--basis", type=click.Choice(BASES),
              help="As in compress: shared basis, plain pruning (identity), or the better one (auto, the default).")
@click.option("--group-size", type=int,
              help=f"As in compress: blocks per group.  [default: {CompressionConfig.group_size}]")  # fmt: skip
@click.option("--groups", help="As in compress: explicit groups of blocks instead of equal ones.")
@click.option("--include", multiple=True, help="As in compress: only matrices whose name matches; repeatable.")
@click.option("--dtype", type=click.Choice(DTYPES), default="auto", show_default=True,
              help="As in compress: dtype of the stored tensors.")  # fmt: skip
@click.option("--trust-remote-code", is_flag=True, help="Allow Python code that lies in the checkpoint to run.")
@output_options
def command(path: str, revision: str | None, groups: str | None, recipe: str, **options: Any) -> None:
    """Show groups, rank, sparsity and sizes of the checkpoint at PATH, or what would be compressed in a dense one."""
    trust, as_json = options.pop("trust_remote_code"), options.pop("as_json")
    progress_of(quiet=options.pop("quiet"), verbose=options.pop("verbose"))
    given = {name: value for name, value in options.items() if value not in (None, ())}
    if groups is not None:
        given["groups"] = parse_groups(groups)
    config = CompressionConfig.from_recipe(recipe, **given)
    from fips.inspection import inspect

    show(inspect(path, config, revision=revision, trust_remote_code=trust), as_json=as_json)
