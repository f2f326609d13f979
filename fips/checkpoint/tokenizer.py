"""The tokenizer that lies beside the weights."""

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from fips.errors import SourceError


def load_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a checkpoint folder.

    Raises:
        SourceError: If there is none that works.
    """
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # tokenizer files of many kinds, and as many errors
        raise SourceError(f"{folder}: no usable tokenizer beside the weights: {error}") from error
