"""What a benchmark runs, validated. Standard library only: the command line imports it before torch."""

from dataclasses import asdict, dataclass
from typing import Any

from fips.config import DEVICES, DTYPES
from fips.errors import ConfigError


@dataclass(frozen=True)
class BenchConfig:
    """Settings of a benchmark.

    Attributes:
        batch_sizes: Sequences, texts or images per pass; every size is measured.
        prompt_length: Tokens of a prompt, or of a text of a text encoder.
        new_tokens: Tokens that a language model then generates.
        repeats: Rounds; every round measures every model once, in a fresh process.
        device: Where the models run.
        dtype: dtype all models run in; "auto" takes the compressed checkpoint's.
        seed: Seed of the random tokens or pixels.

    Raises:
        ConfigError: If a value is out of range.
    """

    batch_sizes: tuple[int, ...] = (1, 8)
    prompt_length: int = 128
    new_tokens: int = 32
    repeats: int = 3
    device: str = "auto"
    dtype: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuses values that cannot work, before anything is loaded."""
        object.__setattr__(self, "batch_sizes", tuple(self.batch_sizes))
        if not self.batch_sizes or len(set(self.batch_sizes)) != len(self.batch_sizes):
            raise ConfigError(f"batch_sizes is {self.batch_sizes!r}; expected different sizes, such as 1,8.")
        for size in self.batch_sizes:
            _require_count("batch_sizes", size, 1)
        for name, least in (("prompt_length", 1), ("new_tokens", 1), ("repeats", 1), ("seed", 0)):
            _require_count(name, getattr(self, name), least)
        for name, allowed in (("device", DEVICES), ("dtype", DTYPES)):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; expected one of {', '.join(allowed)}.")

    def to_dict(self) -> dict[str, Any]:
        """Every setting as JSON values."""
        return {**asdict(self), "batch_sizes": list(self.batch_sizes)}


def parse_sizes(text: str) -> tuple[int, ...]:
    """Reads a list of batch sizes such as "1,8" into (1, 8).

    Raises:
        ConfigError: If an item is not a whole number.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise ConfigError(f"batch_sizes is {text!r}; expected whole numbers with commas between them, such as 1,8.")
    return tuple(int(part) for part in parts)


def _require_count(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**31:
        raise ConfigError(f"{name} is {value!r}; expected a whole number from {least} on.")
