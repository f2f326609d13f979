"""`fips push`."""

from typing import Any

import click

from fips.cli.options import output_options, progress_of, show


@click.command("push")
@click.argument("path", type=click.Path(path_type=str))
@click.argument("repo_id")
@click.option("--public", is_flag=True, help="Let everybody read the repository; it is private otherwise.")
@click.option("--revision", help="Branch to push to, made when it is missing.  [default: the repository's]")
@click.option("--commit-message", help="Title of the commit.")
@click.option("--create-pr", is_flag=True, help="Open a pull request instead of committing to the default branch.")
@click.option("--overwrite", is_flag=True,
              help="Remove files that lie there and are no part of the checkpoint; history keeps them.")  # fmt: skip
@click.option("--token", help="Token with write access. HF_TOKEN or `hf auth login`, the default, keep it out of the "
              "list of processes.")  # fmt: skip
@click.option("--trust-remote-code", is_flag=True, help="Allow Python code that lies in the checkpoint to run.")
@click.option("--dry-run", is_flag=True, help="List files and sizes; contact nothing.")
@output_options
def command(path: str, repo_id: str, token: str | None, **options: Any) -> None:
    """Publish the compressed checkpoint at PATH on the Hub as REPO_ID, such as alice/small-model.

    The folder is verified first, sent in one commit, and compared with what the Hub then holds. A folder that is
    damaged, was changed, or holds other files is refused before anything is sent.
    """
    shown = {name: options.pop(name) for name in ("as_json", "quiet", "verbose")}
    flags = {name: options.pop(name) for name in ("dry_run", "trust_remote_code")}
    given = {name: value for name, value in options.items() if value is not None}
    progress = progress_of(quiet=shown["quiet"], verbose=shown["verbose"])
    from fips.publishing import PushConfig, push

    result = push(path, repo_id, PushConfig(**given), token=token, **flags, progress=progress)
    show(result, as_json=shown["as_json"])
