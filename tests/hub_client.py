"""The real client, pointed at the small Hub of tests/hub_server.py."""

import os
from pathlib import Path

import pytest
from huggingface_hub import constants

from tests.hub_state import HubServer

REPO = "alice/small"


def point_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, url: str) -> None:
    """The client's settings, as the environment variables of these names make them in a new process."""
    for name, value in {"ENDPOINT": url, "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True,
                        "HF_HUB_CACHE": str(tmp_path / "cache"), "HF_TOKEN_PATH": str(tmp_path / "no-token"),
                        "HUGGINGFACE_CO_URL_TEMPLATE": url + "/{repo_id}/resolve/{revision}/{filename}"}.items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setenv("HF_TOKEN", "hf_alice")


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def on_hub(hub: HubServer, revision: str = "main", repo: str = REPO) -> dict[str, bytes]:
    found = hub.repos[repo].tree(revision)
    assert found is not None
    return {name: content for name, content in found.items() if name != ".gitattributes"}


def environment(hub: HubServer, tmp_path: Path) -> dict[str, str]:
    """What a user would export to speak to that Hub."""
    return {**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1",
            "HF_TOKEN": "hf_alice", "HF_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}  # fmt: skip
