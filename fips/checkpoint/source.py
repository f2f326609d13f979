"""The checkpoint that is compressed: found locally or on the Hub, read lazily, refused early."""

import glob
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fips.checkpoint.folder import is_file, module_folders, read_json, require_inside, side_files
from fips.checkpoint.safetensors_io import TensorInfo, read_header, read_tensor
from fips.errors import FormatError, NumericalError, SourceError

_NAMES = (
    ("model.safetensors.index.json", "model.safetensors"),
    ("pytorch_model.bin.index.json", "pytorch_model.bin"),
)  # index of shards, single file; safetensors come first, as in transformers
SIDE_PATTERNS = ["*.json", "*.txt", "*.model", "*.jinja", "*.py", "*.tiktoken", "LICENSE*", "NOTICE*",
                  "*.md"]  # fmt: skip
_DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depths")  # the last a list, one per stage
_LARGEST = {"max_position_embeddings": 2**24, "n_positions": 2**24, "num_labels": 2**20}


@dataclass(frozen=True)
class Source:
    """A checkpoint folder whose tensors are read one by one.

    Attributes:
        folder: The folder.
        name: What the user called it: a path's last part or the Hub id.
        config: Its config.json.
        infos: Tensor name → dtype and shape.
        files: Tensor name → file that holds it.
    """

    folder: Path
    name: str
    config: dict[str, Any]
    infos: dict[str, TensorInfo]
    files: dict[str, Path]

    def read(self, name: str) -> Tensor:
        """One tensor in its stored dtype.

        Raises:
            SourceError: If it is not there or cannot be read.
        """
        if name not in self.files:
            raise SourceError(f"{self.name}: tensor {name} is not in the checkpoint.")
        path = self.files[name]
        try:
            return read_tensor(path, name) if path.suffix == ".safetensors" else _load_bin(path)[name].clone()
        except FormatError as error:
            raise SourceError(str(error)) from error

    def side_files(self) -> list[Path]:
        """Every file that holds no weights, relative to the folder; config.json and the model card left out."""
        return side_files(self.folder)

    def require_finite(self, names: Iterable[str], cast: torch.dtype | None = None) -> None:
        """Refuses NaN and infinity in the named tensors, and values that overflow the dtype they will be stored in.

        Args:
            names: Tensors to check; read one by one.
            cast: dtype the checkpoint will be stored in; None keeps each tensor's own.

        Raises:
            NumericalError: Naming the tensor.
        """
        for name in names:
            tensor = self.read(name)
            if tensor.is_floating_point() and not torch.isfinite(tensor).all():
                bad = int((~torch.isfinite(tensor)).sum())
                raise NumericalError(f"{self.name}: tensor {name} holds {bad:,} NaN or infinite values.")
            if cast is not None and tensor.is_floating_point() and not torch.isfinite(tensor.to(cast)).all():
                raise NumericalError(f"{self.name}: tensor {name} does not fit into {cast}; store as bfloat16.")


def open_source(model: str | os.PathLike[str], revision: str | None = None) -> Source:
    """Opens a checkpoint folder or downloads one from the Hub.

    Args:
        model: Local folder or Hub id.
        revision: Branch, tag or commit of a Hub id.

    Raises:
        SourceError: If it is missing, incomplete, damaged, quantized, or already compressed.
    """
    folder = locate(str(model), revision)
    name = folder.resolve().name if Path(model).expanduser().is_dir() else str(model)
    config = read_config(folder)
    _refuse_quantized(config, name)
    files = weight_paths(folder)
    infos: dict[str, TensorInfo] = {}
    where: dict[str, Path] = {}
    for path in files:
        for tensor, info in _infos(path).items():
            if tensor in infos:
                raise SourceError(f"{folder}: tensor {tensor} is in {where[tensor].name} and in {path.name}.")
            infos[tensor], where[tensor] = info, path
    if not infos:
        raise SourceError(f"{folder}: the weight files hold no tensor.")
    require_depth(config, len(infos), folder)
    return Source(folder, name, config, infos, where)


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a model folder.

    Raises:
        SourceError: If it is missing or not a JSON object with a model type.
    """
    path = folder / "config.json"
    if not is_file(path):
        raise SourceError(f"{folder} has no config.json: not a Hugging Face model folder.")
    require_inside(path, folder)
    config = read_json(path)
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise SourceError(f"{path} names no model_type: not a transformers config.")
    names, remote = config.get("architectures"), config.get("auto_map")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise SourceError(f"{path}: architectures is {str(names)[:80]!r}; expected a list of class names.")
    if remote is not None and not isinstance(remote, dict):
        raise SourceError(f"{path}: auto_map is {str(remote)[:80]!r}; expected an object.")
    return config


def require_depth(config: dict[str, Any], tensors: int, folder: Path) -> None:
    """Refuses a config.json with more layers than there are tensors, before a model of that depth is built.

    Absurd numbers of positions and labels, for which tables would be made, are refused too; in parts of the config as
    well as in itself.

    Raises:
        SourceError: Naming the key.
    """
    parts: list[Any] = [config]
    while parts:
        part = parts.pop()
        for key, value in part.items() if isinstance(part, dict) else ():
            if key == "quantization_config":
                continue
            parts += value if isinstance(value, list) else [value]
            count = sum(n for n in value if isinstance(n, int)) if isinstance(value, list) else value
            if key in _DEPTHS and isinstance(count, int) and count > tensors:
                raise SourceError(f"{folder}: config.json has {key} {count}, but only {tensors} tensors are stored.")
            if key in _LARGEST and isinstance(value, int) and value > _LARGEST[key]:
                raise SourceError(f"{folder}: config.json has {key} {value}; more than {_LARGEST[key]} is no model's.")


def locate(model: str, revision: str | None = None) -> Path:
    """Folder of a checkpoint: the local one, or the Hub's after downloading it.

    Raises:
        SourceError: If there is none.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        if revision is not None:
            raise SourceError(f"{model} is a local folder; a revision can only be given for a Hub id.")
        return folder
    if folder.is_file():
        raise SourceError(f"{model} is a file; expected a model folder or a Hub id.")
    if model.count("/") > 1 or model.startswith((".", "~", "/")):
        raise SourceError(f"{model}: no such folder.")
    return _download(model, revision)


