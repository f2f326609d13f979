"""Eq. 1 of one matrix as a quadratic form in second moments, see docs/method.md, section 2."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Quadratic:
    """The reconstruction error tr(L (W - UV) R (W - UV)ᵀ) of one matrix, per token.

    Attributes:
        W: What U·V should be, (d, f).
        left: L = G of an up-type matrix, (d, d); None is the identity.
        right: R = H of a down-type matrix, (f, f); None is the identity.
    """

    W: Tensor
    left: Tensor | None
    right: Tensor | None

    def apply(self, E: Tensor) -> Tensor:
        """L E R, (d, f)."""
        E = E if self.left is None else self.left @ E
        return E if self.right is None else E @ self.right

    def energy(self, E: Tensor) -> float:
        """tr(L E R Eᵀ), summed in float64."""
        return float((self.apply(E) * E).sum(dtype=torch.float64 if E.device.type != "mps" else None))

    def relative_error(self, U: Tensor, V: Tensor) -> float:
        """Error of U·V divided by the energy of W."""
        return self.energy(self.W - U @ V) / max(self.energy(self.W), 1e-30)


def damped(S: Tensor, share: float = 1e-2) -> Tensor:
    """S + share · mean(diag S) · I: bounded away from singular, also with dead features or few tokens."""
    mean = S.diagonal().mean()
    return S + (share * mean if mean > 0 else 1.0) * torch.eye(len(S), dtype=S.dtype, device=S.device)


def on_cpu_where_needed(S: Tensor) -> Tensor:
    """The matrix where its decompositions exist: MPS has none."""
    return S.cpu() if S.device.type == "mps" else S


def spectrum(S: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues (non-negative) and eigenvectors of a symmetric positive semi-definite matrix."""
    values, vectors = torch.linalg.eigh(on_cpu_where_needed((S + S.T) / 2))
    return values.clamp_min(0).to(S.device), vectors.to(S.device)


def conjugate_gradients(
    operator: "Operator", rhs: Tensor, start: Tensor, diagonal: Tensor, iterations: int
) -> Tensor:
    """Preconditioned conjugate gradients for operator(X) = rhs.

    Args:
        operator: Symmetric positive semi-definite map.
        rhs: Right-hand side.
        start: First X.
        diagonal: Preconditioner, of X's shape or broadcast to it.
        iterations: Steps; it stops early when the residual vanishes.
    """
    X = start
    residual = rhs - operator(X)
    Z = residual / diagonal
    D, rz = Z, (residual * Z).sum()
    for _ in range(iterations):
        AD = operator(D)
        curvature = (D * AD).sum()
        if not curvature > 0:  # the residual is zero, or what is left of it is rounding
            break
        step = rz / curvature
        X = X + step * D
        residual = residual - step * AD
        Z = residual / diagonal
        rz, old = (residual * Z).sum(), rz
        D = Z + rz / old * D
    return X


class Operator:
    """A linear map on matrices: the sum of A X B over its terms, entries outside a mask left out."""

    def __init__(self, terms: Sequence[tuple[Tensor | None, Tensor | None]], mask: Tensor | None = None) -> None:
        self.terms = list(terms)
        self.mask = mask

    def __call__(self, X: Tensor) -> Tensor:
        """Applies the map; X has zeros outside the mask."""
        total: Tensor | None = None
        for A, B in self.terms:
            Y = X if B is None else X @ B
            Y = Y if A is None else A @ Y
            total = Y if total is None else total + Y
        if total is None:
            raise ValueError("an operator without terms")
        return total if self.mask is None else total * self.mask
