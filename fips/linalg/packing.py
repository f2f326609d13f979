"""A sparse matrix as kept values and one mask bit per entry, and back. Exact inverses."""

import torch
from torch import Tensor

from fips.errors import FormatError, NumericalError

_BITS = tuple(1 << i for i in range(8))  # least significant bit first
# Byte → its eight bits as eight bools, which are the bytes of one int64: one look-up gives eight entries of a mask.
_TABLE = [[bool(byte & bit) for bit in _BITS] for byte in range(256)]
_EIGHT = torch.tensor(_TABLE, device="cpu").view(torch.int64)[:, 0]  # (256,)


def pack(V: Tensor) -> tuple[Tensor, Tensor]:
    """Packs the non-zeros of V. Both +0.0 and -0.0 count as zero.

    Args:
        V: Matrix, (r, f).

    Returns:
        Kept values in row-major order, (nnz,) in V's dtype, and the mask bits, (r, ceil(f / 8)) uint8, least
        significant bit first, tail bits of a row zero.

    Raises:
        NumericalError: If V holds NaN or infinity.
    """
    if not torch.isfinite(V).all():
        raise NumericalError(f"projection of shape {tuple(V.shape)} holds NaN or infinite values; nothing is stored.")
    mask = V != 0  # (r, f)
    return V[mask], pack_mask(mask)


def unpack(values: Tensor, bits: Tensor, f: int) -> Tensor:
    """Rebuilds V from its kept values and mask bits.

    Args:
        values: Kept values, (nnz,).
        bits: Mask bits, (r, ceil(f / 8)) uint8.
        f: Columns of V.

    Returns:
        V, (r, f), in the values' dtype.

    Raises:
        FormatError: If the mask does not fit f, has stray tail bits, or counts other than nnz entries.
    """
    mask = unpack_mask(bits, f)
    if int(mask.sum()) != values.numel():
        raise FormatError(f"mask counts {int(mask.sum())} entries but {values.numel()} values are stored.")
    V = torch.zeros(mask.shape, dtype=values.dtype, device=values.device)
    return V.masked_scatter_(mask, values)


def pack_mask(mask: Tensor) -> Tensor:
    """Mask (r, f) bool to bits (r, ceil(f / 8)) uint8."""
    r, f = mask.shape
    padded = torch.nn.functional.pad(mask, (0, -f % 8)).view(r, -1, 8)  # (r, ceil(f/8), 8)
    weights = torch.tensor(_BITS, dtype=torch.uint8, device=mask.device)
    return (padded.to(torch.uint8) * weights).sum(-1, dtype=torch.uint8)


def unpack_mask(bits: Tensor, f: int) -> Tensor:
    """Bits (r, ceil(f / 8)) uint8 to mask (r, f) bool.

    Raises:
        FormatError: If the width does not fit f or a tail bit is set.
    """
    if bits.dim() != 2 or bits.shape[1] != (f + 7) // 8:
        raise FormatError(f"mask of shape {tuple(bits.shape)} does not fit {f} columns.")
    eights = torch.index_select(_EIGHT.to(bits.device), 0, bits.flatten().int())
    mask = eights.view(torch.bool).view(len(bits), 8 * bits.shape[1])  # (r, 8·ceil(f/8))
    if f % 8 and mask[:, f:].any():
        raise FormatError(f"mask has bits set beyond its {f} columns.")
    return mask[:, :f]
