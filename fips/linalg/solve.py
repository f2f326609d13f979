"""Second-moment solver: sparse V by ADMM and masked conjugate gradients, dense U by conjugate gradients, in turn.

Letters as in docs/method.md. For one matrix and fixed U, with P = UᵀLU and B = UᵀLWR, the optimal V solves P V R = B.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fips.linalg.prune import largest_masks
from fips.linalg.quadratic import TINY, Operator, Quadratic, conjugate_gradients, on_cpu_where_needed, spectrum


def choosing_dtype(like: Tensor) -> torch.dtype:
    """Precision of the products inside ADMM and conjugate gradients: bfloat16 where the hardware multiplies it.

    Their rounding (0.4 %) is far below the differences between entries that are kept and entries that are not, and
    every fit of values starts from a residual in the full precision.
    """
    if like.dtype != torch.float32:
        return like.dtype
    if like.device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else like.dtype
    quick = like.device.type == "cpu" and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.bfloat16 if quick else like.dtype


@dataclass(frozen=True)
class Effort:
    """How hard one alternation works, and when alternating ends.

    Attributes:
        rounds: Alternations at most.
        admm: ADMM steps per alternation; they choose the entries of V.
        values: Conjugate-gradient steps on the chosen entries.
        basis: Conjugate-gradient steps on U.
        rho: ADMM penalty, relative to the unit diagonal of the scaled problem.
        momentum: Share of U's last change that is added before the next alternation.
        tolerance: Relative decrease of the error below which alternating ends.
    """

    rounds: int = 6
    admm: int = 6
    values: int = 5
    basis: int = 12
    rho: float = 0.3
    momentum: float = 0.5
    tolerance: float = 0.01


def initial_basis(matrices: Sequence[Quadratic], rank: int) -> Tensor:
    """[I | leading directions of the matrices in the metric of their data], the first `rank` columns.

    Below d columns it is the leading directions alone. With the identity among its atoms a factorization contains plain
    pruning as a special case.

    Returns:
        U, (d, rank).
    """
    d = matrices[0].W.shape[0]
    C = torch.zeros(d, d, dtype=matrices[0].W.dtype, device=matrices[0].W.device)
    for m in matrices:
        WR = m.W if m.right is None else m.W @ m.right
        level = 1.0 if m.left is None else float(m.left.diagonal().mean())
        C += WR @ m.W.T * (level * m.weight)
    directions = spectrum(C)[1].flip(1)
    if rank < d:
        return directions[:, :rank].contiguous()
    atoms = torch.cat([torch.eye(d, dtype=C.dtype, device=C.device), directions], 1)
    if rank > 2 * d:  # more atoms than that: averages of random pairs, so that none is zero or a copy
        generator = torch.Generator().manual_seed(rank)
        signs = torch.randint(0, 2, (d, rank - 2 * d), generator=generator).to(C) * 2 - 1
        atoms = torch.cat([atoms, signs / d**0.5], 1)
    return atoms[:, :rank].contiguous()


class SparseProjection:
    """V of one matrix, with what its solves share over the alternations.

    Attributes:
        matrix: The objective.
        keep: Non-zeros of V.
        V: Current projection, (r, f); None before the first solve.
    """

    def __init__(self, matrix: Quadratic, keep: int) -> None:
        self.matrix, self.keep = matrix, keep
        self.V: Tensor | None = None
        self._dual: Tensor | None = None

    def solve(self, U: Tensor, gram: "Gram", effort: Effort) -> None:
        """Chooses the entries of V for this U by ADMM, then fits their values."""
        scale = gram.rows[:, None] * self.matrix.columns
        B = (U.T @ self.matrix.target) / scale  # (r, f); from here P and R have unit diagonals
        solve = self._penalized(B, gram, effort.rho)
        Z, Y = self._start(solve, scale)
        for _ in range(effort.admm):
            C = solve(Z - Y) + Y
            Z = C * largest_masks([C], self.keep)[0]
            Y = C - Z
        self._dual = Y / scale
        self.V = self._fit(B, Z, gram, effort.values) / scale

    def _start(self, solve: Callable[[Tensor | None], Tensor], scale: Tensor) -> tuple[Tensor, Tensor]:
        if self.V is None or self._dual is None:
            X = solve(None)
            return X * largest_masks([X], self.keep)[0], torch.zeros_like(X)
        return self.V * scale, self._dual * scale

    def _penalized(self, B: Tensor, gram: "Gram", rho: float) -> Callable[[Tensor | None], Tensor]:
        """Solver of the scaled problem P X R + rho X = B + rho T, as a function of T."""
        if self.matrix.right is None:
            inverse = gram.inverse(rho)
            base, quick = inverse @ B, choosing_dtype(inverse)
            inverse = (rho * inverse).to(quick)
            return lambda T: base if T is None else base + inverse @ T.to(quick)
        values, Q = gram.spectrum()
        right, K = self.matrix.right_spectrum
        weights = 1 / (values[:, None] * right + rho)
        turned, quick = Q.T @ B @ K, choosing_dtype(Q)
        Q, K = Q.to(quick), K.to(quick)

        def solve(T: Tensor | None) -> Tensor:
            rhs = turned if T is None else turned + rho * (Q.T @ T.to(quick) @ K)
            return (Q @ (rhs * weights).to(quick) @ K.T).to(turned.dtype)

        return solve

    def _fit(self, B: Tensor, Z: Tensor, gram: "Gram", iterations: int) -> Tensor:
        """Values of the scaled V on its entries: masked conjugate gradients on P Z R = B."""
        mask = Z != 0
        operator = Operator([(gram.scaled, self.matrix.scaled_right)], mask)
        quick = operator.to(choosing_dtype(gram.scaled))
        return conjugate_gradients(operator, B * mask, Z, 1.0, iterations, quick)


class Gram:
    """P = UᵀLU of one left moment, with the decompositions its matrices share.

    Attributes:
        rows: Square root of P's diagonal, (r,): the scale of V's rows.
        scaled: P with a unit diagonal, (r, r).
    """

    def __init__(self, U: Tensor, left: Tensor | None) -> None:
        P = U.T @ (U if left is None else left @ U)
        self.rows = P.diagonal().clamp_min(TINY).sqrt()
        self.scaled = P / self.rows[:, None] / self.rows
        self._inverse: Tensor | None = None
        self._spectrum: tuple[Tensor, Tensor] | None = None

    def inverse(self, rho: float) -> Tensor:
        """(P + rho I)⁻¹ of the scaled P; positive definite also when r > d makes P singular."""
        if self._inverse is None:
            S = on_cpu_where_needed(self.scaled)
            L = torch.linalg.cholesky(S + rho * torch.eye(len(S), dtype=S.dtype, device=S.device))
            self._inverse = torch.cholesky_inverse(L).to(self.scaled.device)
        return self._inverse

    def spectrum(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues and eigenvectors of the scaled P."""
        if self._spectrum is None:
            self._spectrum = spectrum(self.scaled)
        return self._spectrum


