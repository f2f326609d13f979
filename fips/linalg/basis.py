"""Truncated SVD of matrices set side by side, without ever building the concatenation."""

from collections.abc import Iterable

import torch
from torch import Tensor

# FiPS appends copies of V's top rows divided by this when the rank exceeds d.
GROWTH_DIVISOR = 32.0


def moment(weights: Iterable[Tensor]) -> Tensor:
    """W Wᵀ summed over matrices of shape (d, f), in float64: (d, d)."""
    total: Tensor | None = None
    for W in weights:
        # MPS has no float64: the moment is formed on the CPU there.
        W64 = (W.cpu() if W.device.type == "mps" else W).double()
        total = W64 @ W64.T if total is None else total + W64 @ W64.T
    if total is None:
        raise ValueError("moment() of no matrix")
    return total


def leading_directions(S: Tensor, rank: int) -> Tensor:
    """Left singular vectors of the concatenation, from its moment S = Σ W Wᵀ.

    Args:
        S: Moment, (d, d), float64.
        rank: Number of directions; at most d are returned.

    Returns:
        Orthonormal columns by falling singular value, (d, min(rank, d)), float64. The sign of each column is
        fixed (largest entry positive), so equal inputs give equal factors.
    """
    U: Tensor = torch.linalg.eigh((S + S.T) / 2).eigenvectors.flip(1)[:, :rank]  # (d, min(r, d))
    peak = U.gather(0, U.abs().argmax(0, keepdim=True))
    return U * torch.where(peak < 0, -1.0, 1.0)


def grow(U: Tensor, rank: int) -> Tensor:
    """Appends zero columns to U until it has `rank` (FiPS, section 3.3: growth when r > d)."""
    return torch.cat([U, U.new_zeros(len(U), max(rank - U.shape[1], 0))], 1)  # (d, r)


def project(U: Tensor, W: Tensor, rank: int) -> Tensor:
    """Projection V of one matrix on an orthonormal basis, with the growth rows of FiPS.

    Args:
        U: Orthonormal columns, (d, k), in W's dtype and on its device.
        W: Matrix in canonical orientation, (d, f).
        rank: Rows of the result; rows beyond k repeat V's top rows divided by 32, cycled, so that the zero
            columns of the grown U receive a gradient while U·V is unchanged.

    Returns:
        V = Uᵀ W, (r, f), in W's dtype.
    """
    V = U.T @ W  # (k, f)
    if rank > len(V):
        rows = torch.arange(rank - len(V), device=V.device) % len(V)
        V = torch.cat([V, V[rows] / GROWTH_DIVISOR])  # (r, f)
    return V
