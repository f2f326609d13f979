"""The documents are true where a program can tell: the command reference, links, options, and Python snippets."""

import ast
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from fips.cli.main import cli
from fips.models.archs import ARCHITECTURES

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
# Click's own; it is not among a command's parameters.
HELP = {"--help"}

each_document = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))


def options(command: click.Command) -> Iterator[str]:
    """Every option of a command and of the commands below it."""
    for parameter in command.params:
        yield from [*parameter.opts, *parameter.secondary_opts]
    if isinstance(command, click.Group):
        for name in command.list_commands(click.Context(command)):
            child = command.get_command(click.Context(command), name)
            assert child is not None
            yield from options(child)


def blocks(path: Path, language: str) -> list[str]:
    """Fenced code blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def test_command_reference_is_fresh() -> None:
    generator = runpy.run_path(str(ROOT / "docs" / "generate_cli.py"))
    assert (ROOT / "docs" / "cli.md").read_text(encoding="utf-8") == generator["reference"](), "run `make docs`"


@each_document
def test_relative_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
        if not re.match(r"[a-z]+:|#", target):
            assert (path.parent / target.partition("#")[0]).exists(), target


@each_document
def test_named_options_exist(path: Path) -> None:
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", path.read_text(encoding="utf-8")))
    assert not named - set(options(cli)) - HELP


@each_document
def test_fips_commands_parse(path: Path) -> None:
    """Every `fips ...` line of a shell block is right usage."""
    for block in blocks(path, "bash"):
        for line in block.splitlines():
            words = line.split("#")[0].split()
            if words[:1] == ["fips"]:
                command = cli.get_command(click.Context(cli), words[1])
                assert command is not None, line
                command.make_context(words[1], words[2:])


@each_document
def test_python_blocks_use_names_that_exist(path: Path) -> None:
    import fips

    for block in blocks(path, "python"):
        try:
            tree = ast.parse(block)
        except SyntaxError:  # a row of a table, shown without it
            tree = ast.parse(f"{{{block}}}")
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module == "fips":
                assert {alias.name for alias in node.names} <= set(fips.__all__)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "fips":
                assert node.attr in fips.__all__


def test_architecture_names_every_file() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rooms = text[text.index("## Rooms") : text.index("## Who may import whom")]
    files = {p.name for p in (ROOT / "fips").rglob("*.py") if p.parent.name != "cli" and not p.name.startswith("__")}
    named = set(re.findall(r"\w+\.py", rooms)) - {"__init__.py"}
    assert named == files


def test_changelog_names_every_architecture() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert not [name for name in ARCHITECTURES if not re.search(rf"\b{name}\b", text)]
