"""Registers the packed format with transformers, whichever of the two is imported first.

`import fips` must stay light (the command line answers without torch), so nothing is imported here. If transformers'
quantizer registry is already loaded, registration happens at once; otherwise right after it is loaded.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

_REGISTRY = "transformers.quantizers.auto"


def install() -> None:
    """Registers now or when transformers is imported. Calling it again changes nothing."""
    if _REGISTRY in sys.modules:
        register()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def register() -> None:
    """Adds `quant_method` "fips" to transformers' registries, once."""
    from transformers.quantizers import auto

    _register(auto)


def _register(auto: Any) -> None:
    home = sys.modules.get("fips.checkpoint.quantizer")
    if home is not None and not hasattr(home, "FipsQuantizer"):
        return  # it is being imported right now and registers itself at its end
    from fips.checkpoint.quantizer import FipsConfig, FipsQuantizer

    if "fips" in auto.AUTO_QUANTIZER_MAPPING:  # asked only now: importing the module above may have registered
        return
    auto.register_quantization_config("fips")(FipsConfig)
    auto.register_quantizer("fips")(FipsQuantizer)
    # Lets `from_pretrained(..., quantization_config=FipsConfig(runtime="packed"))` choose the runtime.
    known: tuple[type, ...] = getattr(auto, "LOADING_ATTRIBUTES_CONFIG_TYPES", ())
    auto.LOADING_ATTRIBUTES_CONFIG_TYPES = (*known, FipsConfig)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds transformers' registry as Python would, with a loader that registers afterwards."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _REGISTRY:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    """Runs the real loader, then registers."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _register(module)
