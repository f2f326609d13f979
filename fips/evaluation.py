"""evaluate(): what a checkpoint gives, and its sizes, beside the dense model under the same protocol."""

import gc
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fips.calibrate import patches
from fips.checkpoint.load import load_any
from fips.checkpoint.record import record_evaluation, recordable
from fips.checkpoint.source import locate
from fips.checkpoint.tokenizer import load_config, load_image_processor, load_tokenizer, pooling_rule
from fips.config import EvaluationConfig
from fips.data.images import looks_like_images, open_images
from fips.data.texts import DEFAULT_DATASET, Text, read_dataset, read_text
from fips.data.windows import capped_length, encoder_length
from fips.errors import ConfigError
from fips.inspection import sizes_of
from fips.metrics.accuracy import Accuracy, ImageTest, accuracy
from fips.metrics.harness import Tasks, TaskScores
from fips.metrics.perplexity import Perplexity, perplexity
from fips.metrics.similarity import Embeddings, TextTest, image_features, text_features
from fips.models.kinds import IMAGE_MODEL, LANGUAGE_MODEL, model_class, reads, token_places, writes_text
from fips.models.sites import trunk_of
from fips.plan import resolve_device
from fips.progress import Progress
from fips.report import Sizes, format_table
from fips.tasks import TaskConfig

Score = Perplexity | Accuracy | Embeddings | TaskScores
_BATCH_PATCHES = 8192  # patches or tokens per pass; with more of them passes are no faster
_BATCH_ITEMS = 64


@dataclass(frozen=True)
class Measured:
    """One model, measured.

    Attributes:
        model: Its path or Hub id.
        score: What it gives: perplexity of a language model or its scores on tasks, accuracy of an image classifier,
            pooled features of other models; each with its protocol.
        sizes: The three sizes.
    """

    model: str
    score: Score
    sizes: Sizes

    @property
    def perplexity(self) -> Perplexity:
        """The score of a language model.

        Raises:
            ValueError: If it is none.
        """
        if not isinstance(self.score, Perplexity):
            raise ValueError(f"{self.model} is not a language model")
        return self.score

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {"model": self.model, **self.score.to_dict(), "sizes": self.sizes.to_dict()}


@dataclass(frozen=True)
class Evaluation:
    """A model and, where given, its dense baseline under the same protocol.

    Attributes:
        measured: The model.
        baseline: The dense model.
    """

    measured: Measured
    baseline: Measured | None = None

    @property
    def ratio(self) -> float | None:
        """Perplexity divided by the baseline's."""
        return self.compared().get("ratio")

    def compared(self) -> dict[str, Any]:
        """What is said of both together: ratio of perplexities, agreement of classes, or cosine of features."""
        score: Any = self.measured.score
        found: dict[str, Any] = score.compared(self.baseline.score if self.baseline else None)
        return found

    def to_dict(self) -> dict[str, Any]:
        """One JSON object: the model's values, `baseline` with the same keys, and what is said of both."""
        baseline = self.baseline.to_dict() if self.baseline else None
        return {**self.measured.to_dict(), "baseline": baseline, **self.compared()}

    def table(self) -> str:
        """The evaluation for a terminal."""
        score: Any = self.measured.score
        rows = self.measured.sizes.rows() + score.rows(self.baseline.score if self.baseline else None)
        last = "ratio or difference" if isinstance(score, (Accuracy, TaskScores)) else "ratio"
        return format_table(["", "model", "dense", last], rows) + f"\n\nprotocol: {score.protocol.line()}"


