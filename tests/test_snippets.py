"""Commands and Python of README, recipes and publishing, run as they stand and in their order.

They run on tiny models under the names the documents use.
"""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command import run
from tests.families import edit_config, random_text
from tests.hub_client import environment
from tests.hub_server import HubServer
from tests.vision_families import write_images
from tests.vision_families import write_model as write_vision_model

ROOT = Path(__file__).parent.parent
# Run elsewhere: the installation and the demos by CI, tasks of lm-eval in test_tasks.py, as they need its own data.
ELSEWHERE = re.compile(r"pip install|^make |lm_eval|--tasks|benchmarks/|docker ")
CHAT = [{"role": "user", "content": "abc def"}, {"role": "assistant", "content": "ghi jkl " * 40}]


def snippets(document: str) -> list[tuple[str, str]]:
    """(language, code) of every block that is run here."""
    text = (ROOT / document).read_text(encoding="utf-8")
    found = re.findall(r"^```(bash|python)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [(kind, code) for kind, code in found if not ELSEWHERE.search(code)]


def shell_lines(code: str) -> list[list[str]]:
    """The `fips` commands of a block, without the word itself."""
    found = [shlex.split(line, comments=True) for line in code.replace("\\\n", " ").splitlines() if line.strip()]
    assert all(line[0] == "fips" for line in found), found
    return [line[1:] for line in found]


@pytest.fixture
def workspace(llama: Path, tmp_path: Path) -> Path:
    """A folder with everything the documents name."""
    for name in ("my_text.txt", "other_text.txt"):
        (tmp_path / name).write_text(random_text(2000, seed=len(name)))
    (tmp_path / "chats.jsonl").write_text(f"{json.dumps({'messages': CHAT})}\n" * 8)
    (tmp_path / "path" / "to").mkdir(parents=True)
    model = shutil.copytree(llama, tmp_path / "path" / "to" / "model")
    edit_config(model, max_position_embeddings=256)  # long enough to be timed
    (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}\n{% endfor %}")
    write_vision_model("vit", tmp_path / "path" / "to" / "vit")
    write_vision_model("bert", tmp_path / "path" / "to" / "bert")
    for name in ("train_images", "test_images", "photos"):
        write_images(tmp_path / name, 3)
    return tmp_path


def test_the_readme_runs(workspace: Path, hub: HubServer) -> None:
    """Every command in a process of its own, as a user runs it."""
    env = {**environment(hub, workspace / "home"), "PYTHONPATH": str(ROOT)}
    ran = set()
    for kind, code in snippets("README.md"):
        if kind == "python" and "compress(" in code:  # it makes what the shell has made before
            shutil.rmtree(workspace / "small-model")
        lines = [["-c", code]] if kind == "python" else [["-m", "fips", *line] for line in shell_lines(code)]
        for line in lines:
            done = subprocess.run(
                [sys.executable, *line], cwd=workspace, env=env, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, f"{line}\n{done.stderr}"
            ran.add(line[2] if line[0] == "-m" else "python")
    assert ran == {"inspect", "compress", "evaluate", "push", "bench", "verify", "export", "python"}
    assert "alice/small-model" in hub.repos


def run_here(document: str) -> int:
    """Runs a document's snippets in this process and the current folder, and counts them."""
    count = 0
    for kind, code in snippets(document):
        if kind == "python":
            exec(compile(code, document, "exec"), {})
            count += 1
            continue
        for line in shell_lines(code):
            result = run(*line)
            assert result.code == 0, f"{line}\n{result.err}"
            count += 1
    return count


def test_the_recipes_run(workspace: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workspace)
    assert run_here("docs/recipes.md") >= 20
    assert "alice/chat-model" in hub.repos


def test_publishing_runs(workspace: Path, hub: HubServer, compressed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workspace)
    shutil.copytree(compressed, "small-model")
    assert run_here("docs/publishing.md") == 4
    assert "alice/small-model" in hub.repos
