"""Eq. 1 of one matrix as a quadratic form in second moments, see docs/method.md, section 2."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

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

    @cached_property
    def target(self) -> Tensor:
        """L W R, (d, f)."""
        return self.apply(self.W)

    @cached_property
    def weight(self) -> float:
        """1 / energy of W: makes the errors of different matrices comparable."""
        return 1 / max(self.energy(self.W), 1e-30)

    @cached_property
    def columns(self) -> Tensor:
        """Root of R's diagonal: the scale of V's columns, (f,); a scalar 1 where R is the identity."""
        if self.right is None:
            return torch.ones((), dtype=self.W.dtype, device=self.W.device)
        return self.right.diagonal().clamp_min(TINY).sqrt()

    @cached_property
    def scaled_right(self) -> Tensor | None:
        """R with a unit diagonal, (f, f)."""
        return None if self.right is None else self.right / self.columns[:, None] / self.columns

    @cached_property
    def right_spectrum(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues and eigenvectors of the scaled R; computed once for all plans that are tried."""
        if self.scaled_right is None:
            raise ValueError("R is the identity")
        return spectrum(self.scaled_right)

    def relative_error(self, U: Tensor, V: Tensor) -> float:
        """Error of U·V divided by the energy of W."""
        return self.energy(self.W - U @ V) * self.weight


TINY = 1e-12

# Damping of the moments, relative to their mean diagonal; the next one is taken when a solve breaks down.
DAMPING = (1e-2, 1e-1, 1.0)


def damped(S: Tensor, share: float = DAMPING[0]) -> Tensor:
    """S / mean(diag S) + share · I: bounded away from singular, also with dead features or few tokens.

    The scale of the activations drops out, so that float32 holds any of them; a moment of zeros becomes the identity.
    """
    mean = S.diagonal().mean()
    eye = torch.eye(len(S), dtype=S.dtype, device=S.device)
    return S / mean + share * eye if mean > 0 else eye


def on_cpu_where_needed(S: Tensor) -> Tensor:
    """The matrix where its decompositions exist: MPS has none."""
    return S.cpu() if S.device.type == "mps" else S


def spectrum(S: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues (non-negative) and eigenvectors of a symmetric positive semi-definite matrix."""
    values, vectors = torch.linalg.eigh(on_cpu_where_needed((S + S.T) / 2))
    return values.clamp_min(0).to(S.device), vectors.to(S.device)


def conjugate_gradients(
    operator: "Operator",
    rhs: Tensor,
    start: Tensor,
    diagonal: Tensor | float,
    iterations: int,
    quick: "Operator | None" = None,
) -> Tensor:
    """Preconditioned conjugate gradients for operator(X) = rhs.

    Args:
        operator: Symmetric positive semi-definite map.
        rhs: Right-hand side.
        start: First X.
        diagonal: Preconditioner, of X's shape or broadcast to it.
        iterations: Steps; it stops early when the residual vanishes.
        quick: The same map in lower precision for the steps. The residual they start from is always computed with
            `operator` (iterative refinement), so its rounding only slows the last digits of the correction.
    """
    X = start
    residual = rhs - operator(X)
    operator = quick or operator
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

    def to(self, dtype: torch.dtype) -> "Operator":
        """The same map with its products in another dtype; what it returns keeps the argument's."""
        cast = [tuple(None if t is None else t.to(dtype) for t in term) for term in self.terms]
        return Operator([(A, B) for A, B in cast], self.mask)

    def __call__(self, X: Tensor) -> Tensor:
        """Applies the map; X has zeros outside the mask."""
        total: Tensor | None = None
        for A, B in self.terms:
            Y = X if B is None else X.to(B.dtype) @ B
            Y = (Y if A is None else A @ Y.to(A.dtype)).to(X.dtype)
            total = Y if total is None else total + Y
        if total is None:
            raise ValueError("an operator without terms")
        return total if self.mask is None else total * self.mask
