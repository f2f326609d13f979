"""The examples run as they are shown, each in a process of its own, and stay short enough to be read."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

EXAMPLES = Path(__file__).parent.parent / "examples"
CLASSIFIER = Path(__file__).parent / "data" / "vit-fmnist-scratch"
SMALL = ("--calibration-tokens", "128", "--sequence-length", "32", "--rounds", "1")


def _run(name: str, *arguments: object, cwd: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(EXAMPLES / name), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_example_is_short(example: Path) -> None:
    assert len(example.read_text(encoding="utf-8").splitlines()) <= 64


def test_compress_llm_without_any_data(llama: Path, tmp_path: Path) -> None:
    done = _run("compress_llm.py", llama, "out", "--calibration", "self", "--prompt", "abc", *SMALL, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "MLP matrices on disk" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("abc")
    assert (tmp_path / "out" / "model.safetensors").is_file()


def write_images(folder: Path, count: int) -> Path:
    """Images of noise, as many of every class of the classifier."""
    generator = torch.Generator().manual_seed(count)
    for label in ("T-shirt_top", "Trouser", "Ankle boot"):
        (folder / label).mkdir(parents=True)
        for number in range(count):
            pixels = torch.randint(256, (28, 28), generator=generator, dtype=torch.uint8)
            Image.fromarray(pixels.numpy()).save(folder / label / f"{number}.png")
    return folder


def test_compress_vit(tmp_path: Path) -> None:
    train, test = write_images(tmp_path / "train", 8), write_images(tmp_path / "test", 2)
    done = _run("compress_vit.py", CLASSIFIER, "out", "--images", train, "--test", test, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "agreement" in done.stdout
    assert "24 images; 2,560 were asked for" in done.stdout
    assert done.stdout.splitlines()[-1] == "ViTForImageClassification: 805,130 parameters in memory"


def test_custom_architecture(tmp_path: Path) -> None:
    done = _run("custom_architecture.py", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "WideForCausalLM"
    masks = [name for name in load_file(tmp_path / "out" / "model.safetensors") if name.endswith(".mask")]
    assert sorted(masks) == sorted(f"model.layers.{n}.mlp.{m}.mask" for n in range(4) for m in ("widen", "narrow"))


def test_demo_vision(tmp_path: Path) -> None:
    write_images(tmp_path / "assets" / "fashion-mnist" / "train", 8)
    write_images(tmp_path / "assets" / "fashion-mnist" / "test", 2)
    done = _run("demo_vision.py", "--limit", 3, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "top-1" in done.stdout
    assert "3 images of 6, drawn at random, labels matched by name" in done.stdout


@pytest.mark.parametrize(
    ("example", "arguments"),
    [("compress_llm.py", ["nowhere/", "out"]), ("demo.py", []), ("demo_vision.py", []), ("push.py", ["nowhere", "a/b"]),
     ("compress_vit.py", [CLASSIFIER, "out", "--images", "nowhere/", "--test", "nowhere/"])],
)  # fmt: skip
def test_failure_is_one_line(example: str, arguments: list[str], tmp_path: Path) -> None:
    done = _run(example, *arguments, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("Error: ")
    assert len(done.stderr.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())
