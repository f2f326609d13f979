"""Proves that a written folder is what was meant, before anybody is told so."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from fips.checkpoint.format import DTYPE_NAMES, Member, PackedGroupInfo, basis_key, dtype_name, parse
from fips.checkpoint.pack import digest
from fips.checkpoint.safetensors_io import TensorInfo, read_header, read_tensor
from fips.checkpoint.save import CheckpointWriter
from fips.checkpoint.source import read_config
from fips.errors import FormatError
from fips.linalg.packing import unpack


def weight_files(folder: Path) -> list[Path]:
    """The weights files of a written folder, in order."""
    return sorted(folder.glob("*.safetensors"))


def stored_tensors(files: list[Path]) -> dict[str, tuple[Path, TensorInfo]]:
    """Tensor name → its file and header entry.

    Raises:
        FormatError: If a file is damaged or a tensor is stored twice.
    """
    stored: dict[str, tuple[Path, TensorInfo]] = {}
    for path in files:
        for name, info in read_header(path).items():
            if name in stored:
                raise FormatError(f"{name} is stored in {stored[name][0].name} and in {path.name}.")
            stored[name] = (path, info)
    return stored


def as_stored(
    groups: tuple[PackedGroupInfo, ...], stored: dict[str, tuple[Path, TensorInfo]]
) -> tuple[PackedGroupInfo, ...]:
    """The description with the names and dtypes the tensors have on disk.

    A packed model that was saved again may have another prefix (saved without its head, say) or another dtype than
    its description; shapes and counts never change.
    """
    masks = [name.removesuffix(".mask") for name in stored if name.endswith(".mask")]
    return tuple(_group_as_stored(group, stored, masks) for group in groups)


def _group_as_stored(
    group: PackedGroupInfo, stored: dict[str, tuple[Path, TensorInfo]], masks: list[str]
) -> PackedGroupInfo:
    def name(member: Member) -> str:
        if f"{member.name}.mask" in stored:
            return member.name
        found = [m for m in masks if m.endswith(f".{member.name}") or member.name.endswith(f".{m}")]
        return found[0] if len(found) == 1 else member.name

    members = tuple(replace(m, name=name(m)) for m in group.members)
    found = stored.get(basis_key(group.name) if group.columns else f"{members[0].name}.weight")
    known = found is not None and found[1].dtype in DTYPE_NAMES.values()
    dtype = dtype_name(found[1].dtype) if found is not None and known else group.dtype
    return replace(group, dtype=dtype, members=members)


def packed_problems(groups: tuple[PackedGroupInfo, ...], stored: dict[str, tuple[Path, TensorInfo]]) -> Iterator[str]:
    """What is wrong with the headers of the packed tensors: missing, unexpected, or not of the described kind.

    Args:
        groups: The description as stored (`as_stored`): values may have been saved again in another dtype, but all of
            a group in one.
        stored: Tensor name → its file and header entry.
    """
    expected = {name: info for group in groups for name, info in group.tensors().items()}
    for name, info in expected.items():
        if name not in stored:
            yield f"{name} is missing from the weights; the checkpoint is damaged."
        elif stored[name][1] != info:
            found = stored[name][1]
            yield (
                f"{name} is stored as {found.dtype} {list(found.shape)}; config.json describes {info.dtype} "
                f"{list(info.shape)}."
            )
    for name in stored:
        weight = stored.get(name.removesuffix(".mask") + ".weight")
        packed = name.endswith(".mask") and weight is not None and len(weight[1].shape) == 1
        if name not in expected and (name.startswith("fips_bases.") or packed):
            yield f"{name} is stored but config.json does not describe it; the checkpoint is damaged."


def check_packed(groups: tuple[PackedGroupInfo, ...], stored: dict[str, tuple[Path, TensorInfo]]) -> None:
    """Refuses a checkpoint whose packed tensors are missing, unexpected, or not as described.

    Raises:
        FormatError: Naming the first such tensor.
    """
    for problem in packed_problems(groups, stored):
        raise FormatError(problem)


def verify_written(writer: CheckpointWriter) -> None:
    """Reads a written folder back and compares every tensor bit by bit.

    Packed tensors are compared with digests taken before they were written, all others with the source.

    Raises:
        FormatError: Naming the first difference.
    """
    groups = parse(read_config(writer.folder)["quantization_config"])
    stored = stored_tensors(weight_files(writer.folder))
    check_packed(groups, stored)
    kept = writer.kept()
    if set(stored) != set(kept) | set(writer.digests):
        raise FormatError(f"written tensors differ in name: {sorted(set(stored) ^ (set(kept) | set(writer.digests)))}")
    for name, expected in writer.digests.items():
        if digest(read_tensor(stored[name][0], name)) != expected:
            raise FormatError(f"{name} reads back differently from what was written; the disk may be failing.")
    for name, entry in kept.items():
        if digest(read_tensor(stored[name][0], name)) != digest(entry.load()):
            raise FormatError(f"{name} reads back differently from the source; the disk may be failing.")
    for group in groups:
        for member in group.members:
            path = stored[f"{member.name}.weight"][0]
            unpack(read_tensor(path, f"{member.name}.weight"), read_tensor(stored[f"{member.name}.mask"][0],
                   f"{member.name}.mask"), member.f)  # fmt: skip
