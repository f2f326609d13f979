"""Compares fips, plain pruning and truncated SVD on image and text encoders, at equal stored bytes.

Usage: python benchmarks/vision.py [--assets assets] [--out vision-out] [--model fmnist] [--budgets 0.5 0.4 0.25]
           [--objectives mlp linear]

Models: `fmnist`, a small image classifier of this repository on the 10,000 test images of Fashion-MNIST: top-1, top-5
and agreement with the dense model; `dinov2` on photos and `minilm` on text: mean cosine of their pooled features with
the dense model's. For each budget fips runs with its default basis; plain pruning (`--basis identity`) gets the bytes
of the MLP matrices that it reports, and truncated SVD the largest rank that fits into them. --objectives adds fips
with other objectives than its default.

Every method is calibrated on the same inputs: 2,560 training images, 65,536 tokens of text, or, as there are few, 160
flipped and cropped views of the odd photos; the even ones are for evaluation. MiniLM is judged on 100 paragraphs.
Needs the assets: python benchmarks/assets.py assets fmnist photos dinov2 minilm text
"""

import argparse
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fips import CompressionConfig, EvaluationConfig, compress, evaluate, inspect
from fips.progress import Progress
from fips.report import CompressionReport, format_table

CLASSIFIER = Path(__file__).parents[1] / "tests" / "data" / "vit-fmnist-scratch"
COLUMNS = ("top1", "top5", "agreement", "cosine")


@dataclass(frozen=True)
class Case:
    """A model and its inputs.

    Attributes:
        source: Dense checkpoint.
        calibration: Images or text for calibration.
        evaluation: Setting of EvaluationConfig that names the inputs of the evaluation.
        settings: Further settings of the compression.
    """

    source: Path
    calibration: Path
    evaluation: dict[str, Any]
    settings: dict[str, object]


def cases(assets: Path, photos: Path) -> dict[str, Case]:
    fashion, text = assets / "fashion-mnist", assets / "text"
    return {
        "fmnist": Case(CLASSIFIER, fashion / "train", {"images": str(fashion / "test")}, {}),
        "dinov2": Case(assets / "dinov2-small", photos / "odd", {"images": str(photos / "even")},
                       {"augment": True, "calibration_images": 160}),
        "minilm": Case(assets / "all-minilm-l6-v2", text / "wiki_calib.txt",
                       {"text": str(text / "wiki_eval.txt"), "limit": 100}, {"sequence_length": 256}),
    }  # fmt: skip


def split_photos(assets: Path, out: Path) -> None:
    """Two disjoint folders of photos."""
    shutil.rmtree(out, ignore_errors=True)
    for number, photo in enumerate(sorted((assets / "photos").glob("*.jpg"))):
        folder = out / ("odd" if number % 2 else "even")
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(photo, folder / photo.name)


def squeeze(case: Case, out: Path, **choices: object) -> CompressionReport:
    config = CompressionConfig(calibration=str(case.calibration), **{**case.settings, **choices})
    return compress(case.source, out, config, overwrite=True, progress=Progress())


def svd_budget(case: Case, size: float) -> float:
    """The largest budget, in steps of 0.001, whose truncated SVD is stored in a share of the bytes, masks included."""
    budget = size
    while True:
        config = CompressionConfig(budget=budget, sparsity=0.0, steps=0)
        if inspect(case.source, config).sizes.to_dict()["matrix_share"] <= size:
            return budget
        budget -= 0.001


def row(name: str, case: Case, folder: Path, seconds: float) -> list[str]:
    """Evaluates one model beside the dense one and returns its table row."""
    config = EvaluationConfig(**case.evaluation)
    found = evaluate(folder, case.source, config, progress=Progress()).to_dict()
    values = [found.get(column) for column in COLUMNS]
    size = found["sizes"]["matrix_share"]
    return [name, f"{size:.4f}", *("" if v is None else f"{v:.4f}" for v in values), f"{seconds:.0f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--assets", type=Path, default=Path("assets"))
    parser.add_argument("--out", type=Path, default=Path("vision-out"))
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.5, 0.4, 0.25])
    parser.add_argument("--model", choices=("fmnist", "dinov2", "minilm"), default="fmnist")
    parser.add_argument("--objectives", nargs="+", default=[])
    args = parser.parse_args()
    split_photos(args.assets, args.out / "photos")
    case = cases(args.assets, args.out / "photos")[args.model]
    rows = [row("dense", case, case.source, 0)]
    for budget in args.budgets:
        size = 0.0
        for method in ("fips", *args.objectives, "identity", "svd"):
            out, started = args.out / f"{args.model}-{method}-{budget}", time.monotonic()
            if method == "fips":
                size = squeeze(case, out, budget=budget).sizes.to_dict()["matrix_share"]
            elif method == "identity":
                squeeze(case, out, basis="identity", target_size=size)
            elif method in args.objectives:
                squeeze(case, out, budget=budget, objective=method)
            else:
                squeeze(case, out, budget=svd_budget(case, size), sparsity=0.0, steps=0)
            rows.append(row(f"{method}, budget {budget}", case, out, time.monotonic() - started))
    print(format_table(["model", "MLP bytes", *COLUMNS, "seconds"], rows))


if __name__ == "__main__":
    main()
