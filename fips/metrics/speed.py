"""How fast a loaded model runs: passes of random tokens or pixels, timed after a warm-up."""

import inspect
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fips.errors import ArchitectureError
from fips.models.kinds import IMAGE_MODEL, LANGUAGE_MODEL, reads
from fips.models.sites import trunk_of
from fips.timings import Series
from fips.workload import BenchConfig

_SECONDS = 0.5  # passes of one shape are repeated for so long
_PASSES = 50  # or so many times


def synchronize(device: str) -> None:
    """Waits until the device has done what it was given."""
    if device == "cuda":
        torch.cuda.synchronize()
    elif device == "mps":
        torch.mps.synchronize()


@torch.inference_mode()
def speeds(model: Any, config: BenchConfig) -> list[Series]:
    """What a model does per second, for every batch size.

    Of a language model: tokens of the prompts that are read (prefill), and tokens generated greedily behind them one by
    one (decode). Of other models: texts or images. Every shape is warmed up first; of its passes the median counts.

    Args:
        model: A loaded model.
        config: Batch sizes and lengths.

    Raises:
        ArchitectureError: If a language model keeps no cache between tokens.
    """
    trunk, device = trunk_of(model)[1], next(model.parameters()).device
    kind = reads(trunk, model)
    found = []
    for batch in config.batch_sizes:
        generator = torch.Generator().manual_seed(config.seed)
        if kind == IMAGE_MODEL:
            pixels = random_pixels(model, batch, generator).to(device, model.dtype)
            whole = "ForImageClassification" in type(model).__name__
            found.append(_rate("images", batch, device.type, partial(model if whole else trunk, pixel_values=pixels)))
            continue
        ids = random_tokens(model, (batch, config.prompt_length), generator).to(device)
        if kind == LANGUAGE_MODEL:
            found += _generation(model, ids, config.new_tokens)
        else:
            run = partial(model.base_model, input_ids=ids, attention_mask=torch.ones_like(ids))
            found.append(_rate("texts", batch, device.type, run))
    return found


def random_tokens(model: Any, shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Token ids, (batch, length) int64."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    return torch.randint(vocabulary, shape, generator=generator)


def random_pixels(model: Any, batch: int, generator: torch.Generator) -> Tensor:
    """Pixel values of the size the model was trained on, (batch, channels, height, width) float32."""
    config = getattr(model.config, "vision_config", model.config)
    size = getattr(config, "image_size", 224)
    height, width = (size, size) if isinstance(size, int) else tuple(size)[:2]
    return torch.randn(batch, int(getattr(config, "num_channels", 3)), height, width, generator=generator)


@torch.inference_mode()
def touch(model: Any) -> None:
    """Runs a model on one token or image, so that weights that are read from disk on first use are in memory."""
    trunk, device = trunk_of(model)[1], next(model.parameters()).device
    if reads(trunk, model) == IMAGE_MODEL:
        trunk(pixel_values=random_pixels(model, 1, torch.Generator().manual_seed(0)).to(device, model.dtype))
    else:
        model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=device))
    synchronize(device.type)


@dataclass(frozen=True)
class _Timed:
    prefill: float  # seconds
    decode: float


def _generation(model: Any, ids: Tensor, new: int) -> list[Series]:
    _generate(model, ids, 1)
    runs = _repeat(partial(_generate, model, ids, new))
    batch, length = ids.shape
    prefill = statistics.median(run.prefill for run in runs)
    decode = statistics.median(run.decode for run in runs)
    return [Series("prefill", batch, "tokens/s", (batch * length / prefill,)),
            Series("decode", batch, "tokens/s", (batch * new / decode,))]  # fmt: skip


def _generate(model: Any, ids: Tensor, new: int) -> _Timed:
    """Reads the prompts, then generates `new` tokens greedily; the name of the cache depends on transformers."""
    device, taken = ids.device.type, inspect.signature(model.forward).parameters
    options = {"logits_to_keep": 1} if "logits_to_keep" in taken else {}
    name = "cache" if "cache" in taken else "past_key_values"
    synchronize(device)
    started = time.perf_counter()
    out = model(input_ids=ids, use_cache=True, **options)
    synchronize(device)
    read = time.perf_counter()
    for _ in range(new):
        cache = getattr(out, name, None)
        if cache is None:
            raise ArchitectureError(f"{type(model).__name__} keeps no cache between tokens; generating with it cannot "
                                    "be timed.")  # fmt: skip
        token = out.logits[:, -1:].argmax(-1)  # (batch, 1)
        out = model(input_ids=token, use_cache=True, **{name: cache}, **options)
    synchronize(device)
    return _Timed(read - started, time.perf_counter() - read)


def _rate(unit: str, batch: int, device: str, run: Callable[[], object]) -> Series:
    def timed() -> float:
        synchronize(device)
        started = time.perf_counter()
        run()
        synchronize(device)
        return time.perf_counter() - started

    run()
    return Series(unit, batch, f"{unit}/s", (batch / statistics.median(_repeat(timed)),))


def _repeat(run: Callable[[], Any]) -> list[Any]:
    """Results of repeated runs: one of a slow model, many of a quick one."""
    results: list[Any] = []
    started = time.perf_counter()
    while not results or (time.perf_counter() - started < _SECONDS and len(results) < _PASSES):
        results.append(run())
    return results
