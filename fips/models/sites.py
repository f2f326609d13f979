"""The MLP matrices of a model as sites, read and written in canonical orientation. The only file that transposes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
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
    spec = ARCHITECTURES.get(model.config.model_type)
    return (spec, "table") if spec else (discover(model), "structure")


def blocks_of(model: nn.Module, spec: ArchSpec) -> list[tuple[str, nn.Module]]:
    """The model's blocks in order, each with its module path."""
    layers = model.get_submodule(spec.blocks)
    return [(f"{spec.blocks}.{name}", block) for name, block in layers.named_children()]


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
    for number, (path, block) in enumerate(blocks_of(model, spec)):
        for role, names in (("up", spec.up), ("down", spec.down)):
            sites += [_site(block, path, name, number, role, disk_names) for name in names]
    if not sites:
        raise ArchitectureError(f"no MLP matrix found: {spec.blocks} holds no block.")
    return _included(sites, include)


def _site(block: nn.Module, path: str, name: str, number: int, role: str, disk: Mapping[str, str]) -> Site:
    full = f"{path}.{name}"
    try:
        module = block.get_submodule(name)
    except AttributeError:
        module = None
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
