"""Calibration data of a run: a text, a Hub text, the model's own, or images."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fips.checkpoint.tokenizer import load_image_processor, load_tokenizer
from fips.config import CompressionConfig
from fips.data.images import check_images, looks_like_images, open_images, sample
from fips.data.pixels import ImageReader, check_pillow, pixel_values
from fips.data.texts import DEFAULT_DATASET, Text, check_file, looks_like_file, read_dataset, read_text
from fips.data.windows import WRAPPED, capped_length, check_vocabulary, encoder_length, resolve_bos
from fips.errors import CalibrationError
from fips.models.kinds import IMAGE_MODEL, LANGUAGE_MODEL, TEXT_ENCODER, model_class, token_places
from fips.plan import Plan
from fips.progress import Progress
from fips.report import CompressionReport
from fips.stages.calibration import Calibration, ImageCalibration, sample_tokens, windows_of


def check_calibration(plan: Plan, config: CompressionConfig) -> None:
    """Refuses calibration data that cannot be meant for the model, before any long work.

    Raises:
        CalibrationError: Saying what the model needs.
    """
    named = config.calibration
    if plan.reads == IMAGE_MODEL:
        check_pillow()
        if named is None or named == "self" or named.endswith((".txt", ".jsonl")):
            raise CalibrationError(f"{plan.source.name} is an image model; name a folder of images, a .parquet or "
                                   ".arrow file, or a Hub data set with --calibration.")  # fmt: skip
        check_images(named)
        load_image_processor(plan.source.folder, trust_remote_code=plan.trust_remote_code)
    elif named is not None and looks_like_images(named):
        raise CalibrationError(f"{named}: {plan.source.name} is a {plan.reads}; name a .txt or .jsonl file.")
    elif named is not None and looks_like_file(named):
        check_file(Path(named))
    elif named == "self" and plan.reads != LANGUAGE_MODEL:
        raise CalibrationError(f"{plan.source.name} is a {plan.reads} and cannot write text; name one with "
                               "--calibration.")  # fmt: skip


def calibrate(
    plan: Plan, config: CompressionConfig, report: CompressionReport, progress: Progress
) -> Calibration | ImageCalibration:
    """The data whose activations the model is compressed on."""
    if plan.reads == IMAGE_MODEL:
        return calibration_images(plan, config, report)
    return calibration_tokens(plan, config, report, progress)


def calibration_images(plan: Plan, config: CompressionConfig, report: CompressionReport) -> ImageCalibration:
    """Chosen images of a folder, a table or a data set; none is decoded yet."""
    images = open_images(str(config.calibration), "train")
    chosen = sample(images, config.calibration_images, torch.Generator().manual_seed(config.seed))
    if config.augment:  # few images are seen again and again, flipped and cropped in other ways
        chosen = (chosen * (config.calibration_images // max(len(chosen), 1) + 1))[: config.calibration_images]
    if len(chosen) < config.calibration_images:
        report.notes.append(f"{images.origin} gives {len(chosen):,} images; {config.calibration_images:,} were asked "
                            "for.")  # fmt: skip
    processor = load_image_processor(plan.source.folder, trust_remote_code=plan.trust_remote_code)
    vision: Any = plan.trunk.module.config
    reader = ImageReader(images, chosen, int(getattr(vision, "num_channels", 3)))
    one = pixel_values(next(reader.batches(1)).images, processor)  # shows a wrong processor before any long work, too
    calibration = ImageCalibration(
        images.origin, images.sha256, reader, len(chosen), processor, tokens_each=patches(vision, one.shape[-2:]),
        augmented=config.seed if config.augment else None,
    )  # fmt: skip
    _note_few(plan, len(chosen) * calibration.tokens_each, report)
    return calibration


def patches(config: Any, size: Sequence[int] | None = None) -> int:
    """Patches of an image of a height and width, or of the size the model was trained on; it only sizes batches."""
    trained, patch = getattr(config, "image_size", 224), getattr(config, "patch_size", 16)
    height, width = tuple(size or ((trained, trained) if isinstance(trained, int) else trained))[:2]
    rows, columns = (patch, patch) if isinstance(patch, int) else tuple(patch)[:2]
    return max(int(height) // int(rows) * (int(width) // int(columns)), 1)


def calibration_tokens(
    plan: Plan, config: CompressionConfig, report: CompressionReport, progress: Progress
) -> Calibration:
    """Calibration tokens of the chosen text, or the model's own."""
    tokenizer = load_tokenizer(plan.source.folder, trust_remote_code=plan.trust_remote_code)
    encoder = plan.reads == TEXT_ENCODER
    bos = WRAPPED if encoder else resolve_bos("auto", tokenizer)
    length = capped_length(config.sequence_length, plan.model.config)
    length = encoder_length(length, token_places(plan.model), tokenizer) if encoder else length
    count = max(config.calibration_tokens // length, 1)
    text = _calibration_text(plan, config, tokenizer, report)
    if text is not None:
        windows = windows_of(text, tokenizer, length, count, bos, torch.Generator().manual_seed(config.seed))
        calibration = Calibration(windows, text.origin, text.sha256, bos)
    else:
        progress.note(f"sampling {count * length:,} calibration tokens from the model itself")
        dense = _load_dense(plan)
        tokens = sample_tokens(dense, tokenizer, length, count, config.seed)
        calibration = Calibration.sampled(tokens, bos)
    check_vocabulary(calibration.tokens, plan.vocabulary, calibration.origin)
    if len(calibration.tokens) < count:
        report.notes.append(f"{calibration.origin} gives {len(calibration.tokens)} sequences of {length} tokens; "
                            f"{count} were asked for.")  # fmt: skip
    _note_few(plan, calibration.tokens.numel(), report)
    return calibration


def _note_few(plan: Plan, tokens: int, report: CompressionReport) -> None:
    widest = max(site.f for site in plan.sites)
    if tokens < widest:
        what = "patches" if plan.reads == IMAGE_MODEL else "tokens"
        report.notes.append(f"{tokens:,} calibration {what} are fewer than the {widest:,} features of a matrix; more "
                            f"{what} give a better result.")  # fmt: skip


def _calibration_text(
    plan: Plan, config: CompressionConfig, tokenizer: Any, report: CompressionReport
) -> Text | None:
    """The text that was asked for; a Hub text when nothing was and it can be had; None for "self"."""
    if config.calibration == "self":
        return None
    if config.calibration is not None:
        if looks_like_file(config.calibration):
            return read_text(Path(config.calibration), tokenizer)
        return read_dataset(config.calibration, "train")
    try:
        text = read_dataset(DEFAULT_DATASET, "train")
        report.notes.append(f"calibrated on {DEFAULT_DATASET}, as no calibration was named.")
        return text
    except CalibrationError as error:
        if plan.reads != LANGUAGE_MODEL:
            raise CalibrationError(f"no calibration was named, and {DEFAULT_DATASET} is not available here; name a "
                                   "text with --calibration.") from error  # fmt: skip
        report.notes.append("calibrated on text sampled from the model itself: none was named, and "
                            f"{DEFAULT_DATASET} is not available here.")  # fmt: skip
        return None


def _load_dense(plan: Plan) -> Any:
    """The whole dense model, the only time it is needed."""
    kind = model_class(plan.model.config, trust_remote_code=plan.trust_remote_code)
    model = kind.from_pretrained(plan.source.folder, trust_remote_code=plan.trust_remote_code)
    return model.to(plan.device).eval()
