"""More tiny models: other heads, layouts and rough weights; architectures outside the table, also refused ones."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from transformers import models as hf

from tests.families import tokenizer

CLASSES = ("cat", "tabby cat, tiger", "dog", "red fox", "owl", "newt", "hen")
SIDE = 24  # of the images that image models take
_NAMES = {"id2label": dict(enumerate(CLASSES)), "label2id": {name: i for i, name in enumerate(CLASSES)}}
_WIDTHS = {"hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4}
_IMAGE = {**_WIDTHS, "image_size": SIDE, "patch_size": 6}
_BOTH = ("CLIPModel", "SiglipModel")  # towers for texts and for images
_TEXT = {**_WIDTHS, "vocab_size": 96, "max_position_embeddings": 64}
_DINO = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": SIDE, "patch_size": 6,
         "mlp_ratio": 3}  # fmt: skip
# Patch grids of 13, 7 and 4 with windows of 3: every stage is padded, the second block of a stage is shifted.
_SWIN = {"image_size": 26, "patch_size": 2, "embed_dim": 16, "depths": [2, 2, 2], "num_heads": [2, 2, 4],
         "window_size": 3, "mlp_ratio": 3.0}  # fmt: skip


def _two_towers(family: str) -> Any:
    config = getattr(hf, family)
    text, vision, whole = (getattr(config, n) for n in (
        ("CLIPTextConfig", "CLIPVisionConfig", "CLIPConfig") if family == "clip" else
        ("SiglipTextConfig", "SiglipVisionConfig", "SiglipConfig")))  # fmt: skip
    ends = {"eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}
    towers = {"text_config": text(**_TEXT, **ends).to_dict(), "vision_config": vision(**_IMAGE).to_dict()}
    return whole(**towers, projection_dim=16) if family == "clip" else whole(**towers)


@dataclass(frozen=True)
class Kind:
    """A class of models.

    Attributes:
        name: Its name in transformers.
        config: Makes a tiny config.
        options: Arguments of its constructor.
        matrices: How many it has.
        stages: Numbers of the last blocks of all stages.
    """

    name: str
    config: Any
    options: Mapping[str, Any] | None = None
    matrices: int = 6
    stages: tuple[int, ...] = (2,)

    @property
    def reads_text(self) -> bool:
        """Whether it is a text encoder."""
        return getattr(transformers, self.name).main_input_name == "input_ids" and self.name not in _BOTH


def _kinds() -> dict[str, Kind]:
    vit = lambda: hf.vit.ViTConfig(**_IMAGE, **_NAMES)  # noqa: E731
    beit = lambda: hf.beit.BeitConfig(**_IMAGE, **_NAMES, use_relative_position_bias=True)  # noqa: E731
    dino = lambda: hf.dinov2.Dinov2Config(**_DINO, **_NAMES)  # noqa: E731
    swin = lambda: hf.swin.SwinConfig(**_SWIN, **_NAMES)  # noqa: E731
    bert = lambda: hf.bert.BertConfig(**_TEXT, pad_token_id=0, **_NAMES)  # noqa: E731
    clip = lambda: hf.clip.CLIPVisionConfig(**_IMAGE, projection_dim=16)  # noqa: E731
    return {
        "vit": Kind("ViTForImageClassification", vit),
        "vit without pooler": Kind("ViTModel", vit, {"add_pooling_layer": False}),
        "beit": Kind("BeitForImageClassification", beit),
        "beit backbone": Kind("BeitModel", beit),
        "dinov2": Kind("Dinov2Model", dino),
        "swin": Kind("SwinForImageClassification", swin, None, 12, (1, 3, 5)),
        "clip": Kind("CLIPModel", lambda: _two_towers("clip")),
        "clip vision with projection": Kind("CLIPVisionModelWithProjection", clip),
        "siglip": Kind("SiglipModel", lambda: _two_towers("siglip")),
        "siglip without head": Kind("SiglipVisionModel",
                                    lambda: hf.siglip.SiglipVisionConfig(**_IMAGE, vision_use_head=False)),
        "bert without pooler": Kind("BertModel", bert, {"add_pooling_layer": False}),
        "bert classifier": Kind("BertForSequenceClassification", bert),
        "roberta": Kind("RobertaModel", lambda: hf.roberta.RobertaConfig(**{**_TEXT, "max_position_embeddings": 66},
                                                                         pad_token_id=1)),
    }  # fmt: skip


def _gemma3() -> Any:
    """A language model with a tower for images, which stays as it is."""
    text = hf.gemma3.Gemma3TextConfig(**_TEXT, num_key_value_heads=2, head_dim=8, sliding_window=8)
    vision = hf.siglip.SiglipVisionConfig(**_IMAGE, vision_use_head=False)
    return hf.gemma3.Gemma3Config(text_config=text.to_dict(), vision_config=vision.to_dict(), mm_tokens_per_image=4,
                                  image_token_index=95, boi_token_index=93, eoi_token_index=94)  # fmt: skip


def _unlisted() -> dict[str, Kind]:
    pyramid = {"image_size": 32, "depths": [2, 2, 2, 2], "hidden_sizes": [8, 16, 24, 32]}
    attended = {**pyramid, "num_attention_heads": [1, 2, 2, 4], "mlp_ratios": [4, 4, 3, 3]}
    four = (16, (1, 3, 5, 7))
    mae = lambda: hf.vit_mae.ViTMAEConfig(**_IMAGE)  # noqa: E731
    return {
        "swinv2": Kind("Swinv2ForImageClassification", lambda: hf.swinv2.Swinv2Config(**_SWIN), None, 12, (1, 3, 5)),
        "donut": Kind("DonutSwinModel", lambda: hf.donut.DonutSwinConfig(**_SWIN), None, 12, (1, 3, 5)),
        "pvt": Kind("PvtForImageClassification",
                    lambda: hf.pvt.PvtConfig(**attended, sequence_reduction_ratios=[4, 2, 2, 1]), None, *four),
        "convnext": Kind("ConvNextForImageClassification", lambda: hf.convnext.ConvNextConfig(**pyramid), None, *four),
        "vit mae": Kind("ViTMAEModel", mae),
        "data2vec": Kind("Data2VecVisionForImageClassification",
                         lambda: hf.data2vec.Data2VecVisionConfig(**_IMAGE, use_relative_position_bias=True)),
        "ijepa": Kind("IJepaForImageClassification", lambda: hf.ijepa.IJepaConfig(**_IMAGE)),
        "dinov2 registers": Kind("Dinov2WithRegistersModel",
                                 lambda: hf.dinov2_with_registers.Dinov2WithRegistersConfig(**_DINO)),
        "dinov3": Kind("DINOv3ViTModel", lambda: hf.dinov3_vit.DINOv3ViTConfig(**_IMAGE)),
        "gemma3": Kind("Gemma3ForConditionalGeneration", _gemma3, None, 9),
        "distilbert": Kind("DistilBertForMaskedLM", lambda: hf.distilbert.DistilBertConfig(
            dim=32, hidden_dim=80, n_layers=3, n_heads=4, vocab_size=96, max_position_embeddings=64)),
        "electra": Kind("ElectraModel", lambda: hf.electra.ElectraConfig(**_TEXT, embedding_size=16)),
        "mpnet": Kind("MPNetModel", lambda: hf.mpnet.MPNetConfig(**_TEXT)),
        "modernbert": Kind("ModernBertModel", lambda: hf.modernbert.ModernBertConfig(**_TEXT, pad_token_id=0)),
        "deberta": Kind("DebertaV2Model", lambda: hf.deberta_v2.DebertaV2Config(
            **_TEXT, relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=16, share_att_key=True,
            norm_rel_ebd="layer_norm", position_biased_input=False)),
        "xlnet": Kind("XLNetModel", lambda: hf.xlnet.XLNetConfig(vocab_size=96, d_model=32, n_layer=3, n_head=4,
                                                                 d_inner=80)),
    }  # fmt: skip


def _refused() -> dict[str, Kind]:
    masked = {"depths": [1, 1, 1], "num_attention_heads": [2, 2, 4], "key_dim": [4, 4, 4]}
    return {
        "levit": Kind("LevitModel", lambda: hf.levit.LevitConfig(
            image_size=64, hidden_sizes=[16, 24, 32], mlp_ratio=[2, 2, 2], attention_ratio=[2, 2, 2], **masked)),
        "mobilebert": Kind("MobileBertModel", lambda: hf.mobilebert.MobileBertConfig(
            **_TEXT, embedding_size=16, intra_bottleneck_size=16, true_hidden_size=16)),
        "funnel": Kind("FunnelModel", lambda: hf.funnel.FunnelConfig(
            vocab_size=96, block_sizes=[1, 1, 1], d_model=32, n_head=4, d_head=8, d_inner=80)),
        "t5": Kind("T5ForConditionalGeneration", lambda: hf.t5.T5Config(
            vocab_size=96, d_model=32, d_ff=80, num_layers=2, num_heads=4)),
        "albert": Kind("AlbertModel", lambda: hf.albert.AlbertConfig(**_TEXT, embedding_size=16)),
        "squeezebert": Kind("SqueezeBertModel", lambda: hf.squeezebert.SqueezeBertConfig(**_TEXT, embedding_size=32)),
        "videomae": Kind("VideoMAEModel", lambda: hf.videomae.VideoMAEConfig(**_IMAGE, num_frames=2)),
        "mobilevit": Kind("MobileViTModel", lambda: hf.mobilevit.MobileViTConfig(
            image_size=64, hidden_sizes=[16, 24, 32], neck_hidden_sizes=[8, 8, 16, 16, 24, 24, 32])),
    }  # fmt: skip


KINDS = _kinds()  # in the table
UNLISTED = _unlisted()  # found by structure
REFUSED = _refused()  # of another structure
EVERY = {**KINDS, **UNLISTED, **REFUSED}


def randomize_(model: torch.nn.Module) -> None:
    """Adds noise to every parameter, so that biases, norms and scales of layers are not trivial."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_((0.2 if parameter.dim() > 1 else 0.05) * torch.randn_like(parameter))
        for name, parameter in model.named_parameters():
            if "lambda" in name:  # layer scale: some channels count much, some hardly at all
                parameter.copy_(torch.rand_like(parameter) * 1.5 + 0.01)


