"""Reference implementations of what fips is compared with, on one matrix, written by us from the papers.

    sparsegpt  SparseGPT, unstructured (Frantar and Alistarh 2023, arXiv 2301.00774, algorithm 1)
    wanda      Wanda (Sun et al. 2023, arXiv 2306.11695, section 3)
    svd        whitened truncated SVD per matrix (SVD-LLM, Wang et al. 2024, arXiv 2403.07378, section 3.1)

The share of a matrix's bytes is what a packed file would take at 16-bit values: a pruned matrix is its kept values and
one mask bit per entry, a low-rank matrix is two dense factors. It is never exceeded.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

DAMPING = 0.01  # SparseGPT's percdamp, of the mean of the Hessian's diagonal
COLUMNS = 128  # SparseGPT's blocksize
WHITENING_DAMPING = 1e-6  # SVD-LLM adds no more than the Cholesky factor needs
MASK_SHARE = 1 / 16  # a mask bit per entry, in entries of 16 bits


def sparsegpt(W: Tensor, H: Tensor, keep: int, columns: int = COLUMNS, damping: float = DAMPING) -> Tensor:
    """SparseGPT: columns from left to right, every pruned entry is made up for by the entries to its right in its row.

    The mask is chosen per block of columns, when all columns to its left are done, over all rows together: the entries
    with the smallest w² / c², where c is the diagonal of the upper Cholesky factor of the inverse Hessian.

    Args:
        W: Weight, (out, in).
        H: Second moment of the input, (in, in); its scale does not matter.
        keep: Entries kept, spread over the blocks of columns by their size.
        columns: Columns per block.
        damping: Added to the diagonal of H, as a share of its mean.

    Returns:
        The pruned weight, (out, in), with exactly `keep` entries that are not set to zero.
    """
    rest = W.T.float().clone(memory_format=torch.contiguous_format)  # (in, out): a column of W is a row here
    factor = _inverse_factor(H, damping).float()  # (in, in), upper
    width, dropped = len(rest), rest.numel() - keep
    rest[H.diagonal() == 0] = 0  # inputs that are never active
    for start in range(0, width, columns):
        end = min(start + columns, width)
        count = dropped * end // width - dropped * start // width
        errors = _prune_columns_(rest[start:end], factor[start:end, start:end], count)
        rest[end:] -= factor[start:end, end:].T @ errors
    return rest.T.contiguous().to(W.dtype)


def _inverse_factor(H: Tensor, damping: float) -> Tensor:
    """Upper triangular R with Rᵀ R = (H + damping)⁻¹, (in, in) float64; row i is what dropping column i costs."""
    H = H.double()
    damped = H + damping * H.diagonal().mean() * torch.eye(len(H), dtype=H.dtype)
    return torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(damped)), upper=True)


def _prune_columns_(block: Tensor, factor: Tensor, count: int) -> Tensor:
    """Prunes a block of columns in place.

    Args:
        block: The columns as rows, (columns, out).
        factor: Their part of the inverse's factor, (columns, columns), upper.
        count: Entries to prune.

    Returns:
        What the columns to the right have to make up for, (columns, out).
    """
    scale = factor.diagonal()[:, None]
    drop = torch.zeros(block.numel(), dtype=torch.bool)
    drop[torch.topk((block / scale).square().flatten(), count, largest=False, sorted=False).indices] = True
    drop = drop.view_as(block)
    errors = torch.zeros_like(block)
    for i in range(len(block)):
        errors[i] = torch.where(drop[i], block[i] / scale[i], 0.0)
        block[i].masked_fill_(drop[i], 0.0)
        block[i + 1 :] -= factor[i, i + 1 :, None] * errors[i]
    return errors


def wanda(W: Tensor, squares: Tensor, keep: int) -> Tensor:
    """Wanda: in every row the entries with the largest |w| · ‖x‖ stay, unchanged.

    Args:
        W: Weight, (out, in).
        squares: ‖x‖² of every input feature, (in,).
        keep: Entries kept per row.
    """
    scores = W.abs() * squares.sqrt().to(W.dtype)
    mask = torch.zeros_like(W).scatter_(1, torch.topk(scores, keep, dim=1, sorted=False).indices, 1.0)
    return W * mask


def whitened_svd(W: Tensor, H: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """SVD-LLM's truncation-aware SVD: W S = P Σ Qᵀ with S Sᵀ = H, cut to `rank`, whitening undone.

    No other factors of this rank have a smaller error E‖W x − A B x‖².

    Args:
        W: Weight, (out, in).
        H: Second moment of the input, (in, in).
        rank: Rank of the result.

    Returns:
        A, (out, rank), and B, (rank, in), in float32; the singular values are split evenly between them.
    """
    H = H.double()
    damped = H + WHITENING_DAMPING * H.diagonal().mean() * torch.eye(len(H), dtype=H.dtype)
    S = torch.linalg.cholesky(damped)  # lower
    P, values, Qt = torch.linalg.svd(W.double() @ S, full_matrices=False)
    root = values[:rank].sqrt()
    B = torch.linalg.solve_triangular(S, root[:, None] * Qt[:rank], upper=False, left=False)
    return (P[:, :rank] * root).float(), B.float()


@dataclass(frozen=True)
class Replaced:
    """A matrix as it would be stored.

    Attributes:
        weight: What the model computes with, (out, in) bfloat16.
        bytes: Stored bytes at 16-bit values.
    """

    weight: Tensor
    bytes: int


def _pruned(weight: Tensor, kept: int) -> Replaced:
    return Replaced(weight.to(torch.bfloat16), 2 * kept + -(-weight.numel() // 8))


def _kept(W: Tensor, share: float) -> float:
    """Entries of a pruned matrix whose values and mask take `share` of its bytes."""
    if not MASK_SHARE < share <= 1:
        raise SystemExit(f"share is {share}; a pruned matrix takes more than {MASK_SHARE} of its bytes, and at most 1.")
    return (share - MASK_SHARE) * W.numel()


def by_sparsegpt(W: Tensor, H: Tensor, share: float) -> Replaced:
    """SparseGPT at a share of the bytes."""
    keep = int(_kept(W, share))
    return _pruned(sparsegpt(W, H, keep), keep)


def by_wanda(W: Tensor, squares: Tensor, share: float) -> Replaced:
    """Wanda at a share of the bytes."""
    keep = int(_kept(W, share) / len(W))
    return _pruned(wanda(W, squares, keep), keep * len(W))


def by_svd(W: Tensor, H: Tensor, share: float) -> Replaced:
    """Whitened SVD at a share of the bytes; the factors are rounded as they would be stored."""
    rank = max(int(share * W.numel() / sum(W.shape)), 1)
    A, B = (factor.to(torch.bfloat16).float() for factor in whitened_svd(W, H, rank))
    return Replaced((A @ B).to(torch.bfloat16), 2 * rank * sum(W.shape))


# Each takes a weight (out, in), what it needs of the inputs, and a share of the bytes.
METHODS: dict[str, Callable[[Tensor, Tensor, float], Replaced]] = {
    "sparsegpt": by_sparsegpt,
    "wanda": by_wanda,
    "svd": by_svd,
}
DIAGONAL_ONLY = {"wanda"}  # these need ‖x‖² per feature, not the whole moment
