"""Images from folders, tables and data sets: reading, choosing, decoding, skipping, and the models' processors."""

import io
import json
import os
import shutil
import sys
import types
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fips.checkpoint.tokenizer import load_image_processor
from fips.data.images import ImageSet, looks_like_images, open_images, sample
from fips.data.labels import NumberedName, class_indices
from fips.data.pixels import ImageReader, augment, decode, pixel_values
from fips.errors import BrokenImageError, CalibrationError, SourceError

Image = pytest.importorskip("PIL.Image")
pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


def random(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def encoded(image: Any, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def plain(color: Any = (10, 20, 30), size: tuple[int, int] = (6, 4), mode: str = "RGB") -> bytes:
    return encoded(Image.new(mode, size, color))


def write(folder: Path, files: Sequence[str], data: bytes | None = None) -> Path:
    """A folder of images, each of its own color unless `data` is given."""
    for number, file in enumerate(files):
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(plain((number % 256, number // 256, 7)) if data is None else data)
    return folder


# ---- folders


def test_class_folders_are_labels(tmp_path: Path) -> None:
    root = write(tmp_path / "val", ["b/2.PNG", "b/1.png", "a/x.png"])
    (root / "a" / "notes.txt").write_text("not an image")
    images = open_images(str(root), "train")
    assert (images.origin, len(images), images.labels) == ("val", 3, ("a", "b", "b"))
    assert [images.name(k) for k in range(3)] == ["val/a/x.png", "val/b/1.png", "val/b/2.PNG"]
    assert images.read(2) == (root / "b" / "2.PNG").read_bytes()


@pytest.mark.parametrize("files", [["1.png", "2.png"], ["1.png", "a/2.png"], ["a/1.png", "a/b/2.png"], ["x/a/1.png"]])
def test_folders_of_another_depth_have_no_labels(tmp_path: Path, files: list[str]) -> None:
    images = open_images(str(write(tmp_path, files)), "train")
    assert len(images) == len(files)
    assert images.labels is None


def test_what_file_managers_leave_behind_is_not_read(tmp_path: Path) -> None:
    root = write(tmp_path, ["a/1.png", "a/._1.png", ".cache/2.png", "__MACOSX/a/1.png"])
    assert len(open_images(str(root), "train")) == 1


def test_linked_class_folders_are_followed(tmp_path: Path) -> None:
    write(tmp_path / "all", ["cat/1.png"])
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "cat").symlink_to(tmp_path / "all" / "cat")
    assert open_images(str(tmp_path / "some"), "train").labels == ("cat",)


def test_the_hash_tells_names_and_bytes_apart(tmp_path: Path) -> None:
    root = write(tmp_path / "one", ["a/1.png", "b/2.png"])
    big = (root / "a" / "1.png").read_bytes() + b"0" * 10_000  # more than both edges
    (root / "a" / "1.png").write_bytes(big)
    first = open_images(str(root), "train").sha256
    assert len(first) == 64
    copy = shutil.copytree(root, tmp_path / "two")
    assert open_images(str(copy), "test").sha256 == first
    (copy / "a" / "1.png").write_bytes(big[:-1] + b"1")
    last_byte = open_images(str(copy), "train").sha256
    (copy / "a" / "1.png").write_bytes(big)
    (copy / "a").rename(copy / "c")
    assert len({first, last_byte, open_images(str(copy), "train").sha256}) == 3


def test_what_holds_no_images(tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("words")
    with pytest.raises(CalibrationError, match=r"holds no images.*\.jpeg"):
        open_images(str(tmp_path), "train")
    for name in (tmp_path / "words.txt", tmp_path / "gone", "imagenet", "./images/val"):
        with pytest.raises(CalibrationError, match=r"no folder of images.*owner/name"):
            open_images(str(name), "train")
    with pytest.raises(CalibrationError, match=r"gone\.parquet: no such file"):
        open_images(str(tmp_path / "gone.parquet"), "train")


def test_what_looks_like_images(tmp_path: Path) -> None:
    assert looks_like_images(str(tmp_path))
    assert looks_like_images("x.parquet")
    assert looks_like_images("x.arrow")
    assert not looks_like_images("owner/name")
    assert not looks_like_images("x.txt")


# ---- tables


def table(labels: Sequence[object] | None = None, names: list[str] | None = None, count: int = 5,
          column: str = "image", label: str = "label") -> Any:  # fmt: skip
    """Rows as `datasets` writes them, with the class names beside the schema."""
    cells = [{"bytes": plain((k, 0, 0)), "path": f"{k}.png"} for k in range(count)]
    made = pa.table({column: cells} if labels is None else {column: cells, label: list(labels)})
    features: dict[str, object] = {column: {"_type": "Image"}, label: {"_type": "ClassLabel", "names": names}}
    info = {"huggingface": json.dumps({"info": {"features": features}})}
    return made.replace_schema_metadata(info) if names else made


def saved(folder: Path, rows: Any, group: int = 2) -> str:
    parquet.write_table(rows, folder / "images.parquet", row_group_size=group)
    return str(folder / "images.parquet")


def test_parquet_with_class_names(tmp_path: Path) -> None:
    images = open_images(saved(tmp_path, table([0, 1, 1, 2, 0], ["cat", "dog", "emu"])), "train")
    assert images.labels == ("cat", "dog", "dog", "emu", "cat")
    assert [label.number for label in images.labels] == [0, 1, 1, 2, 0]  # type: ignore[union-attr]
    assert images.origin == "images.parquet"
    assert images.name(3) == "images.parquet, row 3"
    # Three row groups, read out of order.
    assert [images.read(k) for k in (4, 0, 3, 1, 2)] == [plain((k, 0, 0)) for k in (4, 0, 3, 1, 2)]


@pytest.mark.parametrize("label", ["label", "labels", "fine_label"])
@pytest.mark.parametrize("column", ["image", "img"])
def test_parquet_with_bare_labels(tmp_path: Path, column: str, label: str) -> None:
    numbers = table([3, 1, 2, 0, 5], column=column, label=label)
    assert open_images(saved(tmp_path, numbers), "train").labels == (3, 1, 2, 0, 5)
    strings = table(list("abcde"), column=column, label=label)
    assert open_images(saved(tmp_path, strings), "train").labels == ("a", "b", "c", "d", "e")


def test_parquet_without_labels(tmp_path: Path) -> None:
    assert open_images(saved(tmp_path, table()), "train").labels is None
    assert open_images(saved(tmp_path, table([-1] * 5, ["cat", "dog"])), "train").labels is None
    assert open_images(saved(tmp_path, table(list("abcde"), label="caption")), "train").labels is None


def test_parquet_of_plain_bytes_and_of_paths(tmp_path: Path) -> None:
    images = open_images(saved(tmp_path, pa.table({"img": [plain(), b"x"]})), "train")
    assert [images.read(0), images.read(1)] == [plain(), b"x"]
    write(tmp_path, ["1.png"])
    rows = [{"bytes": None, "path": str(tmp_path / name)} for name in ("1.png", "2.png")]
    rows.append({"bytes": None, "path": ""})
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    images = open_images(saved(tmp_path, pa.table({"image": pa.array(rows, kind)})), "train")
    assert images.read(0) == (tmp_path / "1.png").read_bytes()
    with pytest.raises(BrokenImageError, match=r"row 1 cannot be read: .*2\.png"):
        images.read(1)
    with pytest.raises(BrokenImageError, match="row 2 holds no encoded image"):
        images.read(2)


@pytest.mark.parametrize(("rows", "match"), [
    (lambda: table([0, 1, 2, 0, 0], ["cat", "dog"]), r"a label is 2, but only 2 classes are named"),
    (lambda: table(column="picture"), r"column `image` or `img`.*It has: picture \(struct"),
    (lambda: pa.table({"image": ["a.png"], "label": [1]}), r"It has: image \(string\), label \(int64\)"),
], ids=["out of range", "column", "kind"])  # fmt: skip
def test_tables_that_are_refused(tmp_path: Path, rows: Any, match: str) -> None:
    with pytest.raises(CalibrationError, match=match):
        open_images(saved(tmp_path, rows()), "train")


@pytest.mark.parametrize("kind", ["stream", "file"])
def test_arrow_files_of_both_kinds(tmp_path: Path, kind: str) -> None:
    rows, path = table([1, 0, 1, 0, 0], ["cat", "dog"]), tmp_path / "data.arrow"
    with (pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file)(path, rows.schema) as writer:
        writer.write_table(rows, max_chunksize=2)
    images = open_images(str(path), "train")
    assert (len(images), images.labels) == (5, ("dog", "cat", "dog", "cat", "cat"))
    assert images.read(3) == plain((3, 0, 0))


def test_the_hash_of_a_table_is_that_of_the_file(tmp_path: Path) -> None:
    import hashlib

    name = saved(tmp_path, table())
    assert open_images(name, "train").sha256 == hashlib.sha256(Path(name).read_bytes()).hexdigest()


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_damaged_tables(tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"x{suffix}").write_bytes(b"PAR1 nothing of the kind PAR1")
    with pytest.raises(CalibrationError, match=rf"x{suffix} is not a readable {suffix} file"):
        open_images(str(tmp_path / f"x{suffix}"), "train")


# ---- data sets


class FakeDataset:
    """The part of `datasets.Dataset` that is used."""

    def __init__(self, columns: dict[str, list[Any]], features: dict[str, Any]) -> None:
        self.columns, self.features, self.decoded = columns, features, True

    @property
    def column_names(self) -> list[str]:
        return list(self.columns)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, key: str | int) -> Any:
        if isinstance(key, str):
            return self.columns[key]
        assert not self.decoded
        return {name: values[key] for name, values in self.columns.items()}

    def select_columns(self, names: list[str]) -> "FakeDataset":
        return FakeDataset({name: self.columns[name] for name in names}, self.features)

    def cast_column(self, name: str, feature: Any) -> "FakeDataset":
        assert feature == {"decode": False}
        made = FakeDataset(self.columns, self.features)
        made.decoded = False
        return made


def test_hub_data_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    cells: list[Any] = [{"bytes": plain((k, 0, 0)), "path": None} for k in range(3)]
    columns: dict[str, list[Any]] = {"img": cells, "label": [1, 0, 1]}
    features = {"label": types.SimpleNamespace(names=["cat", "dog"])}

    def load_dataset(*args: Any, **kwargs: Any) -> FakeDataset:
        asked.append((*args, kwargs))
        return FakeDataset(columns, features)

    fake = types.SimpleNamespace(load_dataset=load_dataset, Image=lambda **options: options)
    monkeypatch.setitem(sys.modules, "datasets", fake)
    images = open_images("owner/pets:small", "test")
    assert asked == [("owner/pets", "small", {"split": "test"})]
    assert (images.origin, images.labels, len(images)) == ("owner/pets:small:test", ("dog", "cat", "dog"), 3)
    assert images.read(2) == plain((2, 0, 0))
    assert open_images("owner/pets:small@validation", "test").origin == "owner/pets:small:validation"
    assert asked[1:] == [("owner/pets", "small", {"split": "validation"})]
    columns["label"] = [-1, -1, -1]  # as test splits are published
    assert "3 of its 3 rows have no label (another split: owner/name@split)" in open_images(
        "owner/pets", "test").why_unlabelled()  # fmt: skip
    columns["label"] = [1, 1, 1]
    relabelled = open_images("owner/pets", "test").sha256
    cells[0] = {"bytes": None, "path": None}
    assert len({images.sha256, relabelled, open_images("owner/pets", "test").sha256}) == 3

    columns["img"], columns["label"] = [], []
    with pytest.raises(CalibrationError, match="holds no images"):
        open_images("owner/pets", "test")
    columns["picture"] = columns.pop("img")
    with pytest.raises(CalibrationError, match=r"'owner/pets'.*It has: label, picture"):
        open_images("owner/pets", "test")
    fake.load_dataset = lambda *_, **__: 1 / 0
    with pytest.raises(CalibrationError, match=r"'owner/pets' is no folder here.*division"):
        open_images("owner/pets", "test")


def test_a_folder_that_holds_itself(tmp_path: Path) -> None:
    write(tmp_path / "val", ["a/1.png", "b/2.png"])
    (tmp_path / "val" / "a" / "round").symlink_to(tmp_path / "val")
    assert len(open_images(str(tmp_path / "val"), "test")) == 2


def test_folders_that_hold_each_other(tmp_path: Path) -> None:
    root = write(tmp_path / "val", ["a/1.png", "b/2.png"])
    (root / "a" / "round").symlink_to(root / "b")
    (root / "b" / "round").symlink_to(root / "a")
    images = open_images(str(root), "test")
    assert {images.name(k) for k in range(len(images))} == {
        "val/a/1.png", "val/a/round/2.png", "val/b/2.png", "val/b/round/1.png"}  # fmt: skip


def test_a_folder_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, real = write(tmp_path / "val", ["a/1.png", "b/2.png"]), os.scandir

    def scandir(path: str) -> Any:
        if Path(path).name == "b":
            raise PermissionError(13, "Permission denied", path)
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(CalibrationError, match=r"val/b cannot be read: Permission denied"):
        open_images(str(root), "train")


def test_images_of_an_unread_kind_count_as_broken(tmp_path: Path) -> None:
    write(tmp_path, [f"{k}.png" for k in range(4)])
    (tmp_path / "9.heic").write_bytes(b"\0\0\0\x18ftypheic")
    images = open_images(str(tmp_path), "train")
    reader = ImageReader(images, range(5), 3)
    assert [batch.kept for batch in reader.batches(8)] == [[0, 1, 2, 3]]
    assert reader.skipped == [images.name(4)]


@pytest.mark.parametrize(("labels", "why"), [
    ([0, -1, 1, None, 0], "2 of its 5 rows have no label"), ([[0], [1, 0], [], [1], [0]], "a label of it is a list"),
    ([0.5, 1.0, 2.0, 0.0, 0.0], "a label of it is a float"),
], ids=["some", "several", "float"])  # fmt: skip
def test_tables_whose_labels_are_not_one_per_row(tmp_path: Path, labels: list[Any], why: str) -> None:
    images = open_images(saved(tmp_path, table(labels, ["cat", "dog"])), "train")
    assert images.labels is None
    assert why in images.why_unlabelled()
    assert len(sample(images, 3, random())) == 3


@pytest.mark.parametrize(("module", "name", "extra"), [
    ("datasets", "owner/pets", "datasets"), ("pyarrow", "x.parquet", "datasets"),
])  # fmt: skip
def test_missing_extras(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, name: str, extra: str) -> None:
    (tmp_path / "x.parquet").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(CalibrationError, match=rf"{name}.*pip install 'fips\[{extra}\]'"):
        open_images(name, "train")


def test_without_pillow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(CalibrationError, match=r"pip install 'fips\[vision\]'"):
        decode(b"", "x.png", 3)
    with pytest.raises(SourceError, match=r"pip install 'fips\[vision\]'"):
        load_image_processor(tmp_path)


# ---- choosing


def classes(tmp_path: Path, **counts: int) -> ImageSet:
    return open_images(str(write(tmp_path, [f"{c}/{k}.png" for c, n in counts.items() for k in range(n)])), "train")


@pytest.mark.parametrize(("count", "expected"), [
    (9, {"a": 3, "b": 3, "c": 3}), (17, {"a": 3, "b": 7, "c": 7}), (30, {"a": 3, "b": 9, "c": 18}),
    (99, {"a": 3, "b": 9, "c": 20}), (0, {}),
])  # fmt: skip
def test_equally_many_of_every_class(tmp_path: Path, count: int, expected: dict[str, int]) -> None:
    images = classes(tmp_path, a=3, b=9, c=20)
    assert images.labels
    chosen = sample(images, count, random())
    assert chosen == sorted(set(chosen))
    assert Counter(images.labels[k] for k in chosen) == expected


def test_fewer_than_the_classes_and_the_seed(tmp_path: Path) -> None:
    images = classes(tmp_path, a=3, b=9, c=20)
    assert images.labels
    drawn = [tuple(sample(images, 2, random(seed))) for seed in range(30)]
    assert all(len({images.labels[k] for k in chosen}) == 2 for chosen in drawn)
    assert {images.labels[k] for chosen in drawn for k in chosen} == {"a", "b", "c"}
    assert drawn == [tuple(sample(images, 2, random(seed))) for seed in range(30)]
    assert len(set(drawn)) > 10


def test_without_labels_every_image_is_as_likely(tmp_path: Path) -> None:
    images = open_images(str(write(tmp_path, [f"{k}.png" for k in range(20)])), "train")
    drawn = [sample(images, 5, random(seed)) for seed in range(40)]
    assert all(chosen == sorted(chosen) and len(set(chosen)) == 5 for chosen in drawn)
    assert {k for chosen in drawn for k in chosen} == set(range(20))
    assert sample(images, 5, random(3)) == drawn[3]


# ---- decoding


def pixels(data: bytes, channels: int = 3) -> np.ndarray:
    image = decode(data, "x", channels)
    assert image.mode == {1: "L", 3: "RGB"}[channels]
    return np.asarray(image)


GRADIENT = np.arange(24, dtype=np.uint8).reshape(4, 6) * 10  # wider than high


def test_grayscale_and_color() -> None:
    gray = encoded(Image.fromarray(GRADIENT))
    assert (pixels(gray) == GRADIENT[:, :, None]).all()
    assert (pixels(gray, 1) == GRADIENT).all()
    assert (pixels(plain((10, 20, 30))) == (10, 20, 30)).all()
    assert (pixels(plain((10, 20, 30)), 1) == 18).all()  # ITU-R 601
    assert (pixels(encoded(Image.new("1", (6, 4), 1)), 1) == 255).all()


def test_sixteen_bits() -> None:
    wide = np.array([[0, 257, 128, 129], [257 * 200, 65535, 300, 65407]], dtype=np.uint16)
    expected = np.array([[0, 1, 0, 1], [200, 255, 1, 255]], dtype=np.uint8)
    for kind in ("PNG", "TIFF"):
        assert (pixels(encoded(Image.fromarray(wide), kind), 1) == expected).all()
    assert (pixels(encoded(Image.fromarray(wide))) == expected[:, :, None]).all()
    assert (pixels(encoded(Image.fromarray(wide.astype(np.int32)), "TIFF"), 1) == expected).all()
    big = encoded(Image.fromarray(wide.astype(np.int32) * 2), "TIFF")
    for data in (big, encoded(Image.fromarray(wide.astype(np.float32)), "TIFF")):
        with pytest.raises(BrokenImageError, match="x is not a readable image: expected at most 16 bits"):
            decode(data, "x", 1)


def test_transparency_is_on_white() -> None:
    clear = np.zeros((4, 6, 4), dtype=np.uint8)
    clear[:, :, 0], clear[:, :3, 3], clear[:, 3, 3] = 200, 255, 102  # left opaque, then 40 %, then nothing
    seen = pixels(encoded(Image.fromarray(clear)))
    assert (seen[:, :3] == (200, 0, 0)).all()
    assert (seen[:, 3] == (233, 153, 153)).all()
    assert (seen[:, 4:] == 255).all()
    assert (pixels(encoded(Image.fromarray(clear)), 1)[:, 4:] == 255).all()
    pair = Image.merge("LA", [Image.fromarray(GRADIENT), Image.new("L", (6, 4), 0)])
    assert (pixels(encoded(pair), 1) == 255).all()


def test_palettes() -> None:
    image = Image.fromarray((GRADIENT > 100).astype(np.uint8)).convert("P")
    image.putpalette([10, 20, 30, 200, 100, 50])
    expected = np.where((GRADIENT > 100)[:, :, None], (200, 100, 50), (10, 20, 30))
    assert (pixels(encoded(image)) == expected).all()
    for kind in ("PNG", "GIF"):
        assert (pixels(encoded(image, kind, transparency=0)) == np.where(expected == (10, 20, 30), 255, expected)).all()


def test_cmyk() -> None:
    data = encoded(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), "JPEG", quality=100)
    assert Image.open(io.BytesIO(data)).mode == "CMYK"
    assert abs(pixels(data).astype(int) - (255, 0, 0)).max() <= 3


@pytest.mark.parametrize(("orientation", "turned"), [(1, GRADIENT), (3, GRADIENT[::-1, ::-1]),
                                                     (6, np.rot90(GRADIENT, -1)), (8, np.rot90(GRADIENT))])  # fmt: skip
def test_images_are_turned_as_exif_says(orientation: int, turned: np.ndarray) -> None:
    image = Image.fromarray(GRADIENT)
    image.getexif()[0x0112] = orientation
    data = encoded(image, exif=image.getexif())
    assert np.array_equal(pixels(data, 1), turned)


@pytest.mark.parametrize("data", [b"", b"not an image", plain(size=(60, 40))[:-30],
                                  encoded(Image.fromarray(np.tile(GRADIENT, (9, 9))), "JPEG")[:-40]])  # fmt: skip
def test_broken_images(data: bytes) -> None:
    with pytest.raises(BrokenImageError, match=r"val/1\.png is not a readable image"):
        decode(data, "val/1.png", 3)


def test_other_numbers_of_channels() -> None:
    with pytest.raises(CalibrationError, match=r"4 channels; fips reads images of 1 or 3"):
        decode(plain(), "x", 4)


# ---- skipping


def with_broken(tmp_path: Path, count: int, broken: Sequence[int]) -> ImageSet:
    write(tmp_path, [f"{k:04}.png" for k in range(count)])
    for k in broken:
        (tmp_path / f"{k:04}.png").write_bytes(plain()[:-30])
    return open_images(str(tmp_path), "train")


def test_a_broken_one_among_good_ones_is_skipped_and_named(tmp_path: Path) -> None:
    images = with_broken(tmp_path / "val", 8, [2])
    reader = ImageReader(images, [0, 2, 3, 5, 7], 3)
    for _ in range(2):  # a second pass counts anew
        batches = list(reader.batches(3))
        assert [batch.kept for batch in batches] == [[0, 3, 5], [7]]
        assert [image.getpixel((0, 0)) for batch in batches for image in batch.images] == [
            (k, 0, 7) for k in (0, 3, 5, 7)
        ]
        assert reader.skipped == ["val/0002.png"]


def test_what_vanished_counts_as_broken(tmp_path: Path) -> None:
    images = with_broken(tmp_path / "val", 3, [])
    (tmp_path / "val" / "0001.png").unlink()
    reader = ImageReader(images, range(3), 3)
    assert [batch.kept for batch in reader.batches(9)] == [[0, 2]]
    with pytest.raises(BrokenImageError, match=r"val/0001\.png cannot be read: No such file"):
        images.read(1)


def test_more_than_one_percent_ends_the_run(tmp_path: Path) -> None:
    images = with_broken(tmp_path / "val", 300, [3, 5, 7, 200])
    reader = ImageReader(images, range(200), 3)  # 2 of 200 are tolerated, not 3
    batches = reader.batches(4)
    assert next(batches).kept == [0, 1, 2, 4]
    shown = r"val/0003\.png, val/0005\.png, val/0007\.png\. The latest error: val/0007\.png is not"
    match = f"more than 1 % of the 200 images.*{shown}"
    with pytest.raises(CalibrationError, match=match) as caught:
        list(batches)
    assert not isinstance(caught.value, BrokenImageError)
    assert len(reader.skipped) == 3
    with pytest.raises(CalibrationError, match="of the 100 images"):  # one of up to 199 is tolerated
        list(ImageReader(images, range(4, 104), 3).batches(64))
    kept = [k for batch in ImageReader(images, range(6, 300), 3).batches(64) for k in batch.kept]
    assert kept == [k for k in range(6, 300) if k not in (7, 200)]


def test_an_image_that_is_used_several_times_is_one_image(tmp_path: Path) -> None:
    images = with_broken(tmp_path / "val", 8, [2])
    reader = ImageReader(images, [*range(8)] * 16, 3)
    assert sum(len(batch.kept) for batch in reader.batches(16)) == reader.kept == 7 * 16
    assert reader.skipped == ["val/0002.png"]
    with pytest.raises(CalibrationError, match=r"of the 3 images .* val/0002\.png, val/0003\.png\. The"):
        list(ImageReader(with_broken(tmp_path / "val", 4, [2, 3]), [1, 2, 3] * 400, 3).batches(16))


@pytest.mark.parametrize("asked", [[], [1]])
def test_nothing_left(tmp_path: Path, asked: list[int]) -> None:
    images = with_broken(tmp_path / "val", 2, [1])
    with pytest.raises(CalibrationError, match=f"val: no image is left of the {len(asked)} asked for"):
        list(ImageReader(images, asked, 3).batches(4))


# ---- augmentation


def test_augmentation_flips_and_crops_a_little() -> None:
    ramp = Image.fromarray(np.tile(np.arange(200, dtype=np.uint8), (100, 1)))
    upright = ramp.transpose(Image.Transpose.ROTATE_90).resize((200, 100))
    flips, shares, ratios = 0, [], []
    for seed in range(200):
        image, other = augment(ramp, random(seed)), augment(upright, random(seed))
        assert (image.size, image.mode) == ((200, 100), "L")
        row, column = np.asarray(image).astype(float)[50], np.asarray(other).astype(float)[:, 100]
        across = (row[-5] - row[4]) / 191 * 200 / 200  # share of the width that is seen
        down = abs(column[-3] - column[2]) / (200 * 95 / 100)
        flips += across < 0
        shares.append(abs(across) * down)
        ratios.append(abs(across) / down)
    assert 70 < flips < 130
    assert 0.77 < min(shares) < 0.83
    assert 0.97 < max(shares) < 1.04
    assert 0.75 < min(ratios) < 0.9
    assert 1.1 < max(ratios) < 4 / 3


def test_augmentation_depends_on_the_generator_alone() -> None:
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (30, 40, 3), dtype=np.uint8))
    once, again, other = (np.asarray(augment(image, random(seed))) for seed in (1, 1, 2))
    assert np.array_equal(once, again)
    assert not np.array_equal(once, other)
    generator = random(1)
    assert np.array_equal(np.asarray(augment(image, generator)), once)
    assert not np.array_equal(np.asarray(augment(image, generator)), once)


# ---- the models' processors

IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}