def evaluate(
    model: str | os.PathLike[str],
    baseline: str | os.PathLike[str] | None = None,
    config: EvaluationConfig | TaskConfig | None = None,
    *,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> Evaluation:
    """What a compressed or dense checkpoint gives, and its dense baseline under the same protocol.

    Of a language model that is the perplexity on a text, or scores on tasks of lm-eval; of an image classifier top-1,
    top-5 and the agreement with the baseline on images; of any other model the cosine of its pooled features to the
    baseline's.

    Args:
        model: Folder or Hub id, compressed or dense.
        baseline: Dense checkpoint measured under the same protocol.
        config: Text, images or tasks, and protocol; the papers' WikiText-2 test set by default.
        trust_remote_code: Whether Python code in the checkpoints may run.
        progress: Where progress goes.

    Raises:
        FipsError: If an input is unusable, or what a model gives is not finite.
    """
    config, progress = config or EvaluationConfig(dataset=DEFAULT_DATASET), progress or Progress(-1)
    device = resolve_device(config.device)
    folders = [locate(str(m)) for m in (model, baseline) if m is not None]
    configs = [load_config(folder, trust_remote_code=trust_remote_code) for folder in folders]
    if isinstance(config, TaskConfig):
        test = _tasks(config, folders[0], quiet=progress.verbosity < 0, trust_remote_code=trust_remote_code)
    else:
        pixels = _main_input(configs[0], trust_remote_code) == "pixel_values"
        images = config.text is None and (config.images is not None or pixels)
        test = (_images if images else _text)(config, folders[0], configs, trust_remote_code)
    if config.update_card:
        recordable(folders[0])  # refused before anything runs
    sizes = [sizes_of(folder, trust_remote_code=trust_remote_code) for folder in folders]
    results: list[Measured] = []
    for name, folder, size in zip((model, baseline), folders, sizes, strict=False):
        if results and config.dtype == "auto":  # one protocol: the baseline runs in the model's dtype
            config = replace(config, dtype=results[0].score.protocol.dtype)
        progress.note(f"loading {name}")
        loaded = load_any(folder, config.runtime, config.dtype, trust_remote_code=trust_remote_code).to(device)
        value = _measure(loaded, test, progress)
        del loaded
        gc.collect()
        results.append(Measured(str(name), value, size))
    evaluation = Evaluation(results[0], results[1] if len(results) > 1 else None)
    if config.update_card:
        record_evaluation(folders[0], evaluation.to_dict())
    return evaluation


@dataclass(frozen=True)
class Test:
    """What a model is put through.

    Attributes:
        run: Takes the model, and a function that is told how much is done.
        total: How much there is to do; 0 if that is not known.
    """

    run: Callable[[Any, Callable[[int], object]], Score]
    total: int = 0


def _measure(model: Any, test: Test, progress: Progress) -> Score:
    language = reads(trunk_of(model)[1], model) == LANGUAGE_MODEL
    label = "perplexity" if language else "accuracy" if _classifies(type(model)) else "features"
    progress.start_group(label, test.total)
    try:
        return test.run(model, lambda done: progress.step(done))
    finally:
        progress.close()


def _classifies(kind: type) -> bool:
    """Whether models of a class give classes of images."""
    return "ForImageClassification" in kind.__name__


def _require_baseline(folder: Path, configs: list[Any]) -> None:
    """Refuses to compute features that nothing is compared with.

    Raises:
        ConfigError: If there is one model only.
    """
    if len(configs) < 2:
        raise ConfigError(f"{folder} gives features, which say something only beside the dense model's; name that with "
                          "--baseline.")  # fmt: skip


def _main_input(stated: Any, trust: bool) -> str | None:  # noqa: FBT001
    """What the class of a config reads first; of one with several towers that says little."""
    name: str | None = getattr(model_class(stated, trust_remote_code=trust), "main_input_name", None)
    return name


def _images(config: EvaluationConfig, folder: Path, configs: list[Any], trust: bool) -> Test:  # noqa: FBT001
    """Opens the images; the test then runs a model on them."""
    if _main_input(configs[0], trust) == "input_ids" and not hasattr(configs[0], "vision_config"):
        raise ConfigError(f"{folder} is no image model; evaluate it on a text (--text).")
    classifies = _classifies(model_class(configs[0], trust_remote_code=trust))
    if not classifies:
        _require_baseline(folder, configs)
    elif len(configs) > 1 and configs[0].id2label != configs[1].id2label:
        raise ConfigError(f"{folder} and the baseline name different classes; their answers cannot be compared.")
    images = open_images(str(config.images or config.dataset), "test")
    if classifies and images.labels is None and len(configs) < 2:
        raise ConfigError(f"{images.origin} has no labels{images.why_unlabelled()}; without them only a --baseline "
                          "gives something to compare with.")  # fmt: skip
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    chosen = order[: config.limit].sort().values.tolist()
    vision = getattr(configs[0], "vision_config", configs[0])
    batch = min(max(_BATCH_PATCHES // patches(vision), 1), _BATCH_ITEMS)
    processor = load_image_processor(folder, trust_remote_code=trust)
    test = ImageTest(images, chosen, processor, int(getattr(vision, "num_channels", 3)), batch)

    def run(model: Any, advance: Callable[[int], object]) -> Score:
        if reads(trunk_of(model)[1], model) != IMAGE_MODEL:
            raise ConfigError(f"{folder} is no image model; evaluate it on a text (--text).")
        return accuracy(model, test, advance) if classifies else image_features(model, test, advance)

    return Test(run, len(chosen))


def _tasks(config: TaskConfig, folder: Path, *, quiet: bool, trust_remote_code: bool) -> Test:
    """Finds the tasks; the test then scores a model on them."""
    tasks = Tasks(config)
    tokenizer = load_tokenizer(folder, trust_remote_code=trust_remote_code)
    return Test(lambda model, _: tasks.run(model, tokenizer, quiet=quiet))


def _text(config: EvaluationConfig, folder: Path, configs: list[Any], trust: bool) -> Test:  # noqa: FBT001
    """Reads the text; the test then runs a model on it."""
    if config.text is not None and looks_like_images(config.text):
        raise ConfigError(f"{config.text} holds images; name it with --images.")
    if _main_input(configs[0], trust) == "pixel_values":
        raise ConfigError(f"{folder} is an image model; evaluate it on images (--images).")
    if not writes_text(configs[0], trust_remote_code=trust):
        _require_baseline(folder, configs)
    tokenizer = load_tokenizer(folder, trust_remote_code=trust)
    if config.text is not None:
        text = read_text(Path(config.text), tokenizer)
    else:
        text = read_dataset(str(config.dataset), "test")
    # One protocol: both models are measured on windows that fit the shorter.
    length = min(capped_length(config.length, c) for c in configs)

    def run(model: Any, advance: Callable[[int], object]) -> Score:
        kind = reads(trunk_of(model)[1], model)
        if kind == IMAGE_MODEL:
            raise ConfigError(f"{folder} is an image model; evaluate it on images (--images).")
        if kind == LANGUAGE_MODEL:
            return perplexity(model, tokenizer, text, length, config.bos, advance=advance)
        return text_features(model, _texts(config, folder, text, tokenizer, length, model), advance)

    return Test(run)


def _texts(config: EvaluationConfig, folder: Path, text: Text, tokenizer: Any, length: int, model: Any) -> TextTest:
    """The paragraphs of a text."""
    paragraphs = [p.strip() for p in text.content.split("\n\n") if p.strip()][: config.limit]
    length = encoder_length(length, token_places(model), tokenizer)
    return TextTest(paragraphs, text.origin, text.sha256, tokenizer, length, pooling_rule(folder), _BATCH_ITEMS // 4)
