"""Runs single blocks with the arguments the model itself passes to them; no model code is written down here.

One pass of the model's own forward in which every block is a recorder gives the arguments of every block. Afterwards
any block can be called alone with its own recorded arguments and real hidden states.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fips.errors import ArchitectureError


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


class _Finished(Exception):
    """Raised by the last recorder: what comes after the blocks is not needed."""


class Recorder(nn.Module):
    """Stands in for a block: keeps its arguments and returns the hidden state in the block's own return structure.

    Attributes such as `attention_type`, which models read from their blocks, are the block's.
    """

    def __init__(self, block: nn.Module, *, returns: int, last: bool) -> None:
        super().__init__()
        self.__dict__["_block"] = block
        self._returns = returns
        self._last = last
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
        return (self.hidden, *[None] * (self._returns - 1)) if self._returns else self.hidden


def _split(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Call]:
    if args:
        return args[0], Call(args[1:], kwargs, None)
    name = next((n for n, v in kwargs.items() if isinstance(v, Tensor) and v.is_floating_point()), None)
    if name is None:
        raise ArchitectureError("a block was called without a hidden state.")
    return kwargs[name], Call((), {k: v for k, v in kwargs.items() if k != name}, name)


def returned_tuple_length(model: nn.Module, blocks: nn.ModuleList, tokens: Tensor) -> int:
    """Length of the tuple that blocks return, 0 for a bare tensor; learned from one real call of the first block.

    The first block must be materialized.
    """
    seen: list[Any] = []
    handle = blocks[0].register_forward_hook(lambda _m, _a, out: seen.append(out))
    real = list(blocks)
    stops = [Recorder(block, returns=0, last=True) for block in real[1:]]
    try:
        _replace_(blocks, [real[0], *stops])
        model(input_ids=tokens, use_cache=False)
    except _Finished:
        pass
    finally:
        handle.remove()
        _replace_(blocks, real)
    return len(seen[0]) if isinstance(seen[0], tuple) else 0


def _replace_(blocks: nn.ModuleList, modules: Sequence[nn.Module]) -> None:
    for i, module in enumerate(modules):
        blocks[i] = module


def record_calls(
    model: nn.Module, blocks: nn.ModuleList, tokens: Tensor, *, tuples: int
) -> tuple[Tensor, list[Call]]:
    """Hidden state that enters the first block, and the arguments of every block, for one batch of tokens.

    Args:
        model: The trunk (everything before the blocks materialized).
        blocks: Its list of blocks; replaced for the pass and put back.
        tokens: Token ids, (windows, length).
        tuples: Length of the tuples the blocks return, see `returned_tuple_length`.

    Raises:
        ArchitectureError: If the blocks do not run one after the other on each other's output.
    """
    real = list(blocks)
    recorders = [Recorder(b, returns=tuples, last=i == len(real) - 1) for i, b in enumerate(real)]
    try:
        _replace_(blocks, recorders)
        model(input_ids=tokens, use_cache=False)
    except _Finished:
        pass
    finally:
        _replace_(blocks, real)
    first = recorders[0].hidden
    calls = [r.call for r in recorders]
    if first is None or any(c is None for c in calls):
        raise ArchitectureError(f"{type(model).__name__} does not run its blocks in one pass, one after the other.")
    for number, recorder in enumerate(recorders):
        if recorder.hidden is None or not torch.equal(recorder.hidden, first):
            raise ArchitectureError(
                f"{type(model).__name__} changes the hidden state before block {number}, outside of any block; "
                "its blocks cannot be run alone."
            )
    return first, [c for c in calls if c is not None]


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