# As their checkpoints have them on the Hub, but for the sizes.
PROCESSORS: dict[str, dict[str, Any]] = {
    "vit": {"image_processor_type": "ViTImageProcessor", "size": 32, "do_resize": True, "resample": 2, **HALF},
    "vit, fast": {"image_processor_type": "ViTImageProcessorFast", "size": {"height": 32, "width": 32}, **HALF},
    "deit": {"feature_extractor_type": "DeiTFeatureExtractor", "size": 36, "crop_size": 32, "do_center_crop": True,
             "resample": 3, **IMAGENET},
    "dinov2": {"image_processor_type": "BitImageProcessor", "size": {"shortest_edge": 36}, "resample": 3,
               "crop_size": {"height": 32, "width": 32}, "do_center_crop": True, "do_convert_rgb": True, **IMAGENET},
    "swin": {"feature_extractor_type": "ViTFeatureExtractor", "size": 32, "resample": 3, **IMAGENET},
    "beit": {"feature_extractor_type": "BeitFeatureExtractor", "size": 32, "crop_size": 32, "do_center_crop": False,
             "resample": 2, **HALF},
    "clip": {"feature_extractor_type": "CLIPFeatureExtractor", "size": 32, "crop_size": 32, "do_center_crop": True,
             "resample": 3, "image_mean": [0.48145466, 0.4578275, 0.40821073],
             "image_std": [0.26862954, 0.26130258, 0.27577711]},
    "siglip": {"image_processor_type": "SiglipImageProcessor", "size": {"height": 32, "width": 32}, "resample": 3,
               "processor_class": "SiglipProcessor", **HALF},
}  # fmt: skip


