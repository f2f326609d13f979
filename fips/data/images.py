"""Images of a folder, a parquet or arrow file, or a Hub data set. One reader for calibration and evaluation."""

import hashlib
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from fips.data import tables
from fips.data.labels import Label
from fips.errors import BrokenImageError, CalibrationError

_TABLES = (".parquet", ".arrow")
_SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".jfif",
             ".avif"}  # fmt: skip
_UNREAD = {".heic", ".heif"}  # images, but not to Pillow alone: they count as broken and are named
_EDGE = 4096
_DATASET = re.compile(r"\w[\w.-]*/\w[\w.-]*(:[^@]+)?(@\w+)?")


@dataclass(frozen=True)
class ImageSet(ABC):
    """Images that are read and decoded one by one.

    Attributes:
        origin: Folder name, file name or data set id, as recorded in reports.
        sha256: Hash of the content. Of a .parquet or .arrow file: the hash of the file. Of a folder or a data set:
            over the name, the size, and the first and last 4 KiB of every image (and its label), in order.
        labels: One per image: class folder, class name or number; None when the images are not labelled.
    """

    origin: str
    sha256: str
    labels: tuple[Label, ...] | None

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, index: int) -> bytes:
        """Encoded bytes of one image.

        Raises:
            BrokenImageError: If they cannot be read.
        """

    @abstractmethod
    def name(self, index: int) -> str:
        """What to call one image in messages."""

    def why_unlabelled(self) -> str:
        """What is missing for labels, as the rest of a sentence; empty where there is nothing to say."""
        return ""


@dataclass(frozen=True)
class FolderImages(ImageSet):
    """Image files of a folder, sorted by relative name."""

    root: Path
    files: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.files)

    def read(self, index: int) -> bytes:
        """The file's bytes."""
        try:
            return (self.root / self.files[index]).read_bytes()
        except OSError as error:
            raise BrokenImageError(f"{self.name(index)} cannot be read: {error.strerror}.") from error

    def name(self, index: int) -> str:
        """Folder and relative file name."""
        return f"{self.origin}/{self.files[index]}"

    def why_unlabelled(self) -> str:
        """The first file that does not lie in a folder of its class."""
        odd = [file for file in self.files if file.count("/") != 1]
        return f": {len(odd):,} of its images are not in one subfolder per class, such as {odd[0]}" if odd else ""


@dataclass(frozen=True)
class TableImages(ImageSet):
    """Rows of a table."""

    table: tables.Table

    def __len__(self) -> int:
        return self.table.rows

    def read(self, index: int) -> bytes:
        """The bytes in the row."""
        return self.table.read(index, self.name(index))

    def name(self, index: int) -> str:
        """File or data set, and row."""
        return f"{self.origin}, row {index}"

    def why_unlabelled(self) -> str:
        """What keeps the labels from being one per row."""
        return self.table.why_unlabelled


def looks_like_images(name: str) -> bool:
    """Whether a calibration or evaluation argument means images on this machine: a folder, or a file of a table."""
    return name.endswith(_TABLES) or Path(name).is_dir()


def check_images(name: str) -> None:
    """Refuses what names no images, without opening any.

    Raises:
        CalibrationError: If it is no folder, no .parquet or .arrow file, and no data set id.
    """
    path = Path(name)
    if path.is_dir():
        return
    if path.suffix in _TABLES:
        if not path.is_file():
            raise CalibrationError(f"{path}: no such file of images.")
    elif path.exists() or not _DATASET.fullmatch(name):
        raise CalibrationError(
            f"{name}: no folder of images, no .parquet or .arrow file, and no data set id such as owner/name."
        )


