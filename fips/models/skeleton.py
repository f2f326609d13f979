"""The model without its weights: structure from the config, parameters on meta, names mapped to the disk's."""

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fips.errors import ArchitectureError, FipsError, SourceError
from fips.models import kinds

ReadTensor = Callable[[str], Tensor]
_FILLED = (torch.arange, torch.zeros, torch.ones, torch.full, torch.linspace, torch.eye)
_LARGEST_TABLE = 2**31  # bytes


class _Modest(TorchFunctionMode):
    """Refuses tables, such as one of positions, that are larger than any model's, before memory is taken for them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Asks on meta how large the table would be."""
        kwargs = kwargs or {}
        if func in _FILLED:
            size = func(*args, **{**kwargs, "device": "meta"}).nbytes
            if size > _LARGEST_TABLE:
                raise ArchitectureError(f"config.json asks for a table of {size:,} bytes; is one of its sizes wrong?")
        return func(*args, **kwargs)


def build_skeleton(config: Any, *, trust_remote_code: bool = False) -> Any:
    """The checkpoint's model in float32 with every parameter on meta and every buffer real.

    Args:
        config: The checkpoint's transformers config.
        trust_remote_code: Whether the checkpoint's own Python code may run.

    Raises:
        ArchitectureError: If transformers cannot build the model.
    """
    try:
        with init_empty_weights(include_buffers=False), _Modest():
            model = kinds.from_config(config, trust_remote_code=trust_remote_code, dtype=torch.float32)
    except FipsError:
        raise
    except Exception as error:  # constructors of many models raise anything for odd values
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ArchitectureError(f"config.json does not give a {config.model_type} model: {first}") from error
    model.eval()
    model.config.use_cache = False
    return model.requires_grad_(requires_grad=False)


def map_names(model: nn.Module, on_disk: Iterable[str]) -> dict[str, str]:
    """Name of every module tensor on disk, by the renamings transformers itself applies when loading.

    Args:
        model: The skeleton.
        on_disk: Tensor names of the checkpoint.

    Returns:
        Module tensor name → disk name, for every disk tensor the model has a place for.

    Raises:
        ArchitectureError: If a tensor of the checkpoint must be converted, not only renamed, to fit the model.
    """
    rename = disk_renamer(model)
    wanted = set(model.state_dict())
    names: dict[str, str] = {}
    for name in on_disk:
        target = rename(name)
        if target in wanted:
            names[target] = name
    for tied, origin in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        for a, b in ((tied, origin), (origin, tied)):  # either side of a tie may be the one on disk
            if a not in names and b in names:
                names[a] = names[b]
    return names


def disk_renamer(model: Any) -> Callable[[str], str]:
    """Function from a tensor's name on disk to its name in the model, as transformers renames when loading.

    It raises ArchitectureError for a tensor that would be converted, not only renamed.
    """
    wanted = dict.fromkeys(model.state_dict(), torch.empty(0))
    prefix = getattr(model, "base_model_prefix", "")
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, rename_source_key
    except ImportError:  # transformers moved its internals: plain names and the base model's prefix remain
        return lambda name: _with_prefix(name, prefix, wanted)
    transforms = get_model_conversion_mapping(model)
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    renamings = [t for t in transforms if not isinstance(t, WeightConverter)]

    def rename(name: str) -> str:
        target, converted = rename_source_key(name, renamings, converters, prefix, wanted)
        if converted is not None:
            raise ArchitectureError(
                f"{name}: transformers rebuilds this tensor while loading (fused or per-expert weights); "
                f"such checkpoints of {model.config.model_type} are not supported."
            )
        return target if target in wanted else _with_prefix(name, prefix, wanted)

    return rename


def _with_prefix(name: str, prefix: str, wanted: Mapping[str, Tensor]) -> str:
    stripped = re.sub(rf"^{re.escape(prefix)}\.", "", name)
    return next((n for n in (name, f"{prefix}.{name}", stripped) if n in wanted), name)