def solve_basis(
    matrices: Sequence[Quadratic], projections: Sequence[Tensor], U: Tensor, iterations: int, *, fixed: int = 0
) -> Tensor:
    """U for fixed V: conjugate gradients on Σ wᵢ Lᵢ U (Vᵢ Rᵢ Vᵢᵀ) = Σ wᵢ Lᵢ Wᵢ Rᵢ Vᵢᵀ, wᵢ = 1 / energy of Wᵢ.

    Matrices that share one left moment (gate and up of a block) share one product.

    Args:
        matrices: Objectives of a group.
        projections: V of each, (r, f).
        U: Where to start, (d, r).
        iterations: Conjugate-gradient steps.
        fixed: Leading columns of U that stay as they are.

    Returns:
        U, (d, r).
    """
    if fixed >= U.shape[1]:
        return U
    sums: dict[int, tuple[Tensor | None, Tensor]] = {}
    rhs, diagonal = torch.zeros_like(U), torch.zeros_like(U)
    for m, V in zip(matrices, projections, strict=True):
        C = m.weight * ((V if m.right is None else V @ m.right) @ V.T)  # (r, r)
        rhs += m.weight * (m.target @ V.T)
        left = torch.ones_like(U[:, 0]) if m.left is None else m.left.diagonal()
        diagonal += left[:, None] * C.diagonal()
        known = sums.get(id(m.left))
        sums[id(m.left)] = (m.left, C if known is None else known[1] + C)
    if not fixed:
        return conjugate_gradients(Operator(list(sums.values())), rhs, U, diagonal.clamp_min(TINY), iterations)
    held, free = U[:, :fixed], U[:, fixed:]
    taken = Operator([(L, C[:fixed, fixed:]) for L, C in sums.values()])(held)  # what the fixed columns explain
    operator = Operator([(L, C[fixed:, fixed:]) for L, C in sums.values()])
    diagonal = diagonal[:, fixed:].clamp_min(TINY)
    return torch.cat([held, conjugate_gradients(operator, rhs[:, fixed:] - taken, free, diagonal, iterations)], 1)


@dataclass(frozen=True)
class Solution:
    """Factors of a group.

    Attributes:
        U: Shared basis, (d, r).
        V: Projections in the order of the matrices, (r, f) each.
        error: Mean relative error over the matrices.
        rounds: Alternations that were run.
    """

    U: Tensor
    V: list[Tensor]
    error: float
    rounds: int


def alternate(
    matrices: Sequence[Quadratic],
    U: Tensor,
    keep: Sequence[int],
    effort: Effort,
    progress: Callable[[int, float], None] = lambda _n, _e: None,
    *,
    fixed: int = 0,
) -> Solution:
    """Solves for every V, then for U, until the error stops falling; the best alternation is returned.

    Args:
        matrices: Objectives of a group.
        U: Initial basis, (d, r).
        keep: Non-zeros of every V.
        effort: How hard to work.
        progress: Called after every alternation with 1 and the mean relative error.
        fixed: Leading columns of U that stay as they are (an identity that is not stored).
    """
    projections = [SparseProjection(m, k) for m, k in zip(matrices, keep, strict=True)]
    best = Solution(U, [], float("inf"), 0)
    previous = U
    for number in range(1, effort.rounds + 1):
        ahead = U + effort.momentum * (U - previous)
        previous = U
        grams = {id(m.left): Gram(ahead, m.left) for m in matrices}
        for p in projections:
            p.solve(ahead, grams[id(p.matrix.left)], effort)
        del grams  # decompositions are large, and the next alternation has its own
        V = [p.V for p in projections if p.V is not None]
        U = solve_basis(matrices, V, ahead, effort.basis, fixed=fixed)
        error = sum(m.relative_error(U, v) for m, v in zip(matrices, V, strict=True)) / len(matrices)
        progress(1, error)
        fell = best.error - error
        if error < best.error:
            best = Solution(U, V, error, number)
        if not fell > effort.tolerance * error:
            break
    return best
