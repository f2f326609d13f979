"""The table of architectures, looked up by `config.model_type`. Adding one is adding a row."""

from fips.models.arch import ArchSpec

_GATED = ArchSpec("model.layers", ("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",))

ARCHITECTURES: dict[str, ArchSpec] = {
    "llama": _GATED,
    "mistral": _GATED,
    "qwen2": _GATED,
    "qwen3": _GATED,
    "gemma": _GATED,
    "gemma2": _GATED,
    "gemma3_text": _GATED,
    "olmo2": _GATED,
    "smollm3": _GATED,
    # One tensor of two matrices: along f it is simply a wider matrix.
    "phi3": ArchSpec("model.layers", ("mlp.gate_up_proj",), ("mlp.down_proj",)),
    "phi": ArchSpec("model.layers", ("mlp.fc1",), ("mlp.fc2",)),
    "opt": ArchSpec("model.decoder.layers", ("fc1",), ("fc2",)),
    "gpt_neox": ArchSpec("gpt_neox.layers", ("mlp.dense_h_to_4h",), ("mlp.dense_4h_to_h",)),
    "gpt2": ArchSpec("transformer.h", ("mlp.c_fc",), ("mlp.c_proj",)),
}
