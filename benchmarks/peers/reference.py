"""Makes a checkpoint with one of the reference methods of methods.py, for comparison with fips.

Usage: python benchmarks/peers/reference.py SOURCE OUT --method sparsegpt --share 0.65 --calibration TEXT

Only MLP matrices are replaced, block by block: one pass through a block, still dense, behind the replaced blocks
before it gives the input moments of its matrices; they are replaced; a second pass gives the hidden states for the next
block. Only Llama-shaped blocks (mlp.gate_proj, mlp.up_proj, mlp.down_proj) are supported; gate and up have the same
input and share its moment. Runs on the CPU.

OUT is an ordinary dense bfloat16 checkpoint, whose weights are those that a packed file would give back.
"""

import argparse
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from methods import DIAGONAL_ONLY, METHODS
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from fips import CompressionConfig
from fips.calibrate import calibrate
from fips.checkpoint.source import open_source
from fips.models.blocks import Trunk, run_block
from fips.plan import make_plan
from fips.progress import Progress
from fips.report import CompressionReport
from fips.stages.stream import Stream, check_finite, start_stream


@dataclass
class Sums:
    """What a run adds up.

    Attributes:
        matrix_bytes: Stored bytes of the replaced matrices.
        dense_matrix_bytes: Their dense bytes at 16-bit values.
        solve_seconds: Wall time of the mathematics on weights, without the passes through the model.
        seconds: Wall time of everything, loading and saving included.
    """

    matrix_bytes: int = 0
    dense_matrix_bytes: int = 0
    solve_seconds: float = 0.0
    seconds: float = 0.0


@torch.no_grad()
def replace_matrices_(model: Any, windows: Tensor, method: str, share: float, batch: int = 1) -> Sums:
    """Replaces the MLP matrices of a Llama-shaped model, block by block, each behind the replaced ones.

    Args:
        model: The dense model in float32; changed.
        windows: Calibration token ids, (windows, length).
        method: One of METHODS.
        share: Share of the matrices' bytes at 16-bit values.
        batch: Windows per pass.
    """
    sums, blocks = Sums(), model.model.layers
    stream = start_stream(Trunk.of(model.model, blocks), windows.split(batch), "cpu", separate=False)
    for number, block in enumerate(blocks):
        moments = _moments(block, number, stream, whole=method not in DIAGONAL_ONLY)
        started = time.monotonic()
        for name, H in moments.items():
            linear = block.mlp.get_submodule(name)
            replaced = METHODS[method](linear.weight, H, share)
            linear.weight.copy_(replaced.weight)
            sums.matrix_bytes += replaced.bytes
            sums.dense_matrix_bytes += 2 * linear.weight.numel()
        sums.solve_seconds += time.monotonic() - started
        if number + 1 < len(blocks):  # nothing reads the hidden states behind the last block
            for index, hidden in enumerate(stream.dense):
                stream.dense[index] = run_block(block, stream.calls[index][number], hidden)
                check_finite(stream.dense[index], f"the output of block {number}")
    return sums


def _moments(block: nn.Module, number: int, stream: Stream, *, whole: bool) -> dict[str, Tensor]:
    """Matrix name → sum over all tokens of its input's x xᵀ, (in, in), or x², (in,); gate and up share one."""
    wide, inner = _Moment(whole=whole), _Moment(whole=whole)
    with wide.watching(block.get_submodule("mlp.gate_proj")), inner.watching(block.get_submodule("mlp.down_proj")):
        for index, hidden in enumerate(stream.dense):
            run_block(block, stream.calls[index][number], hidden)
    return {"gate_proj": wide.total, "up_proj": wide.total, "down_proj": inner.total}


class _Moment:
    """Adds up x xᵀ or x² of a linear's input: float32 products, float64 sum."""

    def __init__(self, *, whole: bool) -> None:
        self.total = torch.zeros((), dtype=torch.float64)
        self._whole = whole

    @contextmanager
    def watching(self, linear: nn.Module) -> Iterator[None]:
        """Adds everything the linear is given while the context lasts."""
        handle = linear.register_forward_pre_hook(self._add)
        try:
            yield
        finally:
            handle.remove()

    def _add(self, _module: nn.Module, args: tuple[Tensor, ...]) -> None:
        x = args[0].reshape(-1, args[0].shape[-1])
        self.total = self.total + (x.T @ x if self._whole else x.square().sum(0)).double()


def calibration_windows(source: Path, text: Path, tokens: int, length: int = 2048) -> Tensor:
    """The very windows that `fips compress` takes for these settings and seed 0, (windows, length)."""
    config = CompressionConfig(calibration=str(text), calibration_tokens=tokens, sequence_length=length, device="cpu")
    plan = make_plan(open_source(source), config)
    return calibrate(plan, config, CompressionReport(str(source), None, {}, {}, {}, "cpu", ""), Progress(-1)).tokens


def save_dense(model: Any, source: Path, out: Path) -> None:
    """Writes a dense bfloat16 checkpoint with the source's tokenizer files."""
    model.to(torch.bfloat16).save_pretrained(out)
    for name in open_source(source).side_files():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, out / name)


def make(source: Path, out: Path, windows: Tensor, method: str, share: float) -> Sums:
    """Makes one checkpoint."""
    started = time.monotonic()
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    if not all(f"model.layers.{i}.mlp.{name}_proj.weight" in model.state_dict()
               for i in range(model.config.num_hidden_layers) for name in ("gate", "up", "down")):  # fmt: skip
        raise SystemExit(f"{source}: not every block of {model.config.model_type} has a Llama-shaped MLP.")
    sums = replace_matrices_(model, windows, method, share)
    save_dense(model, source, out)
    sums.seconds = time.monotonic() - started
    return sums


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path, nargs="?", help="New checkpoint folder; without it no model is made.")
    parser.add_argument("--method", choices=METHODS, default="sparsegpt")
    parser.add_argument("--share", type=float, default=0.65, help="Share of the matrices' bytes at 16-bit values.")
    parser.add_argument("--calibration", type=Path, required=True, help="A .txt or .jsonl file.")
    parser.add_argument("--tokens", type=int, default=65_536)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--dump-windows", type=Path, help="Also write the windows there, as a torch file.")
    args = parser.parse_args()
    windows = calibration_windows(args.source, args.calibration, args.tokens, args.length)
    if args.dump_windows:
        torch.save(windows, args.dump_windows)
    if args.out:
        sums = make(args.source, args.out, windows, args.method, args.share)
        print(f"{args.method}: share of bytes {sums.matrix_bytes / sums.dense_matrix_bytes:.4f}, "
              f"{sums.seconds:.1f} s, of which solving {sums.solve_seconds:.1f} s")  # fmt: skip


if __name__ == "__main__":
    main()
