"""evaluate(): perplexity and sizes of a checkpoint, beside the dense model under the same protocol."""

import gc
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from fips.checkpoint.format import QUANT_METHOD
from fips.checkpoint.load import load
from fips.checkpoint.source import locate, read_config
from fips.checkpoint.tokenizer import load_config, load_tokenizer
from fips.config import EvaluationConfig
from fips.data.texts import DEFAULT_DATASET, Text, read_dataset, read_text
from fips.data.windows import capped_length
from fips.errors import FipsError, SourceError
from fips.inspection import sizes_of
from fips.metrics.perplexity import Perplexity, perplexity
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
    config: EvaluationConfig | None = None,
    *,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> Evaluation:
    """Perplexity of a compressed or dense checkpoint on a text, and of its dense baseline.

    Args:
        model: Folder or Hub id, compressed or dense.
        baseline: Dense checkpoint measured under the same protocol.
        config: Text and protocol; the papers' WikiText-2 test set by default.
        trust_remote_code: Whether Python code in the checkpoints may run.
        progress: Where progress goes.

    Raises:
        FipsError: If an input is unusable, or a logit is not finite.
    """
    config, progress = config or EvaluationConfig(dataset=DEFAULT_DATASET), progress or Progress(-1)
    device = resolve_device(config.device)
    folders = [locate(str(m)) for m in (model, baseline) if m is not None]
    tokenizer = load_tokenizer(folders[0], trust_remote_code=trust_remote_code)
    if config.text is not None:
        text = read_text(Path(config.text), tokenizer)
    else:
        text = read_dataset(str(config.dataset), "test")
    sizes = [sizes_of(folder, trust_remote_code=trust_remote_code) for folder in folders]
    configs = [load_config(folder, trust_remote_code=trust_remote_code) for folder in folders]
    # One protocol: both models are measured on windows that fit the shorter.
    config = replace(config, length=min(capped_length(config.length, c) for c in configs))
    results: list[Measured] = []
    for name, folder, size in zip((model, baseline), folders, sizes, strict=False):
        if results and config.dtype == "auto":  # one protocol: the baseline runs in the model's dtype
            config = replace(config, dtype=results[0].perplexity.protocol.dtype)
        progress.note(f"loading {name}")
        loaded = _load(folder, config, trust_remote_code=trust_remote_code).to(device)
        value = _measure(loaded, tokenizer, text, config, progress)
        del loaded
        gc.collect()
        results.append(Measured(str(name), value, size))
    return Evaluation(results[0], results[1] if len(results) > 1 else None)


def _measure(model: Any, tokenizer: Any, text: Text, config: EvaluationConfig, progress: Progress) -> Perplexity:
    progress.start_group("perplexity", 0)
    try:
        return perplexity(model, tokenizer, text, config.length, config.bos, advance=progress.step)
    finally:
        progress.close()


def _load(folder: Path, config: EvaluationConfig, *, trust_remote_code: bool) -> Any:
    options = {
        "dtype": config.dtype if config.dtype == "auto" else getattr(torch, config.dtype),
        "trust_remote_code": trust_remote_code,
    }
    description = read_config(folder).get("quantization_config") or {}
    try:
        if description.get("quant_method") == QUANT_METHOD:
            return load(folder, config.runtime, **options)
        return AutoModelForCausalLM.from_pretrained(folder, **options)
    except FipsError:
        raise
    except Exception as error:  # loading runs code of many models and raises anything
        raise SourceError(f"{folder} cannot be loaded: {error}") from error
