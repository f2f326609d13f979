"""One architecture as data."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ArchSpec:
    """Where an architecture keeps its blocks and MLP matrices.

    Attributes:
        blocks: Path of the list of blocks inside the trunk; "*" stands for every stage of a model with several lists.
        up: Paths inside a block of the matrices that read the model width (d → f).
        down: Paths inside a block of the matrices that write it (f → d).
        trunk: Path of the trunk inside the model; "" is what transformers calls the base model.
    """

    blocks: str
    up: tuple[str, ...]
    down: tuple[str, ...]
    trunk: str = ""
