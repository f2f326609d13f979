"""The second-moment solver against dense least squares in float64, and its promises."""

import itertools
from pathlib import Path

import pytest
import torch

import fips
from fips.linalg.quadratic import Operator, Quadratic, conjugate_gradients, damped
from fips.linalg.solve import Effort, Gram, SparseProjection, alternate, initial_basis, solve_basis
from fips.stages.candidates import split_evenly
from fips.stages.grouping import Group

D, F = 6, 10


def psd(n: int, seed: int) -> torch.Tensor:
    X = torch.randn(3 * n, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return X.T @ X / len(X)


def matrices(count: int = 3) -> list[Quadratic]:
    """Up, up (same input) and down matrices in float64."""
    W = torch.randn(count, D, F, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    G = damped(psd(D, 1))
    kinds = [(G, None), (G, None), (None, damped(psd(F, 2)))]
    return [Quadratic(W[i], *kinds[i % 3]) for i in range(count)]


def kron(m: Quadratic, P: torch.Tensor) -> torch.Tensor:
    """The operator X -> P X R as a matrix over row-major entries of X."""
    R = torch.eye(F, dtype=torch.float64) if m.right is None else m.right
    return torch.kron(P, R)


@pytest.mark.parametrize("index", [0, 2])
@pytest.mark.parametrize("rank", [4, 9])
def test_values_on_a_mask_are_the_least_squares_ones(index: int, rank: int) -> None:
    m = matrices()[index]
    U = torch.randn(D, rank, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    keep = 12  # fewer than d·f, so that the normal equations on the mask are regular
    projection = SparseProjection(m, keep)
    projection.solve(U, Gram(U, m.left), Effort(admm=5, values=400))
    V = projection.V
    assert V is not None
    mask = (V != 0).flatten()
    assert int(mask.sum()) == keep
    A = kron(m, U.T @ (U if m.left is None else m.left @ U))[mask][:, mask]
    b = (U.T @ m.apply(m.W)).flatten()[mask]
    expected = torch.linalg.solve(A, b)
    assert (V.flatten()[mask] - expected).norm() <= 1e-8 * expected.norm()


@pytest.mark.parametrize("rank", [4, 9])
def test_the_basis_is_the_least_squares_one(rank: int) -> None:
    group = matrices()
    generator = torch.Generator().manual_seed(5)
    V = [torch.randn(rank, F, generator=generator, dtype=torch.float64) for _ in group]
    start = torch.randn(D, rank, generator=generator, dtype=torch.float64)
    U = solve_basis(group, V, start, 400)
    A, b = torch.zeros(D * rank, D * rank, dtype=torch.float64), torch.zeros(D * rank, dtype=torch.float64)
    for m, v in zip(group, V, strict=True):
        w = 1 / m.energy(m.W)
        L = torch.eye(D, dtype=torch.float64) if m.left is None else m.left
        R = torch.eye(F, dtype=torch.float64) if m.right is None else m.right
        A += w * torch.kron(L, v @ R @ v.T)
        b += w * (m.apply(m.W) @ v.T).flatten()
    expected = torch.linalg.solve(A, b).view(D, rank)
    assert (U - expected).norm() <= 1e-8 * expected.norm()


@pytest.mark.parametrize("keep", [0, 1, 37, 9 * F])
def test_kept_counts_are_exact(keep: int) -> None:
    for m in matrices():
        U = initial_basis(matrices(), 9)
        projection = SparseProjection(m, keep)
        projection.solve(U, Gram(U, m.left), Effort())
        assert projection.V is not None
        assert int((projection.V != 0).sum()) == keep


def test_with_everything_kept_the_factorization_is_exact() -> None:
    group = matrices()
    solution = alternate(group, initial_basis(group, D), [D * F] * 3, Effort(rounds=3, values=200, basis=50))
    assert solution.error <= 1e-12


@pytest.mark.parametrize("rank", [4, 9])
def test_the_best_alternation_is_returned(rank: int) -> None:
    group, seen = matrices(), []
    effort = Effort(rounds=8, values=30, basis=30, momentum=0.0, tolerance=-1.0)
    solution = alternate(group, initial_basis(group, rank), [20] * 3, effort, lambda _n, e: seen.append(e))
    assert len(seen) == 8
    assert solution.error == min(seen)
    found = sum(m.relative_error(solution.U, V) for m, V in zip(group, solution.V, strict=True)) / 3
    assert found == pytest.approx(solution.error, rel=1e-12)
    assert solution.error < 0.9 * seen[0]


def test_values_and_basis_never_raise_the_error_of_chosen_entries() -> None:
    group = matrices()
    U = initial_basis(group, 9)
    projections = [SparseProjection(m, 20) for m in group]
    for p in projections:
        p.solve(U, Gram(U, p.matrix.left), Effort(values=0))
    errors = []
    for _ in range(6):
        V = [p.V for p in projections if p.V is not None]
        errors.append(sum(m.relative_error(U, v) for m, v in zip(group, V, strict=True)))
        for p, v in zip(projections, V, strict=True):
            gram = Gram(U, p.matrix.left)
            scale = gram.rows[:, None] * p.matrix.columns
            p.V = p._fit(U.T @ p.matrix.target / scale, v * scale, gram, 5) / scale
        errors.append(sum(p.matrix.relative_error(U, p.V) for p in projections if p.V is not None))
        U = solve_basis(group, [p.V for p in projections if p.V is not None], U, 5)
    assert all(b <= a * (1 + 1e-12) for a, b in itertools.pairwise(errors))
    assert errors[-1] < errors[0]


def test_first_basis_holds_the_identity_and_more_atoms_than_twice_the_width_are_not_zero() -> None:
    for rank in (9, 2 * D, 3 * D):
        U = initial_basis(matrices(), rank)
        assert U.shape == (D, rank)
        assert torch.equal(U[:, :D], torch.eye(D, dtype=torch.float64))
        assert (U.norm(dim=0) > 0.5).all()
    assert initial_basis(matrices(), 4).shape == (D, 4)


def test_conjugate_gradients_stop_at_the_solution() -> None:
    A = damped(psd(D, 4))
    X = torch.ones(D, F, dtype=torch.float64)
    found = conjugate_gradients(Operator([(A, None)]), A @ X, X, torch.ones_like(X), 50)
    assert torch.equal(found, X)


def test_a_dead_metric_is_damped_to_something_regular() -> None:
    assert torch.equal(damped(torch.zeros(3, 3)), torch.eye(3))


def test_shares_of_non_zeros_add_up_exactly() -> None:
    assert split_evenly(101, [10, 10, 20]) == [25, 25, 51]
    assert sum(split_evenly(1_000_003, [1536, 1536, 3072, 7])) == 1_000_003


def test_a_setting_of_the_other_solver_is_refused() -> None:
    with pytest.raises(fips.FipsError, match="learning_rate is a setting of the gradient solver"):
        fips.CompressionConfig.from_recipe("default", learning_rate=1e-4)
    with pytest.raises(fips.FipsError, match="rounds is a setting of the moments solver"):
        fips.CompressionConfig.from_recipe("paper", rounds=3)
    with pytest.raises(fips.FipsError, match="rounds is 0"):
        fips.CompressionConfig(rounds=0)
    assert fips.CompressionConfig.from_recipe("default", steps=0).solver == "moments"


def test_a_group_without_matrices_and_an_operator_without_terms_are_mistakes() -> None:
    with pytest.raises(ValueError, match="blocks_0_1 has no matrix"):
        Group("blocks_0_1", 0, 1, (), ()).require_plan()
    with pytest.raises(ValueError, match="without terms"):
        Operator([])(torch.ones(2, 2))


def test_more_rounds_lower_the_error_of_a_run(llama, settings, tmp_path) -> None:
    once = fips.compress(llama, tmp_path / "a", settings(steps=1, rounds=1))
    often = fips.compress(llama, tmp_path / "b", settings(steps=1, rounds=5))
    assert [g.mean_after for g in often.groups] < [g.mean_after for g in once.groups]


def test_both_solvers_beat_the_pruned_svd(llama, settings, tmp_path) -> None:
    for solver in ("moments", "gradient"):
        report = fips.compress(llama, tmp_path / solver, settings(solver=solver, steps=40))
        assert all(g.mean_after < g.mean_before for g in report.groups)


@pytest.mark.parametrize("scale", [2.0**-30, 2.0**30])
def test_the_scale_of_activations_and_weights_does_not_matter(scale: float) -> None:
    """Powers of two only move exponents, so the factors must agree to the last bit."""
    solutions = []
    for x, w in ((1.0, 1.0), (scale, 1 / scale)):
        W = torch.randn(3, D, F, generator=torch.Generator().manual_seed(7)) * w
        G, H = (damped(psd(n, n) * x * x).float() for n in (D, F))
        group = [Quadratic(W[0], G, None), Quadratic(W[1], G, None), Quadratic(W[2], None, H)]
        solutions.append(alternate(group, initial_basis(group, 9), [25] * 3, Effort(rounds=2), fixed=D))
    plain, scaled = solutions
    assert scaled.error == plain.error
    assert torch.equal(scaled.U, plain.U)
    assert all(torch.equal(b * scale, a) for a, b in zip(plain.V, scaled.V, strict=True))


def test_a_decomposition_that_fails_is_tried_with_more_damping(
    llama: Path, settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fips.linalg import solve

    real, calls = solve.spectrum, []

    def breaks_twice(S: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(float(S.diagonal().min()))
        if len(calls) <= 2:
            raise torch.linalg.LinAlgError("did not converge")
        return real(S)

    monkeypatch.setattr(solve, "spectrum", breaks_twice)
    report = fips.compress(llama, tmp_path / "out", settings())
    assert {t["damping"] for t in report.groups[0].tried} == {1.0}
    assert {t["damping"] for t in report.groups[1].tried} == {0.01}
    monkeypatch.setattr(solve, "spectrum", lambda _S: (_ for _ in ()).throw(torch.linalg.LinAlgError("never")))
    with pytest.raises(fips.FipsError, match="no alternation of the solver gives a finite error"):
        fips.compress(llama, tmp_path / "again", settings())
    assert not (tmp_path / "again").exists()
