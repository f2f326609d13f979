"""Text to token windows of one length, with the BOS rule of the model."""

from typing import Any

import torch
from torch import Tensor

from fips.config import BOS_RULES
from fips.errors import CalibrationError, ConfigError

# Rule of text encoders: every window begins and ends as the tokenizer makes a text begin and end.
WRAPPED = "wrapped"


def resolve_bos(rule: str, tokenizer: Any) -> str:
    """Turns "auto" into "every" when the tokenizer puts a BOS before a text by default, else into "none".

    Models trained with a BOS in every context fall apart without it: Gemma-2B's perplexity is 650 instead of 21.

    Raises:
        ConfigError: If a BOS is asked for and the tokenizer has none.
    """
    if rule not in BOS_RULES:
        raise ConfigError(f"bos is {rule!r}; expected one of {', '.join(BOS_RULES)}.")
    bos = tokenizer.bos_token_id
    if rule == "auto":
        ids = tokenizer("a")["input_ids"]
        return "every" if bos is not None and ids and ids[0] == bos else "none"
    if rule in ("every", "first") and bos is None:
        raise ConfigError(f"bos is {rule!r}, but the tokenizer has no BOS token.")
    return rule


def capped_length(requested: int, config: Any) -> int:
    """The requested tokens per window, capped by the model's maximum."""
    limit = getattr(config, "max_position_embeddings", None)
    return min(requested, limit) if isinstance(limit, int) and limit > 1 else requested


def encoder_length(requested: int, places: int | None, tokenizer: Any) -> int:
    """The requested tokens per text, capped by the model's places for tokens and by the tokenizer's maximum."""
    return min(requested, int(tokenizer.model_max_length), *([] if places is None else [places]))


def wrapped_windows(text: str, tokenizer: Any, length: int, _bos: str = WRAPPED) -> Tensor:
    """Non-overlapping windows of a text, each with the special tokens the tokenizer puts around a text.

    Args:
        text: The text.
        tokenizer: The model's tokenizer.
        length: Tokens per window, special ones included.

    Returns:
        Token ids, (windows, length) int64; no rows when the text is shorter than one window.

    Raises:
        CalibrationError: If a window of that length has no place for text.
    """
    plain, whole = tokenizer("a", add_special_tokens=False)["input_ids"], tokenizer("a")["input_ids"]
    at = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), 0)
    before, after = whole[:at], whole[at + len(plain) :]
    body = length - len(before) - len(after)
    if body < 1:
        raise CalibrationError(f"sequences of {length} tokens hold nothing but the tokenizer's special tokens; give a "
                               "larger --sequence-length.")  # fmt: skip
    ids = torch.tensor(_tokenize(text, tokenizer), dtype=torch.int64)
    windows = ids[: len(ids) // body * body].view(-1, body)
    return torch.cat([torch.tensor(before).long().expand(len(windows), -1), windows,
                      torch.tensor(after).long().expand(len(windows), -1)], 1)  # fmt: skip


def token_windows(text: str, tokenizer: Any, length: int, bos: str) -> Tensor:
    """Non-overlapping windows of a text that is tokenized once; the tail is dropped.

    Args:
        text: The text.
        tokenizer: The model's tokenizer.
        length: Tokens per window L.
        bos: "every": exactly one BOS opens every window, inside the L tokens. "first": one opens the text. "none".

    Returns:
        Token ids, (windows, L) int64; no rows when the text is shorter than one window.
    """
    ids = torch.tensor(_tokenize(text, tokenizer), dtype=torch.int64)
    if bos == "first":
        ids = torch.cat([torch.tensor([tokenizer.bos_token_id]), ids])
    body = length - 1 if bos == "every" else length
    windows = ids[: len(ids) // body * body].view(-1, body)
    if bos == "every":
        start = torch.full((len(windows), 1), tokenizer.bos_token_id)
        windows = torch.cat([start, windows], 1)  # (windows, L)
    return windows


def check_vocabulary(windows: Tensor, rows: int, origin: str) -> None:
    """Refuses token ids the model has no embedding for.

    Raises:
        CalibrationError: Naming the id: the tokenizer belongs to another model.
    """
    if len(windows) and int(windows.max()) >= rows:
        raise CalibrationError(
            f"{origin}: the tokenizer gives token {int(windows.max())}, but the model has {rows} embeddings. "
            "Is it the model's own tokenizer?"
        )


def _tokenize(text: str, tokenizer: Any) -> list[int]:
    # verbose=False: the whole text is longer than any model's limit, which is the point, not a mistake.
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids
