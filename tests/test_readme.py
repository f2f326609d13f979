"""The README's commands and Python, run as they stand and in their order, on tiny models under the names it uses."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.families import edit_config, random_text
from tests.hub_client import environment
from tests.hub_server import HubServer
from tests.vision_families import write_images
from tests.vision_families import write_model as write_vision_model

README = Path(__file__).parent.parent / "README.md"
# Run elsewhere: the installation and the demos by CI, tasks of lm-eval in test_tasks.py, as they need its own data.
ELSEWHERE = re.compile(r"pip install|^make |lm_eval|--tasks|benchmarks/|git clone")


def blocks() -> list[tuple[str, str]]:
    """(language, code) of every block that is run here."""
    found = re.findall(r"^```(bash|python)\n(.*?)^```", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return [(kind, code) for kind, code in found if not ELSEWHERE.search(code)]


@pytest.fixture
def workspace(llama: Path, hub: HubServer, tmp_path: Path) -> Path:
    """A folder with everything the README names."""
    for name in ("my_text.txt", "other_text.txt"):
        (tmp_path / name).write_text(random_text(2000, seed=len(name)))
    (tmp_path / "path" / "to").mkdir(parents=True)
    shutil.copytree(llama, tmp_path / "path" / "to" / "model")
    edit_config(tmp_path / "path" / "to" / "model", max_position_embeddings=256)  # long enough to be timed
    write_vision_model("vit", tmp_path / "path" / "to" / "vit")
    write_vision_model("bert", tmp_path / "path" / "to" / "bert")
    for name in ("train_images", "test_images"):
        write_images(tmp_path / name, 3)
    return tmp_path


def test_the_readme_runs(workspace: Path, hub: HubServer) -> None:
    env = {**environment(hub, workspace / "home"), "PYTHONPATH": str(README.parent)}
    ran = []
    for kind, code in blocks():
        if kind == "python" and "compress(" in code:  # it makes what the shell has made before
            shutil.rmtree(workspace / "small-model")
        for line in shell_lines(code) if kind == "bash" else [[sys.executable, "-c", code]]:
            done = subprocess.run(line, cwd=workspace, env=env, capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"{line}\n{done.stderr}"
            ran.append(line)
    commands = {line[3] for line in ran if line[1:3] == ["-m", "fips"]}
    assert commands == {"inspect", "compress", "evaluate", "push", "bench", "verify", "export"}
    assert len([line for line in ran if line[1] == "-c"]) >= 2
    assert "alice/small-model" in hub.repos


def shell_lines(code: str) -> list[list[str]]:
    """Commands of a block, `fips` run by this interpreter."""
    found = [shlex.split(line, comments=True) for line in code.replace("\\\n", " ").splitlines() if line.strip()]
    assert all(line[0] == "fips" for line in found), found
    return [[sys.executable, "-m", *line] for line in found]
