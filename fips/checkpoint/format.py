"""The packed checkpoint: key names and the description in config.json. Version 1, see docs/format.md."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from fips.checkpoint.safetensors_io import TensorInfo
from fips.errors import FormatError
from fips.linalg.budget import StoredBasis

QUANT_METHOD = "fips"
FORMAT_VERSION = 1
REPORT_NAME = "fips_report.json"
DTYPE_NAMES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Member:
    """A packed linear.

    Attributes:
        name: On-disk name of the linear, without ".weight".
        role: "up" or "down".
        f: Inner size.
        nnz: Kept values.
    """

    name: str
    role: str
    f: int
    nnz: int


@dataclass(frozen=True)
class PackedGroupInfo(StoredBasis):
    """A packed group.

    Attributes:
        name: Group name; its basis is stored as "fips_bases.<name>".
        d: Model width.
        rank: Columns of U.
        dtype: "float32", "bfloat16" or "float16".
        members: Its linears.
        identity: Whether the first d columns of U are the identity, which is not stored.
    """

    name: str
    d: int
    rank: int
    dtype: str
    members: tuple[Member, ...]
    identity: bool = False

    def tensors(self) -> dict[str, TensorInfo]:
        """Every tensor the group must have on disk, biases left out."""
        values = DTYPE_NAMES[self.dtype]
        infos = {basis_key(self.name): TensorInfo(values, (self.d, self.columns))} if self.columns else {}
        for member in self.members:
            infos[f"{member.name}.weight"] = TensorInfo(values, (member.nnz,))
            infos[f"{member.name}.mask"] = TensorInfo(torch.uint8, (self.rank, (member.f + 7) // 8))
        return infos

    def packed_bytes(self) -> int:
        """Bytes of values, masks and basis."""
        return sum(info.bytes for info in self.tensors().values())

    def dense_bytes(self) -> int:
        """Bytes of the replaced matrices at the same dtype."""
        return self.d * sum(m.f for m in self.members) * DTYPE_NAMES[self.dtype].itemsize

    def parameters(self) -> int:
        """Stored values of U and non-zeros of V, as the parameter budget counts."""
        return self.d * self.columns + sum(m.nnz for m in self.members)

    def ideal_bytes(self) -> int:
        """Values and basis plus exactly one bit per mask entry."""
        size = DTYPE_NAMES[self.dtype].itemsize
        return self.parameters() * size + sum(self.rank * m.f for m in self.members) // 8


def basis_key(group: str) -> str:
    """On-disk name of a group's basis."""
    return f"fips_bases.{group}"


def dtype_name(dtype: torch.dtype) -> str:
    """"float32", "bfloat16" or "float16".

    Raises:
        FormatError: For any other dtype.
    """
    for name, known in DTYPE_NAMES.items():
        if known == dtype:
            return name
    raise FormatError(f"weights of dtype {dtype} cannot be packed; expected float32, bfloat16 or float16.")


def describe(groups: tuple[PackedGroupInfo, ...]) -> dict[str, Any]:
    """The `quantization_config` of config.json."""
    return {
        "quant_method": QUANT_METHOD,
        "format_version": FORMAT_VERSION,
        "groups": [{**asdict(g), "members": [asdict(m) for m in g.members]} for g in groups],
    }


def check_version(version: object) -> None:
    """Refuses a format this version of fips cannot read.

    Raises:
        FormatError: Naming both versions.
    """
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise FormatError(f"config.json has format_version {version!r}; this fips reads version {FORMAT_VERSION}.")
    if version > FORMAT_VERSION:
        raise FormatError(
            f"the checkpoint has format_version {version}; this fips reads up to {FORMAT_VERSION}. Update fips."
        )


def parse(description: Mapping[str, Any]) -> tuple[PackedGroupInfo, ...]:
    """Reads `quantization_config` back, strictly.

    Raises:
        FormatError: If the version is unknown or newer, or any value is missing or of the wrong kind.
    """
    check_version(description.get("format_version"))
    groups = description.get("groups")
    if not isinstance(groups, list) or not groups:
        raise FormatError("config.json describes no packed group; the checkpoint is damaged.")
    parsed = tuple(_group(group) for group in groups)
    names = [g.name for g in parsed] + [m.name for g in parsed for m in g.members]
    if len(set(names)) != len(names):
        raise FormatError("config.json describes a group or linear twice; the checkpoint is damaged.")
    return parsed


def _group(raw: object) -> PackedGroupInfo:
    name = str(_field(raw, "name", str, "a group"))
    where = f"group {name}"
    if not name or "." in name:
        raise FormatError(f"config.json: {where!r} is not a valid group name.")
    members = _field(raw, "members", list, where)
    dtype = str(_field(raw, "dtype", str, where))
    if dtype not in DTYPE_NAMES:
        raise FormatError(f"config.json: {where} has dtype {dtype!r}; expected one of {', '.join(DTYPE_NAMES)}.")
    if not members:
        raise FormatError(f"config.json: {where} has no member.")
    d, rank = (_positive(raw, key, where) for key in ("d", "rank"))
    identity = raw.get("identity", False) if isinstance(raw, dict) else None
    if not isinstance(identity, bool) or (identity and rank < d):
        raise FormatError(f"config.json: identity of {where} is {identity!r} at rank {rank} and width {d}.")
    return PackedGroupInfo(name, d, rank, dtype, tuple(_member(m, where, rank) for m in members), identity)


def _member(raw: object, where: str, rank: int) -> Member:
    name = str(_field(raw, "name", str, f"a member of {where}"))
    role = str(_field(raw, "role", str, name))
    f, nnz = _positive(raw, "f", name), int(_field(raw, "nnz", int, name))
    if role not in ("up", "down"):
        raise FormatError(f"config.json: {name} has role {role!r}; expected up or down.")
    if not 0 <= nnz <= rank * f:
        raise FormatError(f"config.json: {name} has {nnz} kept values of {rank * f}.")
    return Member(name, role, f, nnz)


def _positive(raw: object, key: str, where: str) -> int:
    value = int(_field(raw, key, int, where))
    if value < 1:
        raise FormatError(f"config.json: {key} of {where} is {value}; expected a positive number.")
    return value


def _field(raw: object, key: str, kind: type, where: str) -> Any:
    value = raw.get(key) if isinstance(raw, dict) else None
    if not isinstance(value, kind) or isinstance(value, bool):
        raise FormatError(f"config.json: {key} of {where} is {value!r}; the checkpoint is damaged.")
    return value
