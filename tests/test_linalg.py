"""The mathematics against independent references: packing, pruning, budgets, bases."""

import math

import pytest
import torch

from fips.errors import ConfigError, FormatError, NumericalError
from fips.linalg.basis import GROWTH_DIVISOR, grow, leading_directions, moment, project
from fips.linalg.budget import GroupPlan, check_smaller, mask_bytes, plan_group
from fips.linalg.packing import pack, pack_mask, unpack, unpack_mask
from fips.linalg.prune import PruningSchedule, largest_masks


def sparse(r: int, f: int, share: float = 0.4, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(r * 1000 + f)
    V = torch.randn(r, f, generator=generator)
    return (V * (torch.rand(r, f, generator=generator) < share)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (3, 8), (3, 9), (5, 80), (2, 17)])
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_unpack_inverts_pack(shape: tuple[int, int], share: float, dtype: torch.dtype) -> None:
    V = sparse(*shape, share, dtype)
    values, bits = pack(V)
    assert values.shape == (int((V != 0).sum()),)
    assert values.dtype == dtype
    assert bits.dtype == torch.uint8
    assert bits.shape == (shape[0], math.ceil(shape[1] / 8))
    assert torch.equal(unpack(values, bits, shape[1]), V)


def test_packed_bytes_of_a_matrix_written_by_hand() -> None:
    V = torch.tensor([[1.0, 0, 2, 0, 0, 0, 0, 3, 4, 0], [0, 0, 0, 0, 0, 0, 0, 0, 0, -5]])
    values, bits = pack(V)
    assert values.tolist() == [1, 2, 3, 4, -5]  # row by row
    assert bits.tolist() == [[0b1000_0101, 0b0000_0001], [0, 0b0000_0010]]  # least significant bit first


def test_negative_zero_counts_as_zero() -> None:
    values, bits = pack(torch.tensor([[-0.0, 1.0, 0.0]]))
    assert values.tolist() == [1.0]
    assert bits.tolist() == [[2]]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_values_are_not_packed(bad: float) -> None:
    with pytest.raises(NumericalError, match=r"\(1, 2\)"):
        pack(torch.tensor([[1.0, bad]]))


def test_masks_that_do_not_belong_to_the_values_are_refused() -> None:
    values, bits = pack(sparse(3, 10))
    with pytest.raises(FormatError, match="counts"):
        unpack(values[1:], bits, 10)
    with pytest.raises(FormatError, match="does not fit 17"):
        unpack(values, bits, 17)
    bits[0, 1] |= 0b0000_0100  # column 10 of 10
    with pytest.raises(FormatError, match="beyond its 10 columns"):
        unpack_mask(bits, 10)


def test_mask_bytes_is_the_size_of_a_packed_mask() -> None:
    for f in (1, 8, 9, 80, 83):
        assert mask_bytes(5, f) == pack_mask(torch.ones(5, f, dtype=torch.bool)).numel()


def by_sorting(tensors: list[torch.Tensor], keep: int) -> list[torch.Tensor]:
    """Reference: stable sort of all magnitudes, so that equal ones are kept in order."""
    flat = torch.cat([t.flatten().abs().double() for t in tensors])
    mask = torch.zeros(len(flat), dtype=torch.bool)
    mask[flat.sort(descending=True, stable=True).indices[:keep]] = True
    return [m.view_as(t) for m, t in zip(mask.split([t.numel() for t in tensors]), tensors, strict=True)]


@pytest.mark.parametrize("keep", [0, 1, 2, 50, 149, 150, 151, 1000])
@pytest.mark.parametrize("kind", ["random", "ties", "tiny"])
def test_largest_masks_keeps_what_sorting_keeps(keep: int, kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(6, 10, generator=generator), torch.randn(9, 10, generator=generator)]
    if kind == "ties":
        tensors = [t.round() for t in tensors]
    if kind == "tiny":  # threshold differs only in the low half of the bits, and among denormals
        tensors = [1 + t * 1e-6 for t in tensors[:1]] + [tensors[1] * 1e-40]
    masks = largest_masks(tensors, keep)
    assert sum(int(m.sum()) for m in masks) == min(keep, 150)
    for mask, expected in zip(masks, by_sorting(tensors, keep), strict=True):
        assert torch.equal(mask, expected)


@pytest.mark.parametrize("kind", ["accelerated", "zhu-gupta"])
@pytest.mark.parametrize("steps", [1, 2, 7, 100, 800])
def test_schedule_rises_to_its_final_value_at_its_end(kind: str, steps: int) -> None:
    schedule = PruningSchedule.over(kind, 0.75, steps, 5)
    curve = [schedule.sparsity(t) for t in range(steps + 1)]
    assert curve == sorted(curve)
    assert schedule.sparsity(schedule.end) == 0.75
    assert schedule.sparsity(steps) == 0.75




@pytest.mark.parametrize("steps", [
    1, 2, 3, 4, 7, 100, 800,
])  # fmt: skip
@pytest.mark.parametrize("kind", ["accelerated", "zhu-gupta"])
def test_the_last_mask_update_of_a_run_prunes_to_the_final_sparsity(kind: str, steps: int) -> None:
    """A run visits the steps 0 … steps - 1."""
    schedule = PruningSchedule.over(kind, 0.75, steps, 5)
    assert schedule.sparsity(max(t for t in range(steps) if schedule.updates_at(t))) == 0.75


