"""One calibration pass of a group: second moments of every matrix's input. No activation is kept."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fips.errors import NumericalError
from fips.linalg.quadratic import DAMPING, Quadratic, damped, on_cpu_where_needed
from fips.models.blocks import Call
from fips.models.sites import Site
from fips.models.trace import BlockView, Trace, trace_block, trace_sensitivity
from fips.stages.stream import Stream, check_finite


@dataclass
class Moments:
    """Second moments of the input of one or several matrices, per token, summed in float64 where it exists.

    Attributes:
        second: E[z zᵀ] of the input the compressed matrix will see, (features, features).
        mean: E[z], (features,).
        cross: E[x zᵀ] with x the dense model's input; None when z is x.
        dense_second: E[x xᵀ]; None when z is x.
        dense_mean: E[x], (features,); None when z is x.
        tokens: Tokens seen.
        alive: Features that any token activates.
    """

    second: Tensor
    mean: Tensor
    cross: Tensor | None
    dense_second: Tensor | None
    dense_mean: Tensor | None
    tokens: int
    alive: Tensor

    @classmethod
    def empty(cls, features: int, device: str, *, crossed: bool) -> "Moments":
        """No token yet."""
        dtype = torch.float32 if device == "mps" else torch.float64
        square = torch.zeros(features, features, dtype=dtype, device=device)
        vector = square[0].clone()
        alive = torch.zeros(features, dtype=torch.bool, device=device)
        if not crossed:
            return cls(square, vector, None, None, None, 0, alive)
        return cls(square, vector, square.clone(), square.clone(), vector.clone(), 0, alive)

    def add(self, z: Tensor, x: Tensor) -> None:
        """Adds a batch: z, x of shape (tokens, features) in float32."""
        self.second += (z.T @ z).to(self.second.dtype)
        self.mean += z.sum(0, dtype=self.mean.dtype)
        if self.cross is not None and self.dense_second is not None and self.dense_mean is not None:
            self.cross += (x.T @ z).to(self.cross.dtype)
            self.dense_second += (x.T @ x).to(self.dense_second.dtype)
            self.dense_mean += x.sum(0, dtype=self.dense_mean.dtype)
        self.alive |= (z != 0).any(0)
        self.tokens += len(z)

    def of_dense(self, *, centered: bool) -> Tensor:
        """E[x xᵀ] of the dense model's input, or its covariance."""
        total, mean = (self.second, self.mean) if self.dense_second is None else (self.dense_second, self.dense_mean)
        if not centered or mean is None:
            return total / self.tokens
        return total / self.tokens - (mean / self.tokens).outer(mean / self.tokens)

    def centered(self) -> tuple[Tensor, Tensor | None]:
        """Covariances of z, and of x with z: what counts where a bias takes up the mean."""
        mean = self.mean / self.tokens
        second = self.second / self.tokens - mean.outer(mean)
        if self.cross is None or self.dense_mean is None:
            return second, None
        return second, self.cross / self.tokens - (self.dense_mean / self.tokens).outer(mean)

    def plain(self) -> tuple[Tensor, Tensor | None]:
        """E[z zᵀ] and E[x zᵀ]."""
        return self.second / self.tokens, None if self.cross is None else self.cross / self.tokens


@dataclass(frozen=True)
class GroupMoments:
    """Moments of a group.

    Attributes:
        of: Matrix name → its moments; gate and up of a block share one object.
        ahead: Hidden states of the dense model after the group, per batch.
        sensitivity: Matrix name → E‖∂out/∂y_k‖² of its outputs y, out being the block's output, (outputs,); empty when
            it was not asked for.
    """

    of: dict[str, Moments]
    ahead: list[Tensor]
    sensitivity: dict[str, Tensor]

    def channels(self, site: Site) -> Tensor | None:
        """Weights of a matrix's outputs in its error, (outputs,), or None where they all count the same.

        They are the root of the sensitivity, relative to its mean; a hundredth is added, so that an output that does
        not matter on the calibration data still counts.
        """
        if site.name not in self.sensitivity:
            return None
        c = self.sensitivity[site.name]
        mean = c.mean()
        if not mean > 0 or bool((c == c[0]).all()):  # what is simply added to the hidden state counts exactly 1
            return None
        return (c / mean + 1e-2).sqrt()


@torch.no_grad()
def collect_moments(
    views: Sequence[BlockView], stream: Stream, seed: int | None = None, *, in_place: bool = False
) -> GroupMoments:
    """Runs the calibration stream through a group's dense blocks once.

    With inputs of the compressed prefix the same dense blocks also run on its hidden states, and the moments are
    those of its activations, with cross moments to the dense ones.

    Args:
        views: The group's blocks, materialized.
        stream: The stream, at the group's first block.
        seed: Seed of the random signs that measure the sensitivity of the block's output to the outputs of the
            matrices; None leaves that out.
        in_place: Whether the hidden states behind the group take the place of those before it, one batch after the
            other, so that only one of them is in memory.

    Raises:
        NumericalError: If a block's output is not finite.
    """
    of: dict[str, Moments] = {}
    sensitivity: dict[str, Tensor] = {}
    generator = None if seed is None else torch.Generator().manual_seed(seed + views[0].number)
    ahead = stream.dense if in_place else list(stream.dense)
    for batch in range(len(stream.dense)):
        hidden = stream.dense[batch].to(stream.device)
        prefix = stream.compressed[batch].to(stream.device) if stream.separate else hidden
        for view in views:
            call = stream.calls[batch][view.number]
            dense = _trace_dense(view, call, hidden, generator, sensitivity)
            ours = trace_block(view, call, prefix) if stream.separate else dense
            check_finite(dense.hidden, f"the output of block {view.number} ({view.path})")
            _add(of, view, dense.inputs, ours.inputs, crossed=stream.separate)
            hidden, prefix = dense.hidden, ours.hidden
        ahead[batch] = hidden.cpu()
    tokens = {name: of[name].tokens for name in sensitivity}
    return GroupMoments(of, ahead, {name: c / tokens[name] for name, c in sensitivity.items()})


