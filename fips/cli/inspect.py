"""`fips inspect`."""

import click

from fips.cli.options import output_options, progress_of, show
from fips.config import CompressionConfig


@click.command("inspect")
@click.argument("path")
@click.option("--budget", type=float, default=CompressionConfig.budget, show_default=True,
              help="For a dense checkpoint: share of the MLP parameters kept.")  # fmt: skip
@click.option("--sparsity", type=float, default=CompressionConfig.sparsity, show_default=True,
              help="For a dense checkpoint: share of zeros in V.")  # fmt: skip
@click.option("--group-size", type=int, default=CompressionConfig.group_size, show_default=True,
              help="For a dense checkpoint: blocks per group.")  # fmt: skip
@click.option("--trust-remote-code", is_flag=True, help="Allow Python code that lies in the checkpoint to run.")
@output_options
def command(path: str, budget: float, sparsity: float, group_size: int, **flags: bool) -> None:
    """Show groups, rank, sparsity and sizes of the checkpoint at PATH, or what would be compressed in a dense one."""
    config = CompressionConfig(budget=budget, sparsity=sparsity, group_size=group_size)
    progress_of(quiet=flags["quiet"], verbose=flags["verbose"])
    from fips.inspection import inspect

    show(inspect(path, config, trust_remote_code=flags["trust_remote_code"]), as_json=flags["as_json"])
