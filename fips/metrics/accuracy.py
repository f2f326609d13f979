"""Top-1 and top-5 accuracy of an image classifier, with the protocol that makes them comparable."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from fips.data.images import ImageSet
from fips.data.labels import class_indices
from fips.data.pixels import ImageReader, pixel_values
from fips.errors import CalibrationError, NumericalError

_TOP = 5


@dataclass(frozen=True)
class ImageProtocol:
    """Every setting a result on images depends on.

    Attributes:
        images: Origin of the images.
        images_sha256: Their hash.
        count: Images that were scored.
        available: Images there are; with fewer scored, those were drawn at random.
        skipped: Names of broken images that were left out.
        labels: How labels were matched to classes; None without labels.
        pooling: How hidden states become the features that are compared; None of a classifier.
        processor: The image processor; it is the checkpoint's own.
        dtype: dtype of the model.
        device: Where it ran.
        torch: Version.
        transformers: Version.
    """

    images: str
    images_sha256: str
    count: int
    available: int
    skipped: tuple[str, ...]
    labels: str | None
    pooling: str | None
    processor: str
    dtype: str
    device: str
    torch: str
    transformers: str

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {**asdict(self), "skipped": list(self.skipped)}

    def line(self) -> str:
        """The protocol for a terminal."""
        labels = self.pooling or ("no labels" if self.labels is None else f"labels matched {self.labels}")
        drawn = "" if self.count + len(self.skipped) == self.available else f" of {self.available:,}, drawn at random"
        named = ", ".join(self.skipped[:3])
        skipped = f", {len(self.skipped)} broken ones left out ({named})" if self.skipped else ""
        return (f"{self.images}, {self.count:,} images{drawn}{skipped}, {labels}, {self.processor}, {self.dtype} on "
                f"{self.device}, images sha256 {self.images_sha256[:12]}")  # fmt: skip


@dataclass(frozen=True)
class Accuracy:
    """What a classifier says of every image.

    Attributes:
        ranked: The most likely classes of every image, (images, 5), or (images, 1) of five classes or fewer.
        truth: Class of every image; None without labels.
        protocol: How it was measured.
    """

    ranked: Tensor
    truth: Tensor | None
    protocol: ImageProtocol

    @property
    def top1(self) -> float | None:
        """Share of images whose class is the most likely one; None without labels."""
        return None if self.truth is None else float((self.ranked[:, 0] == self.truth).double().mean())

    @property
    def top5(self) -> float | None:
        """Share of images whose class is among the five most likely ones; None if unlabelled or of so few classes."""
        if self.truth is None or self.ranked.shape[1] < _TOP:
            return None
        return float((self.ranked == self.truth[:, None]).any(1).double().mean())

    def agreement(self, other: "Accuracy") -> float:
        """Share of images to which both models give the same most likely class."""
        return float((self.ranked[:, 0] == other.ranked[:, 0]).double().mean())

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {"top1": self.top1, "top5": self.top5, "images": len(self.ranked), "protocol": self.protocol.to_dict()}

    def compared(self, baseline: "Accuracy | None") -> dict[str, Any]:
        """What is said of two models together."""
        return {"agreement": None if baseline is None else self.agreement(baseline)}

    def rows(self, baseline: "Accuracy | None") -> list[list[str]]:
        """Rows of the evaluation's table."""
        rows = [] if self.truth is not None else [["top-1", "no labels", "" if baseline is None else "no labels", ""]]
        for name in ("top1", "top5"):
            ours, dense = getattr(self, name), getattr(baseline, name, None)
            if ours is not None:
                points = "" if dense is None else f"{100 * (ours - dense):+.2f} points"
                rows.append([f"{name[:3]}-{name[3:]}", f"{100 * ours:.2f} %", _percent(dense), points])
        if baseline is not None:
            rows.append(["agreement", f"{100 * self.agreement(baseline):.2f} %", "", ""])
        return rows


def _percent(value: float | None) -> str:
    return "not measured" if value is None else f"{100 * value:.2f} %"


@dataclass(frozen=True)
class ImageTest:
    """Images to measure on.

    Attributes:
        images: The set.
        chosen: Indices into it.
        processor: Image processor of the model.
        channels: Channels the model takes.
        batch: Images per pass.
    """

    images: ImageSet
    chosen: Sequence[int]
    processor: Any
    channels: int
    batch: int

    def run(
        self, model: Any, score: Callable[[Tensor], Tensor], advance: Callable[[int], object]
    ) -> tuple[Tensor, list[int], tuple[str, ...]]:
        """Runs a function of pixel values over all images.

        Returns:
            Its results, (images, ·); the indices they belong to; the names of broken images.

        Raises:
            NumericalError: If a result is not finite, naming the image.
        """
        device = next(model.parameters()).device
        reader = ImageReader(self.images, self.chosen, self.channels)
        results, kept = [], []
        for batch in reader.batches(self.batch):
            pixels = pixel_values(batch.images, self.processor).to(device, model.dtype)
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                torch.manual_seed(0)  # some models drop patches at random: the same ones of both models
                try:
                    found = score(pixels)
                except (RuntimeError, ValueError) as error:
                    size, first = "x".join(map(str, pixels.shape[1:])), str(error).strip().partition("\n")[0]
                    raise CalibrationError(f"The model cannot run on images of {size}, which its image processor "
                                           f"gives: {first}") from error  # fmt: skip
            if not torch.isfinite(found).all():
                bad = int((~torch.isfinite(found)).any(1).nonzero()[0])
                raise NumericalError(f"{self.images.name(batch.kept[bad])}: the model gives NaN or infinity.")
            results.append(found.float().cpu())
            kept += batch.kept
            advance(len(batch.kept))
        return torch.cat(results), kept, tuple(reader.skipped)

    def protocol(
        self, model: Any, count: int, skipped: tuple[str, ...], *, labels: str | None = None, pooling: str | None = None
    ) -> ImageProtocol:
        """The protocol of a result of `run`."""
        import transformers

        return ImageProtocol(
            images=self.images.origin, images_sha256=self.images.sha256, count=count,
            available=len(self.images), skipped=skipped, labels=labels, pooling=pooling,
            processor=type(self.processor).__name__, dtype=str(model.dtype).removeprefix("torch."),
            device=next(model.parameters()).device.type, torch=torch.__version__,
            transformers=transformers.__version__,
        )  # fmt: skip


@torch.no_grad()
def accuracy(model: Any, test: ImageTest, advance: Callable[[int], object] = lambda _: None) -> Accuracy:
    """Top-1 and top-5 of an image classifier with its own image processor and class names.

    Args:
        model: The classifier.
        test: Images; without labels only the agreement of two models can be said.
        advance: Called after every batch with its number of images.

    Raises:
        CalibrationError: If labels are not among the model's classes, or too many images are broken.
        NumericalError: If a logit is not finite.
    """
    truth, how = None, None
    if test.images.labels is not None:  # before anything runs
        truth, how = class_indices(test.images.labels, model.config.id2label)  # of all, whatever was chosen
    logits, kept, skipped = test.run(model, lambda pixels: model(pixel_values=pixels).logits, advance)
    top = _TOP if logits.shape[1] > _TOP else 1  # of five classes all would be among the first five
    ranked = logits.sort(dim=1, descending=True, stable=True).indices[:, :top]  # of equal ones the first
    classes = None if truth is None else torch.tensor([truth[i] for i in kept])
    return Accuracy(ranked, classes, test.protocol(model, len(kept), skipped, labels=how))
