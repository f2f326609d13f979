"""Calibration data: tokens of a text or sampled by the model itself, or images."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fips.data.pixels import ImageReader, augment, pixel_values
from fips.data.texts import Text
from fips.data.windows import WRAPPED, token_windows, wrapped_windows
from fips.errors import CalibrationError

_SAMPLING_BATCH = 16


@dataclass(frozen=True)
class Calibration:
    """Calibration tokens and their provenance.

    Attributes:
        tokens: Token ids, (windows, length).
        origin: File name, data set id, or "self".
        sha256: Hash of the text, or of the tokens when the model sampled them.
        bos: BOS rule.
    """

    tokens: Tensor
    origin: str
    sha256: str
    bos: str

    @classmethod
    def sampled(cls, tokens: Tensor, bos: str) -> "Calibration":
        """Tokens the model wrote itself, hashed as little-endian int64."""
        return cls(tokens, "self", hashlib.sha256(tokens.numpy().tobytes()).hexdigest(), bos)

    @property
    def tokens_each(self) -> int:
        """Tokens per window."""
        return self.tokens.shape[1]

    @property
    def count(self) -> int:
        """Windows."""
        return len(self.tokens)

    def batches(self, size: int) -> Iterator[Tensor]:
        """Token ids, `size` windows at a time."""
        parts: tuple[Tensor, ...] = torch.split(self.tokens, size)
        yield from parts

    def to_dict(self) -> dict[str, Any]:
        """What the report records."""
        windows, length = self.tokens.shape
        return {
            "origin": self.origin,
            "sha256": self.sha256,
            "tokens": windows * length,
            "windows": windows,
            "length": length,
            "bos": self.bos,
        }


@dataclass(frozen=True)
class ImageCalibration:
    """Calibration images, decoded batch by batch whenever they are needed, and their provenance.

    Attributes:
        origin: Folder, file or data set id.
        sha256: Hash of the images.
        reader: Decodes the chosen ones.
        count: How many were chosen.
        processor: The model's image processor.
        tokens_each: Patches per image; batches are sized by them.
        augmented: Seed of the augmentation; None without one. With it an image may be among the chosen ones more than
            once: every time it is flipped and cropped in another way.
    """

    origin: str
    sha256: str
    reader: ImageReader
    count: int
    processor: Any
    tokens_each: int
    augmented: int | None

    def batches(self, size: int) -> Iterator[Tensor]:
        """Pixel values, (images, channels, height, width), `size` images at a time."""
        generator = None if self.augmented is None else torch.Generator().manual_seed(self.augmented)
        for batch in self.reader.batches(size):
            images = batch.images
            if generator is not None:
                images = [augment(image, generator) for image in images]
            yield pixel_values(images, self.processor)

    def to_dict(self) -> dict[str, Any]:
        """What the report records."""
        return {
            "origin": self.origin,
            "sha256": self.sha256,
            "images": self.reader.kept,
            "skipped": list(self.reader.skipped),
            "augmented": self.augmented is not None,
            "processor": type(self.processor).__name__,
        }


def windows_of(text: Text, tokenizer: Any, length: int, count: int, bos: str, generator: torch.Generator) -> Tensor:
    """Random windows of a text, in the order of the text.

    Args:
        text: The calibration text.
        tokenizer: The model's tokenizer.
        length: Tokens per window.
        count: Windows wanted; fewer when the text is short.
        bos: BOS rule, resolved, or "wrapped".
        generator: Chooses the windows.

    Returns:
        Token ids, (at most count, length).

    Raises:
        CalibrationError: If the text is shorter than one window.
    """
    cut = wrapped_windows if bos == WRAPPED else token_windows
    windows = cut(text.content, tokenizer, length, bos)
    if not len(windows):
        raise CalibrationError(
            f"{text.origin} has fewer tokens than one sequence of {length}. "
            "Give more text or a smaller --sequence-length."
        )
    chosen = torch.randperm(len(windows), generator=generator)[:count].sort().values
    return windows[chosen]


@torch.no_grad()
def sample_tokens(model: Any, tokenizer: Any, length: int, count: int, seed: int) -> Tensor:
    """Lets the model write its own calibration text: BOS, a random first token, then sampling at temperature 1.

    This needs neither data nor network, and works about as well as real text for methods of this kind (data-free
    quantization of language models, arXiv 2305.17888, section 3.1).

    Args:
        model: The dense model, loaded whole.
        tokenizer: Its tokenizer.
        length: Tokens per sequence.
        count: Sequences.
        seed: Seed of the first tokens and of the sampling.

    Returns:
        Token ids, (count, length), on the CPU.
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    bos = tokenizer.bos_token_id
    known = min(len(tokenizer), model.get_input_embeddings().weight.shape[0])
    sampled = []
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        for start in range(0, count, _SAMPLING_BATCH):
            rows = min(_SAMPLING_BATCH, count - start)
            first = torch.randint(known, (rows, 1), generator=generator)
            prompt = first if bos is None else torch.cat([torch.full((rows, 1), bos), first], 1)
            sampled.append(_continue(model, prompt.to(device), length).cpu())
    return torch.cat(sampled)


def _continue(model: Any, prompt: Tensor, length: int) -> Tensor:
    from transformers import GenerationConfig

    if prompt.shape[1] >= length:
        return prompt[:, :length]
    # No end-of-text token: a finished document is followed by the next one, as in real calibration text.
    settings = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=length - prompt.shape[1],
        eos_token_id=None, pad_token_id=0, use_cache=True,
    )  # fmt: skip
    model.generation_config = GenerationConfig()
    tokens: Tensor = model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=settings)
    return tokens
