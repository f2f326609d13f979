"""`fips verify`."""

import sys

import click

from fips.cli.options import output_options, progress_of, show


@click.command("verify")
@click.argument("path")
@click.option("--revision", help="Branch, tag or commit of a Hub id at PATH.")
@click.option("--against", help="The dense checkpoint it was made from: what was not compressed must be equal to it.")
@click.option("--load/--no-load", default=True, show_default=True,
              help="Load the model at the end, which takes the memory of the dense one.")  # fmt: skip
@click.option("--trust-remote-code", is_flag=True, help="Allow Python code that lies in the checkpoint to run.")
@output_options
def command(path: str, against: str | None, revision: str | None, **options: bool) -> None:
    """Check the compressed checkpoint at PATH and list everything that is damaged; exit status 1 if anything is."""
    as_json = options.pop("as_json")
    progress = progress_of(quiet=options.pop("quiet"), verbose=options.pop("verbose"))
    from fips.verification import verify

    result = verify(path, against, revision=revision, **options, progress=progress)
    show(result, as_json=as_json)
    if not result.ok:
        sys.exit(1)
