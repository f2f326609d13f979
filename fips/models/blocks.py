"""Runs single blocks with the arguments the model itself passes to them; no model code is written down here.

One pass of the model's own forward in which every block is a recorder gives the arguments of every block. Afterwards
any block can be called alone with its own recorded arguments and real hidden states.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fips.errors import ArchitectureError
from fips.models.sites import Block


@dataclass(frozen=True)
class Call:
    """Everything a block was given besides the hidden state.

    Attributes:
        args: Positional arguments after the hidden state.
        kwargs: Keyword arguments without the hidden state.
        keyword: Name under which the hidden state was passed; None when it was the first positional argument.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    keyword: str | None

    def with_hidden(self, hidden: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with a hidden state in its place."""
        if self.keyword is None:
            return (hidden, *self.args), self.kwargs
        return self.args, {**self.kwargs, self.keyword: hidden}


@dataclass(frozen=True)
class Trunk:
    """The part of a model that runs its blocks one after the other.

    Attributes:
        module: The module, whose forward takes token ids or pixel values.
        blocks: Its blocks in order.
    """

    module: Any
    blocks: Sequence[Block]

    @classmethod
    def of(cls, module: Any, blocks: nn.ModuleList) -> "Trunk":
        """A trunk with a single list of blocks."""
        return cls(module, [Block(name, block, blocks, 0) for name, block in blocks.named_children()])

    def run(self, inputs: Tensor) -> None:
        """Runs the forward of the whole trunk, up to the recorder that ends it."""
        given: dict[str, Any] = {self.module.main_input_name: inputs}
        if "use_cache" in inspect.signature(self.module.forward).parameters:
            given["use_cache"] = False
        with suppress(_Finished):
            self.module(**given)

    @contextmanager
    def replaced(self, modules: Sequence[nn.Module]) -> Iterator[None]:
        """Other modules in place of the first blocks while the context lasts."""
        places = self.blocks[: len(modules)]
        for block, module in zip(places, modules, strict=True):
            block.parent._modules[block.key] = module
        try:
            yield
        finally:
            for block in places:
                block.parent._modules[block.key] = block.module


class _Finished(Exception):
    """Raised by the last recorder: what comes after the blocks is not needed."""


class Recorder(nn.Module):
    """Stands in for a block: keeps its arguments and returns the hidden state in the block's own return structure.

    Attributes such as `attention_type`, which models read from their blocks, are the block's. With `gives` it returns
    that instead of the hidden state it was given.
    """

    def __init__(self, block: nn.Module, *, returns: int, last: bool, gives: Tensor | None = None) -> None:
        super().__init__()
        self.__dict__["_block"] = block
        self._returns = returns
        self._last = last
        self._gives = gives
        self.call: Call | None = None
        self.hidden: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_block"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Keeps the arguments; the last recorder ends the pass."""
        self.hidden, self.call = _split(args, kwargs)
        if self._last:
            raise _Finished
        passed = self.hidden if self._gives is None else self._gives
        return (passed, *[None] * (self._returns - 1)) if self._returns else passed


def _split(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Call]:
    if args:
        return args[0], Call(args[1:], kwargs, None)
    name = next((n for n, v in kwargs.items() if isinstance(v, Tensor) and v.is_floating_point()), None)
    if name is None:
        raise ArchitectureError("a block was called without a hidden state.")
    return kwargs[name], Call((), {k: v for k, v in kwargs.items() if k != name}, name)


def returned_tuple_length(trunk: Trunk, inputs: Tensor) -> int:
    """Length of the tuple that blocks return, 0 for a bare tensor; learned from one real call of the first block.

    The first block must be materialized.
    """
    seen: list[Any] = []
    real = [block.module for block in trunk.blocks]
    handle = real[0].register_forward_hook(lambda _m, _a, out: seen.append(out))
    try:
        with trunk.replaced([real[0], *(Recorder(block, returns=0, last=True) for block in real[1:])]):
            trunk.run(inputs)
    finally:
        handle.remove()
    return len(seen[0]) if isinstance(seen[0], tuple) else 0


def record_calls(trunk: Trunk, inputs: Tensor, *, tuples: int) -> tuple[Tensor, list[Call]]:
    """Hidden state that enters the first block, and the arguments of every block, for one batch.

    Args:
        trunk: The trunk, everything outside its blocks materialized. Its blocks are replaced for the pass and put back.
        inputs: Token ids, (windows, length), or pixel values, (images, channels, height, width).
        tuples: Length of the tuples the blocks return, see `returned_tuple_length`.

    Raises:
        ArchitectureError: If the blocks do not run one after the other on each other's output.
    """
    name, last = type(trunk.module).__name__, len(trunk.blocks) - 1
    recorders = [Recorder(b.module, returns=tuples, last=i == last) for i, b in enumerate(trunk.blocks)]
    with trunk.replaced(recorders):
        trunk.run(inputs)
    hidden = [r.hidden for r in recorders]
    calls = [r.call for r in recorders]
    if hidden[0] is None or any(c is None for c in calls):
        raise ArchitectureError(f"{name} does not run its blocks in one pass, one after the other.")
    for number in range(1, len(hidden)):
        before, here = hidden[number - 1], hidden[number]
        border = trunk.blocks[number].stage != trunk.blocks[number - 1].stage
        if not border and (before is None or here is None or not torch.equal(before, here)):
            raise ArchitectureError(
                f"{name} changes the hidden state before block {number}, outside of any block; its blocks cannot be "
                "run alone."
            )
    return hidden[0], [c for c in calls if c is not None]


def cross_stage(trunk: Trunk, shape: Sequence[int], after: int, hidden: Tensor, *, tuples: int) -> Tensor:
    """Hidden state that enters the first block of a stage: what the model makes of what the stage before passes on.

    The model's own forward runs once more, on empty inputs of the recorded shape; all blocks only pass on what they are
    given, but for the last one of the stage, which gives `hidden`. Swin merges patches there.

    Args:
        trunk: The trunk, everything outside its blocks materialized.
        shape: Shape of the batch's inputs.
        after: Number of the last block of a stage.
        hidden: What it passes on, (images, patches, d).
        tuples: Length of the tuples the blocks return.
    """
    places = trunk.blocks[: after + 2]
    recorders = [
        Recorder(block.module, returns=tuples, last=i == after + 1, gives=hidden if i == after else None)
        for i, block in enumerate(places)
    ]
    kind = torch.int64 if trunk.module.main_input_name == "input_ids" else torch.float32
    with trunk.replaced(recorders):
        trunk.run(torch.zeros(*shape, dtype=kind, device=hidden.device))
    entering = recorders[-1].hidden
    if entering is None:
        raise ArchitectureError(f"{type(trunk.module).__name__} does not run block {after + 1} after block {after}.")
    return entering


def run_block(block: nn.Module, call: Call, hidden: Tensor, weights: dict[str, Tensor] | None = None) -> Tensor:
    """One block on a hidden state, optionally with some of its parameters replaced.

    Args:
        block: The block, materialized.
        call: Its recorded arguments.
        hidden: Hidden state, (windows, length, d).
        weights: Parameter name inside the block → tensor used instead.

    Returns:
        The hidden state it passes on, (windows, length, d).
    """
    args, kwargs = call.with_hidden(hidden)
    out = torch.func.functional_call(block, weights, args, kwargs) if weights else block(*args, **kwargs)
    passed: Tensor = out[0] if isinstance(out, tuple) else out
    return passed


def share_equal(calls: Sequence[Call], earlier: Sequence[Call]) -> list[Call]:
    """Replaces calls by bit-equal earlier ones, so that masks and rotary tables are kept once, not per batch."""
    return [old if _equal((old.args, old.kwargs), (new.args, new.kwargs)) else new
            for new, old in zip(calls, earlier, strict=True)]


def _equal(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[k], b[k]) for k in a)
    if isinstance(a, (tuple, list)) and type(a) is type(b):
        return len(a) == len(b) and all(_equal(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and not isinstance(a, Tensor) and bool(a == b)
