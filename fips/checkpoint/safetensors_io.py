"""Reads headers of safetensors files and writes such files one tensor at a time.

The safetensors library writes a file from tensors that are all in memory. A compressed checkpoint may be larger than
memory, so it is written here as a header followed by one tensor after the other; reading stays the library's.
"""

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fips.errors import FormatError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_CODES = {dtype: code for code, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorInfo:
    """Shape and dtype of a stored tensor.

    Attributes:
        dtype: torch dtype.
        shape: Shape.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Size on disk."""
        return self.dtype.itemsize * int(torch.Size(self.shape).numel())


@dataclass(frozen=True)
class Entry:
    """A tensor to be written: what it is, and how to get it when its turn comes."""

    info: TensorInfo
    load: Callable[[], Tensor]


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Tensors of a safetensors file, without reading their data; the library checks sizes and offsets.

    Raises:
        FormatError: If the file is missing, truncated, corrupted, or holds a dtype that is not supported.
    """
    infos = {}
    try:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                part = file.get_slice(name)
                code = part.get_dtype()
                if code not in DTYPES:
                    raise FormatError(f"{path.name}: {name} has dtype {code}, which is not supported.")
                infos[name] = TensorInfo(DTYPES[code], tuple(part.get_shape()))
    except (SafetensorError, OSError, ValueError) as error:
        raise FormatError(f"{path} is not a whole safetensors file ({error}). Download or copy it again.") from error
    return infos


def read_tensor(path: Path, name: str) -> Tensor:
    """One tensor of a safetensors file, as a copy, so that the file's mapping does not stay in memory.

    Raises:
        FormatError: If it cannot be read.
    """
    try:
        with safe_open(path, "pt") as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor.clone()
    except (SafetensorError, OSError) as error:
        raise FormatError(f"{name} cannot be read from {path}: {error}") from error


def write_file(path: Path, entries: Iterable[tuple[str, Entry]]) -> None:
    """Writes a safetensors file tensor by tensor and syncs it to disk.

    Args:
        path: New file.
        entries: Names and tensors in the order of the file; only one tensor is in memory at a time.

    Raises:
        FormatError: If a tensor is not what its entry announced.
    """
    entries = list(entries)
    header = _header([(name, entry.info) for name, entry in entries])
    with path.open("xb") as file:
        file.write(len(header).to_bytes(8, "little"))
        file.write(header)
        for name, entry in entries:
            tensor = entry.load()
            if tensor.dtype != entry.info.dtype or tuple(tensor.shape) != entry.info.shape:
                raise FormatError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, announced as {entry.info}.")
            file.write(tensor_bytes(tensor))
        file.flush()
        os.fsync(file.fileno())


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The tensor's data as it is stored: contiguous, little-endian."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if not flat.numel():
        return memoryview(b"")
    return flat.view(torch.uint8).numpy().data


def _header(infos: list[tuple[str, TensorInfo]]) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, info in infos:
        end = offset + info.bytes
        header[name] = {"dtype": _CODES[info.dtype], "shape": list(info.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)  # the data starts aligned, as the library writes it
