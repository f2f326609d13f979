"""The compressed linear, and the one owner of the shared bases."""

from typing import Any

import torch
from torch import Tensor, nn

from fips.errors import FormatError
from fips.linalg.packing import unpack
from fips.models.sites import from_canonical


class SharedBases(nn.Module):
    """Owns the basis U of every group, so that each exists once in memory and once on disk.

    Linears hold this owner and a key and ask for U in `forward`. Asking by a call, not by an attribute, lets
    accelerate's offloading hooks bring U to the device first.
    """

    def add_(self, group: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
        """Makes room for the basis of a group, (d, r)."""
        self.register_parameter(group, nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False))

    def forward(self, group: str) -> Tensor:
        """U of a group, (d, r).

        Raises:
            FormatError: If its values were never loaded.
        """
        U: Tensor = self.get_parameter(group)
        if U.device.type == "meta":
            raise FormatError(f"basis {group} has no values: the checkpoint was not loaded completely.")
        return U


class CompressedLinear(nn.Module):
    """A linear whose weight is U·V, V packed as kept values and mask bits.

    Up-type computes y = (x U) V + bias, down-type y = (h Vᵀ) Uᵀ + bias (docs/method.md, section 1).

    Attributes:
        weight: Kept values of V, (nnz,).
        mask: Mask bits of V, (r, ceil(f / 8)) uint8.
        bias: Bias of the linear, or None.
    """

    def __init__(self, bases: SharedBases, group: str, role: str, f: int, packed: dict[str, Any]) -> None:
        """Makes an empty layer.

        Args:
            bases: Owner of U.
            group: Key of U in `bases`.
            role: "up" or "down".
            f: Inner size of the matrix.
            packed: `nnz`, `rank`, `dtype` of the values, and `bias`: the shape of the bias or None.
        """
        super().__init__()
        self.__dict__["_bases"] = bases  # not a submodule: U must appear under its owner only
        self.group, self.role, self.f = group, role, f
        values = torch.empty(packed["nnz"], dtype=packed["dtype"])
        bits = torch.empty(packed["rank"], (f + 7) // 8, dtype=torch.uint8)
        self.weight = nn.Parameter(values, requires_grad=False)
        self.mask = nn.Parameter(bits, requires_grad=False)
        self.bias = None
        if packed["bias"] is not None:
            self.bias = nn.Parameter(torch.empty(packed["bias"], dtype=packed["dtype"]), requires_grad=False)

    def basis(self) -> Tensor:
        """U on this layer's device, (d, r)."""
        U: Tensor = self.__dict__["_bases"](self.group)
        return U.to(self.weight.device)

    def projection(self) -> Tensor:
        """V, (r, f).

        Raises:
            FormatError: If mask and values do not belong together.
        """
        return unpack(self.weight.detach(), self.mask.detach(), self.f)

    def forward(self, x: Tensor) -> Tensor:
        """Applies the linear. The weight is rebuilt for the call exactly as the dense runtime rebuilds it."""
        W = from_canonical(rebuild(self.basis(), self.projection()), transposed=self.role == "up")
        return nn.functional.linear(x, W.to(x.dtype), self.bias)

    def extra_repr(self) -> str:
        """Shape for `print(model)`."""
        return f"group={self.group}, role={self.role}, f={self.f}, nnz={self.weight.numel()}"


def rebuild(U: Tensor, V: Tensor) -> Tensor:
    """W = U V, (d, f): computed in float32, rounded once to the factors' dtype."""
    return (U.float() @ V.float()).to(V.dtype)
