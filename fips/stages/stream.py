"""The calibration stream: hidden states at the border of the current group, and nothing else of the activations."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fips.errors import ArchitectureError, NumericalError
from fips.models.blocks import Call, record_calls, returned_tuple_length, run_block, share_equal
from fips.models.trace import BlockView


@dataclass
class Stream:
    """Hidden states that enter the next group.

    Attributes:
        dense: One (windows, length, d) tensor per batch, from the original model, on the CPU.
        compressed: The same from the compressed prefix; the very list `dense` when inputs are the original model's.
        calls: Per batch, the recorded arguments of every block.
        device: Where blocks run.
    """

    dense: list[Tensor]
    compressed: list[Tensor]
    calls: list[list[Call]]
    device: str

    @property
    def separate(self) -> bool:
        """Whether the compressed prefix has hidden states of its own."""
        return self.compressed is not self.dense


@torch.no_grad()
def start_stream(
    model: Any, blocks: nn.ModuleList, tokens: Tensor, batch: int, device: str, *, separate: bool
) -> Stream:
    """Embeds the calibration tokens and records what the model passes to its blocks.

    Args:
        model: The trunk, with everything but the blocks after the first materialized on `device`.
        blocks: Its list of blocks.
        tokens: Token windows, (windows, length).
        batch: Windows per batch.
        device: Where blocks run.
        separate: Whether to carry hidden states of the compressed prefix too.
    """
    chunks: tuple[Tensor, ...] = torch.split(tokens, batch)
    hidden: list[Tensor] = []
    calls: list[list[Call]] = []
    tuples: int | None = None
    for number, chunk in enumerate(chunks):
        try:
            if tuples is None:
                tuples = returned_tuple_length(model, blocks, chunk[:1].to(device))
            first, recorded = record_calls(model, blocks, chunk.to(device), tuples=tuples)
        except (LookupError, RuntimeError, TypeError, ValueError, AttributeError) as error:  # any model's own code
            kind, first_line = type(model).__name__, (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ArchitectureError(f"{kind} cannot be run block by block: {first_line}") from error
        check_finite(first, f"the embedding of calibration batch {number}")
        hidden.append(first.cpu())
        calls.append(share_equal(recorded, calls[0]) if calls else recorded)
    return Stream(hidden, list(hidden) if separate else hidden, calls, device)


@torch.no_grad()
def advance(
    stream: Stream, views: Sequence[BlockView], batch: int, weights: Mapping[int, dict[str, Tensor]] | None
) -> Tensor:
    """Hidden state of one batch after a group's blocks, on the CPU.

    Args:
        stream: The stream, at the group's first block.
        views: The group's blocks, materialized.
        batch: Batch number.
        weights: Block number → replaced parameters, to run the compressed path; None runs the dense one.

    Raises:
        NumericalError: If a block's output is not finite.
    """
    hidden = (stream.dense if weights is None else stream.compressed)[batch].to(stream.device)
    for view in views:
        replaced = None if weights is None else weights.get(view.number)
        hidden = run_block(view.module, stream.calls[batch][view.number], hidden, replaced)
        check_finite(hidden, f"the output of block {view.number} ({view.path})")
    return hidden.cpu()


def check_finite(t: Tensor, what: str) -> None:
    """Refuses NaN and infinity.

    Raises:
        NumericalError: Naming `what`.
    """
    if not torch.isfinite(t).all():
        bad = int((~torch.isfinite(t)).sum())
        raise NumericalError(f"{what} holds {bad:,} NaN or infinite values of {t.numel():,}; nothing is compressed.")
