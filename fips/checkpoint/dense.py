"""The dense checkpoint that a compressed folder stands for, tensor by tensor."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fips.checkpoint.format import DTYPE_NAMES, QUANT_METHOD, Member, PackedGroupInfo, basis_key, parse
from fips.checkpoint.reload import as_stored, packed_problems, stored_tensors
from fips.checkpoint.safetensors_io import Entry, TensorInfo, read_tensor
from fips.checkpoint.source import read_config, require_depth, weight_paths
from fips.checkpoint.tokenizer import load_config
from fips.errors import FipsError, FormatError
from fips.linalg.packing import unpack
from fips.models.layers import rebuild
from fips.models.sites import from_canonical, is_transposed
from fips.models.skeleton import build_skeleton, disk_renamer, map_names, require_tensors

Stored = Mapping[str, tuple[Path, TensorInfo]]


@dataclass
class PackedCheckpoint:
    """A compressed folder whose tensors are read one by one.

    Attributes:
        folder: The folder.
        config: Its config.json.
        groups: Its description, with names and dtypes as stored.
        stored: Tensor name → its file and header entry.
        transposed: Name of a packed linear → whether its weight is the transpose of the canonical (d, f).
    """

    folder: Path
    config: dict[str, Any]
    groups: tuple[PackedGroupInfo, ...]
    stored: Stored
    transposed: dict[str, bool]
    _basis: tuple[str, Tensor] | None = field(default=None, repr=False)

    def rebuilt(self) -> dict[str, Entry]:
        """Tensor name → the weight of every packed linear as a model that is loaded the default way has it."""
        found = {}
        for group in self.groups:
            dtype = self._loaded_dtype(group)
            for member in group.members:
                shape = (group.d, member.f)
                info = TensorInfo(dtype, shape[::-1] if self.transposed[member.name] else shape)
                found[f"{member.name}.weight"] = Entry(
                    info,
                    lambda g=group, m=member, t=dtype: self._weight(g, m, t),  # type: ignore[misc]
                )
        return found

    def kept(self) -> dict[str, Entry]:
        """Every tensor that is not packed, as it is stored."""
        packed = {name for group in self.groups for name in group.tensors()}
        return {
            name: Entry(info, lambda p=path, n=name: read_tensor(p, n))  # type: ignore[misc]
            for name, (path, info) in self.stored.items()
            if name not in packed
        }

    def read(self, name: str) -> Tensor:
        """One stored tensor.

        Raises:
            FormatError: If it is missing or cannot be read.
        """
        if name not in self.stored:
            raise FormatError(f"{name} is missing from the weights; the checkpoint is damaged.")
        return read_tensor(self.stored[name][0], name)

    def _loaded_dtype(self, group: PackedGroupInfo) -> torch.dtype:
        """What the group is loaded in by default: the dtype of config.json, from which the stored one can differ."""
        name = self.config.get("dtype", self.config.get("torch_dtype"))
        return DTYPE_NAMES.get(str(name).removeprefix("torch."), DTYPE_NAMES[group.dtype])

    def _weight(self, group: PackedGroupInfo, member: Member, dtype: torch.dtype) -> Tensor:
        try:
            V = unpack(self.read(f"{member.name}.weight"), self.read(f"{member.name}.mask"), member.f).to(dtype)
        except FormatError as error:
            raise FormatError(f"{member.name}: {error}") from error
        W = rebuild(self._columns(group).to(dtype), V)
        if not torch.isfinite(W).all():
            raise FormatError(f"{member.name}: the rebuilt weight holds NaN or infinity; the checkpoint is damaged.")
        return from_canonical(W, transposed=self.transposed[member.name])

    def _columns(self, group: PackedGroupInfo) -> Tensor:
        """Stored columns of the group's U, (d, k); the last group's stay in memory."""
        if not group.columns:
            return torch.empty(group.d, 0)
        if self._basis is None or self._basis[0] != group.name:
            self._basis = (group.name, self.read(basis_key(group.name)))
        return self._basis[1]


def open_packed(folder: Path, *, trust_remote_code: bool = False) -> PackedCheckpoint:
    """Opens a compressed folder; headers are checked, no tensor is read.

    Raises:
        FipsError: If it is not compressed by fips, is damaged, or does not fit its config.json.
    """
    opened, problems = examine(folder, trust_remote_code=trust_remote_code)
    if opened is None or problems:
        raise problems[0]
    return opened


def examine(folder: Path, *, trust_remote_code: bool = False) -> tuple[PackedCheckpoint | None, list[FipsError]]:
    """Opens a compressed folder and finds everything that is wrong with its description and headers.

    Returns:
        The checkpoint, if so much of it is right that its tensors can be read, and what is wrong.
    """
    problems: list[FipsError] = []
    config, groups, stored = None, None, _headers(folder, problems)
    try:
        config = read_config(folder)
        groups = parse(description_of(folder, config))
        require_depth(config, max(len(stored), 1), folder)
    except FipsError as error:
        problems.append(error)
    if config is None or groups is None or problems:
        return None, problems
    groups = as_stored(groups, stored)
    problems += [FormatError(problem) for problem in packed_problems(groups, stored)]
    try:
        stated = load_config(folder, trust_remote_code=trust_remote_code)
        stated.quantization_config = None
        model = build_skeleton(stated, trust_remote_code=trust_remote_code)
        opened = PackedCheckpoint(folder, config, groups, stored, orientations(model, groups))
        problems += [FormatError(problem) for problem in shape_problems(model, opened)]
    except FipsError as error:
        return None, [*problems, error]
    return opened, problems


def _headers(folder: Path, problems: list[FipsError]) -> dict[str, tuple[Path, TensorInfo]]:
    """Tensor name → its file and header entry, of the files that can be read; what is wrong goes to `problems`."""
    stored: dict[str, tuple[Path, TensorInfo]] = {}
    try:
        files = weight_paths(folder)
    except FipsError as error:
        problems.append(error)
        files = []
    for path in files:
        try:
            found = stored_tensors([path])
        except FipsError as error:
            problems.append(error)
            continue
        twice = sorted(found.keys() & stored.keys())
        problems += [FormatError(f"{n} is stored in {stored[n][0].name} and in {path.name}.") for n in twice]
        stored |= found
    return stored


def description_of(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """The `quantization_config` of a compressed folder.

    Raises:
        FormatError: If there is none of fips.
    """
    description = config.get("quantization_config")
    if not isinstance(description, dict) or description.get("quant_method") != QUANT_METHOD:
        raise FormatError(f"{folder} is not a checkpoint compressed by fips; transformers loads it without.")
    return description


def orientations(model: nn.Module, groups: tuple[PackedGroupInfo, ...]) -> dict[str, bool]:
    """Name of a packed linear → whether its dense weight is the transpose of the canonical (d, f).

    `Linear` and `Conv1D` differ, and with d = f no shape tells: the module does.

    Raises:
        FormatError: If the model has no such linear.
    """
    rename = disk_renamer(model)
    found = {}
    for group in groups:
        for member in group.members:
            name = rename(f"{member.name}.weight").removesuffix(".weight")
            try:
                module = model.get_submodule(name)
            except AttributeError as error:
                kind = type(model).__name__
                raise FormatError(f"{member.name} is packed, but a {kind} has no such layer.") from error
            found[member.name] = is_transposed(module, member.role)
    return found


def shape_problems(model: nn.Module, opened: PackedCheckpoint) -> list[str]:
    """Tensors that the model of config.json lacks or has in another shape, one sentence each."""
    entries = {**opened.kept(), **opened.rebuilt()}
    names = map_names(model, entries)
    problems = []
    try:
        require_tensors(model, names)
    except FipsError as error:
        problems.append(str(error))
    for name, parameter in model.named_parameters():
        info = entries[names[name]].info if name in names else None
        if info is not None and info.shape != tuple(parameter.shape):
            asked = list(parameter.shape)
            problems.append(f"{names[name]} has the shape {list(info.shape)}; config.json asks for {asked}.")
        elif info is not None and not info.dtype.is_floating_point:
            problems.append(f"{names[name]} is stored as {info.dtype}; expected a floating-point dtype.")
    return problems
