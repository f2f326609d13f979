"""The calibration stream: hidden states at the border of the current group, and nothing else of the activations."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fips.errors import ArchitectureError, NumericalError
from fips.models.blocks import Call, Trunk, cross_stage, record_calls, returned_tuple_length, run_block, share_equal
from fips.models.trace import BlockView


@dataclass
class Stream:
    """Hidden states that enter the next group.

    Attributes:
        dense: One (windows, length, d) tensor per batch, from the original model, on the CPU.
        compressed: The same from the compressed prefix; the very list `dense` when inputs are the original model's.
        calls: Per batch, the recorded arguments of every block.
        shapes: Per batch, the shape of the model's inputs.
        tuples: Length of the tuples that blocks return.
        device: Where blocks run.
    """

    dense: list[Tensor]
    compressed: list[Tensor]
    calls: list[list[Call]]
    shapes: list[torch.Size]
    tuples: int
    device: str

    @property
    def separate(self) -> bool:
        """Whether the compressed prefix has hidden states of its own."""
        return self.compressed is not self.dense


@torch.no_grad()
def start_stream(trunk: Trunk, batches: Iterable[Tensor], device: str, *, separate: bool) -> Stream:
    """Embeds the calibration inputs and records what the model passes to its blocks.

    Args:
        trunk: The trunk, with everything outside its blocks, and the first block, materialized on `device`.
        batches: Token ids, (windows, length), or pixel values, (images, channels, height, width).
        device: Where blocks run.
        separate: Whether to carry hidden states of the compressed prefix too.
    """
    hidden: list[Tensor] = []
    calls: list[list[Call]] = []
    shapes: list[torch.Size] = []
    tuples: int | None = None
    for number, chunk in enumerate(batches):
        try:
            with torch.random.fork_rng(devices=[device] if device == "cuda" else []):
                torch.manual_seed(number)  # some models drop patches at random, even in evaluation mode
                if tuples is None:
                    tuples = returned_tuple_length(trunk, chunk[:1].to(device))
                first, recorded = record_calls(trunk, chunk.to(device), tuples=tuples)
        except (LookupError, RuntimeError, TypeError, ValueError, AttributeError) as error:  # any model's own code
            kind, first_line = type(trunk.module).__name__, (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ArchitectureError(f"{kind} cannot be run block by block: {first_line}") from error
        check_finite(first, f"the embedding of calibration batch {number}")
        hidden.append(first.cpu())
        calls.append(share_equal(recorded, calls[0]) if calls else recorded)
        shapes.append(chunk.shape)
    return Stream(hidden, list(hidden) if separate else hidden, calls, shapes, tuples or 0, device)


@torch.no_grad()
def enter_stage(stream: Stream, trunk: Trunk, after: int) -> None:
    """Moves the stream from the end of one stage to the first block of the next.

    Args:
        stream: The stream, behind block `after`.
        trunk: The trunk, with everything outside its blocks materialized.
        after: Number of the last block of a stage.

    Raises:
        NumericalError: If what enters the next block is not finite.
    """
    for states in [stream.dense, stream.compressed] if stream.separate else [stream.dense]:
        for batch, hidden in enumerate(states):
            entering = cross_stage(trunk, stream.shapes[batch], after, hidden.to(stream.device), tuples=stream.tuples)
            check_finite(entering, f"what enters block {after + 1}")
            states[batch] = entering.cpu()


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
