"""Encoded images to the tensor a model takes: decoding, skipping broken ones, augmentation, the image processor."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fips.data.images import ImageSet
from fips.errors import BrokenImageError, CalibrationError

if TYPE_CHECKING:
    from PIL.Image import Image

_MODES = {1: "L", 3: "RGB"}
_SHOWN = 3


def check_pillow() -> None:
    """Refuses to go on without Pillow, before any long work.

    Raises:
        CalibrationError: If it is not installed.
    """
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise CalibrationError("Reading images needs the extra: pip install 'fips[vision]'.") from error


def decode(data: bytes, name: str, channels: int) -> "Image":
    """Decodes an image as it is meant to be seen: turned as its EXIF data say, transparent parts on white.

    Args:
        data: The encoded image.
        name: What to call it in messages.
        channels: Channels the model takes: 3 for "RGB", 1 for "L". 16-bit grayscale is scaled to 8 bit.

    Raises:
        BrokenImageError: If it is truncated, damaged, of no known format, or its pixels have no known range.
        CalibrationError: If Pillow is missing or the model takes another number of channels.
    """
    check_pillow()
    from PIL import Image, ImageOps

    if channels not in _MODES:
        raise CalibrationError(f"The model takes images of {channels} channels; fips reads images of 1 or 3.")
    try:
        with Image.open(BytesIO(data)) as opened:
            image = ImageOps.exif_transpose(opened)
        return _flatten(_eight_bit(image)).convert(_MODES[channels])
    except Exception as error:  # decoders of many formats, and as many errors
        raise BrokenImageError(f"{name} is not a readable image: {error}") from error


def _eight_bit(image: "Image") -> "Image":
    import numpy as np
    from PIL import Image

    if image.mode != "F" and not image.mode.startswith("I"):
        return image
    values = np.asarray(image)
    if image.mode == "F" or values.min() < 0 or values.max() > 65535:
        raise BrokenImageError(f"expected at most 16 bits per pixel, not mode {image.mode!r}. Convert it to 8 bits")
    return Image.fromarray(((values.astype(np.uint32) + 128) // 257).astype(np.uint8))


def _flatten(image: "Image") -> "Image":
    from PIL import Image

    if "A" in image.getbands() or "transparency" in image.info:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image if image.mode in ("L", "1") else image.convert("RGB")


@dataclass(frozen=True)
class Decoded:
    """Images that could be decoded.

    Attributes:
        images: They.
        kept: The index of each in its set.
    """

    images: "list[Image]"
    kept: list[int]


class ImageReader:
    """Decodes chosen images in batches and skips broken ones, up to 1 % of those asked for, but at least one.

    An image may be chosen several times; it is one image to that rule.

    Attributes:
        skipped: Names of the broken images met in the latest pass.
        kept: Images that the latest pass gave.
    """

    def __init__(self, images: ImageSet, indices: Sequence[int], channels: int) -> None:
        self._images, self._indices, self._channels = images, indices, channels
        self.skipped: list[str] = []
        self.kept = 0

    def batches(self, size: int) -> Iterator[Decoded]:
        """One pass over the chosen images; every batch but the last has `size` images.

        Raises:
            CalibrationError: As soon as too many are broken, or at the end if none is left.
        """
        self.skipped, self.kept = [], 0
        batch = Decoded([], [])
        for index in self._indices:
            try:
                image = decode(self._images.read(index), self._images.name(index), self._channels)
            except BrokenImageError as error:
                self._skip(index, error)
                continue
            self.kept += 1
            batch.images.append(image)
            batch.kept.append(index)
            if len(batch.kept) == size:
                yield batch
                batch = Decoded([], [])
        if batch.kept:
            yield batch
        if not self.kept:
            raise CalibrationError(f"{self._images.origin}: no image is left of the {self._asked} asked for.")

    @property
    def _asked(self) -> int:
        return len(set(self._indices))

    def _skip(self, index: int, error: BrokenImageError) -> None:
        name = self._images.name(index)
        if name in self.skipped:
            return
        self.skipped.append(name)
        if len(self.skipped) > max(1, self._asked // 100):
            raise CalibrationError(
                f"{self._images.origin}: more than 1 % of the {self._asked} images asked for are broken, among them "
                f"{', '.join(self.skipped[:_SHOWN])}. The latest error: {error} Replace or remove them."
            ) from error


def augment(image: "Image", generator: torch.Generator) -> "Image":
    """Light augmentation: flipped or not, and a random part of 80 to 100 % of the area, back at the image's size.

    The part is at most 5/4 wider or higher in proportion than the image (80 % of the area allow no more), so that
    its ratio stays within 3/4 to 4/3 of the image's. The size stays, and with it all that the processor does next.
    """
    from PIL import Image

    flip, area, ratio, left, top = torch.rand(5, generator=generator, dtype=torch.float64).tolist()
    area = 0.8 + 0.2 * area
    stretch = area ** (2 * ratio - 1)  # log-uniform between `area` and its inverse: neither side exceeds the image
    width, height = image.width * (area * stretch) ** 0.5, image.height * (area / stretch) ** 0.5
    x, y = left * (image.width - width), top * (image.height - height)
    box = (x, y, min(x + width, image.width), min(y + height, image.height))
    part = image.resize(image.size, Image.Resampling.BICUBIC, box=box)
    return part.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if flip < 0.5 else part


def pixel_values(images: "Sequence[Image]", processor: Any) -> Tensor:
    """Images through the model's own image processor.

    Args:
        images: At least one, "RGB" or "L".
        processor: A transformers image processor.

    Returns:
        Pixel values, (n, channels, height, width) float32.

    Raises:
        CalibrationError: If the processor refuses an image, changes its channels, or gives images of several sizes.
    """
    values = [_process(image, processor) for image in images]
    sizes = {tuple(value.shape[-2:]): image.size for value, image in zip(values, images, strict=True)}
    if len(sizes) > 1:
        shown = ", ".join(f"{w}x{h} (from {a}x{b})" for (h, w), (a, b) in list(sizes.items())[:_SHOWN])
        raise CalibrationError(
            f"The model's image processor ({type(processor).__name__}) gives images of several sizes: {shown}. "
            "Use images of one size, or let preprocessor_config.json resize or crop to a fixed one."
        )
    return torch.cat(values)


def _process(image: "Image", processor: Any) -> Tensor:
    import numpy as np

    # Some processors take a two-dimensional array for none at all, so that one channel is given as an axis of its own.
    one: dict[str, Any] = {"images": image}
    if image.mode == "L":
        one = {"images": np.asarray(image)[:, :, None], "input_data_format": "channels_last"}
    what = f"The model's image processor ({type(processor).__name__})"
    try:
        values = processor(**one, return_tensors="pt")["pixel_values"]
    except Exception as error:  # processors of many models, and as many errors
        size = f"{image.width}x{image.height}"
        raise CalibrationError(f"{what} refuses an image of {size}, {image.mode}: {error}") from error
    channels = len(image.getbands())
    if values.ndim != 4 or tuple(values.shape[:2]) != (1, channels):
        raise CalibrationError(
            f"{what} makes pixel values of shape {tuple(values.shape)} from one image of {channels} channels; "
            f"expected (1, {channels}, height, width)."
        )
    result: Tensor = values.to(torch.float32)
    return result
