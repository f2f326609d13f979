"""Where a checkpoint comes from: its Hub id and commit, and what its own model card says about license and task."""

import re
from pathlib import Path
from typing import Any

import yaml

from fips.checkpoint.source import Source

# What a compressed model inherits. Tags, results and the base model describe the source alone.
_INHERITED = ("license", "license_name", "license_link", "language", "datasets", "pipeline_tag")
_TASKS = {"ForCausalLM": "text-generation", "ForImageClassification": "image-classification"}


def origin_of(source: Source) -> dict[str, Any]:
    """What the model card says of the source, as JSON values.

    Returns:
        `name`; `hub_id` and `commit`, None for a folder outside the Hub's cache; `task`, None when unknown; and
        `metadata`, taken over from the source's own model card.
    """
    hub_id, commit = hub_place(source.folder)
    metadata = read_metadata(source.folder / "README.md")
    architecture = str((source.config.get("architectures") or [""])[0])
    known = next((task for suffix, task in _TASKS.items() if architecture.endswith(suffix)), None)
    task = metadata.pop("pipeline_tag", known)
    return {"name": hub_id or source.name, "hub_id": hub_id, "commit": commit, "task": task, "metadata": metadata}


def hub_place(folder: Path) -> tuple[str | None, str | None]:
    """Id and commit of a folder that lies in the Hub's cache: models--owner--name/snapshots/commit."""
    parts = folder.resolve().parts[-3:]
    if len(parts) == 3 and parts[1] == "snapshots" and parts[0].startswith("models--"):
        return parts[0].removeprefix("models--").replace("--", "/"), parts[2]
    return None, None


def read_metadata(card: Path) -> dict[str, Any]:
    """The inherited keys of a model card's YAML block; a missing or broken block has none."""
    try:
        found = metadata_of(card.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):  # ValueError: no text, or a date such as 2023-02-30
        return {}
    if not isinstance(found, dict):
        return {}
    return {key: found[key] for key in _INHERITED if _plain(found.get(key))}


def metadata_of(card: str) -> Any:
    """What the YAML block of a model card says; None without one.

    A damaged block raises YAMLError, ValueError (a date such as 2023-02-30), or RecursionError.
    """
    block = re.match(r"\ufeff?---\s*?\r?\n(.*?)^---\s*$", card, re.DOTALL | re.MULTILINE)
    return yaml.safe_load(block[1]) if block else None


def _plain(value: object) -> bool:
    """Whether a value is a text or a list of texts; YAML reads `language: no` as false, which says nothing."""
    if isinstance(value, list):
        return bool(value) and all(isinstance(item, str) and item for item in value)
    return isinstance(value, str) and bool(value)
