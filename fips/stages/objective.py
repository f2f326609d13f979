"""What is compared: outputs of the dense and of the factorized matrices of a group (FiPS, Eq. 1)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fips.config import CompressionConfig
from fips.linalg.prune import largest_masks
from fips.models.blocks import Call, run_block
from fips.models.layers import rebuild
from fips.models.sites import Site, from_canonical, to_canonical
from fips.models.trace import BlockView, Trace, run_mlp, trace_block
from fips.stages.factorize import FactorizedGroup
from fips.stages.stream import Stream, check_finite


class TrainableGroup:
    """U, V and biases of a group as parameters; V stays exactly zero outside its mask."""

    def __init__(self, factors: FactorizedGroup, *, trainable: bool) -> None:
        def own(t: Tensor) -> Tensor:
            return nn.Parameter(t.clone()) if trainable else t

        self.U = own(factors.basis)
        self.V = {name: own(V) for name, V in factors.projections.items()}
        self.biases = {name: own(b) for name, b in factors.biases.items()}
        self._masks: dict[str, Tensor] = {}

    def parameters(self) -> list[Tensor]:
        """Everything that is trained."""
        return [t for t in (self.U, *self.V.values(), *self.biases.values()) if t.numel()]

    @torch.no_grad()
    def prune_(self, keep: int) -> None:
        """Keeps the `keep` largest entries over all V; one global threshold for the group."""
        self._masks = dict(zip(self.V, largest_masks(list(self.V.values()), keep), strict=True))
        self.mask_()

    def freeze_masks_(self) -> None:
        """Keeps exactly the entries that are not zero now."""
        self._masks = {name: V.detach() != 0 for name, V in self.V.items()}

    @torch.no_grad()
    def mask_(self) -> None:
        """Sets pruned entries to zero, also where momentum has moved them."""
        for name, M in self._masks.items():
            self.V[name].mul_(M)

    @torch.no_grad()
    def mask_gradients_(self) -> None:
        """Keeps pruned entries out of the optimizer's moments."""
        for name, M in self._masks.items():
            grad = self.V[name].grad
            if grad is not None:
                grad.mul_(M)

    def weight(self, site: Site) -> Tensor:
        """W = U V of one matrix, (d, f)."""
        return rebuild(self.U, self.V[site.name])

    def block_weights(self, view: BlockView) -> dict[str, Tensor]:
        """Parameter name inside the block → factorized weight or trained bias, as the block stores it."""
        weights = {}
        for site in view.sites:
            name = view.inside(site.name)
            weights[f"{name}.weight"] = from_canonical(self.weight(site), transposed=site.transposed)
            if site.name in self.biases:
                weights[f"{name}.bias"] = self.biases[site.name]
        return weights

    def factors(self) -> FactorizedGroup:
        """The current values."""
        return FactorizedGroup(
            self.U.detach(),
            {n: V.detach() for n, V in self.V.items()},
            {n: b.detach() for n, b in self.biases.items()},
        )


@dataclass(frozen=True)
class Term:
    """One compared output.

    Attributes:
        residual: ‖target - ours‖², a scalar.
        energy: ‖target‖², a scalar.
    """

    residual: Tensor
    energy: Tensor


@dataclass
class GroupErrors:
    """Squared residuals and energies of a group over the calibration stream, in float64.

    Attributes:
        residual: Term name → ‖target - ours‖².
        energy: Term name → ‖target‖².
        batches: Batches summed up.
        dead: Matrix name → input features that are zero for every token.
    """

    residual: dict[str, float] = field(default_factory=dict)
    energy: dict[str, float] = field(default_factory=dict)
    batches: int = 0
    dead: dict[str, int] = field(default_factory=dict)

    def add(self, terms: dict[str, Term]) -> None:
        """Adds the terms of one block and batch."""
        for name, term in terms.items():
            self.residual[name] = self.residual.get(name, 0.0) + float(term.residual)
            self.energy[name] = self.energy.get(name, 0.0) + float(term.energy)

    def scale(self, name: str) -> float:
        """Mean energy per batch: divides a term's residual so that every term counts by its relative error."""
        return max(self.energy[name] / self.batches, 1e-30)

    def relative(self) -> dict[str, float]:
        """Term name → relative squared error."""
        return {n: r / max(self.energy[n], 1e-30) for n, r in self.residual.items()}

    def total(self) -> float:
        """Mean relative squared error."""
        return sum(self.relative().values()) / max(len(self.residual), 1)


