"""The image side of assets.py: photos, Fashion-MNIST, and a vision model out of an ONNX file."""

import gzip
import json
import os
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

# Folder names. The labels are the same, but for the first: "T-shirt/top".
FASHION_CLASSES = ("T-shirt_top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag",
                   "Ankle boot")  # fmt: skip
TRAIN_IMAGES = 6_000

# What DINOv2 was trained with; resample 3 is bicubic.
DINOV2_PROCESSOR = {
    "image_processor_type": "BitImageProcessor", "do_convert_rgb": True, "do_resize": True,
    "size": {"shortest_edge": 256}, "resample": 3, "do_center_crop": True, "crop_size": {"height": 224, "width": 224},
    "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True, "image_mean": [0.485, 0.456, 0.406],
    "image_std": [0.229, 0.224, 0.225],
}  # fmt: skip


class AssetError(Exception):
    """An asset cannot be made; the message is one line for the user."""


def build_photos(files: list[Path], out: Path) -> None:
    """Takes the photos as they are."""
    for file in files:
        shutil.copyfile(file, out / file.name)


def build_fashion_mnist(files: list[Path], out: Path) -> None:
    """Writes idx files as one PNG per image, named by its number in the data set, in one folder per class."""
    from PIL import Image

    named = {file.name.split("-idx")[0]: file for file in files}
    for split, prefix, most in (("test", "t10k", None), ("train", "train", TRAIN_IMAGES)):
        images, labels = read_idx(named[f"{prefix}-images"]), read_idx(named[f"{prefix}-labels"])
        if len(images.items) != len(labels.items):
            raise AssetError(f"Fashion-MNIST {split}: {len(images.items)} images, {len(labels.items)} labels.")
        for name in FASHION_CLASSES:
            (out / split / name).mkdir(parents=True)
        height, width = images.shape
        for number, (pixels, label) in enumerate(zip(images.items[:most], labels.items[:most], strict=True)):
            image = Image.frombytes("L", (width, height), pixels)
            image.save(out / split / FASHION_CLASSES[label[0]] / f"{number:05}.png")


class Idx(NamedTuple):
    """An idx file: the shape of one item, and the bytes of each."""

    shape: tuple[int, ...]
    items: list[bytes]


def read_idx(path: Path) -> Idx:
    """Reads a gzipped idx file of bytes: 0, 0, type 8, number of dimensions; the dimensions, big-endian; the data."""
    data = gzip.decompress(path.read_bytes())
    if len(data) < 4 or data[:3] != b"\0\0\x08" or len(data) < 4 + 4 * data[3]:
        raise AssetError(f"{path.name} is not an idx file of bytes.")
    start = 4 + 4 * data[3]
    count, *shape = struct.unpack(f">{data[3]}I", data[4:start])
    size = 1
    for length in shape:
        size *= length
    if len(data) != start + count * size:
        raise AssetError(f"{path.name} holds {len(data) - start} bytes of data; expected {count * size}.")
    return Idx(tuple(shape), [data[start + i * size : start + (i + 1) * size] for i in range(count)])


