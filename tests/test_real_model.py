"""End to end on a real model, SmolLM2-135M-Instruct: what the tiny random models of the other tests cannot show.

`make test` gets the assets and sets FIPS_REQUIRE_ASSETS; without both these tests are skipped.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import fips

ROOT = Path(__file__).parent.parent
ASSETS = ROOT / "assets"
MODEL, TEXTS = ASSETS / "smollm2-135m-instruct", ASSETS / "text"
BLOCKS = 4

pytestmark = pytest.mark.skipif(
    not ASSETS.is_dir() and "FIPS_REQUIRE_ASSETS" not in os.environ,
    reason="no ./assets; `make test` gets them",
)

# Runs in a process of its own, as a user's program does: `import fips` is all it takes.
_RELOAD = """
import sys, torch, fips
from transformers import AutoModelForCausalLM, AutoTokenizer
torch.set_num_threads(2)
folder, target = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder)
tokenizer = AutoTokenizer.from_pretrained(folder)
prompt = tokenizer("The capital of France is", return_tensors="pt")
with torch.no_grad():
    logits = model(**prompt).logits
    text = model.generate(**prompt, max_new_tokens=8, do_sample=False)
torch.save({"logits": logits, "generated": text, "prompt": prompt["input_ids"]}, target)
"""


@pytest.fixture(scope="module", autouse=True)
def _two_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def first_blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real model cut after its first blocks, in bfloat16."""
    folder = tmp_path_factory.mktemp("real") / "dense"
    folder.mkdir()
    with safe_open(MODEL / "model.safetensors", "pt") as file:
        kept = {
            name: file.get_tensor(name).bfloat16()
            for name in file.keys()  # noqa: SIM118 - not a dict
            if (block := re.match(r"model\.layers\.(\d+)\.", name)) is None or int(block[1]) < BLOCKS
        }
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((MODEL / "config.json").read_text())
    config.update(num_hidden_layers=BLOCKS, dtype="bfloat16")
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).write_bytes((MODEL / name).read_bytes())
    return folder


@pytest.fixture(scope="module")
def run(first_blocks: Path) -> tuple[Path, fips.CompressionReport]:
    """The cut model, compressed."""
    config = fips.CompressionConfig(
        budget=0.7, sparsity=0.5, calibration=str(TEXTS / "wiki_calib.txt"), calibration_tokens=2048,
        sequence_length=256, batch_tokens=256, rounds=1, device="cpu",
    )  # fmt: skip
    out = first_blocks.with_name("compressed")
    return out, fips.compress(first_blocks, out, config)


def test_reconstruction_lowers_the_error_of_real_blocks(run) -> None:
    _, report = run
    assert report.verified
    for group in report.groups:
        assert group.mean_after < group.mean_before, group.name


def test_replaced_matrices_take_what_their_entries_need(run) -> None:
    """Every kept value and basis entry at its dtype and one bit per mask entry; at most one per cent more."""
    out, report = run
    sizes = {"values": 0, "bases": 0, "masks": 0}
    needed = 0.0
    with safe_open(out / "model.safetensors", "pt") as file:
        names = set(file.keys())
        for name in names:
            tensor = file.get_tensor(name)
            if name.startswith("fips_bases."):
                sizes["bases"] += tensor.nbytes
                needed += 2 * tensor.numel()
            elif name.endswith(".mask"):
                values = file.get_tensor(name.removesuffix("mask") + "weight")
                bits = int(sum((tensor >> k & 1).sum() for k in range(8)))
                assert values.dtype == torch.bfloat16
                assert bits == values.numel(), name
                assert int((values != 0).sum()) == values.numel(), name
                sizes["values"] += values.nbytes
                sizes["masks"] += tensor.nbytes
                needed += 2 * bits + tensor.shape[0] * 1536 / 8
    stored = sum(sizes.values())
    assert stored <= 1.01 * needed
    assert report.sizes is not None
    assert report.sizes.matrix_bytes == stored
    assert report.sizes.parameters <= 0.7 * report.sizes.dense_parameters


def test_the_whole_checkpoint_is_smaller_than_its_source(run, first_blocks: Path) -> None:
    out, report = run
    ours, dense = ((folder / "model.safetensors").stat().st_size for folder in (out, first_blocks))
    assert ours < dense
    assert report.sizes is not None
    saved = report.sizes.dense_matrix_bytes - report.sizes.matrix_bytes
    assert dense - ours == pytest.approx(saved, abs=16_384)  # the headers differ in length


def test_a_fresh_process_loads_it_and_generates(run, tmp_path: Path) -> None:
    out, _ = run
    subprocess.run([sys.executable, "-c", _RELOAD, str(out), str(tmp_path / "seen.pt")], check=True, cwd=tmp_path)
    seen = torch.load(tmp_path / "seen.pt")
    here = AutoModelForCausalLM.from_pretrained(out)
    assert here.dtype == torch.bfloat16
    with torch.no_grad():
        logits = here(input_ids=seen["prompt"]).logits
        packed = fips.load(out, "packed")(input_ids=seen["prompt"]).logits
    assert torch.equal(seen["logits"], logits)
    assert torch.allclose(packed.float(), logits.float(), atol=0.1, rtol=0.05)
    length = seen["prompt"].shape[1]
    assert length < seen["generated"].shape[1] <= length + 8
    assert AutoTokenizer.from_pretrained(out).decode(seen["generated"][0]).startswith("The capital of France is")


def test_demo_prints_sizes_and_both_perplexities(tmp_path: Path) -> None:
    """The whole model through examples/demo.py, with two of its blocks compressed and a short evaluation text."""
    command = [sys.executable, ROOT / "examples" / "demo.py", "--assets", ASSETS, "--out", tmp_path / "out",
               "--calibration-tokens", "1024", "--rounds", "1", "--include", "model.layers.[01].*",
               "--eval-characters", "12000"]  # fmt: skip
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    rows = {}
    for line in done.stdout.splitlines():
        cells = re.split(r"\s{2,}", line.strip())
        rows[cells[0]] = cells[1:]
    for size in ("MLP parameters (non-zeros)", "MLP matrices on disk", "checkpoint"):
        ours, dense, share = rows[size]
        assert ours != dense
        assert 0 < float(share) < 1
    ours, dense, ratio = map(float, rows["perplexity"])
    assert 10 < dense < 40  # the real model, with its own tokenizer
    assert dense < ours
    assert ratio == pytest.approx(ours / dense, rel=1e-3)
    assert "wiki_eval_first_12000.txt" in done.stdout
