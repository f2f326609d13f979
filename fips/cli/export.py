"""`fips export`."""

import click

from fips.cli.options import output_options, progress_of, show
from fips.config import CompressionConfig, parse_size
from fips.report import human_bytes


@click.command("export")
@click.argument("path")
@click.argument("out", type=click.Path(path_type=str))
@click.option("--revision", help="Branch, tag or commit of a Hub id.")
@click.option("--max-shard-size", help="Largest weights file, such as 5GB.  [default: "
              f"{human_bytes(CompressionConfig.max_shard_size)}]")  # fmt: skip
@click.option("--trust-remote-code", is_flag=True, help="Allow Python code that lies in the checkpoint to run.")
@click.option("--overwrite", is_flag=True, help="Replace a model that lies at OUT.")
@output_options
def command(path: str, out: str, revision: str | None, max_shard_size: str | None, **options: bool) -> None:
    """Write the compressed checkpoint at PATH as an ordinary dense one into the new folder OUT.

    OUT has the dense model's size, loads without fips, and, loaded on a CPU, gives the outputs of the compressed
    checkpoint bit by bit.
    """
    as_json = options.pop("as_json")
    size = CompressionConfig.max_shard_size if max_shard_size is None else parse_size(max_shard_size)
    progress = progress_of(quiet=options.pop("quiet"), verbose=options.pop("verbose"))
    from fips.dense_export import export

    show(export(path, out, revision=revision, max_shard_size=size, **options, progress=progress), as_json=as_json)
