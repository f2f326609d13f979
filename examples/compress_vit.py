"""Compresses an image classifier, compares it with the original and loads it with transformers.

    python examples/compress_vit.py MODEL OUT --images FOLDER --test FOLDER

MODEL is a folder or Hub id of a ViT, DeiT, BEiT, DINOv2 or Swin classifier; the FOLDERs hold images in one
subfolder per class; OUT is a new folder.
"""

import argparse
import sys

from transformers import AutoModelForImageClassification

# Importing fips is also what teaches `from_pretrained` to read the compressed checkpoint.
from fips import CompressionConfig, EvaluationConfig, FipsError, compress, evaluate
from fips.progress import Progress


def main() -> None:
    parser = argparse.ArgumentParser(description="Compress an image classifier and compare it with the original.")
    parser.add_argument("model", help="Folder or Hub id.")
    parser.add_argument("out", help="New folder.")
    parser.add_argument("--images", required=True, help="Images for calibration.")
    parser.add_argument("--test", required=True, help="Images to compare on: one subfolder per class.")
    parser.add_argument("--calibration-images", type=int, default=2560)
    parser.add_argument("--budget", type=float, default=0.5, help="Share of the MLP parameters kept.")
    args = parser.parse_args()
    try:
        config = CompressionConfig(
            budget=args.budget, calibration=args.images, calibration_images=args.calibration_images
        )
        report = compress(args.model, args.out, config, progress=Progress())
        result = evaluate(args.out, args.model, EvaluationConfig(images=args.test), progress=Progress())
    except FipsError as error:
        sys.exit(f"Error: {error}")
    print(report.table())
    print(result.table())

    model = AutoModelForImageClassification.from_pretrained(args.out)
    print(f"{type(model).__name__}: {sum(p.numel() for p in model.parameters()):,} parameters in memory")


if __name__ == "__main__":
    main()
