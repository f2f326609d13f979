"""The only code that changes a model: compressed linears in, dense linears back."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fips.errors import ArchitectureError, FormatError
from fips.models.layers import CompressedLinear, SharedBases, rebuild
from fips.models.sites import from_canonical, is_transposed

_NOT_FINITE = "the checkpoint is damaged, or this dtype is too narrow for it."


@dataclass(frozen=True)
class LinearShape:
    """What is known of a packed linear before its tensors are read.

    Attributes:
        name: Module path of the linear.
        role: "up" or "down".
        d: Model width.
        f: Inner size.
        nnz: Kept values.
    """

    name: str
    role: str
    d: int
    f: int
    nnz: int


def install_(
    model: nn.Module, groups: Mapping[str, tuple[int, int, Sequence[LinearShape]]], dtype: torch.dtype
) -> None:
    """Replaces the linears of every group by empty compressed ones and adds the owner of the bases.

    Args:
        model: A model whose parameters may be on meta.
        groups: Group name → (rank, stored columns of U, its linears).
        dtype: dtype the factors are loaded in.

    Raises:
        ArchitectureError: If a linear is missing or has another shape.
    """
    bases = SharedBases()
    model.add_module("fips_bases", bases)
    for group, (rank, columns, linears) in groups.items():
        if columns:
            bases.add_(group, (linears[0].d, columns), dtype)
        for linear in linears:
            old = _linear(model, linear)
            bias = getattr(old, "bias", None)
            shape = None if bias is None else tuple(bias.shape)
            packed = {"nnz": linear.nnz, "rank": rank, "d": linear.d, "columns": columns, "dtype": dtype,
                      "bias": shape}  # fmt: skip
            new = CompressedLinear(bases, group, linear.role, linear.f, packed)
            new.__dict__["_dense_type"] = (type(old), is_transposed(old, linear.role))
            _replace_(model, linear.name, new)


def densify_(model: nn.Module, free: Callable[[], None] = lambda: None) -> None:
    """Replaces every compressed linear by the original module type holding W = U V, and drops the bases.

    Args:
        model: A model with installed and loaded compressed linears.
        free: Called after each linear.

    Raises:
        FormatError: If a tensor was not loaded, or mask and values do not belong together.
    """
    for name, layer in list(model.named_modules()):
        if isinstance(layer, CompressedLinear):
            _replace_(model, name, _dense(name, layer))
            free()
    if hasattr(model, "fips_bases"):
        del model.fips_bases


def check_values(model: nn.Module) -> None:
    """Refuses packed linears whose mask and values do not belong together or are not finite; offloaded ones wait.

    Raises:
        FormatError: Naming the linear.
    """
    for group, U in model.get_submodule("fips_bases").named_parameters():
        if U.device.type != "meta" and not torch.isfinite(U).all():
            raise FormatError(f"basis {group} holds NaN or infinity in {U.dtype}: {_NOT_FINITE}")
    for name, layer in model.named_modules():
        if isinstance(layer, CompressedLinear) and "meta" not in (layer.weight.device.type, layer.mask.device.type):
            try:
                V = layer.projection()
            except FormatError as error:
                raise FormatError(f"{name}: {error}") from error
            if not torch.isfinite(V).all():
                raise FormatError(f"{name}: the values hold NaN or infinity in {V.dtype}: {_NOT_FINITE}")


def _dense(name: str, layer: CompressedLinear) -> nn.Module:
    if "meta" in (layer.weight.device.type, layer.mask.device.type):
        raise FormatError(f"{name} is offloaded: load with runtime='packed', or without offloading.")
    try:
        W = rebuild(layer.basis(), layer.projection())
    except FormatError as error:
        raise FormatError(f"{name}: {error}") from error
    if not torch.isfinite(W).all():
        raise FormatError(f"{name}: the rebuilt weight holds NaN or infinity in {W.dtype}: {_NOT_FINITE}")
    kind: type[nn.Module]
    kind, transposed = layer.__dict__["_dense_type"]
    weight = from_canonical(W, transposed=transposed)
    with torch.device("meta"):
        f, d = W.shape[1], W.shape[0]
        out, into = (f, d) if layer.role == "up" else (d, f)
        linear = issubclass(kind, nn.Linear)
        dense = kind(into, out, bias=layer.bias is not None) if linear else kind(out, into)
    dense.weight = nn.Parameter(weight)
    if layer.bias is not None:
        dense.bias = nn.Parameter(layer.bias.detach())
    dense.train(layer.training)
    return dense


def _linear(model: nn.Module, linear: LinearShape) -> nn.Module:
    try:
        module = model.get_submodule(linear.name)
    except AttributeError as error:
        raise ArchitectureError(f"{linear.name} is not in a {type(model).__name__}.") from error
    weight = getattr(module, "weight", None)
    transposed = is_transposed(module, linear.role)
    expected = (linear.f, linear.d) if transposed else (linear.d, linear.f)
    if weight is None or tuple(weight.shape) != expected:
        found = None if weight is None else tuple(weight.shape)
        raise ArchitectureError(f"{linear.name} has a weight of shape {found}; config.json describes {expected}.")
    return module


def _replace_(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)
