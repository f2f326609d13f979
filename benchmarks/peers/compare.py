"""Perplexity of one model made smaller by several methods, at equal stored bytes of its MLP matrices.

Usage: python benchmarks/peers/compare.py [--assets assets] [--out peers-out] [--shares 0.75 0.65 0.55]
           [--methods sparsegpt wanda svd fips-auto]

Same checkpoint, same calibration tokens, same evaluation windows (bfloat16, 2048 tokens) for every method. Each model
is made and evaluated in a process of its own, so that times and peak memory are its own; it is deleted afterwards
unless --keep. One line per model goes to OUT/results.jsonl; what is there already is not made again.
Needs the assets: python benchmarks/assets.py assets smollm2 text

The README's figures: without options those at 0.75, 0.65 and 0.55; with `--shares 0.6 --methods fips-auto sparsegpt
--keep` those at 0.60, and peers-out/fips-auto-0.6, which `fips bench` then measures; with `--shares 0.75 --methods svd
--eval-characters 60000` that of whitened SVD.
"""

import argparse
import datetime
import json
import math
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
DENSE = "dense"


@dataclass(frozen=True)
class Tokens:
    """What a method may look at.

    Attributes:
        text: The calibration text.
        count: Tokens of it.
        length: Tokens per window, capped by the model's maximum.
    """

    text: Path
    count: int
    length: int


@dataclass(frozen=True)
class Made:
    """What a method reports of the checkpoint it wrote.

    Attributes:
        matrix_bytes: Stored bytes of the replaced matrices, masks included, at 16-bit values.
        dense_matrix_bytes: Their dense bytes at 16-bit values.
        solve_seconds: Wall time without the passes through the model, where it is known.
    """

    matrix_bytes: int
    dense_matrix_bytes: int
    solve_seconds: float | None = None


def _reference(method: str) -> "Method":
    def make(source: Path, out: Path, share: float, tokens: Tokens) -> Made:
        sys.path.insert(0, str(HERE))
        import reference

        windows = reference.calibration_windows(source, tokens.text, tokens.count, tokens.length)
        sums = reference.make(source, out, windows, method, share)
        return Made(sums.matrix_bytes, sums.dense_matrix_bytes, sums.solve_seconds)

    return make


def _maintained(method: str) -> "Method":
    """The same by llm-compressor, which runs in an environment of its own, see llmcompressor_run.py."""

    def make(source: Path, out: Path, share: float, tokens: Tokens) -> Made:
        python = os.environ.get("PEERS_PYTHON")
        if python is None:
            raise SystemExit("set PEERS_PYTHON to the python of the environment described in llmcompressor_run.py")
        sys.path.insert(0, str(HERE))
        import reference
        import torch

        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "windows.pt")
            torch.save(reference.calibration_windows(source, tokens.text, tokens.count, tokens.length), file)
            command = [python, HERE / "llmcompressor_run.py", source, out, "--windows", file, "--method", method,
                       "--share", share]  # fmt: skip
            done = subprocess.run([*map(str, command)], stdout=subprocess.PIPE, text=True, check=True)
        report = json.loads(done.stdout.splitlines()[-1])
        return Made(report["matrix_bytes"], report["dense_matrix_bytes"])

    return make


def _fips(basis: str) -> "Method":
    def make(source: Path, out: Path, share: float, tokens: Tokens) -> Made:
        from fips import CompressionConfig, compress
        from fips.progress import Progress

        config = CompressionConfig(
            target_size=share, basis=basis, calibration=str(tokens.text), calibration_tokens=tokens.count,
            sequence_length=tokens.length, dtype="bfloat16", device="cpu",
        )  # fmt: skip
        sizes = compress(source, out, config, progress=Progress()).sizes
        if sizes is None:
            raise RuntimeError("the report has no sizes")
        return Made(sizes.matrix_bytes, sizes.dense_matrix_bytes)

    return make


# To add a method: a function of source folder, output folder, share of the bytes, and tokens. It writes a checkpoint
# that fips.evaluate reads. It imports what it needs itself, as only the process that runs it should pay for that.
Method = Callable[[Path, Path, float, Tokens], Made]
METHODS: dict[str, Method] = {
    "fips-auto": _fips("auto"),
    "fips-shared": _fips("shared"),
    "fips-identity": _fips("identity"),
    "sparsegpt": _reference("sparsegpt"),
    "wanda": _reference("wanda"),
    "svd": _reference("svd"),
    "llmcompressor-sparsegpt": _maintained("sparsegpt"),
    "llmcompressor-wanda": _maintained("wanda"),
}


def make_and_measure(args: argparse.Namespace, method: str, share: float) -> dict[str, Any]:
    """Makes and evaluates one model in this process."""
    source, texts = args.assets / "smollm2-135m-instruct", args.assets / "text"
    made, seconds, peak, folder = None, 0.0, 0, source
    if method != DENSE:
        folder = args.out / f"{method}-{share:g}"
        shutil.rmtree(folder, ignore_errors=True)  # what an interrupted run left
        started = time.monotonic()
        made = METHODS[method](source, folder, share, Tokens(texts / "wiki_calib.txt", args.tokens, args.length))
        seconds, peak = time.monotonic() - started, _peak_bytes()
    perplexity = _perplexity(folder, evaluation_text(args, texts / "wiki_eval.txt"), args.length)
    if method != DENSE and not args.keep:
        shutil.rmtree(folder)
    return {
        "method": method,
        "share": share,
        "matrix_share": made.matrix_bytes / made.dense_matrix_bytes if made else 1.0,
        "perplexity": perplexity.value,
        "seconds": round(seconds, 1),
        "solve_seconds": round(made.solve_seconds, 1) if made and made.solve_seconds is not None else None,
        "peak_memory_bytes": peak,
        "protocol": perplexity.protocol.to_dict(),
    }