def processor(folder: Path, **settings: Any) -> Any:
    folder.mkdir(exist_ok=True)
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return load_image_processor(folder)


@pytest.mark.parametrize("family", PROCESSORS)
def test_processors_of_the_families(tmp_path: Path, family: str) -> None:
    settings = PROCESSORS[family]
    images = [Image.new("RGB", size, (255, 51, 0)) for size in ((50, 80), (300, 120), (3, 40))]
    values = pixel_values(images, processor(tmp_path, **settings))
    assert (values.shape, values.dtype) == ((3, 3, 32, 32), torch.float32)
    mean, std = torch.tensor(settings["image_mean"]), torch.tensor(settings["image_std"])
    expected = ((torch.tensor([1.0, 0.2, 0.0]) - mean) / std)[:, None, None].expand(3, 32, 32)
    torch.testing.assert_close(values[0], expected)
    torch.testing.assert_close(values[2], expected)


def test_center_crop_takes_the_middle(tmp_path: Path) -> None:
    bars = np.zeros((40, 80, 3), dtype=np.uint8)
    bars[:, 20:60] = 255
    values = pixel_values([Image.fromarray(bars)], processor(tmp_path, **PROCESSORS["dinov2"]))
    assert (values[:, 0] > 2.2).all()


ONE_CHANNEL = {"image_processor_type": "ViTImageProcessor", "do_resize": True, "size": {"height": 28, "width": 28},
               "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True, "image_mean": [0.286],
               "image_std": [0.353]}  # fmt: skip


