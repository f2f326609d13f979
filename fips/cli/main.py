"""The `fips` command. Commands are imported when they run, so that `fips --help` answers without torch."""

import importlib
import signal
import sys
import traceback
from typing import Any, NoReturn

import click

from fips import __version__
from fips.errors import FipsError

_COMMANDS = {
    "bench": "Speed and memory of a compressed checkpoint in both runtimes, beside its dense source.",
    "compress": "Compress a checkpoint and write one that loads with from_pretrained.",
    "evaluate": "Perplexity or accuracy, and sizes, of a checkpoint, beside its dense baseline.",
    "export": "Write a compressed checkpoint as an ordinary dense one, which loads without fips.",
    "inspect": "What a compressed checkpoint holds, or what would be compressed in a dense one.",
    "push": "Publish a compressed checkpoint on the Hub.",
    "verify": "Check a compressed checkpoint: structure, checksums, values, its source, and that it loads.",
}


class _Lazy(click.Group):
    """Lists the commands from a table and imports one only when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"fips.cli.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="fips")
def cli() -> None:
    """Compresses Hugging Face transformer checkpoints after training (FiPS: shared bases, sparse projections)."""


def main() -> None:
    """Entry point: errors of fips become one line; exit 1 for a failed run, 2 for wrong usage, 130 for Ctrl-C."""
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        cli.main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except FipsError as error:
        if "-v" in sys.argv or "--verbose" in sys.argv:
            traceback.print_exc()
        click.echo(f"Error: {' '.join(str(error).split())}", err=True)  # texts of other libraries have many lines
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort) as stop:
        told = str(stop.__cause__ or stop)  # click puts an Abort around the interrupt
        click.echo(told or "Interrupted; nothing was written.", err=True)
        sys.exit(130)


def _interrupt(_signal: int, _frame: Any) -> NoReturn:
    raise KeyboardInterrupt
