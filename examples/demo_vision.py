"""Compresses a small real image classifier and shows what it costs: three sizes and top-1, dense and compressed.

`make demo-vision` gets the images (benchmarks/assets.py) and runs this.
"""

import argparse
import sys
from pathlib import Path

from fips import CompressionConfig, EvaluationConfig, FipsError, compress, evaluate
from fips.progress import Progress

CLASSIFIER = Path(__file__).parents[1] / "tests" / "data" / "vit-fmnist-scratch"


def main() -> None:
    parser = argparse.ArgumentParser(description="Compress a ViT trained on Fashion-MNIST and measure the result.")
    parser.add_argument("--assets", type=Path, default=Path("assets"), help="Folder made by benchmarks/assets.py.")
    parser.add_argument("--out", type=Path, default=Path("demo-vision-out"), help="Result; an old one is replaced.")
    parser.add_argument("--budget", type=float, default=0.4, help="Share of the MLP parameters kept.")
    parser.add_argument("--limit", type=int, help="Test images at most; all 10,000 by default.")
    args = parser.parse_args()
    images = args.assets / "fashion-mnist"
    config = CompressionConfig(budget=args.budget, calibration=str(images / "train"))
    try:
        compress(CLASSIFIER, args.out, config, overwrite=True, progress=Progress())
        test = EvaluationConfig(images=str(images / "test"), limit=args.limit)
        result = evaluate(args.out, CLASSIFIER, test, progress=Progress())
    except (FipsError, OSError) as error:
        sys.exit(f"Error: {error}")
    print(result.table())


if __name__ == "__main__":
    main()