def test_one_channel(tmp_path: Path) -> None:
    seen = np.random.default_rng(0).integers(0, 256, (28, 28), dtype=np.uint8)
    values = pixel_values([decode(encoded(Image.fromarray(seen)), "x", 1)], processor(tmp_path, **ONE_CHANNEL))
    expected = (torch.from_numpy(seen).to(torch.float32) / 255 - 0.286) / 0.353
    torch.testing.assert_close(values, expected[None, None])
    # Sides that could be taken for channels.
    odd = [Image.fromarray(np.full(shape, 51, dtype=np.uint8)) for shape in ((3, 40), (40, 3), (1, 1), (4, 1))]
    values = pixel_values(odd, processor(tmp_path, **ONE_CHANNEL))
    torch.testing.assert_close(values, torch.full((4, 1, 28, 28), (0.2 - 0.286) / 0.353))


def test_a_processor_that_keeps_bytes_still_gives_floats(tmp_path: Path) -> None:
    settings = {**ONE_CHANNEL, "do_rescale": False, "do_normalize": False, "do_resize": False}
    values = pixel_values([Image.new("L", (5, 4), 9)], processor(tmp_path, **settings))
    assert values.dtype == torch.float32
    assert torch.equal(values, torch.full((1, 1, 4, 5), 9.0))


