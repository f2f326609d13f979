"""Tiny random image models and text encoders, written to disk as real checkpoints, and images for them."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from transformers import models as hf

from tests.families import tokenizer

_VIT = {"hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": 24,
        "patch_size": 8}  # fmt: skip
_TEXT = {"hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
         "vocab_size": 96, "max_position_embeddings": 64}  # fmt: skip
_DINO = {"hidden_size": 32, "mlp_ratio": 3, "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": 24,
         "patch_size": 8}  # fmt: skip
# Windows of 3 do not divide the grids of 10, 5 and 3, so that padding and shifts happen.
_SWIN = {"embed_dim": 16, "depths": [2, 2, 1], "num_heads": [2, 2, 4], "window_size": 3, "image_size": 20,
         "patch_size": 2, "mlp_ratio": 3}  # fmt: skip
_LABELS = {"id2label": {0: "cat", 1: "dog", 2: "tree house"}, "label2id": {"cat": 0, "dog": 1, "tree house": 2}}


@dataclass(frozen=True)
class Family:
    """A tiny model.

    Attributes:
        row: Its row in the table of architectures.
        architecture: Class in transformers.
        config: Makes its config.
        blocks: How many blocks are compressed.
    """

    row: str
    architecture: str
    config: Callable[[], Any]
    blocks: int = 3


def _two_towers(kind: Any) -> Any:
    return kind(text_config=_TEXT, vision_config=_VIT)


FAMILIES = {
    "vit": Family("vit", "ViTForImageClassification", lambda: hf.vit.ViTConfig(**_VIT, **_LABELS)),
    "vit backbone": Family("vit", "ViTModel", lambda: hf.vit.ViTConfig(**_VIT)),
    "deit": Family("deit", "DeiTForImageClassification", lambda: hf.deit.DeiTConfig(**_VIT, **_LABELS)),
    "deit teacher": Family("deit", "DeiTForImageClassificationWithTeacher",
                           lambda: hf.deit.DeiTConfig(**_VIT, **_LABELS)),
    "beit": Family("beit", "BeitForImageClassification",
                   lambda: hf.beit.BeitConfig(**_VIT, **_LABELS, use_relative_position_bias=True)),
    "dinov2": Family("dinov2", "Dinov2Model", lambda: hf.dinov2.Dinov2Config(**_DINO, layerscale_value=0.5)),
    "dinov2 classifier": Family("dinov2", "Dinov2ForImageClassification",
                                lambda: hf.dinov2.Dinov2Config(**_DINO, **_LABELS)),
    "swin": Family("swin", "SwinForImageClassification", lambda: hf.swin.SwinConfig(**_SWIN, **_LABELS), 5),
    "swin backbone": Family("swin", "SwinModel", lambda: hf.swin.SwinConfig(**_SWIN), 5),
    "clip": Family("clip", "CLIPModel", lambda: _two_towers(hf.clip.CLIPConfig)),
    "clip tower": Family("clip_vision_model", "CLIPVisionModel", lambda: hf.clip.CLIPVisionConfig(**_VIT)),
    "siglip": Family("siglip", "SiglipModel", lambda: _two_towers(hf.siglip.SiglipConfig)),
    "siglip tower": Family("siglip_vision_model", "SiglipVisionModel", lambda: hf.siglip.SiglipVisionConfig(**_VIT)),
    "bert": Family("bert", "BertModel", lambda: hf.bert.BertConfig(**_TEXT)),
    "bert mlm": Family("bert", "BertForMaskedLM", lambda: hf.bert.BertConfig(**_TEXT)),
    "roberta": Family("roberta", "RobertaModel", lambda: hf.roberta.RobertaConfig(**_TEXT)),
}  # fmt: skip
TEXT = {"bert", "bert mlm", "roberta"}


def write_model(name: str, folder: Path, *, config: Any = None) -> Path:
    """Writes a tiny checkpoint with non-trivial weights, biases, norms and layer scales, and returns its folder."""
    torch.manual_seed(sum(map(ord, name)))
    family = FAMILIES[name]
    model = getattr(transformers, family.architecture)(config or family.config())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_((0.2 if parameter.dim() > 1 else 0.05) * torch.randn_like(parameter))
    model.save_pretrained(folder)
    if name in TEXT:
        tokenizer(bos=True).save_pretrained(folder)
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "tokenizer_class": "PreTrainedTokenizerFast"}))
    else:
        vision = getattr(model.config, "vision_config", model.config)
        write_processor(folder, vision.image_size)
    return folder


def write_processor(folder: Path, size: int) -> None:
    """The image processor of a ViT."""
    values = {"image_processor_type": "ViTImageProcessor", "size": {"height": size, "width": size},
              "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(values))


def write_images(folder: Path, count: int = 4, labels: tuple[str, ...] = ("cat", "dog", "tree house")) -> Path:
    """Images of noise of several sizes, `count` per label."""
    generator = torch.Generator().manual_seed(count)
    for label in labels:
        (folder / label).mkdir(parents=True)
        for number in range(count):
            pixels = torch.randint(256, (24 + number, 40, 3), generator=generator, dtype=torch.uint8)
            Image.fromarray(pixels.numpy()).save(folder / label / f"{number}.png")
    return folder


def inputs_of(name: str, model: Any) -> dict[str, torch.Tensor]:
    """A batch for a model's trunk."""
    generator = torch.Generator().manual_seed(1)
    if name in TEXT:
        return {"input_ids": torch.randint(3, 90, (2, 12), generator=generator)}
    size = getattr(model.config, "vision_config", model.config).image_size
    return {"pixel_values": torch.randn(2, 3, size, size, generator=generator)}