def _trace_dense(
    view: BlockView, call: Call, hidden: Tensor, generator: torch.Generator | None, sensitivity: dict[str, Tensor]
) -> Trace:
    """Runs a dense block; with a generator the squared gradients of its linears' outputs are added up as well."""
    if generator is None:
        return trace_block(view, call, hidden)
    trace, squares = trace_sensitivity(view, call, hidden, generator)
    for name, c in squares.items():
        sensitivity[name] = sensitivity[name] + c if name in sensitivity else c
    return trace


def _add(
    of: dict[str, Moments], view: BlockView, dense: dict[str, Tensor], ours: dict[str, Tensor], *, crossed: bool
) -> None:
    """Adds one batch of one block; matrices that were given the same tensor share one set of moments."""
    seen: dict[int, str] = {}
    for site in view.sites:
        x, z = dense[site.name], ours[site.name]
        first = seen.setdefault(z.data_ptr(), site.name)
        if first != site.name and of.get(site.name, of[first]) is of[first]:
            of[site.name] = of[first]
            continue
        if site.name not in of:
            of[site.name] = Moments.empty(z.shape[1], z.device.type, crossed=crossed)
        of[site.name].add(z, x)


class MetricCache:
    """Damped moments in float32; matrices that share moments get the very same tensor.

    Args:
        damping: Added to the diagonal, relative to its mean.
    """

    def __init__(self, damping: float = DAMPING[0]) -> None:
        self._damping = damping
        self._known: dict[tuple[int, bool], tuple[Tensor, Tensor | None]] = {}

    def quadratic(self, site: Site, W: Tensor, moments: Moments, *, has_bias: bool) -> Quadratic:
        """Eq. 1 of one matrix.

        With cross moments the target is W regressed on the compressed prefix's inputs: E‖W x - U V z‖² is, up to a
        constant, the error to that target in the metric of z.
        """
        key = (id(moments), has_bias)
        if key not in self._known:
            second, cross = moments.centered() if has_bias else moments.plain()
            if not torch.isfinite(second).all():
                raise NumericalError(f"the inputs of {site.name} overflow: their second moments are not finite.")
            regression = None if cross is None else _regression(second, cross, self._damping)
            self._known[key] = (damped(second, self._damping).float(), regression)
        metric, regression = self._known[key]
        if regression is not None:
            W = regression.T @ W if site.role == "up" else W @ regression
        return Quadratic(W, metric, None) if site.role == "up" else Quadratic(W, None, metric)


def stored_error(site: Site, W: Tensor, new: Tensor, moments: Moments, *, has_bias: bool) -> float:
    """E‖W x - (U V) z‖² / E‖W x‖² of what is stored, from the undamped moments; centered where a bias takes the mean.

    Args:
        site: The matrix.
        W: W, (d, f).
        new: U V as a loaded model rebuilds it, (d, f).
        moments: Moments of its input.
        has_bias: Whether the linear has a bias.
    """
    second, cross = moments.centered() if has_bias else moments.plain()
    X = moments.of_dense(centered=has_bias)
    A, B = ((W.T, new.T) if site.role == "up" else (W, new))  # (out, in)
    A, B = A.to(X.dtype), B.to(X.dtype)
    energy = ((A @ X) * A).sum()
    if cross is None:
        residual = (((A - B) @ X) * (A - B)).sum()
    else:
        residual = energy - 2 * ((A @ cross) * B).sum() + ((B @ second) * B).sum()
    return float(residual / energy.clamp_min(1e-30))


def _regression(second: Tensor, cross: Tensor, damping: float) -> Tensor:
    """(E[x zᵀ] + δI)(E[z zᵀ] + δI)⁻¹ in float64: the best linear guess of x from z, (features, features)."""
    S, C = (on_cpu_where_needed(t).double() for t in (second, cross))
    mean = S.diagonal().mean()
    A = damped(S, damping) * (mean if mean > 0 else 1.0)
    # The damping pulls the guess towards z itself.
    guess: Tensor = torch.linalg.solve(A, (C + A - S).T).T
    return guess.float().to(second.device)


def corrected_bias(site: Site, bias: Tensor, dense: Tensor, ours: Tensor, moments: Moments) -> Tensor:
    """The bias that makes the mean output right: b + W E[x] - (U V) E[z]; free, and exact on the calibration data.

    Args:
        site: The matrix.
        bias: b.
        dense: W, (d, f).
        ours: U V, (d, f).
        moments: Moments of its input.
    """
    z = (moments.mean / moments.tokens).to(bias.dtype)
    x = z if moments.dense_mean is None else (moments.dense_mean / moments.tokens).to(bias.dtype)
    W, new = (dense.T, ours.T) if site.role == "up" else (dense, ours)
    return bias + W @ x - new @ z
