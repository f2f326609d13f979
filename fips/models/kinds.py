"""Which class a checkpoint is a model of, and what it reads."""

from typing import Any

from fips.errors import ArchitectureError

LANGUAGE_MODEL = "language model"
TEXT_ENCODER = "text encoder"
IMAGE_MODEL = "image model"

_REMOTE = "AutoModelForCausalLM"


def model_class(config: Any, *, trust_remote_code: bool = False) -> Any:
    """The class a checkpoint was saved from, as its config states it; transformers' default for its type otherwise.

    Args:
        config: The checkpoint's transformers config.
        trust_remote_code: Whether the checkpoint's own Python code may run.

    Returns:
        A class with `from_pretrained`; one of the auto classes where code of the checkpoint is meant.

    Raises:
        ArchitectureError: If transformers has no such class.
    """
    import transformers

    names = getattr(config, "architectures", None)
    stated = names[0] if isinstance(names, list) and names else None
    remote = getattr(config, "auto_map", None)
    if trust_remote_code and isinstance(remote, dict):
        for auto, where in remote.items():
            if auto.startswith("AutoModel") and str(where).endswith(f".{stated}") and hasattr(transformers, auto):
                return getattr(transformers, auto)
        if _REMOTE in remote:
            return transformers.AutoModelForCausalLM
    if stated is None:
        causal = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
        return transformers.AutoModelForCausalLM if causal else transformers.AutoModel
    found = (getattr(transformers, stated, None) or _registered(config, stated)) if isinstance(stated, str) else None
    if not isinstance(found, type) or not issubclass(found, transformers.PreTrainedModel):
        hint = " Its own code may: read it, then pass --trust-remote-code." if remote and not trust_remote_code else ""
        raise ArchitectureError(
            f"config.json names the architecture {stated!r}, which transformers does not have.{hint}"
        )
    return found


def _registered(config: Any, name: str) -> Any:
    """A class of the program's own that it gave to transformers, as by `AutoModelForCausalLM.register`, or None."""
    from transformers.models.auto import modeling_auto as auto

    for mapping in (auto.MODEL_FOR_CAUSAL_LM_MAPPING, auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING, auto.MODEL_MAPPING):
        if type(config) in mapping and getattr(mapping[type(config)], "__name__", None) == name:
            return mapping[type(config)]
    return None


def _is_causal(kind: type, config: Any) -> bool:
    """Whether a class is a language model to transformers, its own or a registered one."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if kind.__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        return True
    return type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and MODEL_FOR_CAUSAL_LM_MAPPING[type(config)] is kind


def token_places(model: Any) -> int | None:
    """Tokens a text encoder has places for; None without a limit. RoBERTa counts them from behind its padding."""
    limit = getattr(model.config, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit < 2:
        return None
    tables = (m for name, m in model.named_modules() if name.endswith("position_embeddings"))
    paddings = [table.padding_idx for table in tables if getattr(table, "padding_idx", None) is not None]
    return limit - max(paddings) - 1 if paddings else limit


def writes_text(config: Any, *, trust_remote_code: bool = False) -> bool:
    """Whether a checkpoint is one of a language model, as far as its config tells."""
    kind = model_class(config, trust_remote_code=trust_remote_code)
    return kind.__name__ == _REMOTE or _is_causal(kind, config)


def from_config(config: Any, *, trust_remote_code: bool = False, **options: Any) -> Any:
    """A model of the checkpoint's class with random weights."""
    kind = model_class(config, trust_remote_code=trust_remote_code)
    if kind.__name__.startswith("Auto"):
        return kind.from_config(config, trust_remote_code=trust_remote_code, **options)
    return kind._from_config(config, **options)


def reads(trunk: Any, model: Any) -> str:
    """What a model is to fips: "language model", "text encoder" or "image model".

    Raises:
        ArchitectureError: If it reads something else, or writes one sequence while it reads another.
    """
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise ArchitectureError(f"{name} has an encoder and a decoder; such models are not supported.")
    inputs = getattr(trunk, "main_input_name", None)
    if inputs == "pixel_values":
        return IMAGE_MODEL
    if inputs != "input_ids":
        raise ArchitectureError(f"{name} reads {inputs}; expected a model of token ids or of pixel values.")
    auto_map = getattr(model.config, "auto_map", None) or {}
    remote = type(model).__module__.startswith("transformers_modules")
    causal = remote and str(auto_map.get(_REMOTE)).endswith(f".{name}")
    return LANGUAGE_MODEL if causal or _is_causal(type(model), model.config) else TEXT_ENCODER