def trace_group(
    model: TrainableGroup, views: Sequence[BlockView], stream: Stream, batch: int, config: CompressionConfig
) -> Iterator[tuple[BlockView, Trace, Trace]]:
    """Runs one batch through a group: per block, the dense trace and the trace whose inputs we are judged on.

    With dense inputs both are the same. With compressed inputs the second runs through the factorized blocks; its
    gradient ends at the block's input.
    """
    hidden = stream.dense[batch].to(stream.device)
    prefix = stream.compressed[batch].to(stream.device) if stream.separate else hidden
    for view in views:
        call = stream.calls[batch][view.number]
        with torch.no_grad():
            dense = trace_block(view, call, hidden)
        hidden = dense.hidden
        ours = dense
        if stream.separate:
            grads = torch.is_grad_enabled() and config.objectives[1] != "linear" and bool(view.sites)
            with torch.set_grad_enabled(grads):
                ours = trace_block(view, call, prefix, model.block_weights(view))
            prefix = ours.hidden.detach()
        if view.sites:
            yield view, dense, ours


def block_terms(
    model: TrainableGroup, view: BlockView, call: Call, traces: tuple[Trace, Trace], config: CompressionConfig
) -> dict[str, Term]:
    """The compared outputs of one block.

    Args:
        model: The factors.
        view: The block.
        call: Its recorded arguments.
        traces: The dense one, and the one whose inputs the factors are judged on; see `trace_group`.
        config: Settings.
    """
    dense, ours = traces
    if config.objectives[1] == "block":
        out = ours.hidden
        if ours is dense:
            out = run_block(view.module, call, dense.entering, model.block_weights(view))
        # What the block adds to its input: on its own it would drown in the energy of the hidden state.
        return {view.path: Term((dense.hidden - out).square().sum(), (dense.hidden - dense.entering).square().sum())}
    if config.objectives[1] == "mlp" and dense.outputs:  # without a down-type matrix the linears' outputs are compared
        outputs = ours.outputs if ours is not dense else run_mlp(view, dense, model.block_weights(view))
        return {n: Term((y - outputs[n]).square().sum(), y.square().sum()) for n, y in dense.outputs.items()}
    return {site.name: _linear_term(model, view, site, dense, ours) for site in view.sites}


def _linear_term(model: TrainableGroup, view: BlockView, site: Site, dense: Trace, ours: Trace) -> Term:
    """‖W x - (U V) x'‖², bias included; x' is the compressed prefix's input or x itself."""
    linear = view.linear(site)
    W = to_canonical(linear.weight, transposed=site.transposed)  # (d, f)
    new = model.weight(site)
    if site.role == "up":
        W, new = W.T, new.T  # (out, in)
    x, z = dense.inputs[site.name], ours.inputs[site.name]
    with torch.no_grad():
        target = x @ W.T
    error = x @ (W - new).T if ours is dense else target - z @ new.T
    if site.name in model.biases:
        error = error + (linear.bias - model.biases[site.name])
    return Term(error.square().sum(), target.square().sum())


@torch.no_grad()
def group_errors(
    model: TrainableGroup, views: Sequence[BlockView], stream: Stream, config: CompressionConfig
) -> GroupErrors:
    """Errors of a group over the whole calibration stream.

    Raises:
        NumericalError: If the output of a dense block is not finite.
    """
    errors = GroupErrors(batches=len(stream.dense))
    alive: dict[str, Tensor] = {}
    for batch in range(len(stream.dense)):
        for view, dense, ours in trace_group(model, views, stream, batch, config):
            check_finite(dense.hidden, f"the output of block {view.number} ({view.path})")
            errors.add(block_terms(model, view, stream.calls[batch][view.number], (dense, ours), config))
            for name, x in dense.inputs.items():
                seen = (x != 0).any(0)
                alive[name] = seen if name not in alive else alive[name] | seen
    errors.dead = {n: int((~a).sum()) for n, a in alive.items() if not a.all()}
    return errors
