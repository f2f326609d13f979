"""From a dense model to a compressed one and back: compress, evaluate, verify, export, load without fips, evaluate.

Usage: python benchmarks/roundtrip.py [--assets assets] [--out roundtrip-out] [--budget 0.5] [--rounds 3]
           [--eval-characters 60000]

The exported checkpoint is loaded by a process in which fips cannot be imported, and its perplexity computed there by a
few lines of plain transformers; it must equal what `fips evaluate` gives for the compressed one. Exit status 1 if
anything fails. Needs the assets: python benchmarks/assets.py assets smollm2 text
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from fips import CompressionConfig, EvaluationConfig, compress, evaluate, export, verify
from fips.progress import Progress

WITHOUT_FIPS = """
import json, math, sys
sys.modules["fips"] = None
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, text, length = sys.argv[1], open(sys.argv[2], encoding="utf-8").read(), int(sys.argv[3])
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
tokenizer = AutoTokenizer.from_pretrained(folder)
ids = tokenizer(text, add_special_tokens=False, return_tensors="pt", verbose=False)["input_ids"][0]
windows = ids[: len(ids) // length * length].view(-1, length)
total = 0.0
with torch.no_grad():
    for window in windows:
        logits = model(input_ids=window[None]).logits[0, :-1].float()
        total += torch.nn.functional.cross_entropy(logits, window[1:], reduction="none").double().sum().item()
print(json.dumps(math.exp(total / (windows.numel() - len(windows)))))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--assets", type=Path, default=Path("assets"))
    parser.add_argument("--out", type=Path, default=Path("roundtrip-out"))
    parser.add_argument("--budget", type=float, default=0.5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--eval-characters", type=int, default=60_000)
    args = parser.parse_args()
    source, texts = args.assets / "smollm2-135m-instruct", args.assets / "text"
    args.out.mkdir(parents=True, exist_ok=True)
    small, dense, text = args.out / "compressed", args.out / "exported", args.out / "text.txt"
    text.write_text((texts / "wiki_eval.txt").read_text(encoding="utf-8")[: args.eval_characters], encoding="utf-8")
    config = CompressionConfig(budget=args.budget, rounds=args.rounds, dtype="bfloat16", sequence_length=1024,
                               calibration=str(texts / "wiki_calib.txt"), calibration_tokens=16_384)  # fmt: skip
    started = time.monotonic()
    compress(source, small, config, overwrite=True, progress=Progress())
    step("compress", started)
    result = evaluate(small, source, EvaluationConfig(text=str(text), dtype="bfloat16", update_card=True))
    print(result.table())
    step("evaluate", started)
    checked = verify(small, source)
    print(checked.table().splitlines()[0], *[f"{c.name}: {c.status}" for c in checked.checks], sep="\n  ")
    step("verify", started)
    export(small, dense, overwrite=True)
    step("export", started)
    score = result.measured.perplexity
    command = [sys.executable, "-c", WITHOUT_FIPS, str(dense), str(text), str(score.protocol.length)]
    again = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    step("load without fips and evaluate", started)
    print(f"perplexity: compressed {score.value!r}, exported and loaded without fips {again!r}")
    sys.exit(0 if checked.ok and again == score.value else 1)


def step(name: str, started: float) -> None:
    print(f"-- {name}: done after {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