def evaluation_text(args: argparse.Namespace, whole: Path) -> Path:
    """The evaluation text, or a file with its beginning."""
    if args.eval_characters is None:
        return whole
    text = args.out / f"wiki_eval_first_{args.eval_characters}.txt"
    text.write_text(whole.read_text(encoding="utf-8")[: args.eval_characters], encoding="utf-8")
    return text


def _perplexity(folder: Path, text: Path, length: int) -> Any:
    from fips import EvaluationConfig, evaluate

    config = EvaluationConfig(text=str(text), dtype="bfloat16", length=length)
    return evaluate(folder, config=config).measured.perplexity


def _peak_bytes() -> int:
    """Largest resident memory of this process or of one it waited for; ru_maxrss is in KiB but on macOS."""
    most = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return most if sys.platform == "darwin" else most * 1024


def in_own_process(args: argparse.Namespace, method: str, share: float) -> dict[str, Any]:
    """Makes and evaluates one model in a fresh process; its progress and errors go to stderr."""
    command = [sys.executable, __file__, "--one", method, "--shares", share, "--assets", args.assets, "--out", args.out,
               "--tokens", args.tokens, "--length", args.length]  # fmt: skip
    command += ["--eval-characters", args.eval_characters] if args.eval_characters is not None else []
    command += ["--keep"] if args.keep else []
    done = subprocess.run([*map(str, command)], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    """What makes two results the same experiment."""
    return tuple(row[name] for name in ("method", "share", "tokens", "length", "eval_characters"))


def read_results(path: Path) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Results so far, by experiment; the last of equal ones counts."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    rows = [json.loads(line) for line in lines]
    return {key(row): row for row in rows}


def compare(args: argparse.Namespace, run: Callable[..., dict[str, Any]] = in_own_process) -> list[dict[str, Any]]:
    """Runs what is not in results.jsonl yet, appends it there, and returns all rows that were asked for."""
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "results.jsonl"
    done, rows = read_results(path), []
    setting = {"tokens": args.tokens, "eval_characters": args.eval_characters, "length": args.length}
    for method, share in [(DENSE, 1.0), *((m, s) for s in args.shares for m in args.methods)]:
        wanted = key({"method": method, "share": share, **setting})
        if wanted not in done:
            row = {**run(args, method, share), **setting, **where_and_when()}
            row["dense_perplexity"] = rows[0]["perplexity"] if rows else row["perplexity"]
            row["gap"] = math.log(row["perplexity"] / row["dense_perplexity"])
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            done[wanted] = row
        rows.append(done[wanted])
    return rows


def where_and_when() -> dict[str, str]:
    """Machine, date and commit of a result."""
    commit = subprocess.run(["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"], cwd=HERE,
                            capture_output=True, text=True, check=False).stdout.strip()  # fmt: skip
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.is_file() else []
    cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} x {cpu or platform.processor()}"
    return {"machine": machine, "date": datetime.date.today().isoformat(), "commit": commit}


def table(rows: list[dict[str, Any]]) -> str:
    """The rows for a terminal; the gap is the logarithm of the ratio of the perplexities."""
    from fips.report import format_table

    head = ["method", "bytes asked", "bytes", "perplexity", "gap", "seconds", "solving", "peak MB"]
    shown = [
        [r["method"], f"{r['share']:.3f}", f"{r['matrix_share']:.4f}", f"{r['perplexity']:.3f}", f"{r['gap']:.4f}",
         f"{r['seconds']:.0f}", "" if r["solve_seconds"] is None else f"{r['solve_seconds']:.0f}",
         f"{r['peak_memory_bytes'] / 1e6:.0f}"]
        for r in rows
    ]  # fmt: skip
    return format_table(head, shown)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--assets", type=Path, default=Path("assets"))
    parser.add_argument("--out", type=Path, default=Path("peers-out"))
    parser.add_argument("--shares", type=float, nargs="+", default=[0.75, 0.65, 0.55])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=["sparsegpt", "wanda", "svd", "fips-auto"])
    parser.add_argument("--tokens", type=int, default=65_536, help="Calibration tokens.")
    parser.add_argument("--length", type=int, default=2048, help="Tokens per window, calibration and evaluation.")
    parser.add_argument("--eval-characters", type=int, help="Evaluate on the text's beginning; the whole by default.")
    parser.add_argument("--keep", action="store_true", help="Keep the checkpoints.")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main() -> None:
    args = parse()
    if args.one:
        print(json.dumps(make_and_measure(args, args.one, args.shares[0])))
    else:
        print(table(compare(args)))


if __name__ == "__main__":
    main()
