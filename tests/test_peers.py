"""The methods of benchmarks/peers do what their papers say, on problems small enough to check by brute force."""

import json
import math
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import fips
from fips.calibrate import calibrate
from fips.checkpoint.source import open_source
from fips.plan import make_plan
from fips.progress import Progress
from fips.report import CompressionReport

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks" / "peers"))
import compare
import methods
import reference

ROLES = ("gate_proj", "up_proj", "down_proj")


def problem(rows: int, columns: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A weight and a correlated input moment."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(columns, columns, generator=generator) * torch.logspace(0, -1.5, columns)
    x = torch.randn(8 * columns, columns, generator=generator) @ mixing + 0.3
    return torch.randn(rows, columns, generator=generator), (x.T @ x).double()


def error(W: Tensor, new: Tensor, H: Tensor) -> float:
    """tr((W - new) H (W - new)ᵀ)."""
    delta = (W - new).double()
    return float(((delta @ H) * delta).sum())


def magnitude(W: Tensor, keep: int) -> Tensor:
    mask = torch.zeros(W.numel())
    mask[W.abs().flatten().topk(keep).indices] = 1
    return W * mask.view_as(W)


@pytest.mark.parametrize("columns", [4, 7, 40])
@pytest.mark.parametrize("keep", [300, 501, 800])
def test_sparsegpt_keeps_exact_counts_and_beats_magnitude(keep: int, columns: int) -> None:
    W, H = problem(30, 40)
    pruned = methods.sparsegpt(W, H, keep, columns)
    assert int((pruned != 0).sum()) == keep
    assert error(W, pruned, H) < 0.7 * error(W, magnitude(W, keep), H)


@pytest.mark.parametrize("columns", [5, 24])
def test_sparsegpt_is_the_conditional_optimum_of_its_mask(columns: int) -> None:
    """Brute force: from left to right, an entry is zero, or what minimizes the error given all entries before it."""
    W, H = problem(6, 24)
    pruned = methods.sparsegpt(W, H, 80, columns, damping=0.0)
    for row, got in zip(W.double(), pruned.double(), strict=True):
        new = row.clone()
        for i in range(len(row)):
            past = H[i:, :i] @ (new[:i] - row[:i])
            best = row[i] - torch.linalg.solve(H[i:, i:], past)[0]
            new[i] = best if got[i] != 0 else 0.0
        torch.testing.assert_close(got, new, rtol=1e-3, atol=1e-4)


def test_sparsegpt_prunes_what_costs_least_in_one_block() -> None:
    """With all columns in one block the mask is that of the smallest w² / c², c from the inverse by brute force."""
    W, H = problem(6, 10)
    kept = methods.sparsegpt(W, H, 20, 10, damping=0.0) != 0
    # c_i² is the inverse of the Schur complement: the (i, i) entry of the inverse of the columns from i on.
    c2 = torch.stack([torch.linalg.inv(H[i:, i:])[0, 0] for i in range(10)])
    cost = W.double().square() / c2
    assert cost[kept].min() > cost[~kept].max()


def test_sparsegpt_at_full_density_changes_nothing() -> None:
    W, H = problem(12, 16)
    assert torch.equal(methods.sparsegpt(W, H, W.numel(), 8), W)


def test_sparsegpt_prunes_inputs_that_are_never_active_first() -> None:
    W, H = problem(12, 16)
    H[3], H[:, 3] = 0, 0
    pruned = methods.sparsegpt(W, H, 15 * 12, 16)
    assert torch.equal(pruned[:, 3], torch.zeros(12))
    assert torch.equal(pruned[:, :3], W[:, :3])


def test_wanda_keeps_the_best_of_every_row_unchanged() -> None:
    W, H = problem(9, 20)
    pruned = methods.wanda(W, H.diagonal(), 7)
    kept = pruned != 0
    assert (kept.sum(1) == 7).all()
    assert torch.equal(pruned[kept], W[kept])
    scores = W.double().abs() * H.diagonal().sqrt()
    for row, mask in zip(scores, kept, strict=True):
        assert row[mask].min() > row[~mask].max()
    assert torch.equal(methods.wanda(W, H.diagonal(), 20), W)


@pytest.mark.parametrize("shape", [(24, 10), (10, 24)])
def test_whitened_svd_reaches_the_lower_bound(shape: tuple[int, int]) -> None:
    """Eckart and Young: no rank-r matrix has a smaller error than the squared tail of the singular values of W H^½."""
    W, H = problem(*shape)
    values, vectors = torch.linalg.eigh(H)
    tail = torch.linalg.svdvals(W.double() @ (vectors * values.clamp_min(0).sqrt()))
    for rank in (1, 4, 9):
        A, B = methods.whitened_svd(W, H, rank)
        assert A.shape == (shape[0], rank)
        assert B.shape == (rank, shape[1])
        assert error(W, A @ B, H) == pytest.approx(float(tail[rank:].square().sum()), rel=1e-3)
    A, B = methods.whitened_svd(W, H, 10)
    torch.testing.assert_close(A @ B, W, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", methods.METHODS)
@pytest.mark.parametrize("share", [0.75, 0.55])
def test_bytes_are_what_was_asked_and_never_more(method: str, share: float) -> None:
    W, H = problem(96, 160)
    moment = H.diagonal() if method in methods.DIAGONAL_ONLY else H
    replaced = methods.METHODS[method](W, moment, share)
    assert replaced.weight.dtype == torch.bfloat16
    assert share - 0.02 < replaced.bytes / (2 * W.numel()) <= share
    if method != "svd":
        assert replaced.bytes == 2 * int((replaced.weight != 0).sum()) + W.numel() // 8


def test_a_share_that_only_the_mask_would_take_is_refused() -> None:
    W, H = problem(8, 8)
    with pytest.raises(SystemExit, match="takes more than"):
        methods.by_sparsegpt(W, H, 1 / 16)


def test_windows_are_those_of_fips(llama: Path, calibration: Path) -> None:
    config = fips.CompressionConfig(calibration=str(calibration), calibration_tokens=256, sequence_length=32,
                                    device="cpu", dtype="bfloat16", budget=0.7)  # fmt: skip
    report = CompressionReport("", None, {}, {}, {}, "cpu", "")
    theirs = calibrate(make_plan(open_source(llama), config), config, report, Progress(-1)).tokens
    assert torch.equal(reference.calibration_windows(llama, calibration, 256, 32), theirs)


@torch.no_grad()
def test_every_block_is_solved_behind_the_replaced_ones(llama: Path, calibration: Path) -> None:
    """Brute force: the last block's replacement is that of moments taken in the finished model's prefix."""
    from transformers import AutoModelForCausalLM

    windows = reference.calibration_windows(llama, calibration, 128, 32)
    dense = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    reference.replace_matrices_(model, windows, "sparsegpt", 0.6)
    expected = model.model.layers[2].mlp.down_proj.weight.clone()
    model.model.layers[2].load_state_dict(dense.model.layers[2].state_dict())
    distances = {}
    for name, prefix in (("replaced", model), ("dense", dense)):
        seen: list[Tensor] = []
        prefix.model.layers[2].mlp.down_proj.register_forward_pre_hook(lambda _m, args, seen=seen: seen.append(args[0]))
        prefix(windows)
        x = seen[0].flatten(0, 1)
        again = methods.by_sparsegpt(dense.model.layers[2].mlp.down_proj.weight, x.T @ x, 0.6).weight.float()
        distances[name] = float((again - expected).norm() / expected.norm())
    assert distances["replaced"] < 0.01 < 0.1 < distances["dense"]


def test_pruned_folder_is_an_ordinary_checkpoint(llama: Path, calibration: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    windows = reference.calibration_windows(llama, calibration, 128, 32)
    sums = reference.make(llama, tmp_path / "out", windows, "sparsegpt", 0.65)
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "out")).__name__ == "LlamaForCausalLM"
    before, after = load_file(llama / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys()
    kept = entries = 0
    for name, weight in after.items():
        assert weight.dtype == torch.bfloat16
        if any(role in name for role in ROLES):
            kept, entries = kept + int((weight != 0).sum()), entries + weight.numel()
            assert int((weight != 0).sum()) == int((0.65 - 1 / 16) * weight.numel())
        else:
            assert torch.equal(weight, before[name].to(torch.bfloat16))
    assert sums.matrix_bytes == 2 * kept + entries // 8
    assert sums.dense_matrix_bytes == 2 * entries
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (llama / "tokenizer.json").read_bytes()


def test_compare_appends_resumes_and_cleans_up(llama: Path, calibration: Path, tmp_path: Path) -> None:
    (tmp_path / "assets" / "text").mkdir(parents=True)
    (tmp_path / "assets" / "smollm2-135m-instruct").symlink_to(llama, target_is_directory=True)
    for name in ("wiki_calib.txt", "wiki_eval.txt"):
        (tmp_path / "assets" / "text" / name).write_bytes(calibration.read_bytes())
    out, started = tmp_path / "out", []

    def run(args: object, method: str, share: float) -> dict:
        started.append((method, share))
        return compare.make_and_measure(args, method, share)

    common = ["--assets", str(tmp_path / "assets"), "--out", str(out), "--tokens", "128", "--length", "32",
              "--eval-characters", "300"]  # fmt: skip
    rows = compare.compare(compare.parse([*common, "--shares", "0.7", "--methods", "wanda"]), run)
    assert started == [("dense", 1.0), ("wanda", 0.7)]
    assert not (out / "wanda-0.7").exists()
    again = compare.compare(compare.parse([*common, "--shares", "0.7", "--methods", "wanda", "svd", "--keep"]), run)
    assert started[2:] == [("svd", 0.7)]
    assert again[:2] == rows
    assert (out / "svd-0.7" / "model.safetensors").is_file()
    lines = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert [line["method"] for line in lines] == ["dense", "wanda", "svd"]
    assert lines[1]["gap"] == pytest.approx(math.log(lines[1]["perplexity"]) - math.log(lines[0]["perplexity"]))
    assert lines[1]["matrix_share"] <= 0.7
    assert lines[1]["protocol"]["dtype"] == "bfloat16"
    assert len(compare.table(again).splitlines()) == 5