def require_tensors(model: nn.Module, names: Mapping[str, str]) -> None:
    """Refuses a checkpoint that lacks a tensor of the model.

    Raises:
        SourceError: Naming the first missing tensors.
    """
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    missing = [n for n in _persistent(model) if n not in names and n not in tied and not may_lack(model, n)]
    if missing:
        shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise SourceError(f"the checkpoint lacks {shown}: it is incomplete or does not belong to its config.json.")


def may_lack(model: Any, name: str) -> bool:
    """Whether a checkpoint may lack a tensor: the pooler of a bare model, which many were published without.

    A classifier is nothing without the pooler it reads.
    """
    return is_pooler(name) and model.base_model is model


def is_pooler(name: str) -> bool:
    """Whether a tensor or module belongs to a pooler: what comes after the blocks, and many checkpoints lack."""
    return "pooler" in name.split(".")


def _persistent(model: nn.Module) -> Iterator[str]:
    yield from (name for name, _ in model.named_parameters())


class _Own(nn.Module):
    """Stands for a module's own tensors, without those of its children."""

    def __init__(self, whole: nn.Module) -> None:
        super().__init__()
        self.__dict__["_whole"] = whole

    @property
    def whole(self) -> nn.Module:
        """The module with its children."""
        found: nn.Module = self.__dict__["_whole"]
        return found


def outside(module: nn.Module, path: str, blocks: Iterable[str]) -> list[tuple[str, nn.Module]]:
    """Everything of a module that is in none of its blocks, to be materialized; poolers come after the blocks.

    Args:
        module: A trunk.
        path: Its path in the model.
        blocks: Paths of its blocks in the model.
    """
    blocks = list(blocks)
    if path in blocks or is_pooler(path):
        return []
    if not any(f"{block}.".startswith(f"{path}." if path else "") for block in blocks):
        return [(path, module)]
    found: list[tuple[str, nn.Module]] = [(path, _Own(module))]
    for name, child in module.named_children():
        found += outside(child, f"{path}.{name}" if path else name, blocks)
    return found


@contextlib.contextmanager
def materialized(
    modules: Iterable[tuple[str, nn.Module]], names: Mapping[str, str], read: ReadTensor, device: str
) -> Iterator[None]:
    """Gives modules their real weights in float32 on `device`; back on meta when the context ends.

    Args:
        modules: Modules with their paths in the model; of one that holds blocks as well only its own tensors, see
            `outside`.
        names: Module tensor name → disk name.
        read: Reads one tensor by its disk name.
        device: Where the weights go.
    """
    held: list[tuple[nn.Module, str, nn.Parameter]] = []
    try:
        for path, module in modules:
            _materialize_(module, path, names, read, device, held)
        yield
    finally:
        for owner, leaf, meta in held:
            setattr(owner, leaf, meta)


def _materialize_(
    module: nn.Module,
    path: str,
    names: Mapping[str, str],
    read: ReadTensor,
    device: str,
    held: list[tuple[nn.Module, str, nn.Parameter]],
) -> None:
    for owner_path, owner in [("", module.whole)] if isinstance(module, _Own) else module.named_modules():
        base = "".join(f"{part}." for part in (path, owner_path) if part)
        for leaf, parameter in list(owner.named_parameters(recurse=False)):
            if parameter.device.type != "meta":
                continue
            name = f"{base}{leaf}"
            if name not in names:
                raise SourceError(f"{name} is not in the checkpoint.")
            value = read(names[name])
            if value.shape != parameter.shape:
                raise SourceError(
                    f"{names[name]} has shape {tuple(value.shape)}; config.json asks for {tuple(parameter.shape)}."
                )
            held.append((owner, leaf, parameter))
            setattr(owner, leaf, nn.Parameter(value.to(device, torch.float32), requires_grad=False))
        for leaf, buffer in list(owner.named_buffers(recurse=False)):
            name = f"{base}{leaf}"
            value = read(names[name]).to(buffer.dtype) if name in names else buffer
            owner._buffers[leaf] = value.to(device)
