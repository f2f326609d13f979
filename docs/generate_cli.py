"""Writes docs/cli.md from `fips --help`; a test fails when it is stale."""

from collections.abc import Iterator
from pathlib import Path

import click

from fips.cli.main import cli

TARGET = Path(__file__).parent / "cli.md"
_HEAD = """\
# Command line

Generated from `--help` by `python docs/generate_cli.py`. Results go to stdout, progress and notes to stderr.
Exit status: 0 done, 1 the run failed, 2 wrong usage, 130 interrupted.
"""


def reference() -> str:
    """The whole reference, as Markdown."""
    root = cli.make_context("fips", [], resilient_parsing=True, terminal_width=100)
    return _HEAD + "".join(f"\n## `{path}`\n\n```text\n{text}\n```\n" for path, text in _pages(cli, root))


def _pages(command: click.Command, context: click.Context) -> Iterator[tuple[str, str]]:
    """Full name and help text of a command and of every command below it."""
    yield context.command_path, command.get_help(context)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            if child is not None:
                yield from _pages(child, child.make_context(name, [], parent=context, resilient_parsing=True))


if __name__ == "__main__":
    TARGET.write_text(reference(), encoding="utf-8")
