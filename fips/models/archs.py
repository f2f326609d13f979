"""The table of architectures, looked up by `config.model_type`. Adding one is adding a row.

Paths are those of modules. Between releases of transformers some have moved (names on disk have not): a row then has
one entry per layout, and the first that fits the installed release counts.
"""

from fips.models.arch import ArchSpec

_GATED = (ArchSpec("layers", ("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",)),)
_BERT = (ArchSpec("encoder.layer", ("intermediate.dense",), ("output.dense",)),)
_VIT = (ArchSpec("layers", ("mlp.fc1",), ("mlp.fc2",)), *_BERT)
_SWIN = tuple(ArchSpec("encoder.layers.*.blocks", (up,), (down,))
              for up, down in (("mlp.fc1", "mlp.fc2"), ("intermediate.dense", "output.dense")))  # fmt: skip
_TOWER = tuple(ArchSpec(f"{inside}encoder.layers", ("mlp.fc1",), ("mlp.fc2",)) for inside in ("", "vision_model."))
# Of a model with two towers the one that reads images is compressed.
_TWO_TOWERS = (ArchSpec("encoder.layers", ("mlp.fc1",), ("mlp.fc2",), trunk="vision_model"),)

ARCHITECTURES: dict[str, tuple[ArchSpec, ...]] = {
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
    "phi3": (ArchSpec("layers", ("mlp.gate_up_proj",), ("mlp.down_proj",)),),
    "phi": (ArchSpec("layers", ("mlp.fc1",), ("mlp.fc2",)),),
    "opt": (ArchSpec("decoder.layers", ("fc1",), ("fc2",)),),
    "gpt_neox": (ArchSpec("layers", ("mlp.dense_h_to_4h",), ("mlp.dense_4h_to_h",)),),
    "gpt2": (ArchSpec("h", ("mlp.c_fc",), ("mlp.c_proj",)),),
    "bert": _BERT,
    "roberta": _BERT,
    "vit": _VIT,
    "deit": _VIT,
    "beit": _VIT,
    "dinov2": (ArchSpec("encoder.layer", ("mlp.fc1",), ("mlp.fc2",)),),
    "swin": _SWIN,
    "clip": _TWO_TOWERS,
    "clip_vision_model": _TOWER,
    "siglip": _TWO_TOWERS,
    "siglip_vision_model": _TOWER,
}
