"""Peak memory of `fips compress` on random Llama-shaped checkpoints that differ only in their number of blocks.

Usage: python benchmarks/memory.py [--blocks 24 48] [--width 512] [--solver moments]

Writes the sources to a temporary folder, compresses each in a process of its own with the same calibration text, and
prints the peak resident memory of each process and their ratio.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def write_source(folder: Path, blocks: int, width: int) -> int:
    """Writes a random bfloat16 checkpoint and returns its size in bytes."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=width, intermediate_size=3 * width, num_hidden_layers=blocks, num_attention_heads=8,
        num_key_value_heads=8, vocab_size=1024, max_position_embeddings=2048, dtype="bfloat16",
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    letters = [*map(chr, range(33, 127)), "\u0120", "\u010a"]
    vocabulary = {t: i for i, t in enumerate(["<unk>", "<s>", "</s>", *letters])}
    core = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    tokenizer.save_pretrained(folder)
    return sum(f.stat().st_size for f in folder.glob("*.safetensors"))


def peak(source: Path, out: Path, text: Path, solver: str) -> dict:
    """Compresses in a fresh process and returns its report."""
    command = [
        sys.executable, "-m", "fips", "compress", source, out, "--device", "cpu", "--calibration", text, "--json", "-q",
        "--calibration-tokens", "8192", "--sequence-length", "512", "--batch-tokens", "1024", "--solver", solver,
        *(["--rounds", "1"] if solver == "moments" else ["--steps", "2"]),
    ]  # fmt: skip
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, nargs=2, default=[24, 48])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--solver", choices=["moments", "gradient"], default="moments")
    args = parser.parse_args()
    peaks = []
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder, "text.txt")
        codes = torch.randint(ord("a"), ord("z") + 1, (20_000,), generator=torch.Generator().manual_seed(0)).tolist()
        text.write_text("".join(map(chr, codes)))
        for blocks in args.blocks:
            size = write_source(Path(folder, f"source-{blocks}"), blocks, args.width)
            report = peak(Path(folder, f"source-{blocks}"), Path(folder, f"out-{blocks}"), text, args.solver)
            peaks.append(report["peak_memory_bytes"])
            print(f"{blocks} blocks: source {size / 1e6:.0f} MB, peak memory {peaks[-1] / 1e6:.0f} MB")
    print(f"ratio {peaks[1] / peaks[0]:.3f}")


if __name__ == "__main__":
    main()