def test_schedules_take_the_papers_values() -> None:
    accelerated = PruningSchedule.over("accelerated", 0.75, 800, 50)
    assert (accelerated.start, accelerated.end) == (80, 600)
    assert accelerated.sparsity(0) == accelerated.sparsity(79) == 0.05
    assert accelerated.sparsity(80) == 0.5
    assert accelerated.sparsity(340) == pytest.approx(0.75 - 0.25 / 8)  # half way: (1/2)³ of the distance is left
    plain = PruningSchedule.over("zhu-gupta", 0.75, 800, 50)
    assert plain.sparsity(plain.start) == 0.0
    assert [t for t in range(801) if accelerated.updates_at(t)] == list(range(0, 601, 50))


def test_a_low_final_sparsity_is_never_exceeded() -> None:
    schedule = PruningSchedule.over("accelerated", 0.02, 100, 5)
    assert max(schedule.sparsity(t) for t in range(101)) == 0.02


@pytest.mark.parametrize("budget", [0.05, 0.25, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.75, 0.99])
@pytest.mark.parametrize(("d", "widths"), [(32, [80] * 6), (32, [80, 83, 96]), (7, [19]), (576, [1536] * 12)])
def test_rank_uses_the_budget_and_never_exceeds_it(d: int, widths: list[int], budget: float, sparsity: float) -> None:
    dense, total = d * sum(widths), sum(widths)
    try:
        plan = plan_group(d, widths, budget, sparsity)
    except ConfigError:
        assert budget * dense < d + (1 - sparsity) * total  # not even one column fits
        return
    assert plan.parameters <= budget * dense + 1e-6
    assert plan.keep <= plan.rank * total
    one_more = (plan.rank + 1) * (d + (1 - sparsity) * total)
    assert one_more > budget * dense
    assert plan.dense_parameters == dense


def test_the_papers_rank() -> None:
    """Section 3: r = floor(b·F·d / (F·(1-s) + d))."""
    assert plan_group(4096, [14336] * 12, 0.5, 0.75).rank == math.floor(0.5 * 172032 * 4096 / (172032 * 0.25 + 4096))


@pytest.mark.parametrize("itemsize", [2, 4])
def test_planned_bytes_are_the_bytes_of_packed_tensors(itemsize: int) -> None:
    dtype = {2: torch.bfloat16, 4: torch.float32}[itemsize]
    widths, rank = [80, 83], 9
    Vs = [sparse(rank, f, dtype=dtype) for f in widths]
    packed = [t for V in Vs for t in pack(V)]
    plan = GroupPlan(32, tuple(widths), rank, sum(int((V != 0).sum()) for V in Vs))
    U = torch.empty(32, rank, dtype=dtype)
    assert plan.packed_bytes(itemsize) == sum(t.numel() * t.element_size() for t in [U, *packed])
    assert plan.dense_bytes(itemsize) == 32 * (80 + 83) * itemsize


def test_a_plan_that_does_not_shrink_is_refused_at_the_border() -> None:
    plan = GroupPlan(8, (16,), 4, 0)
    room = plan.dense_bytes(2) - plan.packed_bytes(2)
    assert room > 0
    check_smaller(GroupPlan(8, (16,), 4, room // 2 - 1), 2, "g")
    with pytest.raises(ConfigError, match="group g"):
        check_smaller(GroupPlan(8, (16,), 4, room // 2), 2, "g")


def matrices() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(12, f, generator=generator) for f in (20, 33, 20)]


@pytest.mark.parametrize("rank", [1, 5, 12])
def test_basis_and_projections_are_the_truncated_svd_of_the_concatenation(rank: int) -> None:
    Ws = matrices()
    U = leading_directions(moment(Ws), rank)
    found = torch.cat([U @ project(U, W.double(), rank) for W in Ws], 1)
    left, values, right = torch.linalg.svd(torch.cat(Ws, 1).double(), full_matrices=False)
    torch.testing.assert_close(found, (left[:, :rank] * values[:rank]) @ right[:rank])
    torch.testing.assert_close(U.T @ U, torch.eye(rank, dtype=torch.float64))


def test_basis_does_not_depend_on_the_sign_of_its_columns() -> None:
    Ws = matrices()
    U = leading_directions(moment(Ws), 5)
    assert (U.gather(0, U.abs().argmax(0, keepdim=True)) > 0).all()
    torch.testing.assert_close(leading_directions(moment([-W for W in reversed(Ws)]), 5), U)


def test_moment_is_of_the_concatenation() -> None:
    W = torch.cat(matrices(), 1).double()
    torch.testing.assert_close(moment(matrices()), W @ W.T)
    with pytest.raises(ValueError, match="no matrix"):
        moment([])


def test_growth_leaves_the_product_unchanged_and_gives_every_new_column_a_gradient() -> None:
    W, rank = matrices()[0].double(), 12 + 15  # more than d, more than once around
    U = leading_directions(moment([W]), rank)
    assert U.shape == (12, 12)
    V, grown = project(U, W, rank), grow(U, rank)
    assert V.shape == (rank, 20)
    assert grown.shape == (12, rank)
    torch.testing.assert_close(grown @ V, W)
    assert torch.equal(V[12:24], V[:12] / GROWTH_DIVISOR)
    assert not grown[:, 12:].any()
    assert (V.abs().sum(1) > 0).all()
