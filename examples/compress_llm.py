"""Compresses a language model, loads the result with transformers and lets it write.

    python examples/compress_llm.py MODEL OUT --calibration self

MODEL is a folder or Hub id of a decoder language model; OUT is a new folder.
"""

import argparse
import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

# Importing fips is also what teaches `from_pretrained` to read the compressed checkpoint.
from fips import CompressionConfig, FipsError, compress
from fips.progress import Progress


def main() -> None:
    parser = argparse.ArgumentParser(description="Compress a language model, load it, generate text.")
    parser.add_argument("model", help="Folder or Hub id.")
    parser.add_argument("out", help="New folder.")
    parser.add_argument("--calibration", default="self", help="Text file, Hub data set, or self.")
    parser.add_argument("--calibration-tokens", type=int, default=65_536)
    parser.add_argument("--sequence-length", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=6, help="Alternations of the solver per group of blocks.")
    parser.add_argument("--budget", type=float, default=0.7, help="Share of the MLP parameters kept.")
    parser.add_argument("--prompt", default="The capital of France is")
    args = parser.parse_args()
    try:
        config = CompressionConfig(
            budget=args.budget,
            calibration=args.calibration,
            calibration_tokens=args.calibration_tokens,
            sequence_length=args.sequence_length,
            rounds=args.rounds,
        )
        report = compress(args.model, args.out, config, progress=Progress())
    except FipsError as error:
        sys.exit(f"Error: {error}")
    print(report.table())

    model = AutoModelForCausalLM.from_pretrained(args.out)
    tokenizer = AutoTokenizer.from_pretrained(args.out)
    prompt = tokenizer(args.prompt, return_tensors="pt")
    tokens = model.generate(input_ids=prompt["input_ids"], max_new_tokens=30, do_sample=False)
    print(tokenizer.decode(tokens[0], skip_special_tokens=True))


if __name__ == "__main__":
    main()
