"""One architecture as data."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ArchSpec:
    """Where an architecture keeps its blocks and MLP matrices.

    Attributes:
        blocks: Module path of the list of blocks inside the whole model.
        up: Paths inside a block of the matrices that read the model width (d → f).
        down: Paths inside a block of the matrices that write it (f → d).
    """

    blocks: str
    up: tuple[str, ...]
    down: tuple[str, ...]
