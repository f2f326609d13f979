"""The tokenizer or image processor, and the transformers config, that lie beside the weights."""

import json
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, AutoTokenizer

from fips.checkpoint.source import read_config
from fips.errors import ArchitectureError, SourceError


def load_config(folder: Path, name: str | None = None, *, trust_remote_code: bool = False) -> Any:
    """The transformers config of a checkpoint folder.

    Args:
        folder: The checkpoint.
        name: What to call it in messages; the folder's name by default.
        trust_remote_code: Whether Python code in the checkpoint may run.

    Raises:
        ArchitectureError: If the type is unknown, needs remote code that is not trusted, or is described wrongly.
    """
    stated, name = read_config(folder), name or folder.resolve().name
    kind, remote = stated["model_type"], stated.get("auto_map") or {}
    if kind not in CONFIG_MAPPING and not (isinstance(remote, dict) and "AutoModelForCausalLM" in remote):
        raise ArchitectureError(f"{name}: model type {kind!r} is unknown to transformers; is it up to date?")
    if kind not in CONFIG_MAPPING and not trust_remote_code:
        raise ArchitectureError(
            f"{name}: model type {kind!r} needs Python code from the checkpoint. Read it, then pass "
            "--trust-remote-code."
        )
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # configs run code of many models and raise anything
        raise ArchitectureError(f"{name}: config.json is not usable: {error}") from error


def load_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a checkpoint folder.

    Raises:
        SourceError: If there is none that works.
    """
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # tokenizer files of many kinds, and as many errors
        raise SourceError(f"{folder}: no usable tokenizer beside the weights: {error}") from error


def pooling_rule(folder: Path) -> str:
    """How a text encoder's hidden states become one vector: as its sentence-transformers files say, else their mean."""
    path = folder / "1_Pooling" / "config.json"
    try:
        stated = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "mean"
    if stated.get("pooling_mode_cls_token"):
        return "first token"
    return "last token" if stated.get("pooling_mode_lasttoken") else "mean"


def load_image_processor(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """The image processor of a checkpoint folder, always on Pillow: resizing differs from one backend to the other.

    Raises:
        SourceError: If Pillow is missing or there is no processor that works.
    """
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise SourceError(f"{folder}: its image processor needs the extra: pip install 'fips[vision]'.") from error
    try:
        from transformers import AutoImageProcessor

        return AutoImageProcessor.from_pretrained(folder, backend="pil", trust_remote_code=trust_remote_code)
    except Exception as error:  # processor files of many kinds, and as many errors
        raise SourceError(f"{folder}: no usable image processor beside the weights: {_brief(error)}") from error


def _brief(error: Exception) -> str:
    # transformers lists every model type it knows behind this.
    return str(error).partition(" Should have a")[0]
