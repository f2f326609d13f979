"""Writes the dense checkpoint that a compressed folder stands for, one tensor at a time."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from fips.checkpoint.dense import PackedCheckpoint
from fips.checkpoint.folder import all_files, file_digest, side_files
from fips.checkpoint.origin import read_metadata
from fips.checkpoint.pack import digest
from fips.checkpoint.reload import stored_tensors, weight_files
from fips.checkpoint.safetensors_io import Entry, read_tensor
from fips.checkpoint.save import copy_side_files, write_json, write_shards
from fips.errors import FormatError

_CARD = """\
---
{metadata}---

# {name}

The dense form of a checkpoint compressed by [fips](https://arxiv.org/abs/2411.09816): {rebuilt} MLP matrices are stored
as the products of their factors, so this folder has the dense model's size and loads without fips. Its outputs are
those of the compressed checkpoint.

```python
from transformers import {kind}

model = {kind}.from_pretrained("{name}")
```
"""


def needed_bytes(opened: PackedCheckpoint) -> int:
    """Bytes of the dense folder: tensors and side files."""
    entries = {**opened.kept(), **opened.rebuilt()}
    side = sum((opened.folder / file).stat().st_size for file in side_files(opened.folder))
    return sum(entry.info.bytes for entry in entries.values()) + side


def write_dense(opened: PackedCheckpoint, folder: Path, name: str, max_shard_size: int) -> int:
    """Writes weights, config.json, side files and card, and reads the weights back.

    The compression report is left out: its checksums and sizes are those of the compressed folder.

    Args:
        opened: The compressed checkpoint.
        folder: Empty folder.
        name: Name of the exported model, for its card.
        max_shard_size: Largest weights file in bytes.

    Returns:
        Bytes of all weights files.

    Raises:
        FormatError: If a tensor of the compressed checkpoint is damaged, or one reads back differently.
    """
    digests: dict[str, str] = {}
    entries = {n: Entry(e.info, _noted(n, e, digests)) for n, e in {**opened.kept(), **opened.rebuilt()}.items()}
    size = write_shards(folder, entries, max_shard_size)
    write_json(folder / "config.json", {k: v for k, v in opened.config.items() if k != "quantization_config"})
    copy_side_files(opened.folder, folder)
    (folder / "README.md").write_text(_card(opened, name), encoding="utf-8")
    _require_written(folder, digests)
    return size


def digests_of(folder: Path) -> dict[str, str]:
    """File of a folder → SHA-256."""
    return {file.as_posix(): file_digest(folder / file) for file in all_files(folder)}


def _noted(name: str, entry: Entry, digests: dict[str, str]) -> Callable[[], Tensor]:
    """Loads a tensor and notes the digest of what is about to be written."""

    def load() -> Tensor:
        tensor = entry.load()
        digests[name] = digest(tensor)
        return tensor

    return load


def _require_written(folder: Path, digests: dict[str, str]) -> None:
    stored = stored_tensors(weight_files(folder))
    if set(stored) != set(digests):
        raise FormatError(f"written tensors differ in name: {sorted(set(stored) ^ set(digests))}")
    for name, expected in digests.items():
        if digest(read_tensor(stored[name][0], name)) != expected:
            raise FormatError(f"{name} reads back differently from what was written; the disk may be failing.")


def _card(opened: PackedCheckpoint, name: str) -> str:
    architectures: Any = opened.config.get("architectures")
    if architectures:
        kind = "AutoModelForCausalLM" if str(architectures[0]).endswith("ForCausalLM") else str(architectures[0])
    else:
        causal = opened.config["model_type"] in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        kind = "AutoModelForCausalLM" if causal else "AutoModel"
    metadata = {"library_name": "transformers", **read_metadata(opened.folder / "README.md")}
    shown = yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True)
    return _CARD.format(metadata=shown, name=name, rebuilt=sum(len(g.members) for g in opened.groups), kind=kind)
