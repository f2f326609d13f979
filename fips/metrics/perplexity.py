"""Perplexity, with the protocol that makes it comparable."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fips.data.texts import Text
from fips.data.windows import capped_length, check_vocabulary, resolve_bos, token_windows
from fips.errors import CalibrationError, NumericalError


@dataclass(frozen=True)
class Protocol:
    """Every setting a perplexity depends on; two numbers compare only if their protocols are equal.

    Attributes:
        text: Origin of the text.
        text_sha256: Its hash.
        length: Tokens per window L; L - 1 are predicted.
        windows: Number of windows; the tail of the text is dropped.
        predicted: Predicted tokens in total.
        bos: "every", "first" or "none".
        dtype: dtype of the model.
        device: Where it ran.
        torch: Version.
        transformers: Version.
    """

    text: str
    text_sha256: str
    length: int
    windows: int
    predicted: int
    bos: str
    dtype: str
    device: str
    torch: str
    transformers: str

    def to_dict(self) -> dict[str, Any]:
        """As JSON values, with the fixed parts of the protocol spelled out."""
        return {**asdict(self), "method": "non-overlapping windows, token-weighted mean NLL, float32 log-softmax"}

    def line(self) -> str:
        """The protocol for a terminal."""
        return (f"{self.text}, {self.windows} windows of {self.length} tokens, BOS {self.bos}, {self.dtype} on "
                f"{self.device}, text sha256 {self.text_sha256[:12]}")  # fmt: skip


@dataclass(frozen=True)
class Perplexity:
    """A perplexity and its protocol.

    Attributes:
        value: exp(mean negative log likelihood per predicted token).
        protocol: How it was measured.
    """

    value: float
    protocol: Protocol

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {"perplexity": self.value, "protocol": self.protocol.to_dict()}

    def compared(self, baseline: "Perplexity | None") -> dict[str, Any]:
        """What is said of two models together."""
        return {"ratio": None if baseline is None else self.value / baseline.value}

    def rows(self, baseline: "Perplexity | None") -> list[list[str]]:
        """Rows of the evaluation's table."""
        dense = "not measured" if baseline is None else f"{baseline.value:.3f}"
        ratio = "" if baseline is None else f"{self.value / baseline.value:.3f}"
        return [["perplexity", f"{self.value:.3f}", dense, ratio]]


@torch.no_grad()
def perplexity(
    model: Any,
    tokenizer: Any,
    text: Text,
    length: int = 2048,
    bos: str = "auto",
    advance: Callable[[int], object] = lambda _: None,
) -> Perplexity:
    """Perplexity of a language model on a text.

    The text is tokenized once and cut into non-overlapping windows of `length` tokens (or the model's maximum if
    smaller); the tail is dropped. Log-softmax in float32, sum in float64.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        text: The text.
        length: Tokens per window.
        bos: "auto", "every", "first" or "none", see `fips.data.windows.resolve_bos`.
        advance: Called after every window with 1.

    Raises:
        CalibrationError: If the text is shorter than one window.
        NumericalError: If a logit is not finite, naming the window.
    """
    import transformers

    length = capped_length(length, model.config)
    rule = resolve_bos(bos, tokenizer)
    windows = token_windows(text.content, tokenizer, length, rule)
    if not len(windows):
        raise CalibrationError(f"{text.origin} has fewer tokens than one window of {length}. Use a shorter --length.")
    check_vocabulary(windows, model.get_input_embeddings().weight.shape[0], text.origin)
    device = next(model.parameters()).device
    total = 0.0
    for number, window in enumerate(windows):
        total += _negative_log_likelihood(model, window[None].to(device), number)
        advance(1)
    predicted = windows.numel() - len(windows)
    protocol = Protocol(
        text=text.origin, text_sha256=text.sha256, length=length, windows=len(windows), predicted=predicted, bos=rule,
        dtype=str(model.dtype).removeprefix("torch."), device=device.type, torch=torch.__version__,
        transformers=transformers.__version__,
    )  # fmt: skip
    return Perplexity(math.exp(min(total / predicted, 700.0)), protocol)


def _negative_log_likelihood(model: Any, window: Tensor, number: int) -> float:
    logits = model(input_ids=window, use_cache=False).logits[0, :-1]  # (L - 1, vocabulary)
    if not torch.isfinite(logits).all():
        raise NumericalError(f"window {number}: the model gives NaN or infinite logits; there is no perplexity.")
    # In slices, so that the float32 copy of a large vocabulary's logits stays small.
    losses = [
        nn.functional.cross_entropy(part.float(), target, reduction="none").double().sum()
        for part, target in zip(torch.split(logits, 512), torch.split(window[0, 1:], 512), strict=True)
    ]
    return float(sum(losses))
