"""How transformers loads a packed checkpoint: its description in config.json, and the quantizer that installs it.

Registered with transformers by `fips._register`, as soon as both are imported.
"""

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from fips import _register
from fips.checkpoint.format import FORMAT_VERSION, QUANT_METHOD, PackedGroupInfo, check_version, parse
from fips.checkpoint.reload import as_stored, check_packed, stored_tensors
from fips.checkpoint.safetensors_io import TensorInfo
from fips.config import RUNTIMES
from fips.errors import ConfigError, FormatError
from fips.models.skeleton import disk_renamer, map_names, may_lack
from fips.models.surgery import LinearShape, check_values, densify_, install_
from fips.resources import release_memory


class FipsConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """Describes a packed checkpoint in config.json, and chooses how it is loaded.

    Attributes:
        runtime: "dense" rebuilds W = U V once at load and gives the original module types; "packed" keeps U and V
            packed in memory and rebuilds W in every call.
        format_version: Version of the on-disk format.
        groups: Description of the packed groups.
    """

    def __init__(
        self, runtime: str = "dense", format_version: int = FORMAT_VERSION, groups: Any = None, **extra: Any
    ) -> None:
        extra.pop("quant_method", None)
        check_version(format_version)  # before unknown settings, which a newer version may well have
        if extra:
            raise FormatError(f"config.json has unknown fips settings: {', '.join(sorted(extra))}.")
        if runtime not in RUNTIMES:
            raise ConfigError(f"runtime is {runtime!r}; expected one of {', '.join(RUNTIMES)}.")
        self.quant_method = QUANT_METHOD
        self.runtime = runtime
        self.format_version = format_version
        self.groups = groups or []

    @property
    def dequantize(self) -> bool:
        """Tells transformers that a dense model is an ordinary one, not a quantized one."""
        return self.runtime == "dense"

    def get_loading_attributes(self) -> dict[str, str]:
        """What a config passed to `from_pretrained` may override."""
        return {"runtime": self.runtime}

    def to_dict(self) -> dict[str, Any]:
        """The description as stored; the runtime is the reader's choice and is not."""
        return {"quant_method": QUANT_METHOD, "format_version": self.format_version, "groups": self.groups}


class FipsQuantizer(HfQuantizer):  # type: ignore[misc]
    """Puts compressed linears into the empty model before its weights are read, and finishes them after."""

    requires_calibration = True

    def _process_model_before_weight_loading(
        self,
        model: nn.Module,
        dtype: torch.dtype | None = None,
        checkpoint_files: list[str] | None = None,
        **_: Any,
    ) -> nn.Module:
        config = self.quantization_config
        groups = parse({"format_version": config.format_version, "groups": config.groups})
        if checkpoint_files:
            stored = stored_tensors([Path(f) for f in checkpoint_files])
            groups = as_stored(groups, stored)
            check_packed(groups, stored)
            _require_tensors(model, {name: info for name, (_, info) in stored.items()})
        rename = _linear_renamer(model)
        shapes = {g.name: (g.rank, g.columns, _shapes(g, rename)) for g in groups}
        install_(model, shapes, dtype or torch.get_default_dtype())
        return model

    def _process_model_after_weight_loading(self, model: nn.Module, **_: Any) -> nn.Module:
        if self.quantization_config.runtime == "dense":
            densify_(model)
            release_memory()  # the factors' place, which is as large as they are
            self.remove_quantization_config(model)
        else:
            check_values(model)
        return model

    def is_serializable(self, *_: Any, **__: Any) -> bool:
        """A packed model can be saved again; a dense one is an ordinary model."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Packed values are not trained."""
        return False


def _require_tensors(model: Any, stored: dict[str, TensorInfo]) -> None:
    """Refuses a checkpoint that lacks a tensor of its own class, which transformers would fill with random numbers.

    Another class than config.json names may have parts that were never stored, such as a new head to be trained.
    """
    names = map_names(model, stored)
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    optional = getattr(model, "_keys_to_ignore_on_load_missing", None) or []
    own = type(model).__name__ in (model.config.architectures or [])
    for name, parameter in model.named_parameters():
        if name in names:
            dtype = stored[names[name]].dtype
            if parameter.is_floating_point() and not dtype.is_floating_point:
                raise FormatError(f"{names[name]} is stored as {dtype}; expected a floating-point dtype.")
        elif own and name not in tied and not may_lack(model, name) and not _matches(name, optional):
            raise FormatError(f"{name} is missing from the weights; the checkpoint is damaged.")


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)


def _linear_renamer(model: nn.Module) -> Callable[[str], str]:
    """On-disk name of a linear → its module path in this transformers version."""
    rename = disk_renamer(model)
    return lambda name: rename(f"{name}.weight").removesuffix(".weight")


def _shapes(group: PackedGroupInfo, rename: Callable[[str], str]) -> list[LinearShape]:
    return [LinearShape(rename(m.name), m.role, group.d, m.f, m.nnz) for m in group.members]


_register.register()  # for whoever imports this module before transformers
