"""Prunes the MLP matrices of a model with llm-compressor 0.14.0.1, the maintained package with SparseGPT and Wanda.

It has requirements of its own, so it lives in an environment of its own, without fips:

    python3.11 -m venv ENV
    ENV/bin/pip install torch==2.13.0 llmcompressor==0.14.0.1

Usage: ENV/bin/python benchmarks/peers/llmcompressor_run.py SOURCE OUT --windows FILE --method sparsegpt --share 0.65

FILE comes from reference.py --dump-windows. OUT is an ordinary dense bfloat16 checkpoint. Everything not named here is
the package's default: blocks of 128 columns, damping 0.01, every block calibrated behind the pruned ones. The last line
printed is a JSON object.
"""

import argparse
import json
import os
import shutil
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.pruning import WandaPruningModifier
from llmcompressor.modifiers.pruning.sparsegpt import SparseGPTModifier
from transformers import AutoModelForCausalLM

MODIFIERS = {"sparsegpt": SparseGPTModifier, "wanda": WandaPruningModifier}
MASK_SHARE = 1 / 16  # a mask bit per entry, in entries of 16 bits
SIDE_FILES = ("tokenizer*", "special_tokens_map.json", "vocab*", "merges.txt", "*.jinja", "generation_config.json")


def prune(source: Path, out: Path, windows: torch.Tensor, method: str, share: float) -> dict[str, float]:
    """Writes the pruned checkpoint; returns its bytes, counted in the stored values, and the time of pruning."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    modifier = MODIFIERS[method](sparsity=1 - (share - MASK_SHARE), targets=["re:.*mlp$"])
    started = time.monotonic()
    oneshot(
        model=model, tokenizer=str(source), recipe=[modifier], dataset=Dataset.from_dict({"input_ids": windows}),
        num_calibration_samples=len(windows), max_seq_length=windows.shape[1], shuffle_calibration_samples=False,
    )  # fmt: skip
    seconds = time.monotonic() - started
    model.to(torch.bfloat16).save_pretrained(out, save_compressed=False)
    for pattern in SIDE_FILES:
        for path in source.glob(pattern):
            shutil.copyfile(path, out / path.name)
    kept = entries = 0
    for name, weight in model.named_parameters():
        if name.endswith(("mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight")):
            kept, entries = kept + int(torch.count_nonzero(weight)), entries + weight.numel()
    return {"matrix_bytes": 2 * kept + entries // 8, "dense_matrix_bytes": 2 * entries, "oneshot_seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--windows", type=Path, required=True, help="Calibration token ids, (windows, length).")
    parser.add_argument("--method", choices=MODIFIERS, default="sparsegpt")
    parser.add_argument("--share", type=float, default=0.65, help="Share of the matrices' bytes at 16-bit values.")
    args = parser.parse_args()
    windows = torch.load(args.windows, weights_only=True)
    print(json.dumps(prune(args.source, args.out, windows, args.method, args.share)))


if __name__ == "__main__":
    main()
