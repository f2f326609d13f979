"""The tokenizer and the transformers config that lie beside the weights."""

from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer

from fips.errors import SourceError


def load_config(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """The transformers config of a checkpoint folder.

    Raises:
        SourceError: If transformers cannot read it.
    """
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # configs run code of many models and raise anything
        raise SourceError(f"{folder}: config.json is not usable: {error}") from error


def load_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a checkpoint folder.

    Raises:
        SourceError: If there is none that works.
    """
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # tokenizer files of many kinds, and as many errors
        raise SourceError(f"{folder}: no usable tokenizer beside the weights: {error}") from error
