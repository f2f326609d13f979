"""The house rules that a program can check: which file imports which, sizes, who touches the disk."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "fips").rglob("*.py"))

# A file imports from its own room and from rooms with a smaller number. Rooms of equal number do not know each other.
_ORDER = {"linalg": 1, "data": 2, "models": 3, "stages": 4, "checkpoint": 4, "metrics": 4, "cli": 6}
_BASE = {"errors", "config", "workload", "tasks", "report", "timings", "progress", "resources", "_register"}
_TOP = 5  # plan, pipeline and every other file beside the rooms
# The quantizer registers itself with transformers, whichever of the two is imported first.
_EXCEPTIONS = {("fips._register", "fips.checkpoint.quantizer")}
# `fips` itself only names where its public names live, and is asked for its version.
_ENTRY = {"fips", "fips.__main__"}


def ids(path: Path) -> str:
    return str(path.relative_to(ROOT))


each_file = pytest.mark.parametrize("path", FILES, ids=ids)


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "fips"


def level(module: str) -> int:
    name = room(module)
    return 0 if name in _BASE else _ORDER.get(name, _TOP)


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Modules of fips that a file imports, also inside functions, with their lines."""
    known = {module_name(f) for f in FILES}
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from ((a.name, node.lineno) for a in node.names if a.name.split(".")[0] == "fips")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{ids(path)}:{node.lineno}: relative import"
            if (node.module or "").split(".")[0] == "fips":
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    yield (inner if inner in known else str(node.module)), node.lineno


def allowed(importer: str, imported: str) -> bool:
    if importer in _ENTRY or imported == "fips" or (importer, imported) in _EXCEPTIONS:
        return True
    same = room(importer) == room(imported) and room(importer) in _ORDER
    beside = level(importer) == level(imported) and level(importer) in (0, _TOP)
    return same or beside or level(imported) < level(importer)


@each_file
def test_imports_go_one_way(path: Path) -> None:
    wrong = [f"line {line}: {name}" for name, line in imports(path) if not allowed(module_name(path), name)]
    assert not wrong


def test_the_rule_forbids_what_it_should() -> None:
    assert not allowed("fips.linalg.basis", "fips.models.sites")
    assert not allowed("fips.stages.stream", "fips.checkpoint.format")
    assert not allowed("fips.checkpoint.save", "fips.metrics.footprint")
    assert not allowed("fips.models.sites", "fips.plan")
    assert not allowed("fips.pipeline", "fips.cli.main")
    assert not allowed("fips.errors", "fips.linalg.budget")
    assert allowed("fips.pipeline", "fips.stages.stream")


def test_files_beside_the_rooms_import_each_other_without_a_cycle() -> None:
    graph = {module_name(p): {n for n, _ in imports(p) if level(n) == _TOP} for p in FILES
             if level(module_name(p)) == _TOP and module_name(p) not in _ENTRY}  # fmt: skip
    done: set[str] = set()
    while ready := {m for m, needs in graph.items() if m not in done and needs <= done | {"fips"}}:
        done |= ready
    assert not set(graph) - done


@pytest.mark.parametrize("path", [p for p in FILES if room(module_name(p)) == "linalg"], ids=ids)
def test_linalg_knows_torch_and_nothing_else(path: Path) -> None:
    names = {alias.name for node in ast.walk(tree(path)) if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in ast.walk(tree(path)) if isinstance(node, ast.ImportFrom)}
    outside = {n.split(".")[0] for n in names} - set(sys.stdlib_module_names)
    assert outside <= {"torch", "fips"}


@each_file
def test_files_and_functions_are_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 300
    for node in ast.walk(tree(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert (node.end_lineno or 0) - node.lineno + 1 <= 60, f"{node.name} is too long"


@each_file
def test_functions_take_at_most_six_positional_parameters(path: Path) -> None:
    for node in ast.walk(tree(path)):
        # A command's parameters are its options: click passes them by name.
        if isinstance(node, ast.FunctionDef) and not any("click" in ast.unparse(d) for d in node.decorator_list):
            names = [a.arg for a in [*node.args.posonlyargs, *node.args.args] if a.arg not in ("self", "cls")]
            assert len(names) <= 6, f"{node.name}({', '.join(names)})"


_DISK_FUNCTIONS = {"open", "safe_open", "rmtree", "copyfile", "copytree", "mkdtemp", "fdopen", "load_file", "save_file"}
_DISK_METHODS = {"open", "read_text", "write_text", "read_bytes", "write_bytes", "mkdir", "rename", "unlink", "rmdir"}
_MAY_OPEN = {"checkpoint", "data", "resources"}  # the last reads what the system says of the process


def calls(path: Path) -> Iterator[tuple[str, bool, int]]:
    """Name of everything a file calls, whether as a method or attribute, and the line."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield node.func.attr, True, node.lineno
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield node.func.id, False, node.lineno


@pytest.mark.parametrize("path", [p for p in FILES if room(module_name(p)) not in _MAY_OPEN], ids=ids)
def test_only_checkpoint_and_data_open_files(path: Path) -> None:
    disk = {True: _DISK_FUNCTIONS | _DISK_METHODS, False: _DISK_FUNCTIONS}
    assert not [f"line {line}: {name}" for name, attribute, line in calls(path) if name in disk[attribute]]


@each_file
def test_nothing_is_printed(path: Path) -> None:
    assert not [f"line {line}" for name, attribute, line in calls(path) if name == "print" and not attribute]


@each_file
def test_names_say_what_is_inside(path: Path) -> None:
    assert not {"utils", "util", "helpers", "helper", "common", "manager", "misc"} & set(
        re.split(r"[_.]", module_name(path))
    )


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [path for name in listed.stdout.splitlines() if (path := ROOT / name).is_file()]


# Written in pieces, so that this file does not find itself.
_REGISTRIES = "|".join([r"py" + r"pi\.org", r"python" + r"hosted\.org", r"npm" + r"js\.org", r"proxy\.go" + r"lang"])
_PLACES = r"(?<![\w.:/~-])/(?:wo" + r"rk|tm" + r"p|ho" + r"me|ro" + r"ot|mn" + r"t)/"


def test_no_tracked_file_names_a_registry_or_a_place_on_one_machine() -> None:
    wrong = []
    for path in tracked():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # weights of golden checkpoints
        for number, line in enumerate(text.splitlines(), 1):
            if re.search(_REGISTRIES, line) or re.search(_PLACES, line):
                wrong.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert not wrong


def test_there_is_a_changelog() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(r"^## ", text, re.MULTILINE)
