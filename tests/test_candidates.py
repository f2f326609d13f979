"""Plans of equal bytes, and the choice among them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fips
from fips.linalg.budget import plan_bytes, plan_group, plan_identity, plan_size
from fips.linalg.quadratic import Quadratic
from fips.linalg.solve import Effort, alternate, initial_basis, solve_basis
from fips.stages.candidates import IDENTITY_ROUNDS, alternations, candidate_plans, choose
from tests.command import run
from tests.test_solve import D, F, matrices

WIDTHS = [1536] * 12


@pytest.mark.parametrize("budget", [0.26, 0.5, 0.8])
def test_identity_columns_leave_their_budget_to_the_rest(budget: float) -> None:
    plan = plan_group(576, WIDTHS, budget, 0.75, identity=True)
    assert plan.identity
    assert plan.rank > plan_group(576, WIDTHS, budget, 0.75).rank
    assert plan.parameters <= budget * plan.dense_parameters
    one_more = plan.parameters + 576 + 0.25 * sum(WIDTHS)
    assert one_more > budget * plan.dense_parameters - 1
    assert plan.columns == plan.rank - 576


def test_a_small_budget_stores_the_whole_basis() -> None:
    plan = plan_group(576, WIDTHS, 0.2, 0.75, identity=True)
    assert not plan.identity
    assert plan == plan_group(576, WIDTHS, 0.2, 0.75)


def test_plain_pruning_stores_no_basis() -> None:
    plan = plan_identity(576, WIDTHS, 0.5)
    assert (plan.columns, plan.basis) == (0, "identity")
    assert plan.parameters == plan.keep == 576 * sum(WIDTHS) // 2
    assert plan.packed_bytes(2) == 2 * plan.keep + 576 * sum(WIDTHS) // 8


@pytest.mark.parametrize("rank", [300, 576, 577, 900])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_a_plan_for_bytes_uses_them_to_the_last_value(rank: int, itemsize: int) -> None:
    size = int(0.6 * 576 * sum(WIDTHS) * itemsize)
    plan = plan_bytes(576, WIDTHS, size, itemsize, rank)
    assert plan is not None
    assert plan.identity == (rank >= 576)
    if plan.keep < rank * sum(WIDTHS):
        assert size - itemsize < plan.packed_bytes(itemsize) <= size


def test_too_few_bytes_give_no_plan() -> None:
    assert plan_bytes(576, WIDTHS, 1000, 2, 300) is None
    with pytest.raises(fips.FipsError, match="leaves no basis column"):
        plan_size(576, WIDTHS, 1000, 2, 0.5)


@pytest.mark.parametrize("sparsity", [0.3, 0.75, 0.9])
@pytest.mark.parametrize("share", [0.1, 0.4, 0.7])
def test_a_plan_for_bytes_and_sparsity_takes_the_largest_rank(share: float, sparsity: float) -> None:
    size = int(share * 2 * 576 * sum(WIDTHS))
    plan = plan_size(576, WIDTHS, size, 2, sparsity)
    column = 2 * 576 + 2 * (1 - sparsity) * sum(WIDTHS) + sum(WIDTHS) / 8
    assert plan.packed_bytes(2) <= size
    if plan.identity or plan.rank < 575:
        assert size < plan.packed_bytes(2) + column + 4
    assert plan.sparsity == pytest.approx(sparsity, abs=1e-4)


@pytest.mark.parametrize("size", [{"target_size": 0.6}, {"target_size": 0.25}, {"budget": 0.5}])
def test_candidates_are_of_equal_size(size: dict[str, float]) -> None:
    plans = candidate_plans(576, WIDTHS, fips.CompressionConfig(**size), 2)
    assert len(plans) > 1
    assert [p.basis for p in plans].count("identity") == 1
    if "target_size" in size:
        stored = [p.packed_bytes(2) for p in plans]
        assert max(stored) - min(stored) <= 2
        assert max(stored) <= size["target_size"] * plans[0].dense_bytes(2)
    else:
        assert all(0 <= 0.5 * p.dense_parameters - p.parameters < 576 + sum(WIDTHS) / 4 for p in plans)
        assert plans[1].packed_bytes(2) < plans[0].packed_bytes(2)
    only = candidate_plans(576, WIDTHS, fips.CompressionConfig(**size, basis="identity"), 2)
    assert [p.basis for p in only] == ["identity"]
    assert all(p.columns for p in candidate_plans(576, WIDTHS, fips.CompressionConfig(**size, basis="shared"), 2))


def sparse_matrices() -> list[Quadratic]:
    """Matrices that plain pruning to 20 entries gets exactly right."""
    generator = torch.Generator().manual_seed(4)
    found = []
    for m in matrices():
        W = torch.zeros(D * F, dtype=torch.float64)
        W[torch.randperm(D * F, generator=generator)[:20]] = 1 + torch.rand(20, generator=generator).double()
        found.append(Quadratic(W.view(D, F), m.left, m.right))
    return found


def low_rank_matrices() -> list[Quadratic]:
    """Matrices of one common column, which no sparse matrix of 20 entries is close to."""
    u = torch.linspace(1, 2, D, dtype=torch.float64)[:, None]
    v = torch.randn(3, 1, F, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return [Quadratic(u @ v[i], m.left, m.right) for i, m in enumerate(matrices())]


@pytest.mark.parametrize(("group", "winner"), [(sparse_matrices, "identity"), (low_rank_matrices, "shared")])
def test_the_basis_with_the_smaller_error_wins(group, winner: str) -> None:
    plans = [plan_bytes(D, [F] * 3, 8 * (60 + 3 * D) + 36, 8, rank) for rank in (2, D)]
    assert None not in plans
    best, tried = choose(group(), plans, 6, lambda _n, _e: None)
    assert best.plan.basis == winner
    assert best.solution.error == min(t["error"] for t in tried)
    assert {t["basis"] for t in tried} == {"shared", "identity"}
    assert alternations(plans, 6) == 6 + IDENTITY_ROUNDS


def test_the_rank_is_searched_on_the_sample_only() -> None:
    plans = [plan_bytes(D, [F] * 3, 900, 8, rank) for rank in (D + 2, D, D + 1, D + 3)]
    best, tried = choose(matrices(), plans, 3, lambda _n, _e: None, sample=[1, 2])
    samples = [t for t in tried if t["matrices"] == 2]
    finals = [t for t in tried if t["matrices"] == 3]
    assert {t["rank"] for t in samples} >= {D + 1, D + 2}
    assert [t["rank"] for t in finals] == [min(samples, key=lambda t: t["error"])["rank"], D]
    assert best.to_dict() in finals


@pytest.mark.parametrize("fixed", [1, 6])
def test_the_free_columns_are_the_least_squares_ones(fixed: int) -> None:
    group, rank = matrices(), 9
    generator = torch.Generator().manual_seed(5)
    V = [torch.randn(rank, F, generator=generator, dtype=torch.float64) for _ in group]
    start = torch.randn(D, rank, generator=generator, dtype=torch.float64)
    U = solve_basis(group, V, start, 400, fixed=fixed)
    assert torch.equal(U[:, :fixed], start[:, :fixed])
    free = rank - fixed
    A, b = torch.zeros(D * free, D * free, dtype=torch.float64), torch.zeros(D * free, dtype=torch.float64)
    for m, v in zip(group, V, strict=True):
        L = torch.eye(D, dtype=torch.float64) if m.left is None else m.left
        R = torch.eye(F, dtype=torch.float64) if m.right is None else m.right
        w, v = m.weight, v
        A += w * torch.kron(L, v[fixed:] @ R @ v[fixed:].T)
        b += w * (m.apply(m.W - start[:, :fixed] @ v[:fixed]) @ v[fixed:].T).flatten()
    expected = torch.linalg.solve(A, b).view(D, free)
    assert (U[:, fixed:] - expected).norm() <= 1e-8 * expected.norm()


def test_a_basis_of_the_identity_alone_never_moves() -> None:
    group = matrices()
    solution = alternate(group, initial_basis(group, D), [30] * 3, Effort(rounds=3), fixed=D)
    assert torch.equal(solution.U, torch.eye(D, dtype=torch.float64))


@pytest.mark.parametrize("basis", ["auto", "shared", "identity"])
def test_the_stored_bytes_are_what_was_asked_for(basis: str, llama: Path, settings, tmp_path: Path) -> None:
    report = fips.compress(llama, tmp_path / "out", settings(target_size=0.6, basis=basis))
    assert report.sizes is not None
    share = report.sizes.matrix_bytes / report.sizes.dense_matrix_bytes
    assert 0.595 <= share <= 0.6
    chosen = {group.basis for group in report.groups}
    assert basis == "auto" or chosen == {basis}
    for group in report.groups:
        finals = [t["error"] for t in group.tried if t["matrices"] == len(group.sparsity)]
        assert {t["basis"] for t in group.tried} == ({"shared", "identity"} if basis == "auto" else {basis})
        assert min(finals) <= group.mean_after * 1.05 + 1e-6
    described = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["groups"]
    pruned = [g["identity"] and g["rank"] == g["d"] for g in described]
    assert pruned == [group.basis == "identity" for group in report.groups]
    dense, packed = (fips.load(tmp_path / "out", runtime=runtime) for runtime in ("dense", "packed"))
    ids = torch.arange(3, 35)[None]
    assert torch.equal(dense(ids).logits, packed(ids).logits)


def test_sizes_that_contradict_each_other_are_refused() -> None:
    for wrong, message in (
        ({"budget": 0.5, "target_size": 0.6}, "give one of them"),
        ({"target_size": 0.6, "solver": "gradient"}, "needs the moments solver"),
        ({"target_size": 1.0}, "target_size is 1.0"),
        ({"basis": "identity", "sparsity": 0.5}, "sparsity follows from the size"),
        ({"basis": "identity", "steps": 0}, "basis needs the moments solver"),
        ({"polish": 5, "solver": "gradient"}, "polish needs the moments solver"),
        ({"polish": -1}, "polish is -1"),
        ({"basis": "dense"}, "basis is 'dense'"),
    ):
        with pytest.raises(fips.FipsError, match=message):
            fips.CompressionConfig(**wrong)
    assert replace(fips.CompressionConfig(), target_size=0.6).budget is None
    assert fips.CompressionConfig().effective_budget == 0.5
    assert fips.CompressionConfig().effective_sparsity == 0.75
    pruning = fips.CompressionConfig.from_recipe("paper", solver="moments", basis="identity")
    assert pruning.sparsity is None


@pytest.mark.parametrize("size", [{"budget": 0.25}, {"budget": 0.5, "sparsity": 0.5},
                                  {"target_size": 0.3125, "sparsity": 0.75}, {"target_size": 0.08},
                                  {"target_size": 0.3}])  # fmt: skip
def test_a_shared_basis_always_stores_a_column(size: dict[str, float]) -> None:
    """Also where the size leaves room for exactly the identity, or for less."""
    for plan in candidate_plans(576, WIDTHS, fips.CompressionConfig(**size, basis="shared"), 2):
        assert plan.basis == "shared"
        assert plan.columns > 0
        if "target_size" in size:
            assert plan.packed_bytes(2) <= size["target_size"] * plan.dense_bytes(2)


def test_what_leaves_nothing_is_refused_before_any_work(llama: Path, settings, tmp_path: Path) -> None:
    for wrong, message in (
        ({"basis": "identity", "budget": 1e-3}, "keeps 15 entries at width 32"),
        ({"basis": "identity", "target_size": 0.03}, "too small for any basis"),
        ({"basis": "shared", "target_size": 0.03}, "no shared basis fits"),
        ({"basis": "identity", "budget": 0.97, "dtype": "bfloat16"}, r"Use a smaller budget\.$"),
    ):
        with pytest.raises(fips.FipsError, match=message):
            fips.compress(llama, tmp_path / "out", settings(**wrong))
    assert not (tmp_path / "out").exists()


def test_where_only_pruning_is_smaller_it_is_the_only_candidate(llama: Path, settings, tmp_path: Path) -> None:
    report = fips.compress(llama, tmp_path / "out", settings(budget=0.9, dtype="bfloat16"))
    assert {t["basis"] for group in report.groups for t in group.tried} == {"identity"}


def test_the_room_for_the_largest_candidate_is_asked_for(llama: Path, settings) -> None:
    from fips.checkpoint.source import open_source
    from fips.plan import make_plan

    plan = make_plan(open_source(llama), settings(budget=0.2, dtype="bfloat16"))
    shared, identity = (sum(g.plans[i].packed_bytes(2) for g in plan.groups) for i in (0, 1))
    assert identity > shared
    side = sum((plan.source.folder / f).stat().st_size for f in plan.source.side_files())
    assert plan.needed_disk() == plan.output_bytes() - shared + 2 * identity + side


def test_inspect_plans_what_the_recipe_stores(llama: Path) -> None:
    ours = fips.inspect(llama, fips.CompressionConfig())
    paper = fips.inspect(llama, fips.CompressionConfig.from_recipe("paper"))
    assert ours.groups[0]["columns"] < ours.groups[0]["rank"]
    assert paper.groups[0]["columns"] == paper.groups[0]["rank"]
    assert "expected basis and rank" in ours.table()
    assert "expected basis and rank" not in paper.table()
    done = run("inspect", llama, "--recipe", "paper", "--json")
    assert json.loads(done.out)["groups"] == paper.groups


def test_failed_trials_and_diverged_polish_stay_valid_json() -> None:
    from fips.linalg.solve import Solution
    from fips.stages.candidates import Trial
    from fips.stages.factorize import FactorizedGroup
    from fips.stages.polish import Polished

    failed = Trial(plan_identity(576, WIDTHS, 0.5), Solution(torch.eye(2), [], float("inf"), 0), 3)
    assert failed.to_dict()["error"] is None
    diverged = Polished(FactorizedGroup(torch.eye(2), {}, {}), 0.1, float("nan"), kept=False)
    assert diverged.to_dict() == {"held_out_before": 0.1, "held_out_after": None, "kept": False}