def _download(model: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    def fetch(patterns: list[str]) -> Path:
        return Path(snapshot_download(model, revision=revision, allow_patterns=patterns))

    try:
        folder = fetch([*SIDE_PATTERNS, "*.safetensors"])
        if not any(folder.glob("*.safetensors")):
            folder = fetch([*SIDE_PATTERNS, "*.bin"])
        more = _named_files(folder)
        return fetch([*SIDE_PATTERNS, *more]) if more else folder
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise SourceError(f"{model}: no such folder, and the Hub gives no such model ({first}).") from error


def _named_files(folder: Path) -> list[str]:
    """Patterns of files that a model names besides the usual ones: in fips_report.json, and in modules.json."""
    try:
        report = read_json(folder / "fips_report.json") if is_file(folder / "fips_report.json") else None
        modules = [f"{glob.escape(path)}/*" for path in module_folders(folder)]
    except SourceError:  # whoever reads the file says so
        return []
    recorded = report.get("side_files") if isinstance(report, dict) else None
    return [*modules, *map(glob.escape, recorded if isinstance(recorded, dict) else ())]


def _refuse_quantized(config: dict[str, Any], name: str) -> None:
    quantization = config.get("quantization_config")
    if not quantization:
        return
    method = quantization.get("quant_method", "an unnamed method") if isinstance(quantization, dict) else quantization
    if method == "fips":
        raise SourceError(f"{name} is already compressed by fips; compress its dense source instead.")
    raise SourceError(f"{name} is quantized ({method}); expected a checkpoint in floating point.")


def weight_paths(folder: Path) -> list[Path]:
    """The weights files transformers would load from a folder, every shard of the index present.

    Raises:
        SourceError: If there are none, or the index is damaged or names a file that is not there.
    """
    for index_name, single in _NAMES:
        index = folder / index_name
        if is_file(index) and is_file(folder / single):
            raise SourceError(f"{folder} holds {single} and {index_name}, an old one of them; remove the wrong one.")
        if is_file(index):
            require_inside(index, folder)
            return _indexed(index)
        if is_file(folder / single):
            require_inside(folder / single, folder)
            return [folder / single]
    raise SourceError(f"{folder} has no model.safetensors or pytorch_model.bin, and no index of shards.")


def _indexed(index: Path) -> list[Path]:
    try:
        weight_map = read_json(index)["weight_map"]
        shards = sorted(set(weight_map.values()))
    except (SourceError, KeyError, TypeError, AttributeError) as error:
        raise SourceError(f"{index} is not a valid shard index: {error}") from error
    suffix = Path(index.name.removesuffix(".index.json")).suffix
    for shard in shards:
        if not isinstance(shard, str) or Path(shard).name != shard or shard in ("", "..", "."):
            raise SourceError(f"{index} names a shard {shard!r} outside its folder.")
        if not is_file(index.parent / shard):
            raise SourceError(f"{index.parent}: shard {shard!r} named in {index.name} is missing. Download it again.")
        if Path(shard).suffix != suffix:
            raise SourceError(f"{index} names a shard {shard!r}; expected a {suffix} file.")
        require_inside(index.parent / shard, index.parent)
    held = {name: shard for shard in shards for name in _infos(index.parent / shard)}
    for name, shard in weight_map.items():
        if held.get(name) != shard:
            raise SourceError(f"{index.name} says {name} is in {shard}, but it is not there.")
    return [index.parent / shard for shard in shards]


def _infos(path: Path) -> dict[str, TensorInfo]:
    if path.suffix == ".safetensors":
        try:
            return read_header(path)
        except FormatError as error:
            raise SourceError(str(error)) from error
    return {n: TensorInfo(t.dtype, tuple(t.shape)) for n, t in _load_bin(path).items()}


def _load_bin(path: Path) -> dict[str, Tensor]:
    """Tensors of a .bin file, memory-mapped where its format allows. Never unpickles code: weights_only=True."""
    load: Callable[..., Any] = torch.load
    try:
        try:
            state = load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # files older than torch 1.6 cannot be mapped
            state = load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # pickle, zip and torch raise many kinds for a damaged file
        raise SourceError(f"{path} cannot be read as plain tensors: {str(error).splitlines()[0]}") from error
    if not isinstance(state, dict) or not all(isinstance(t, Tensor) for t in state.values()):
        raise SourceError(f"{path} holds something other than named tensors.")
    return state
