"""Truncated SVD start of a group: one basis, one projection per matrix."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fips.linalg.basis import grow, leading_directions, moment, project
from fips.stages.grouping import Group


@dataclass(frozen=True)
class FactorizedGroup:
    """The factors of a group.

    Attributes:
        basis: Stored columns of U, (d, k): all r of them, or those after a leading identity (k = r - d, may be 0).
        projections: Module name of the linear → V, (r, f); zeros are exact zeros.
        biases: Module name → bias that belongs to the factors, where the linear has one.
    """

    basis: Tensor
    projections: dict[str, Tensor]
    biases: dict[str, Tensor]

    def rounded(self, dtype: torch.dtype) -> "FactorizedGroup":
        """The values as they are stored in `dtype`, in the precision of the mathematics."""

        def store(t: Tensor) -> Tensor:
            return t.to(dtype).to(t.dtype)

        projections = {n: store(V) for n, V in self.projections.items()}
        return FactorizedGroup(store(self.basis), projections, {n: store(b) for n, b in self.biases.items()})


def factorize(
    group: Group, weights: Mapping[str, Tensor], biases: Mapping[str, Tensor], rank: int
) -> FactorizedGroup:
    """Truncated SVD of the group's matrices set side by side, grown when the rank exceeds d. Nothing is pruned.

    Args:
        group: The group.
        weights: Module name → W, (d, f), float32.
        biases: Module name → bias, where there is one.
        rank: Columns of U.
    """
    U = leading_directions(moment(weights[s.name] for s in group.sites), rank)
    first = weights[group.sites[0].name]
    U = U.to(first.dtype).to(first.device)  # dtype first: MPS has no float64
    projections = {s.name: project(U, weights[s.name], rank) for s in group.sites}
    return FactorizedGroup(grow(U, rank), projections, dict(biases))
