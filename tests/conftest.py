"""Shared fixtures: one thread, no network, one tiny compressed model per session."""

import os
from collections.abc import Iterator
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

import fips
from tests.families import random_text, write_model
from tests.hub_client import point_at
from tests.hub_server import hub_server
from tests.hub_state import HubServer

torch.set_num_threads(1)  # tiny tensors: more threads only wait for each other

SETTINGS = {
    "group_size": 2, "calibration_tokens": 256, "sequence_length": 32, "batch_tokens": 64, "steps": 6,
    "mask_interval": 1, "device": "cpu",
}  # fmt: skip


@pytest.fixture(scope="session")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A calibration text for the tiny tokenizer."""
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(random_text(600))
    return path


@pytest.fixture
def settings(calibration: Path):
    """Makes settings for a tiny run; keyword arguments override."""

    def make(**overrides: object) -> fips.CompressionConfig:
        return fips.CompressionConfig(**{**SETTINGS, "calibration": str(calibration), **overrides})

    return make


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama checkpoint. Do not change it; copy it."""
    return write_model("llama", tmp_path_factory.mktemp("llama") / "dense")


@pytest.fixture(scope="session")
def compressed(llama: Path, calibration: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama, compressed. Do not change it; copy it."""
    out = tmp_path_factory.mktemp("compressed") / "out"
    fips.compress(llama, out, fips.CompressionConfig(**SETTINGS, calibration=str(calibration)))
    return out


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    """A Hub that the client takes for the real one; alice is logged in. An installed hf_xet would not speak to it."""
    with hub_server() as server:
        point_at(monkeypatch, tmp_path, server.url)
        yield server


@pytest.fixture(autouse=True)
def no_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spares every compression the quarter of a second of its picture, but in tests of the picture."""
    if "picture" not in request.node.name:
        monkeypatch.setattr("fips.pipeline.draw_groups", lambda *_: None)
