"""Writes the compressed checkpoint: packed groups as they come, then the whole folder in one streaming pass."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from fips.checkpoint.folder import side_files
from fips.checkpoint.format import PackedGroupInfo, describe
from fips.checkpoint.pack import PackedGroup
from fips.checkpoint.safetensors_io import Entry, TensorInfo, read_tensor, write_file
from fips.checkpoint.source import Source

_PARTS = ".parts"


@dataclass
class CheckpointWriter:
    """Collects packed groups on disk and writes the folder at the end.

    Attributes:
        source: The dense checkpoint.
        folder: Where the compressed one is written.
        dtype: dtype of the stored floating-point tensors; None keeps every tensor's own.
        groups: Descriptions of the groups so far.
        digests: On-disk name → SHA-256 of every packed tensor, taken before it was written.
    """

    source: Source
    folder: Path
    dtype: torch.dtype | None
    groups: list[PackedGroupInfo] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)
    _entries: dict[str, Entry] = field(default_factory=dict)

    def add(self, group: PackedGroup) -> None:
        """Writes a packed group to a part file, so that it need not stay in memory."""
        parts = self.folder / _PARTS
        parts.mkdir(exist_ok=True)
        path = parts / f"{group.info.name}.safetensors"
        entries = {n: Entry(_info(t), lambda t=t: t) for n, t in group.tensors.items()}  # type: ignore[misc]
        write_file(path, entries.items())
        for name, tensor in group.tensors.items():
            self._entries[name] = Entry(_info(tensor), lambda n=name: read_tensor(path, n))  # type: ignore[misc]
        self.groups.append(group.info)
        self.digests.update(group.digests())

    def kept(self) -> dict[str, Entry]:
        """Every tensor that is taken over from the source."""
        names = [n for n in self.source.infos if n not in self._entries]
        return {n: self._source_entry(n) for n in names}

    def finish(self, max_shard_size: int) -> int:
        """Writes weights, config.json and side files.

        Args:
            max_shard_size: Largest weights file in bytes.

        Returns:
            Bytes of all weights files.
        """
        entries = {**self.kept(), **self._entries}
        size = write_shards(self.folder, entries, max_shard_size)
        config = {**self.source.config, "quantization_config": describe(tuple(self.groups))}
        if self.dtype is not None:
            config.pop("torch_dtype", None)
            config["dtype"] = str(self.dtype).removeprefix("torch.")
        write_json(self.folder / "config.json", config)
        copy_side_files(self.source.folder, self.folder)
        shutil.rmtree(self.folder / _PARTS)
        return size

    def _source_entry(self, name: str) -> Entry:
        info = self.source.infos[name]
        dtype = self.dtype if self.dtype is not None and info.dtype.is_floating_point else info.dtype
        return Entry(TensorInfo(dtype, info.shape), lambda: self.source.read(name).to(dtype))


def _info(tensor: Tensor) -> TensorInfo:
    return TensorInfo(tensor.dtype, tuple(tensor.shape))


def write_shards(folder: Path, entries: Mapping[str, Entry], max_shard_size: int) -> int:
    """Writes tensors to model.safetensors, or to numbered shards with an index.

    Args:
        folder: Where to write.
        entries: Name → tensor.
        max_shard_size: Largest file in bytes; a single larger tensor gets a file of its own.

    Returns:
        Bytes of all files.
    """
    # Widest dtype first, as the safetensors library orders its files: every tensor then starts aligned.
    ordered = sorted(entries.items(), key=lambda e: (-e[1].info.dtype.itemsize, e[0]))
    shards = _split(ordered, max_shard_size)
    if len(shards) == 1:
        write_file(folder / "model.safetensors", shards[0])
        return (folder / "model.safetensors").stat().st_size
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        write_file(folder / name, shard)
    weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor, _ in shard}
    total = sum(e.info.bytes for e in entries.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(folder / "model.safetensors.index.json", index)
    return sum((folder / name).stat().st_size for name in names)


def _split(entries: Iterable[tuple[str, Entry]], limit: int) -> list[list[tuple[str, Entry]]]:
    shards: list[list[tuple[str, Entry]]] = [[]]
    size = 0
    for name, entry in entries:
        if shards[-1] and size + entry.info.bytes > limit:
            shards.append([])
            size = 0
        shards[-1].append((name, entry))
        size += entry.info.bytes
    return shards


def write_json(path: Path, value: object) -> None:
    """Writes JSON as transformers does: two spaces, a final newline."""
    path.write_text(json_text(value), encoding="utf-8")


def json_text(value: object) -> str:
    """JSON as transformers writes it."""
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def replace_text(path: Path, text: str) -> None:
    """Writes a file whole or not at all; what was there, a link too, is replaced and not written through."""
    handle, fresh = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(fresh).chmod(path.stat().st_mode & 0o777 if path.exists() else 0o644)
        Path(fresh).replace(path)
    except BaseException:
        Path(fresh).unlink(missing_ok=True)
        raise


def copy_side_files(origin: Path, folder: Path) -> None:
    """Copies tokenizer, generation, processor and other files byte for byte."""
    for relative in side_files(origin):
        target = folder / relative
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(origin / relative, target)
