"""The MLP matrices of a model as sites, read and written in canonical orientation. The only file that transposes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from inspect import signature
from typing import Any

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from fips.errors import ArchitectureError, ConfigError
from fips.models.arch import ArchSpec
from fips.models.archs import ARCHITECTURES
from fips.models.discover import discover, features

_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True)
class Site:
    """One MLP matrix.

    Attributes:
        name: Module path of the linear inside the model.
        disk_name: Its name in the checkpoint, without ".weight".
        block: Number of its block.
        role: "up" (reads the model width) or "down" (writes it).
        d: Model width, the short side.
        f: Inner size, the long side.
        transposed: Whether the stored weight is the transpose of the canonical (d, f).
    """

    name: str
    disk_name: str
    block: int
    role: str
    d: int
    f: int
    transposed: bool


def is_transposed(module: nn.Module, role: str) -> bool:
    """Whether a linear's stored weight is the transpose of the canonical (d, f).

    `Linear` stores (out, in), `Conv1D` (in, out): up-type linears and down-type Conv1Ds are transposed.
    """
    return (role == "up") != isinstance(module, Conv1D)


def to_canonical(weight: Tensor, *, transposed: bool) -> Tensor:
    """Stored weight to W, (d, f)."""
    return weight.T.contiguous() if transposed else weight


def from_canonical(W: Tensor, *, transposed: bool) -> Tensor:
    """W, (d, f), to the stored layout."""
    return W.T.contiguous() if transposed else W


def architecture(model: Any) -> tuple[ArchSpec, str]:
    """The model's `ArchSpec` and where it comes from: "table" or "structure".

    Raises:
        ArchitectureError: If the model has experts, or no MLP matrix can be found.
    """
    _refuse_experts(model)
    for spec in ARCHITECTURES.get(model.config.model_type, ()):
        blocks = blocks_of(model, spec)
        if blocks and all(_has(blocks[0].module, name) for name in (*spec.up, *spec.down)):
            return spec, "table"
    return discover(trunk_of(model)[1]), "structure"


def _has(block: nn.Module, name: str) -> bool:
    try:
        block.get_submodule(name)
    except AttributeError:
        return False
    return True


@dataclass(frozen=True)
class Block:
    """A block and its place in the model.

    Attributes:
        path: Module path inside the model.
        module: The block.
        parent: The module that holds it.
        stage: Number of the list it is in. Within a list every block is given what the one before it returns; between
            two lists the model may do something of its own, such as merging patches.
    """

    path: str
    module: nn.Module
    parent: nn.Module
    stage: int

    @property
    def key(self) -> str:
        """Its name inside the parent."""
        return self.path.rpartition(".")[2]


def trunk_of(model: Any) -> tuple[str, Any]:
    """The module that turns inputs into the hidden states of all blocks, with its path inside the model."""
    rows = ARCHITECTURES.get(model.config.model_type, ())
    if rows and rows[0].trunk and _has(model, rows[0].trunk):
        return rows[0].trunk, model.get_submodule(rows[0].trunk)
    trunk = model.base_model
    if getattr(trunk, "main_input_name", None) not in signature(trunk.forward).parameters:
        trunk = model  # some models call what holds their blocks, but not their embeddings, the base model
    return next(path for path, module in model.named_modules() if module is trunk), trunk


def blocks_of(model: nn.Module, spec: ArchSpec) -> list[Block]:
    """The model's blocks in the order in which they run; none where the model has no such lists."""
    try:
        prefix, trunk = trunk_of(model)
        lists = _expand(trunk, "", spec.blocks.split("."))
    except AttributeError:
        return []
    blocks = []
    for stage, (path, parent) in enumerate(lists):
        full = ".".join(part for part in (prefix, path) if part)
        blocks += [Block(f"{full}.{name}", block, parent, stage) for name, block in parent.named_children()]
    return blocks


def _expand(module: nn.Module, path: str, parts: list[str]) -> list[tuple[str, nn.Module]]:
    """Modules that a path with "*" for any child leads to."""
    if not parts:
        return [(path, module)]
    names = [name for name, _ in module.named_children()] if parts[0] == "*" else parts[:1]
    found = []
    for name in names:
        found += _expand(module.get_submodule(name), f"{path}.{name}" if path else name, parts[1:])
    return found


def find_sites(model: nn.Module, disk_names: Mapping[str, str], include: Sequence[str] = ()) -> list[Site]:
    """Every MLP matrix of the model, block by block.

    Args:
        model: The model; its parameters may be on meta.
        disk_names: Module tensor name to name on disk.
        include: Globs over module or disk names; empty means all.

    Raises:
        ArchitectureError: If nothing can be compressed, a matrix is missing on disk or has an odd shape.
        ConfigError: If a glob matches no matrix.
    """
    spec, _ = architecture(model)
    sites = []
    for number, block in enumerate(blocks_of(model, spec)):
        for role, names in (("up", spec.up), ("down", spec.down)):
            sites += [_site(block, name, number, role, disk_names) for name in names]
    if not sites:
        raise ArchitectureError(f"no MLP matrix found: {spec.blocks} holds no block.")
    return _included(sites, include)


def _site(block: Block, name: str, number: int, role: str, disk: Mapping[str, str]) -> Site:
    full = f"{block.path}.{name}"
    module = block.module.get_submodule(name) if _has(block.module, name) else None
    shape = features(module) if module is not None else None
    if module is None or shape is None:
        found = "nothing" if module is None else f"a {type(module).__name__}"
        raise ArchitectureError(f"{full}: expected a linear layer there, found {found}.")
    stored = disk.get(f"{full}.weight")
    if stored is None or not stored.endswith(".weight"):
        raise ArchitectureError(f"{full}.weight is not in the checkpoint as a plain weight.")
    d, f = shape if role == "up" else shape[::-1]
    return Site(full, stored.removesuffix(".weight"), number, role, d, f, is_transposed(module, role))


def _included(sites: list[Site], include: Sequence[str]) -> list[Site]:
    if not include:
        return sites
    for glob in include:
        if not any(_matches(site, glob) for site in sites):
            raise ConfigError(f"include: {glob!r} matches none of {len(sites)} matrices such as {sites[0].name}.")
    return [site for site in sites if any(_matches(site, glob) for glob in include)]


def _matches(site: Site, glob: str) -> bool:
    return fnmatchcase(site.name, glob) or fnmatchcase(site.disk_name, glob)


def _refuse_experts(model: Any) -> None:
    config = model.config
    for key in _EXPERT_KEYS:
        if isinstance(getattr(config, key, None), int) and getattr(config, key) > 1:
            raise ArchitectureError(
                f"{config.model_type} has {getattr(config, key)} experts ({key}): mixture-of-experts models are not "
                "supported."
            )
    for name, parameter in model.named_parameters():
        if "experts" in name.split(".") and parameter.dim() >= 2:
            raise ArchitectureError(f"{name} is an expert weight: mixture-of-experts models are not supported.")