def test_images_that_a_processor_refuses(tmp_path: Path) -> None:
    gray, color = Image.new("L", (9, 8)), Image.new("RGB", (9, 8))
    with pytest.raises(CalibrationError, match=r"ViTImageProcessor\w*\) refuses an image of 9x8, RGB: mean"):
        pixel_values([color], processor(tmp_path, **ONE_CHANNEL))
    with pytest.raises(CalibrationError, match=r"shape \(1, 3, 32, 32\) from one image of 1 channels"):
        pixel_values([gray], processor(tmp_path, **PROCESSORS["clip"]))
    loose = processor(tmp_path, **{**ONE_CHANNEL, "do_resize": False})
    with pytest.raises(CalibrationError, match=r"several sizes: 9x8 \(from 9x8\), 8x9 \(from 8x9\)"):
        pixel_values([gray, gray.rotate(90, expand=True)], loose)


def test_folders_without_a_processor(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no usable image processor"):
        load_image_processor(tmp_path)
    with pytest.raises(SourceError, match=r"no usable image processor.*Unrecognized") as caught:
        processor(tmp_path, image_processor_type="NoSuchImageProcessor")
    assert len(str(caught.value)) < 400


# ---- labels

FASHION = {0: "T-shirt/top", 1: "Trouser", 2: "Ankle boot"}
IMAGENET_LIKE = {0: "tench, Tinca tinca", 1: "crane", 2: "crane", 3: "missile", 4: "projectile, missile", 5: "emu, EMU"}


def test_labels_by_name() -> None:
    assert class_indices(["Trouser", "T-shirt/top", "Trouser"], FASHION) == ([1, 0, 1], "by name")
    assert class_indices(["ankle_boot", "T-Shirt_Top", "trouser "], FASHION) == ([2, 0, 1], "by name")
    names = ["Tinca_tinca", "tench", "tench, Tinca tinca", "projectile", "missile", "EMU"]
    assert class_indices(names, IMAGENET_LIKE) == ([0, 0, 0, 4, 3, 5], "by name")
    # A name as written comes before one that differs in case.
    assert class_indices(["US", "us"], {0: "us", 1: "US"}) == ([1, 0], "by name")


def test_labels_by_number() -> None:
    assert class_indices([2, 0], FASHION) == ([2, 0], "by number")
    assert class_indices(["2", "00"], FASHION) == ([2, 0], "by number")
    digits = {0: "9", 1: "8", 2: "7"}
    assert class_indices(["7", "9"], digits) == ([2, 0], "by name")
    assert class_indices([7, 9], digits) == ([2, 0], "by name")


def test_labels_by_wordnet_id() -> None:
    ids = ["n03000000", "n01000000", "n02000000", "n01000000"]
    assert class_indices(ids, FASHION) == ([2, 0, 1, 0], "WordNet ids in sorted order")
    with pytest.raises(CalibrationError, match="2 of 2 labels"):
        class_indices(["n03000000", "n01000000"], FASHION)
    assert class_indices(ids[:2], {0: "n03000000", 1: "n01000000"}) == ([0, 1], "by name")


def numbered(names: Sequence[str], classes: int | None = None) -> list[NumberedName]:
    return [NumberedName(name, number, classes or len(names)) for number, name in enumerate(names)]


def test_labels_by_the_numbers_of_the_data_set() -> None:
    how = "by the data set's class numbers"
    assert class_indices(numbered(["shirt", "pants", "boots"])[::-1], FASHION) == ([2, 1, 0], how)
    # One name is not the model's, the others agree; and not every class need be there.
    assert class_indices(numbered(["shirt", "trouser", "boots"])[:2], FASHION) == ([0, 1], how)
    for contradicting in (numbered(["trouser", "pants", "boots"]), numbered(["shirt", "pants"]),
                          [*numbered(["shirt", "pants", "boots"])[:2], "boots"]):  # fmt: skip
        with pytest.raises(CalibrationError, match="'pants'"):
            class_indices(contradicting, FASHION)
    # By name where all names are the model's, in whatever order.
    assert class_indices(numbered(["ankle boot", "trouser", "t-shirt/top"]), FASHION) == ([2, 1, 0], "by name")


@pytest.mark.parametrize(("labels", "id2label", "match"), [
    (["Trouser", "cat", "dog", "emu", "fox"], FASHION,
     r"4 of 5 labels.*3 classes: 'cat', 'dog', 'emu'\. .*0: 'T-shirt/top', 1: 'Trouser'"),
    ([0, 1, 3, -1], FASHION, r"2 of 4 labels.*: '3', '-1'\."),
    (["Trouser", "2"], FASHION, r"1 of 2 labels.*: '2'\."),
    (["crane", "tench"], IMAGENET_LIKE, r"1 of 2 labels name none, or more than one.*: 'crane'\."),
], ids=["names", "numbers", "mixed", "ambiguous"])  # fmt: skip
def test_labels_that_are_not_the_models(labels: list[str | int], id2label: dict[int, str], match: str) -> None:
    with pytest.raises(CalibrationError, match=match):
        class_indices(labels, id2label)
