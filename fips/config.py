"""All settings of a compression, validated. Standard library only: the command line imports it before torch."""

import dataclasses
import math
import re
from dataclasses import dataclass
from typing import Any

from fips.errors import ConfigError

SOLVERS = ("moments", "gradient")
OBJECTIVES = ("mlp", "block", "linear")
INPUTS = ("dense", "compressed")
BASES = ("auto", "shared", "identity")
SCHEDULES = ("accelerated", "zhu-gupta")
DEVICES = ("auto", "cpu", "cuda", "mps")
DTYPES = ("auto", "float32", "bfloat16", "float16")
RECIPES = ("default", "paper")
BOS_RULES = ("auto", "every", "first", "none")
RUNTIMES = ("dense", "packed")

GRADIENT_ONLY = frozenset({"schedule", "steps", "learning_rate", "weight_decay", "mask_interval"})
MOMENTS_ONLY = frozenset({"rounds", "basis", "target_size", "polish"})
_NUMBERS: dict[Any, tuple[type, ...]] = {int: (int,), float: (int, float), float | None: (int, float, type(None))}
DEFAULT_BUDGET = 0.5
DEFAULT_SPARSITY = 0.75
_SIZE_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}

# FiPS (arXiv 2411.09816), language models: 20 sequences of 8192 tokens, 800 steps of 8192 tokens, AdamW with
# cosine decay, loss on the MLP output, inputs of the dense model, accelerated GMP with an update every 50 steps.
_PAPER: dict[str, Any] = {
    "solver": "gradient",
    "sparsity": 0.75,
    "group_size": 4,
    "calibration_tokens": 163_840,
    "sequence_length": 8192,
    "batch_tokens": 8192,
    "steps": 800,
    "learning_rate": 3e-5,
    "weight_decay": 0.1,
    "mask_interval": 50,
    "schedule": "accelerated",
    "objective": "mlp",
    "inputs": "dense",
}


