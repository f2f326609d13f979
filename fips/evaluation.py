"""evaluate(): perplexity and sizes of a checkpoint, beside the dense model under the same protocol."""

import gc
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fips.checkpoint.format import QUANT_METHOD
from fips.checkpoint.load import load
from fips.checkpoint.source import locate, read_config
from fips.data.texts import Text, looks_like_file, read_dataset, read_text
from fips.errors import ConfigError, FipsError, SourceError
from fips.evaluate.perplexity import Perplexity, perplexity
from fips.inspection import sizes_of
from fips.plan import resolve_device
from fips.progress import Progress
from fips.report import Sizes, format_table


@dataclass(frozen=True)
class Measured:
    """One model, measured.

    Attributes:
        model: Its path or Hub id.
        perplexity: Perplexity and protocol.
        sizes: The three sizes.
    """

    model: str
    perplexity: Perplexity
    sizes: Sizes

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "model": self.model,
            "perplexity": self.perplexity.value,
            "protocol": self.perplexity.protocol.to_dict(),
            "sizes": self.sizes.to_dict(),
        }


@dataclass(frozen=True)
class Evaluation:
    """A model and, where given, its dense baseline under the same protocol.

    Attributes:
        measured: The model.
        baseline: The dense model.
    """

    measured: Measured
    baseline: Measured | None = None

    @property
    def ratio(self) -> float | None:
        """Perplexity divided by the baseline's."""
        return self.measured.perplexity.value / self.baseline.perplexity.value if self.baseline else None

    def to_dict(self) -> dict[str, Any]:
        """One JSON object: the model's values, `baseline` with the same keys, and `ratio`."""
        baseline = self.baseline.to_dict() if self.baseline else None
        return {**self.measured.to_dict(), "baseline": baseline, "ratio": self.ratio}

    def table(self) -> str:
        """The evaluation for a terminal."""
        ours, dense = self.measured, self.baseline
        rows = ours.sizes.rows()
        ratio = f"{self.ratio:.3f}" if self.ratio is not None else ""
        rows.append(["perplexity", f"{ours.perplexity.value:.3f}",
                     f"{dense.perplexity.value:.3f}" if dense else "not measured", ratio])  # fmt: skip
        protocol = ours.perplexity.protocol
        return format_table(["", "model", "dense", "ratio"], rows) + (
            f"\n\nprotocol: {protocol.text}, {protocol.windows} windows of {protocol.length} tokens, BOS "
            f"{protocol.bos}, {protocol.dtype} on {protocol.device}, text sha256 {protocol.text_sha256[:12]}"
        )


def evaluate(
    model: str | os.PathLike[str],
    baseline: str | os.PathLike[str] | None = None,
    *,
    text: str | os.PathLike[str] | None = None,
    dataset: str | None = None,
    length: int = 2048,
    bos: str = "auto",
    device: str = "auto",
    dtype: str = "auto",
    runtime: str = "dense",
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> Evaluation:
    """Perplexity of a compressed or dense checkpoint on a text, and of its dense baseline.

    Args:
        model: Folder or Hub id, compressed or dense.
        baseline: Dense checkpoint measured under the same protocol.
        text: Text file; exactly one of `text` and `dataset` is given.
        dataset: Hub data set, "owner/name" or "owner/name:config"; its test split is used.
        length: Tokens per window L.
        bos: BOS rule, see `fips.evaluate.perplexity`.
        device: "auto", "cpu", "cuda" or "mps".
        dtype: dtype the models run in; "auto" takes the checkpoint's.
        runtime: How a compressed checkpoint is loaded, "dense" or "packed".
        trust_remote_code: Whether Python code in the checkpoints may run.
        progress: Where progress goes.

    Raises:
        FipsError: If an input is unusable, or a logit is not finite.
    """
    if (text is None) == (dataset is None):
        raise ConfigError("name exactly one of a text file and a data set to evaluate on.")
    if length < 2:
        raise ConfigError(f"length is {length}; expected 2 or more tokens per window.")
    place, progress = resolve_device(device), progress or Progress(-1)
    options = {"dtype": dtype if dtype == "auto" else getattr(torch, dtype), "trust_remote_code": trust_remote_code}
    folders = [locate(str(m)) for m in (model, baseline) if m is not None]
    tokenizer = _tokenizer(folders[0], trust_remote_code)
    read = read_text(Path(text), tokenizer) if text is not None else read_dataset(str(dataset), "test")
    results = []
    for name, folder in zip((model, baseline), folders, strict=False):
        sizes = sizes_of(folder, trust_remote_code=trust_remote_code)
        value = _measure(folder, tokenizer, read, (length, bos), place, runtime, options, progress)
        results.append(Measured(str(name), value, sizes))
    return Evaluation(results[0], results[1] if len(results) > 1 else None)


def _measure(
    folder: Path,
    tokenizer: Any,
    text: Text,
    rule: tuple[int, str],
    device: str,
    runtime: str,
    options: dict[str, Any],
    progress: Progress,
) -> Perplexity:
    """Loads one model, measures it, and lets it go before the next is loaded."""
    progress.note(f"loading {folder.name}")
    model = _load(folder, runtime, options).to(device)
    progress.start_group(f"perplexity of {folder.name}", 0)
    try:
        return perplexity(model, tokenizer, text, *rule, advance=lambda n: progress.step(n, None))
    finally:
        progress.close()
        del model
        gc.collect()


def _load(folder: Path, runtime: str, options: dict[str, Any]) -> Any:
    description = read_config(folder).get("quantization_config") or {}
    try:
        if description.get("quant_method") == QUANT_METHOD:
            return load(folder, runtime, **options)
        return AutoModelForCausalLM.from_pretrained(folder, **options)
    except FipsError:
        raise
    except Exception as error:  # loading runs code of many models and raises anything
        raise SourceError(f"{folder} cannot be loaded: {error}") from error


def _tokenizer(folder: Path, trust_remote_code: bool) -> Any:  # noqa: FBT001 - private
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # tokenizer files of many kinds, and as many errors
        raise SourceError(f"{folder}: no usable tokenizer beside the weights: {error}") from error
