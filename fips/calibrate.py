"""Calibration tokens of a run: of the text that was named, of a Hub text, or of the model itself."""

from pathlib import Path
from typing import Any

import torch

from fips.checkpoint.tokenizer import load_tokenizer
from fips.config import CompressionConfig
from fips.data.texts import DEFAULT_DATASET, Text, looks_like_file, read_dataset, read_text
from fips.data.windows import WRAPPED, capped_length, check_vocabulary, encoder_length, resolve_bos
from fips.errors import CalibrationError
from fips.models.kinds import TEXT_ENCODER, model_class
from fips.plan import Plan
from fips.progress import Progress
from fips.report import CompressionReport
from fips.stages.calibration import Calibration, sample_tokens, windows_of


def calibrate(plan: Plan, config: CompressionConfig, report: CompressionReport, progress: Progress) -> Calibration:
    """Calibration tokens of the chosen text, or the model's own."""
    tokenizer = load_tokenizer(plan.source.folder, trust_remote_code=plan.trust_remote_code)
    encoder = plan.reads == TEXT_ENCODER
    bos = WRAPPED if encoder else resolve_bos("auto", tokenizer)
    length = capped_length(config.sequence_length, plan.model.config)
    length = encoder_length(length, plan.model.config, tokenizer) if encoder else length
    count = max(config.calibration_tokens // length, 1)
    text = _calibration_text(config, tokenizer, report)
    if text is not None:
        windows = windows_of(text, tokenizer, length, count, bos, torch.Generator().manual_seed(config.seed))
        calibration = Calibration(windows, text.origin, text.sha256, bos)
    else:
        progress.note(f"sampling {count * length:,} calibration tokens from the model itself")
        dense = _load_dense(plan)
        tokens = sample_tokens(dense, tokenizer, length, count, config.seed)
        calibration = Calibration.sampled(tokens, bos)
    check_vocabulary(calibration.tokens, plan.vocabulary, calibration.origin)
    report.calibration = calibration.to_dict()
    if len(calibration.tokens) < count:
        report.notes.append(f"{calibration.origin} gives {len(calibration.tokens)} sequences of {length} tokens; "
                            f"{count} were asked for.")  # fmt: skip
    widest = max(site.f for site in plan.sites)
    if calibration.tokens.numel() < widest:
        report.notes.append(f"{calibration.tokens.numel():,} calibration tokens are fewer than the {widest:,} "
                            "features of a matrix; more tokens give a better result.")  # fmt: skip
    return calibration


def _calibration_text(config: CompressionConfig, tokenizer: Any, report: CompressionReport) -> Text | None:
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
    except CalibrationError:
        report.notes.append("calibrated on text sampled from the model itself: none was named, and "
                            f"{DEFAULT_DATASET} is not available here.")  # fmt: skip
        return None


def _load_dense(plan: Plan) -> Any:
    """The whole dense model, the only time it is needed."""
    kind = model_class(plan.model.config, trust_remote_code=plan.trust_remote_code)
    model = kind.from_pretrained(plan.source.folder, trust_remote_code=plan.trust_remote_code)
    return model.to(plan.device).eval()
