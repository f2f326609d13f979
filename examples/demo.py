"""Compresses a real language model and shows what it costs: three sizes and perplexity, dense and compressed.

`make demo` gets the model and the texts (benchmarks/assets.py) and runs this.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from fips import CompressionConfig, EvaluationConfig, FipsError, compress, evaluate
from fips.progress import Progress


def main() -> None:
    parser = argparse.ArgumentParser(description="Compress SmolLM2-135M-Instruct and measure the result.")
    parser.add_argument("--assets", type=Path, default=Path("assets"), help="Folder made by benchmarks/assets.py.")
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="Result; an old one is replaced.")
    parser.add_argument("--calibration-tokens", type=int, default=16_384)
    parser.add_argument("--rounds", type=int, default=3, help="Alternations of the solver per group.")
    parser.add_argument("--include", action="append", default=[], help="Only matrices whose name matches this glob.")
    parser.add_argument("--eval-characters", type=int, default=130_000, help="Evaluate on the text's beginning.")
    args = parser.parse_args()
    source, texts = args.assets / "smollm2-135m-instruct", args.assets / "text"
    config = CompressionConfig(
        budget=0.5,
        dtype="bfloat16",
        calibration=str(texts / "wiki_calib.txt"),
        calibration_tokens=args.calibration_tokens,
        sequence_length=1024,
        batch_tokens=1024,
        rounds=args.rounds,
        include=tuple(args.include),
    )
    progress = Progress()
    try:
        with tempfile.TemporaryDirectory() as folder:
            text = Path(folder, f"wiki_eval_first_{args.eval_characters}.txt")
            whole = (texts / "wiki_eval.txt").read_text(encoding="utf-8")
            text.write_text(whole[: args.eval_characters], encoding="utf-8")
            compress(source, args.out, config, overwrite=True, progress=progress)
            protocol = EvaluationConfig(text=str(text), dtype="bfloat16")
            result = evaluate(args.out, source, protocol, progress=progress)
    except (FipsError, OSError) as error:
        sys.exit(f"Error: {error}")
    print(result.table())


if __name__ == "__main__":
    main()
