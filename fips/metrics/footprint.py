"""The three sizes of a checkpoint folder, compressed or dense."""

from collections.abc import Mapping, Sequence
from typing import Any

from fips.report import Sizes


def compressed_sizes(groups: Sequence[Any], tensors: Mapping[str, Any]) -> Sizes:
    """Sizes of a compressed checkpoint; the dense counterpart has the same dtype.

    Args:
        groups: Its `PackedGroupInfo`s.
        tensors: Tensor name → header entry with `bytes`, of every stored tensor.
    """
    packed = sum(g.packed_bytes() for g in groups)
    dense = sum(g.dense_bytes() for g in groups)
    total = sum(t.bytes for t in tensors.values())
    return Sizes(
        parameters=sum(g.parameters() for g in groups),
        dense_parameters=sum(g.d * m.f for g in groups for m in g.members),
        matrix_bytes=packed,
        dense_matrix_bytes=dense,
        checkpoint_bytes=total,
        dense_checkpoint_bytes=total - packed + dense,
    )


def dense_sizes(matrices: Sequence[str], tensors: Mapping[str, Any]) -> Sizes:
    """Sizes of a dense checkpoint.

    Args:
        matrices: On-disk names of its MLP weights.
        tensors: Tensor name → header entry with `bytes` and `shape`.
    """
    parameters = sum(tensors[m].bytes // tensors[m].dtype.itemsize for m in matrices)
    matrix = sum(tensors[m].bytes for m in matrices)
    total = sum(t.bytes for t in tensors.values())
    return Sizes(parameters, parameters, matrix, matrix, total, total)
