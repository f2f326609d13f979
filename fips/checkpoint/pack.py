"""Factors of a group to the tensors that are stored."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fips.checkpoint.format import Member, PackedGroupInfo, basis_key, dtype_name
from fips.checkpoint.safetensors_io import tensor_bytes
from fips.errors import NumericalError
from fips.linalg.packing import pack, unpack
from fips.models.layers import rebuild
from fips.models.sites import Site, from_canonical


@dataclass(frozen=True)
class PackedGroup:
    """A group as it is stored.

    Attributes:
        info: Its description in config.json.
        tensors: On-disk name → tensor: basis, values, masks and biases.
    """

    info: PackedGroupInfo
    tensors: dict[str, Tensor]

    def digests(self) -> dict[str, str]:
        """On-disk name → SHA-256 of the stored bytes."""
        return {name: digest(tensor) for name, tensor in self.tensors.items()}

    def weight(self, site: Site) -> Tensor:
        """The linear's weight exactly as a loaded model has it, in the stored layout."""
        V = unpack(self.tensors[f"{site.disk_name}.weight"], self.tensors[f"{site.disk_name}.mask"], site.f)
        U = self.tensors.get(basis_key(self.info.name))
        return from_canonical(rebuild(V.new_empty(site.d, 0) if U is None else U, V), transposed=site.transposed)

    def bias(self, site: Site) -> Tensor | None:
        """The linear's bias, if it has one."""
        return self.tensors.get(f"{site.disk_name}.bias")


def digest(tensor: Tensor) -> str:
    """SHA-256 of a tensor's stored bytes."""
    return hashlib.sha256(tensor_bytes(tensor)).hexdigest()


def pack_group(
    name: str,
    sites: Sequence[Site],
    basis: Tensor,
    projections: Mapping[str, Tensor],
    biases: Mapping[str, Tensor],
    dtype: torch.dtype,
) -> PackedGroup:
    """Rounds the factors of a group to the stored dtype and packs them.

    Args:
        name: Group name.
        sites: Its matrices.
        basis: Stored columns of U, (d, k): all of them, or those after a leading identity (k = r - d, may be 0).
        projections: Module name → V, (r, f).
        biases: Module name → bias.
        dtype: dtype of the stored values.

    Raises:
        NumericalError: If a rounded factor is not finite, naming it.
    """
    U = basis.cpu().to(dtype)
    if not torch.isfinite(U).all():
        raise NumericalError(f"the basis of {name} holds NaN or infinite values as {dtype}; nothing is stored.")
    d, columns = U.shape
    rank, *others = {len(projections[site.name]) for site in sites}
    if others or rank - columns not in (0, d):
        ranks = sorted([rank, *others])
        raise ValueError(f"{name}: {columns} stored columns of width {d} do not make a basis for V of {ranks} rows")
    tensors, members = {basis_key(name): U} if columns else {}, []
    for site in sites:
        try:
            values, mask = pack(projections[site.name].cpu().to(dtype))
        except NumericalError as error:
            raise NumericalError(f"{site.name} as {dtype}: {error}") from error
        tensors[f"{site.disk_name}.weight"], tensors[f"{site.disk_name}.mask"] = values, mask
        if site.name in biases:
            tensors[f"{site.disk_name}.bias"] = biases[site.name].cpu().to(dtype)
        members.append(Member(site.disk_name, site.role, site.f, values.numel()))
    info = PackedGroupInfo(name, d, rank, dtype_name(dtype), tuple(members), identity=rank != columns)
    return PackedGroup(info, tensors)
