"""Agreement of two models that give features instead of words or classes: the cosine of their pooled features."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from fips.errors import ConfigError, NumericalError
from fips.metrics.accuracy import ImageProtocol, ImageTest
from fips.models.sites import trunk_of


@dataclass(frozen=True)
class TextProtocol:
    """Every setting a result on single texts depends on.

    Attributes:
        text: Origin of the texts.
        text_sha256: Hash of the whole text they were taken from.
        count: Texts: its paragraphs.
        length: Tokens per text at most.
        pooling: How the hidden states of a text become one vector.
        dtype: dtype of the model.
        device: Where it ran.
        torch: Version.
        transformers: Version.
    """

    text: str
    text_sha256: str
    count: int
    length: int
    pooling: str
    dtype: str
    device: str
    torch: str
    transformers: str

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)

    def line(self) -> str:
        """The protocol for a terminal."""
        return (f"{self.text}, {self.count:,} paragraphs of at most {self.length} tokens, {self.pooling}, {self.dtype} "
                f"on {self.device}, text sha256 {self.text_sha256[:12]}")  # fmt: skip


@dataclass(frozen=True)
class Embeddings:
    """Pooled features.

    Attributes:
        values: One row per image or text, (n, d).
        protocol: How they were made.
    """

    values: Tensor
    protocol: ImageProtocol | TextProtocol

    def cosines(self, other: "Embeddings") -> Tensor:
        """Cosine of both models' features, (n,).

        Raises:
            ConfigError: If they are of different widths.
        """
        if self.values.shape != other.values.shape:
            ours, theirs = self.values.shape[1], other.values.shape[1]
            raise ConfigError(f"The model's features have {ours} entries, the baseline's {theirs}.")
        return torch.nn.functional.cosine_similarity(self.values.double(), other.values.double(), dim=1)

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        what = "images" if isinstance(self.protocol, ImageProtocol) else "texts"
        return {what: len(self.values), "protocol": self.protocol.to_dict()}

    def compared(self, baseline: "Embeddings | None") -> dict[str, Any]:
        """What is said of two models together: mean and smallest cosine."""
        if baseline is None:
            return {"cosine": None, "cosine_min": None}
        found = self.cosines(baseline)
        return {"cosine": float(found.mean()), "cosine_min": float(found.min())}

    def rows(self, baseline: "Embeddings | None") -> list[list[str]]:
        """Rows of the evaluation's table."""
        if baseline is None:
            return [["cosine to the dense model", "not measured", "", ""]]
        found = self.cosines(baseline)
        return [["cosine to the dense model", f"{float(found.mean()):.4f}", "", ""],
                ["  smallest", f"{float(found.min()):.4f}", "", ""]]  # fmt: skip


@torch.no_grad()
def image_features(model: Any, test: ImageTest, advance: Callable[[int], object] = lambda _: None) -> Embeddings:
    """Pooled features of images: the trunk's own pooled output, else that of [CLS], else the mean over the patches.

    A `pooler` with a dense layer does not count: it is often not trained and not part of a checkpoint.

    Args:
        model: A backbone, or a model with a tower for images.
        test: Images.
        advance: Called after every batch with its number of images.
    """
    trunk = trunk_of(model)[1]
    names = [name.split(".") for name, _ in trunk.named_parameters()]
    dense = any({"pooler", "dense"} <= set(name) for name in names)
    first = any(name[-1] in ("cls_token", "class_embedding") for name in names)
    pooling = "[CLS]" if first else "mean over patches"

    def pooled(pixels: Tensor) -> Tensor:
        nonlocal pooling
        out = trunk(pixel_values=pixels)
        if not dense and getattr(out, "pooler_output", None) is not None:
            pooling = "pooled output"
            own: Tensor = out.pooler_output
            return own.flatten(1)
        hidden: Tensor = out.last_hidden_state
        return hidden[:, 0] if first else hidden.mean(1)

    values, kept, skipped = test.run(model, pooled, advance)
    return Embeddings(values, test.protocol(model, len(kept), skipped, pooling=pooling))


@dataclass(frozen=True)
class TextTest:
    """Texts to measure on.

    Attributes:
        texts: They.
        origin: Where they come from.
        sha256: Hash of the whole.
        tokenizer: The model's tokenizer.
        length: Tokens per text at most.
        pooling: "mean", "first token" or "last token".
        batch: Texts per pass.
    """

    texts: Sequence[str]
    origin: str
    sha256: str
    tokenizer: Any
    length: int
    pooling: str
    batch: int


@torch.no_grad()
def text_features(model: Any, test: TextTest, advance: Callable[[int], object] = lambda _: None) -> Embeddings:
    """Pooled features of texts.

    Args:
        model: A text encoder.
        test: Texts.
        advance: Called after every batch with its number of texts.

    Raises:
        NumericalError: If a feature is not finite, naming the text.
    """
    import transformers

    trunk, device = trunk_of(model)[1], next(model.parameters()).device
    rows = []
    for start in range(0, len(test.texts), test.batch):
        part = list(test.texts[start : start + test.batch])
        inputs = _padded(part, test, model.config).to(device)
        hidden = trunk(**inputs).last_hidden_state
        rows.append(_pool(hidden, inputs["attention_mask"], test.pooling).float().cpu())
        if not torch.isfinite(rows[-1]).all():
            bad = start + int((~torch.isfinite(rows[-1])).any(1).nonzero()[0])
            raise NumericalError(f"text {bad} of {test.origin}: the model gives NaN or infinity.")
        advance(len(part))
    protocol = TextProtocol(
        text=test.origin, text_sha256=test.sha256, count=len(test.texts), length=test.length, pooling=test.pooling,
        dtype=str(model.dtype).removeprefix("torch."), device=device.type, torch=torch.__version__,
        transformers=transformers.__version__,
    )  # fmt: skip
    return Embeddings(torch.cat(rows), protocol)


def _padded(texts: list[str], test: TextTest, config: Any) -> Any:
    if test.tokenizer.pad_token is None:  # padded places are masked, so any token will do
        test.tokenizer.pad_token_id = getattr(config, "pad_token_id", None) or 0
    test.tokenizer.padding_side = "right"
    return test.tokenizer(texts, padding=True, truncation=True, max_length=test.length, return_tensors="pt")


def _pool(hidden: Tensor, mask: Tensor, pooling: str) -> Tensor:
    if pooling == "first token":
        return hidden[:, 0]
    if pooling == "last token":
        return hidden[torch.arange(len(hidden)), mask.sum(1) - 1]
    weights = mask[..., None].to(hidden.dtype)
    return (hidden * weights).sum(1) / weights.sum(1)