def build_dinov2(files: list[Path], out: Path) -> None:
    """Writes the backbone inside an ONNX file as a Dinov2Model checkpoint."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from safetensors.torch import save_file
    from transformers import Dinov2Config, Dinov2Model
    from transformers.utils import logging

    logging.disable_progress_bar()
    (file,) = files
    state = dinov2_state(*read_onnx(file))
    save_file({k: t.contiguous() for k, t in state.items()}, out / "model.safetensors", metadata={"format": "pt"})
    # The position embeddings are those of 518 px; the model interpolates them to the size of its input.
    Dinov2Config(hidden_size=384, num_attention_heads=6, num_hidden_layers=12, image_size=518, patch_size=14,
                 architectures=["Dinov2Model"], dtype="float32").save_pretrained(out)  # fmt: skip
    (out / "preprocessor_config.json").write_text(json.dumps(DINOV2_PROCESSOR, indent=2) + "\n", encoding="utf-8")
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # what is wrong is said below, in one line
    _, info = Dinov2Model.from_pretrained(out, output_loading_info=True)
    logging.set_verbosity(verbosity)
    wrong = sorted(str(key) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") for key in info[kind])
    if wrong:
        raise AssetError(f"{file.name} does not give a Dinov2Model: {', '.join(wrong[:4])}.")


def dinov2_state(tensors: dict[str, Any], nodes: list["Node"]) -> dict[str, Any]:
    """Tensors of a Dinov2Model, by its own names.

    The export has kept the names of all but the position embeddings, which are a constant for [CLS] and one for the
    patches, and the weights of linears: those are constants too, transposed, and named here after the bias added next.
    """
    import torch

    state = {name.removeprefix("backbone."): t for name, t in tensors.items() if name.startswith("backbone.")}
    products = {node.outputs[0]: node.inputs[1] for node in nodes if node.op == "MatMul"}
    for node in nodes:
        bias = next((name for name in node.inputs if name.startswith("backbone.") and name.endswith(".bias")), None)
        weight = next((products[name] for name in node.inputs if name in products), None)
        if node.op == "Add" and bias and weight in tensors:
            state[bias.removeprefix("backbone.").removesuffix("bias") + "weight"] = tensors[weight].T
    cls = state["embeddings.cls_token"]
    positions = [t for name, t in tensors.items() if name.startswith("onnx::") and t.dim() == 3]
    state["embeddings.position_embeddings"] = torch.cat(sorted(positions, key=lambda t: t.shape[1]), dim=1)
    state["embeddings.mask_token"] = torch.zeros_like(cls[0])  # for training only; the export has dropped it
    return state


class Node(NamedTuple):
    """An operation of an ONNX graph: what it does, and the names of its inputs and outputs."""

    op: str
    inputs: list[str]
    outputs: list[str]


def read_onnx(path: Path) -> tuple[dict[str, Any], list[Node]]:
    """Reads the float32 tensors and the operations of an ONNX file. The field numbers are those of onnx.proto.

    ONNX is protobuf, and these few fields of it are read sooner than a dependency is added.
    """
    import torch

    tensors, nodes = {}, []
    graph = next((value for field, value in fields(memoryview(path.read_bytes())) if field == 7), None)
    if graph is None:
        raise AssetError(f"{path.name} holds no ONNX graph.")
    for field, message in fields(graph):
        if field == 1:
            parts = [(number, value) for number, value in fields(message) if number in (1, 2, 4)]
            inputs, outputs, op = ([_text(v) for n, v in parts if n == wanted] for wanted in (1, 2, 4))
            nodes.append(Node(op[0], inputs, outputs))
        elif field == 5:
            parts = list(fields(message))
            tensor = dict(parts)
            name, shape = _text(tensor[8]), [value for number, value in parts if number == 1]
            if tensor[2] != 1 or 9 not in tensor:
                raise AssetError(f"{path.name}: {name} is not stored as raw float32.")
            tensors[name] = torch.frombuffer(bytearray(tensor[9]), dtype=torch.float32).reshape(shape)
    return tensors, nodes


def fields(message: memoryview) -> Iterator[tuple[int, Any]]:
    """Number and value of each field of a protobuf message: an int, or a memoryview of bytes."""
    position = 0

    def varint() -> int:
        nonlocal position
        value = shift = 0
        while True:
            byte = message[position]
            position += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    try:
        while position < len(message):
            key = varint()
            kind = key & 7
            if kind == 0:
                yield key >> 3, varint()
                continue
            length = {1: 8, 5: 4}[kind] if kind != 2 else varint()
            if position + length > len(message):
                raise IndexError
            yield key >> 3, message[position : position + length]
            position += length
    except (IndexError, KeyError) as error:
        raise AssetError("The file is not protobuf, or is cut off.") from error


def _text(value: memoryview) -> str:
    return bytes(value).decode()
