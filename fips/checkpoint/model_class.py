"""The transformers class that config.json names, for checkpoints of any kind of model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate import init_empty_weights
from torch import nn

from fips.checkpoint.tokenizer import load_config
from fips.errors import ArchitectureError


def model_class(config: Mapping[str, Any], *, trust_remote_code: bool = False) -> Any:
    """The class to load a checkpoint with: the first of `architectures`, or the Auto class that its own code is for.

    Args:
        config: config.json.
        trust_remote_code: Whether Python code in the checkpoint may run.

    Raises:
        ArchitectureError: If transformers has no such model.
    """
    import transformers

    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    remote = config.get("auto_map")
    if trust_remote_code and isinstance(remote, dict):
        for auto, where in remote.items():
            if str(where).endswith(f".{name}") and hasattr(transformers, auto):
                return getattr(transformers, auto)
    if name is None:
        return transformers.AutoModelForCausalLM
    found = getattr(transformers, name, None) if isinstance(name, str) else None
    if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)):
        hint = " Its own code may: read it, then pass --trust-remote-code." if remote and not trust_remote_code else ""
        raise ArchitectureError(f"config.json names the architecture {name!r}; transformers has no such model.{hint}")
    return found


def empty_model(folder: Path, config: Mapping[str, Any], *, trust_remote_code: bool = False) -> nn.Module:
    """A checkpoint's model with all parameters on meta, nothing of it compressed.

    Args:
        folder: Checkpoint folder.
        config: Its config.json.
        trust_remote_code: Whether Python code in the checkpoint may run.

    Raises:
        FipsError: If transformers cannot build it.
    """
    kind = model_class(config, trust_remote_code=trust_remote_code)
    loaded = load_config(folder, trust_remote_code=trust_remote_code)
    if hasattr(loaded, "quantization_config"):
        del loaded.quantization_config
    try:
        with init_empty_weights(include_buffers=False):
            if hasattr(kind, "from_config"):  # an Auto class
                model: nn.Module = kind.from_config(loaded, trust_remote_code=trust_remote_code)
            else:
                model = kind(loaded)
    except Exception as error:  # building runs code of many models and raises anything
        raise ArchitectureError(f"{folder}: config.json gives no {kind.__name__}: {error}") from error
    return model
