"""Perplexity of the real model compressed in several ways, beside the dense one, under one protocol.

Usage: python benchmarks/quality.py [--assets assets] [--out quality-out] [--budget 0.7 0.5] [--methods svd moments]

Methods: `svd` is truncated SVD at the same budget (--steps 0 --sparsity 0), `gradient` the paper's optimizer with few
steps, `moments` the default. Values are stored and run in bfloat16; calibration is 16,384 tokens of wiki_calib.
Needs the assets: python benchmarks/assets.py assets smollm2 text
"""

import argparse
import time
from pathlib import Path

from fips import CompressionConfig, EvaluationConfig, compress, evaluate
from fips.progress import Progress
from fips.report import format_table

METHODS = {
    "svd": {"steps": 0, "sparsity": 0.0},
    "gradient": {"solver": "gradient", "steps": 30, "mask_interval": 2, "sparsity": 0.75},
    "moments": {"sparsity": 0.75},
}


def row(name: str, folder: Path, text: Path, seconds: float) -> list[str]:
    """Evaluates one model and returns its table row."""
    found = evaluate(folder, config=EvaluationConfig(text=str(text), dtype="bfloat16"), progress=Progress()).measured
    sizes = found.sizes.to_dict()
    shares = [f"{sizes[share]:.3f}" for share in ("parameter_share", "matrix_share", "checkpoint_share")]
    return [name, *shares, f"{found.perplexity.value:.2f}", f"{seconds:.0f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--assets", type=Path, default=Path("assets"))
    parser.add_argument("--out", type=Path, default=Path("quality-out"))
    parser.add_argument("--budget", type=float, nargs="+", default=[0.7, 0.5])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=["svd", "moments"])
    parser.add_argument("--eval-characters", type=int, default=250_000, help="Evaluate on the text's beginning.")
    args = parser.parse_args()
    args.out.mkdir(exist_ok=True)
    source, text = args.assets / "smollm2-135m-instruct", args.out / f"wiki_eval_first_{args.eval_characters}.txt"
    whole = (args.assets / "text" / "wiki_eval.txt").read_text(encoding="utf-8")
    text.write_text(whole[: args.eval_characters], encoding="utf-8")
    rows = [row("dense", source, text, 0)]
    for budget in args.budget:
        for method in args.methods:
            config = CompressionConfig(
                budget=budget, calibration=str(args.assets / "text" / "wiki_calib.txt"), calibration_tokens=16_384,
                sequence_length=1024, batch_tokens=1024, dtype="bfloat16", **METHODS[method],
            )  # fmt: skip
            out, started = args.out / f"{method}-{budget}", time.monotonic()
            compress(source, out, config, overwrite=True, progress=Progress())
            rows.append(row(f"{method}, budget {budget}", out, text, time.monotonic() - started))
    print(format_table(["model", "parameters", "MLP bytes", "checkpoint", "perplexity", "seconds"], rows))


if __name__ == "__main__":
    main()
