"""Loads a compressed checkpoint with the runtime of one's choice, or any checkpoint."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig

from fips.checkpoint.dense import description_of
from fips.checkpoint.format import QUANT_METHOD, check_version
from fips.checkpoint.quantizer import FipsConfig
from fips.checkpoint.reload import stored_tensors
from fips.checkpoint.source import locate, read_config, require_depth, weight_paths
from fips.checkpoint.tokenizer import load_config
from fips.errors import FipsError, FormatError, SourceError
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
    config = read_config(folder)
    description = description_of(folder, config)
    runtime = FipsConfig(runtime=runtime).runtime
    check_version(description.get("format_version"))  # before what a newer version may do differently
    require_depth(config, len(stored_tensors(weight_paths(folder))), folder)
    options = {"trust_remote_code": False, **kwargs}  # without a word from the caller transformers would ask for one
    try:
        loaded = AutoConfig.from_pretrained(folder, trust_remote_code=options["trust_remote_code"])
        loaded.quantization_config = {**description, "runtime": runtime}
        kind = model_class(loaded, trust_remote_code=bool(options["trust_remote_code"]))
        model: nn.Module = kind.from_pretrained(folder, config=loaded, **options)
    except FipsError:
        raise
    except Exception as error:  # loading runs code of many models and raises anything
        raise FormatError(f"{folder} cannot be loaded: {error}") from error
    return model


def is_compressed(folder: Path) -> bool:
    """Whether a checkpoint folder was compressed by fips."""
    description = read_config(folder).get("quantization_config")
    return isinstance(description, dict) and description.get("quant_method") == QUANT_METHOD


def load_any(folder: Path, runtime: str = "dense", dtype: str = "auto", *, trust_remote_code: bool = False) -> Any:
    """Loads a checkpoint, compressed or dense, as a model of its own class.

    Args:
        folder: The checkpoint.
        runtime: How a compressed one is loaded.
        dtype: Name of a dtype, or "auto" for the checkpoint's.
        trust_remote_code: Whether Python code in the checkpoint may run.

    Raises:
        FipsError: If it cannot be loaded.
    """
    options: dict[str, Any] = {
        "dtype": dtype if dtype == "auto" else getattr(torch, dtype),
        "trust_remote_code": trust_remote_code,
    }
    try:
        if is_compressed(folder):
            return load(folder, runtime, **options)
        stated = load_config(folder, trust_remote_code=trust_remote_code)
        return model_class(stated, trust_remote_code=trust_remote_code).from_pretrained(folder, **options)
    except FipsError:
        raise
    except Exception as error:  # loading runs code of many models and raises anything
        raise SourceError(f"{folder} cannot be loaded: {error}") from error
