"""Tiny random models of every architecture in the table, written to disk as real checkpoints."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers import models as hf

_WIDE = {"hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
         "vocab_size": 96, "max_position_embeddings": 64}  # fmt: skip
_KV = {**_WIDE, "num_key_value_heads": 2}

FAMILIES = {
    "llama": lambda: hf.llama.LlamaConfig(**_KV),
    "mistral": lambda: hf.mistral.MistralConfig(**_KV, sliding_window=8),
    "qwen2": lambda: hf.qwen2.Qwen2Config(**_KV),
    "qwen3": lambda: hf.qwen3.Qwen3Config(**_KV, head_dim=8),
    "gemma": lambda: hf.gemma.GemmaConfig(**_KV, head_dim=16),
    "gemma2": lambda: hf.gemma2.Gemma2Config(**_KV, head_dim=16, sliding_window=8),
    "gemma3_text": lambda: hf.gemma3.Gemma3TextConfig(**_KV, head_dim=16, sliding_window=8),
    "olmo2": lambda: hf.olmo2.Olmo2Config(**_KV, pad_token_id=0),
    "smollm3": lambda: hf.smollm3.SmolLM3Config(**_KV, pad_token_id=0),
    "phi": lambda: hf.phi.PhiConfig(**_WIDE),
    "phi3": lambda: hf.phi3.Phi3Config(**_KV, pad_token_id=0),
    "opt": lambda: hf.opt.OPTConfig(hidden_size=32, ffn_dim=80, num_hidden_layers=3, num_attention_heads=4,
                                    vocab_size=96, max_position_embeddings=64, word_embed_proj_dim=32),
    "gpt2": lambda: hf.gpt2.GPT2Config(n_embd=32, n_inner=80, n_layer=3, n_head=4, vocab_size=96, n_positions=64),
    "gpt_neox": lambda: hf.gpt_neox.GPTNeoXConfig(**_WIDE),
}  # fmt: skip


def tokenizer(*, bos: bool = False) -> PreTrainedTokenizerFast:
    """One token per character (byte-level BPE without merges), optionally with a BOS before every text."""
    letters = ["\u0120", "\u010a", *map(chr, range(33, 124))]  # space, newline, printable ASCII
    vocabulary = {t: i for i, t in enumerate(["<unk>", "<s>", "</s>", *letters])}
    core = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    if bos:
        core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def random_text(count: int, seed: int = 0) -> str:
    """Random text of about `count` tokens of that tokenizer."""
    ids = torch.randint(ord("a"), ord("z") + 1, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    text = "".join(map(chr, ids))
    return "\n\n".join(text[k : k + 100] for k in range(0, count, 100))


def write_model(family: str, folder: Path, *, dtype: torch.dtype = torch.float32, tied: bool | None = None,
                shard: str = "5GB", bos: bool = False) -> Path:  # fmt: skip
    """Writes a tiny checkpoint with non-trivial weights and biases, and returns its folder."""
    torch.manual_seed(sum(map(ord, family)))
    config = FAMILIES[family]()
    if tied is not None:
        config.tie_word_embeddings = tied
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = 0.2 if parameter.dim() > 1 else 0.05
            parameter.add_(spread * torch.randn_like(parameter))
            if name.endswith("embed_tokens.weight"):
                parameter.mul_(2)
    model.to(dtype).save_pretrained(folder, max_shard_size=shard)
    tokenizer(bos=bos).save_pretrained(folder)
    # Without a class of its own a tokenizer is loaded as the model type's, which reads other files.
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


def edit_config(folder: Path, **values: object) -> None:
    """Sets values in a folder's config.json; None removes one."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for key, value in values.items():
        config.pop(key, None) if value is None else config.__setitem__(key, value)
    path.write_text(json.dumps(config))