@dataclass(frozen=True)
class CompressionConfig:
    """Settings of one compression.

    Attributes:
        budget: Share of the MLP parameters kept (non-zeros of every V plus what is stored of U), in (0, 1]; 0.5 when
            neither it nor a target size is given.
        target_size: Share of the replaced matrices' bytes kept (values, masks and bases), in (0, 1), instead of
            `budget`; rank and sparsity are then chosen for every group.
        sparsity: Share of zeros in V, in [0, 1). None: 0.75 with a budget, chosen for every group with a target size.
        basis: Moments solver: "shared" is FiPS; "identity" is plain pruning, U = I, of which nothing is stored; "auto"
            takes the one with the smaller error per group.
        group_size: Consecutive blocks that share one basis U.
        groups: Explicit groups as (first, last) block numbers, instead of `group_size`.
        include: Globs over matrix names; only matching MLP matrices are compressed.
        calibration: Text file (.txt, .jsonl), Hub data set id, "self", or None (a Hub text when online, else "self").
            For an image model: a folder of images, a .parquet or .arrow file, or a Hub data set id.
        calibration_tokens: Tokens of calibration text.
        calibration_images: Images, of every class equally many where they are labelled.
        augment: Whether they are flipped and cropped at random; if they are too few, each in several ways.
        sequence_length: Tokens per calibration sequence, capped by the model's maximum.
        solver: "moments": second-order solves on second moments of the activations. "gradient": the paper's AdamW on
            the activations themselves.
        rounds: Alternations of the moments solver at most.
        polish: Moments solver: gradient steps per group on the output of the MLP after the solve, kept only where they
            lower the error on held-out batches.
        objective: What is reconstructed: every linear's output (Eq. 1, "linear"), the output of the MLP ("mlp"), or of
            the whole block ("block"). The moments solver weighs outputs by their effect on the block's output: with
            "mlp" those of up-type matrices, with "block", its default, all. The default of gradient steps is "mlp".
        inputs: Activations of the original model ("dense") or of the already compressed prefix ("compressed").
        schedule: Gradient solver: gradual pruning, the paper's accelerated schedule or Zhu and Gupta's.
        steps: Gradient solver: optimizer steps per group. With either solver 0 leaves the truncated SVD, pruned once.
        batch_tokens: Tokens per step.
        learning_rate: Peak learning rate of AdamW.
        weight_decay: Weight decay of AdamW.
        mask_interval: Steps between two mask updates.
        seed: Seed of every random draw.
        device: Where the mathematics runs.
        dtype: dtype of the stored tensors; "auto" keeps the source's.
        max_shard_size: Largest weights file in bytes.

    Raises:
        ConfigError: If a value is out of range.
    """

    budget: float | None = None
    target_size: float | None = None
    sparsity: float | None = None
    basis: str = "auto"
    group_size: int = 4
    groups: tuple[tuple[int, int], ...] | None = None
    include: tuple[str, ...] = ()
    calibration: str | None = None
    calibration_tokens: int = 65_536
    calibration_images: int = 2560
    augment: bool = False
    sequence_length: int = 2048
    solver: str = "moments"
    rounds: int = 6
    polish: int = 0
    objective: str | None = None
    inputs: str = "dense"
    schedule: str = "accelerated"
    steps: int = 200
    batch_tokens: int = 2048
    learning_rate: float = 1e-3
    weight_decay: float = 0.0
    mask_interval: int = 10
    seed: int = 0
    device: str = "auto"
    dtype: str = "auto"
    max_shard_size: int = 5 * 10**9

    def __post_init__(self) -> None:
        """Refuses values that cannot work, before anything is read or written."""
        if self.calibration is not None:
            object.__setattr__(self, "calibration", str(self.calibration))
        if isinstance(self.include, str):
            object.__setattr__(self, "include", (self.include,))
        _check_numbers(self)
        self._check_ranges()
        self._check_choices()
        self._check_combinations()

    @property
    def second_order(self) -> bool:
        """Whether the moments solver runs; without steps only the truncated SVD is left of either solver."""
        return self.solver == "moments" and self.steps > 0

    @property
    def objectives(self) -> tuple[str, str]:
        """What the moments solver reconstructs, and what gradient steps do."""
        return self.objective or "block", self.objective or "mlp"

    @property
    def effective_budget(self) -> float:
        """The budget, or its default."""
        return DEFAULT_BUDGET if self.budget is None else self.budget

    @property
    def effective_sparsity(self) -> float:
        """The sparsity, or its default."""
        return DEFAULT_SPARSITY if self.sparsity is None else self.sparsity

    def _check_combinations(self) -> None:
        if self.target_size is not None and self.budget is not None:
            raise ConfigError("budget and target_size both say how small the result is; give one of them.")
        for name, unset in (("target_size", None), ("basis", "auto"), ("polish", 0)):
            if getattr(self, name) != unset and not self.second_order:
                raise ConfigError(f"{name} needs the moments solver, and steps that are not 0; leave it out.")
        if self.basis == "identity" and self.sparsity is not None:
            raise ConfigError("sparsity follows from the size with basis identity; leave it out.")

    def _check_ranges(self) -> None:
        for name in ("budget", "target_size", "sparsity"):
            value = getattr(self, name)
            _require(value is None or (math.isfinite(value) and 0 <= value <= 1), name, value, "a share in [0, 1]")
        _require(self.budget != 0, "budget", self.budget, "a share of the parameters in (0, 1]")
        _require(self.target_size is None or 0 < self.target_size < 1, "target_size", self.target_size,
                 "a share of the bytes in (0, 1)")  # fmt: skip
        _require(self.sparsity != 1, "sparsity", self.sparsity, "a share of zeros in [0, 1)")
        for name in ("steps", "polish"):
            _require(getattr(self, name) >= 0, name, getattr(self, name), "0 or more")
        _require(0 < self.learning_rate < 10, "learning_rate", self.learning_rate, "a positive number below 10")
        _require(0 <= self.weight_decay < 10, "weight_decay", self.weight_decay, "0 or more, below 10")
        _require(0 <= self.seed < 2**63, "seed", self.seed, "0 or more")
        for name in ("group_size", "calibration_tokens", "calibration_images", "batch_tokens", "mask_interval",
                     "max_shard_size", "rounds"):  # fmt: skip
            _require(getattr(self, name) >= 1, name, getattr(self, name), "1 or more")
        _require(self.sequence_length >= 2, "sequence_length", self.sequence_length, "2 or more")
        wanted = f"at least one sequence ({self.sequence_length})"
        _require(self.calibration_tokens >= self.sequence_length, "calibration_tokens", self.calibration_tokens, wanted)

    def _check_choices(self) -> None:
        choices = {"solver": SOLVERS, "basis": BASES, "inputs": INPUTS, "schedule": SCHEDULES, "device": DEVICES,
                   "dtype": DTYPES, **({"objective": OBJECTIVES} if self.objective is not None else {})}  # fmt: skip
        for name, allowed in choices.items():
            _require(getattr(self, name) in allowed, name, getattr(self, name), "one of " + ", ".join(allowed))

    @classmethod
    def from_recipe(cls, recipe: str, **overrides: Any) -> "CompressionConfig":
        """The settings of a named recipe, with single values replaced by `overrides`.

        Args:
            recipe: "default" or "paper" (the hyperparameters of arXiv 2411.09816 for language models).
            **overrides: Fields of this class.

        Raises:
            ConfigError: If the recipe is unknown or a value is out of range.
        """
        _require(recipe in RECIPES, "recipe", recipe, "one of " + ", ".join(RECIPES))
        settings = {**(_PAPER if recipe == "paper" else {}), **overrides}
        if overrides.get("basis") == "identity" and "sparsity" not in overrides:
            settings.pop("sparsity", None)
        config = cls(**settings)
        gradient = config.solver == "gradient"
        foreign, other = (MOMENTS_ONLY, "moments") if gradient else (GRADIENT_ONLY, "gradient")
        for name in sorted(foreign.intersection(overrides)):
            if not (name == "steps" and overrides[name] == 0):
                raise ConfigError(f"{name} is a setting of the {other} solver; add --solver {other}, or leave it out.")
        if config.steps == 0 and "rounds" in overrides:
            raise ConfigError("rounds has no meaning with steps 0, which leaves the truncated SVD; give one of them.")
        return config

    def to_dict(self) -> dict[str, Any]:
        """Every setting as JSON values."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class EvaluationConfig:
    """Settings of an evaluation: with the text they make up its protocol.

    Attributes:
        text: Text file (.txt or .jsonl); exactly one of `text`, `dataset` and `images` is given.
        dataset: Hub data set, "owner/name" or "owner/name:config"; its test split is used.
        images: For an image model: a folder with a subfolder per class, a .parquet or .arrow file, or a Hub data set.
        limit: Images, or texts of a text encoder, at most; None is all of them.
        length: Tokens per window L, capped by the model's maximum.
        bos: BOS in every window ("every"), before the text ("first"), "none", or as the tokenizer does ("auto").
        device: Where the models run.
        dtype: dtype the models run in; "auto" takes the checkpoint's, for the baseline too.
        runtime: How a compressed checkpoint is loaded, "dense" or "packed".
        update_card: Whether the result is added to the report and model card of a compressed folder.

    Raises:
        ConfigError: If a value is out of range.
    """

    text: str | None = None
    dataset: str | None = None
    images: str | None = None
    limit: int | None = None
    length: int = 2048
    bos: str = "auto"
    device: str = "auto"
    dtype: str = "auto"
    runtime: str = "dense"
    update_card: bool = False

    def __post_init__(self) -> None:
        """Refuses values that cannot work."""
        if sum(given is not None for given in (self.text, self.dataset, self.images)) != 1:
            raise ConfigError("name exactly one of a text file (--text), a data set (--dataset) and images (--images) "
                              "to evaluate on.")  # fmt: skip
        _require(self.limit is None or self.limit >= 1, "limit", self.limit, "1 or more")
        _require(self.length >= 2, "length", self.length, "2 or more tokens per window")
        choices = {"bos": BOS_RULES, "device": DEVICES, "dtype": DTYPES, "runtime": RUNTIMES}
        for name, allowed in choices.items():
            _require(getattr(self, name) in allowed, name, getattr(self, name), "one of " + ", ".join(allowed))


def _check_numbers(config: CompressionConfig) -> None:
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        kinds = _NUMBERS.get(field.type)
        if kinds and (not isinstance(value, kinds) or isinstance(value, bool)):
            expected = "a whole number" if kinds == (int,) else "a number"
            raise ConfigError(f"{field.name} is {value!r}; expected {expected}.")


def _require(ok: bool, name: str, value: object, expected: str) -> None:  # noqa: FBT001 - a private assertion
    if not ok:
        raise ConfigError(f"{name} is {value!r}; expected {expected}.")


def parse_groups(text: str) -> tuple[tuple[int, int], ...]:
    """Reads a group list such as "0-1,2-5,6" into ((0, 1), (2, 5), (6, 6)).

    Raises:
        ConfigError: If an item is not a block number or an ascending range.
    """
    groups = []
    for item in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", item)
        if match is None:
            raise ConfigError(f"groups: {item!r} is not a block number or a range such as 2-5.")
        first, last = int(match[1]), int(match[2] or match[1])
        _require(first <= last, "groups", item, "an ascending range such as 2-5")
        groups.append((first, last))
    return tuple(groups)


def parse_size(text: str) -> int:
    """Reads a size such as "5GB", "500MB" or "2GiB" into bytes.

    Raises:
        ConfigError: If the text is not a positive size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]i?B)?\s*", text, re.IGNORECASE)
    size = int(float(match[1]) * _SIZE_UNITS[(match[2] or "").upper()]) if match else 0
    _require(size > 0, "size", text, "a positive number of bytes with an optional unit, such as 5GB or 500MB")
    return size