def write_image_model(model: Any, folder: Path) -> Path:
    """Writes a model and the processor that gives it images of its size."""
    model.save_pretrained(folder)
    vision = getattr(model.config, "vision_config", model.config)
    side = vision.image_size
    settings = {
        "image_processor_type": "ViTImageProcessor", "do_resize": True, "size": {"height": side, "width": side},
        "resample": 2, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True,
        "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(settings, indent=2))
    return folder


def write_text_model(model: Any, folder: Path, **settings: Any) -> Path:
    """Writes a model and the tokenizer of one token per character, which puts <s> and </s> around a text."""
    from tokenizers import processors

    model.save_pretrained(folder)
    made = tokenizer()
    made.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    made.model_max_length = 64
    made.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    read = {**json.loads(path.read_text()), "tokenizer_class": "PreTrainedTokenizerFast", **settings}
    path.write_text(json.dumps(read))
    return folder


def write_kind(kind: str, folder: Path, seed: int = 0) -> Path:
    """Writes a tiny checkpoint of a kind and returns its folder."""
    made = EVERY[kind]
    torch.manual_seed(sum(map(ord, kind)) + seed)
    model = getattr(transformers, made.name)(made.config(), **(made.options or {}))
    randomize_(model)
    return write_text_model(model, folder) if made.reads_text else write_image_model(model, folder)


def load_dense(folder: Path) -> Any:
    """The model of a folder in the class it was saved from."""
    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    return getattr(transformers, name).from_pretrained(folder)


def write_images(root: Path, count: int, classes: tuple[str, ...] = ("cat", "dog", "owl"), seed: int = 0) -> Path:
    """`count` noisy images in a folder per class, in turn; without classes directly in the folder."""
    generator = torch.Generator().manual_seed(seed)
    for number in range(count):
        folder = root / classes[number % len(classes)] if classes else root
        folder.mkdir(parents=True, exist_ok=True)
        width, height = (30, 24) if number % 2 else (26, 40)
        coarse = torch.randint(0, 256, (5, 5, 3), generator=generator, dtype=torch.uint8)
        Image.fromarray(coarse.numpy()).resize((width, height)).save(folder / f"{number:03d}.png")
    return root
