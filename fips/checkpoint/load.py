"""Loads a compressed checkpoint, with the runtime of one's choice."""

import os

from torch import nn
from transformers import AutoConfig

from fips.checkpoint.format import QUANT_METHOD
from fips.checkpoint.quantizer import FipsConfig
from fips.checkpoint.source import locate, read_config
from fips.errors import FormatError
from fips.models.kinds import model_class


def load(path: str | os.PathLike[str], runtime: str = "dense", **kwargs: object) -> nn.Module:
    """Loads a compressed checkpoint.

    Args:
        path: Folder written by `fips compress`, or a Hub id.
        runtime: "dense" (default) rebuilds the weights once; "packed" keeps them packed in memory.
        **kwargs: `revision` of a Hub id; everything else is passed to `from_pretrained` of the checkpoint's own class,
            for example `dtype` or `device_map`.

    Returns:
        The model, in evaluation mode.

    Raises:
        SourceError: If there is no such folder, and the Hub has no such model.
        FormatError: If the folder is not a compressed checkpoint, is damaged, or is of a newer version.
    """
    revision = kwargs.pop("revision", None)
    folder = locate(str(path), None if revision is None else str(revision))
    description = read_config(folder).get("quantization_config")
    if not isinstance(description, dict) or description.get("quant_method") != QUANT_METHOD:
        raise FormatError(f"{folder} is not a checkpoint compressed by fips; load it with transformers.")
    trust = bool(kwargs.get("trust_remote_code", False))
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust)
    config.quantization_config = {**description, "runtime": FipsConfig(runtime=runtime).runtime}
    kind = model_class(config, trust_remote_code=trust)
    model: nn.Module = kind.from_pretrained(folder, config=config, **kwargs)
    return model
