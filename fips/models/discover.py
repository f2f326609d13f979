"""Finds blocks and MLP matrices by structure, for architectures that are not in the table."""

import re
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from fips.errors import ArchitectureError
from fips.models.arch import ArchSpec

_PLAIN_FORWARDS = (nn.Linear.forward, Conv1D.forward)
_PLAIN_NAMES = ("FalconLinear",)  # x Wᵀ + b, written out in transformers' own code
_INNER_NAMES = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "d_ff")


def features(module: nn.Module) -> tuple[int, int] | None:
    """(input, output) features of a plain linear or Conv1D; None for any other module.

    A subclass that computes something else, or has parameters of its own, is not a plain linear: its weight alone
    does not say what it does.
    """
    plain = {name for name, _ in module.named_parameters()} <= {"weight", "bias"}
    kind = type(module)
    ours = kind.__module__.startswith("transformers.") and kind.__name__ in _PLAIN_NAMES
    if not plain or (kind.forward not in _PLAIN_FORWARDS and not ours):
        return None
    if isinstance(module, Conv1D):
        return module.nx, module.nf
    linear: Any = module
    return linear.in_features, linear.out_features


def discover(trunk: nn.Module) -> ArchSpec:
    """Describes the lists of equal blocks that hold matrices d → f and f → d with one shared f.

    Lists whose paths differ only in numbers are the stages of one model. Where lists lie inside each other, the inner
    ones hold the blocks.

    Args:
        trunk: The base model.

    Raises:
        ArchitectureError: If there is no such list, or some of the matrices are elsewhere.
    """
    inner = next((v for n in _INNER_NAMES if isinstance(v := getattr(trunk.config, n, None), int)), None)
    lists = {p: m for p, m in trunk.named_modules() if isinstance(m, nn.ModuleList) and len(m)}
    found: dict[str, tuple[int, ArchSpec]] = {}
    for path, module in lists.items():
        matrices = _matrices(module[0], inner)
        if matrices is None or any(_matrices(lists[p][0], inner) for p in lists if p.startswith(f"{path}.")):
            continue
        pattern = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)
        found[pattern] = found.get(pattern, (0,))[0] + len(module), ArchSpec(pattern, *matrices)
    if not found:
        raise ArchitectureError(
            f"no MLP matrix found in a {type(trunk).__name__}: expected blocks with linears d → f and f → d of one f."
        )
    spec = max(found.values(), key=lambda entry: entry[0])[1]
    _require_whole(trunk, spec, lists, inner)
    return spec


def _require_whole(trunk: nn.Module, spec: ArchSpec, lists: dict[str, nn.ModuleList], inner: int | None) -> None:
    """Refuses a model of which the description covers only a part: several MLPs in a block, or other blocks."""
    blocks = re.escape(spec.blocks).replace(r"\*", r"\d+")
    known = re.compile(rf"{blocks}\.\d+\.({'|'.join(map(re.escape, spec.down))})")
    for path, module in lists.items():
        for name, block in module.named_children():
            for down in _pairs(block, inner):
                if not known.fullmatch(f"{path}.{name}.{down}"):
                    raise ArchitectureError(
                        f"{type(trunk).__name__} has MLP matrices in several places, such as {path}.{name}.{down} and "
                        f"{spec.blocks}.*.{spec.down[0]}; only models with one MLP per block are supported."
                    )


def _matrices(block: nn.Module, inner: int | None) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """Names of the up and down matrices of one block."""
    return next(((up, (down,)) for down, up in _pairs(block, inner).items()), None)


def _pairs(block: nn.Module, inner: int | None) -> dict[str, tuple[str, ...]]:
    """Every down matrix of a block with the up matrices that fit it; attention and state-space mixers left out."""
    shapes = {
        name: shape
        for name, module in block.named_modules()
        if (shape := features(module)) and not re.search("attn|attention|mixer", name.lower())
    }
    found = {}
    for down, (f, d) in shapes.items():
        up = tuple(n for n, s in shapes.items() if s in ((d, f), (d, 2 * f)))
        if up and (f == inner if inner else f > d):
            found[down] = up
    return found
