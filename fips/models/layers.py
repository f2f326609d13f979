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
        """Makes room for the stored columns of a group's basis, (d, k), k > 0."""
        self.register_parameter(group, nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False))

    def forward(self, group: str) -> Tensor:
        """Stored columns of a group's U, (d, k).

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
            packed: `nnz`, `rank`, `d`, `columns` (stored ones of U), `dtype` of the values, and `bias`: the shape of
                the bias or None.
        """
        super().__init__()
        self.__dict__["_bases"] = bases  # not a submodule: U must appear under its owner only
        self.group, self.role, self.f = group, role, f
        self.d, self.columns = packed["d"], packed["columns"]
        values = torch.empty(packed["nnz"], dtype=packed["dtype"])
        bits = torch.empty(packed["rank"], (f + 7) // 8, dtype=torch.uint8)
        self.weight = nn.Parameter(values, requires_grad=False)
        self.mask = nn.Parameter(bits, requires_grad=False)
        self.bias = None
        if packed["bias"] is not None:
            self.bias = nn.Parameter(torch.empty(packed["bias"], dtype=packed["dtype"]), requires_grad=False)

    def basis(self) -> Tensor:
        """Stored columns of U on this layer's device, (d, k); of a pure identity nothing is stored and k is 0."""
        if not self.columns:
            return self.weight.detach().new_empty(self.d, 0)
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


def rebuild(basis: Tensor, V: Tensor) -> Tensor:
    """W = U V, (d, f): computed in float32, rounded once to the factors' dtype.

    Args:
        basis: Stored columns of U, (d, k). With k = r all of U; with k = r - d (which may be 0) U = [I | basis], and
            W = V[:d] + basis V[d:].
        V: Projection, (r, f).

    Raises:
        FormatError: If k is neither.
    """
    d, k = basis.shape
    if k == len(V):
        return (basis.float() @ V.float()).to(V.dtype)
    if k + d != len(V):
        raise FormatError(f"a basis of shape {d} x {k} does not fit a projection of {len(V)} rows.")
    W = V[:d].float()
    return (W + basis.float() @ V[d:].float() if k else W).to(V.dtype)