def open_images(name: str, split: str) -> ImageSet:
    """Opens images without decoding any.

    Args:
        name: A folder, searched recursively: images in exactly one level of subfolders have the subfolder as label,
            all others have none. A .parquet or .arrow file with a column `image` or `img`, and `label`, `labels` or
            `fine_label` if there are labels. Or a Hub data set, "owner/name" or "owner/name:config", with "@split"
            behind it for another split than `split`.
        split: Split of a data set; not used otherwise.

    Raises:
        CalibrationError: If there is no such thing, it cannot be read, or it holds no images.
    """
    check_images(name)
    path = Path(name)
    if path.is_dir():
        images: ImageSet = _open_folder(path)
    elif path.suffix in _TABLES:
        table = tables.open_file(path)
        images = TableImages(path.name, _file_hash(path), table.labels, table)
    else:
        images = _open_dataset(name, split)
    if not len(images):
        raise CalibrationError(f"{name} holds no images. Files that are read: {', '.join(sorted(_SUFFIXES))}; of a "
                               "table name the .parquet or .arrow file itself.")  # fmt: skip
    return images


def sample(images: ImageSet, count: int, generator: torch.Generator) -> list[int]:
    """Chooses images at random; of every class equally many as far as they go, the rest from the other classes.

    Args:
        images: Where to choose from.
        count: How many; all of them if there are fewer.
        generator: Source of randomness.

    Returns:
        Indices in ascending order.
    """
    order = torch.randperm(len(images), generator=generator).tolist()
    if images.labels is not None:
        taken: dict[Label, int] = {}
        turns: list[tuple[int, int]] = []  # how many of its class come before it; place in the random order
        for place, index in enumerate(order):
            label = images.labels[index]
            turns.append((taken.get(label, 0), place))
            taken[label] = taken.get(label, 0) + 1
        order = [order[place] for _, place in sorted(turns)]
    return sorted(order[: max(count, 0)])


def _open_folder(root: Path) -> FolderImages:
    found = [file.relative_to(root) for file in _files(root, ()) if file.suffix.lower() in _SUFFIXES | _UNREAD]
    # What file managers and notebooks leave behind has image suffixes too.
    shown = [file for file in found if not any(part.startswith((".", "__MACOSX")) for part in file.parts)]
    files = sorted(shown, key=lambda file: file.as_posix())
    labels = tuple(file.parts[0] for file in files) if all(len(file.parts) == 2 for file in files) else None
    digest = _content_hash((file.as_posix(), *_edges(root / file)) for file in files)
    return FolderImages(root.resolve().name, digest, labels, root, tuple(file.as_posix() for file in files))


def _files(folder: Path, above: tuple[Path, ...]) -> Iterator[Path]:
    """Files of a folder and of those in it; class folders are often links, and links may lead back up."""
    real = folder.resolve()
    if any(one.is_relative_to(real) for one in above):
        return
    try:
        with os.scandir(folder) as entries:
            children = [(Path(entry.path), entry.is_dir()) for entry in entries]
    except OSError as error:
        raise CalibrationError(f"{folder} cannot be read: {error.strerror}. Make it readable.") from error
    for child, holds_more in children:
        if holds_more:
            yield from _files(child, (*above, real))
        else:
            yield child


def _open_dataset(name: str, split: str) -> TableImages:
    name, _, named = name.partition("@")
    table = tables.open_dataset(name, named or split)
    images = TableImages(f"{name}:{named or split}", "", table.labels, table)
    return TableImages(images.origin, _content_hash(_rows(images)), images.labels, table)


def _rows(images: TableImages) -> Iterable[tuple[str, int, bytes]]:
    for index in range(len(images)):
        try:
            data = images.read(index)
        except BrokenImageError:  # counted where it is decoded
            data = b""
        label = None if images.labels is None else images.labels[index]
        yield f"{index} {label}", len(data), data[:_EDGE] + data[-_EDGE:]


def _edges(path: Path) -> tuple[int, bytes]:
    """Size of a file, and its first and last bytes; nothing of one that cannot be read."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(_EDGE)
            file.seek(max(size - _EDGE, 0))
            return size, head + file.read(_EDGE)
    except OSError:
        return 0, b""


def _content_hash(items: Iterable[tuple[str, int, bytes]]) -> str:
    digest = hashlib.sha256()
    for name, size, edges in items:
        digest.update(f"{name}\0{size}\0".encode(errors="surrogateescape"))
        digest.update(edges)
    return digest.hexdigest()


def _file_hash(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
