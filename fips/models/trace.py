"""What goes in and out of a block's MLP while the block runs."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fips.errors import ArchitectureError
from fips.models.blocks import Call, run_block
from fips.models.sites import Site


@dataclass(frozen=True)
class BlockView:
    """A block, its place in the model, and its matrices.

    Attributes:
        number: Block number.
        path: Module path inside the model.
        module: The block.
        sites: Its matrices; may be empty.
    """

    number: int
    path: str
    module: nn.Module
    sites: tuple[Site, ...]

    def linear(self, site: Site) -> Any:
        """The linear of a site."""
        return self.module.get_submodule(self.inside(site.name))

    def inside(self, name: str) -> str:
        """A module path of the model as seen from this block."""
        return name.removeprefix(f"{self.path}.")

    @property
    def mlp_path(self) -> str:
        """Path inside the block of the smallest module that holds all its matrices; "" for the block itself."""
        parts = [self.inside(s.name).split(".")[:-1] for s in self.sites]
        common = []
        for level in zip(*parts, strict=False):
            if len(set(level)) > 1:
                break
            common.append(level[0])
        return ".".join(common)


@dataclass
class Trace:
    """One run of a block.

    Attributes:
        hidden: Hidden state passed on, (windows, length, d).
        entering: Hidden state the block was given, (windows, length, d).
        inputs: Site name → input of its linear, (tokens, features).
        outputs: Name of every down-type site → output of its linear, (tokens, d): what the MLP gives.
        mlp_call: Arguments the MLP module was called with.
    """

    hidden: Tensor
    entering: Tensor
    inputs: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    mlp_call: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})


def trace_block(view: BlockView, call: Call, hidden: Tensor, weights: dict[str, Tensor] | None = None) -> Trace:
    """Runs a block and keeps what its MLP saw.

    Args:
        view: The block, materialized.
        call: Its recorded arguments.
        hidden: Hidden state, (windows, length, d).
        weights: Parameter name inside the block → tensor used instead.
    """
    trace = Trace(hidden, hidden)
    with _recording(view, trace):
        trace.hidden = run_block(view.module, call, hidden, weights)
    for site in view.sites:
        if site.name not in trace.inputs:
            raise ArchitectureError(f"{site.name} is not used when its block runs; leave it out with --include.")
    return trace


def trace_sensitivity(
    view: BlockView, call: Call, hidden: Tensor, generator: torch.Generator
) -> tuple[Trace, dict[str, Tensor]]:
    """Runs a block like `trace_block` and measures how much every output of its linears matters.

    One backward pass of random signs ε from the block's output to the outputs y of the linears: the squared gradient of
    εᵀ out in y_k has the expectation ‖∂out/∂y_k‖² (Hutchinson's estimator), and a token is one sample.

    Args:
        view: The block, materialized, its parameters without gradients.
        call: Its recorded arguments.
        hidden: Hidden state, (windows, length, d).
        generator: Draws the signs, on the CPU.

    Returns:
        The trace, and site name → squared gradients summed over the tokens, (outputs,), float32.
    """
    leaves: dict[str, Tensor] = {}
    handles = [view.linear(site).register_forward_hook(_cut(leaves, site)) for site in view.sites]
    try:
        with torch.enable_grad():
            trace = trace_block(view, call, hidden)
    finally:
        for handle in handles:
            handle.remove()
    squares: dict[str, Tensor] = {}
    if trace.hidden.requires_grad:
        signs = torch.randint(0, 2, trace.hidden.shape, generator=generator, dtype=torch.int8) * 2 - 1
        gradients = torch.autograd.grad(trace.hidden, list(leaves.values()), signs.to(trace.hidden), allow_unused=True)
        for name, gradient in zip(leaves, gradients, strict=True):
            g = torch.zeros_like(leaves[name]) if gradient is None else gradient  # None: it does not reach the output
            squares[name] = _flat(g).float().square().sum(0)
    inputs = {name: x.detach() for name, x in trace.inputs.items()}
    outputs = {name: y.detach() for name, y in trace.outputs.items()}
    return Trace(trace.hidden.detach(), hidden, inputs, outputs), squares


def _cut(leaves: dict[str, Tensor], site: Site) -> Callable[..., Tensor]:
    """Makes a linear's output a leaf where it depends on none, so that a backward pass ends there."""

    def hook(_module: nn.Module, _args: Sequence[Tensor], output: Tensor) -> Tensor:
        leaves[site.name] = output if output.requires_grad else output.detach().requires_grad_()
        return leaves[site.name].clone()  # activations that work in place may not touch a leaf

    return hook


def run_mlp(view: BlockView, trace: Trace, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """MLP outputs with replaced weights on the inputs of an earlier trace.

    Args:
        view: The block.
        trace: A trace of it, for the MLP's arguments.
        weights: Parameter name inside the block → tensor used instead.

    Returns:
        Down-type site name → output, (tokens, d).
    """
    path = view.mlp_path
    module = view.module.get_submodule(path) if path else view.module
    prefix = f"{path}." if path else ""
    inner = {name.removeprefix(prefix): tensor for name, tensor in weights.items()}
    outputs = Trace(trace.hidden, trace.entering)
    args, kwargs = trace.mlp_call
    with _recording(view, outputs):
        torch.func.functional_call(module, inner, args, kwargs)
    return outputs.outputs


@contextmanager
def _recording(view: BlockView, trace: Trace) -> Iterator[None]:
    handles = []
    for site in view.sites:
        linear = view.linear(site)
        handles.append(linear.register_forward_pre_hook(_keep_input(trace, site)))
        if site.role == "down":
            handles.append(linear.register_forward_hook(_keep_output(trace, site)))
    if view.sites:
        path = view.mlp_path
        scope = view.module.get_submodule(path) if path else view.module
        handles.append(scope.register_forward_pre_hook(_keep_call(trace), with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _flat(t: Tensor) -> Tensor:
    return t.reshape(-1, t.shape[-1])


def _keep_input(trace: Trace, site: Site) -> Callable[..., None]:
    def hook(_module: nn.Module, args: Sequence[Tensor]) -> None:
        trace.inputs[site.name] = _flat(args[0])

    return hook


def _keep_output(trace: Trace, site: Site) -> Callable[..., None]:
    def hook(_module: nn.Module, _args: Sequence[Tensor], output: Tensor) -> None:
        trace.outputs[site.name] = _flat(output)

    return hook


def _keep_call(trace: Trace) -> Callable[..., None]:
    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        trace.mlp_call = (args, kwargs)

    return hook
