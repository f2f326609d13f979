"""Everything that is known of a compression before anything is computed: the early refusals happen here."""

import platform
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fips.checkpoint.format import dtype_name
from fips.checkpoint.source import Source
from fips.checkpoint.tokenizer import load_config
from fips.config import CompressionConfig
from fips.errors import ArchitectureError, ConfigError, FipsError
from fips.models.blocks import Trunk
from fips.models.kinds import reads
from fips.models.sites import Site, architecture, blocks_of, find_sites, trunk_of
from fips.models.skeleton import build_skeleton, map_names, outside, require_tensors
from fips.models.trace import BlockView
from fips.stages.grouping import Group, group_blocks, plan_groups


@dataclass(frozen=True)
class Plan:
    """A model that can be compressed, and how.

    Attributes:
        source: The dense checkpoint.
        model: Its skeleton, parameters on meta.
        names: Module tensor name → disk name.
        groups: Groups with rank and non-zeros.
        views: Its blocks.
        trunk: The part of the model that runs the blocks.
        reads: What the model is: "language model", "text encoder" or "image model".
        found_by: "table" or "structure".
        device: Where the mathematics runs.
        dtype: dtype of the stored factors.
        trust_remote_code: Whether Python code in the checkpoint may run.
        cast: dtype all floating-point tensors are stored in; None keeps each tensor's own.
    """

    source: Source
    model: nn.Module
    names: dict[str, str]
    groups: tuple[Group, ...]
    views: tuple[BlockView, ...]
    trunk: Trunk
    reads: str
    found_by: str
    device: str
    dtype: torch.dtype
    cast: torch.dtype | None
    trust_remote_code: bool

    @property
    def vocabulary(self) -> int:
        """Rows of the input embedding.

        Raises:
            ArchitectureError: If the model does not say which one that is.
        """
        model: Any = self.model
        try:
            return int(model.get_input_embeddings().weight.shape[0])
        except (NotImplementedError, AttributeError) as error:
            raise ArchitectureError(f"{type(model).__name__} has no single embedding of tokens.") from error

    @property
    def sites(self) -> list[Site]:
        """All matrices that are compressed."""
        return [site for group in self.groups for site in group.sites]

    def outside_blocks(self) -> list[tuple[str, nn.Module]]:
        """What the trunk runs besides its blocks, as `materialized` takes it."""
        module = self.trunk.module
        path = next(path for path, found in self.model.named_modules() if found is module)
        return outside(module, path, [view.path for view in self.views])

    def ends_stage(self, block: int) -> bool:
        """Whether the model does something of its own between this block and the next."""
        blocks = self.trunk.blocks
        return block + 1 < len(blocks) and blocks[block].stage != blocks[block + 1].stage

    def output_bytes(self) -> int:
        """Bytes of the compressed checkpoint, packed groups at their expected size."""
        size = self.dtype.itemsize
        replaced = {f"{site.disk_name}.weight" for site in self.sites}
        kept = sum(self._stored_bytes(n) for n in self.source.infos if n not in replaced)
        return kept + sum(g.plan.packed_bytes(size) for g in self.groups if g.plan)

    def _stored_bytes(self, name: str) -> int:
        info = self.source.infos[name]
        if self.cast is None or not info.dtype.is_floating_point:
            return info.bytes
        return info.bytes // info.dtype.itemsize * self.cast.itemsize

    def needed_disk(self) -> int:
        """Bytes the run writes at its peak: packed parts beside the finished folder, and the side files."""
        parts = sum(max(p.packed_bytes(self.dtype.itemsize) for p in g.plans) for g in self.groups if g.plans)
        side = sum((self.source.folder / f).stat().st_size for f in self.source.side_files())
        expected = sum(g.plan.packed_bytes(self.dtype.itemsize) for g in self.groups if g.plan)
        return self.output_bytes() - expected + 2 * parts + side


def make_plan(source: Source, config: CompressionConfig, *, trust_remote_code: bool = False) -> Plan:
    """Finds the matrices of a checkpoint, groups them, and refuses what cannot work.

    Raises:
        FipsError: One of its children, naming what is wrong.
    """
    device = resolve_device(config.device)
    stated = load_config(source.folder, source.name, trust_remote_code=trust_remote_code)
    model = build_skeleton(stated, trust_remote_code=trust_remote_code)
    base = trunk_of(model)[1]
    reading = reads(base, model)
    spec, found_by = architecture(model)
    names = map_names(model, source.infos)
    require_tensors(model, names)
    sites = find_sites(model, names, config.include)
    dtype = _stored_dtype(source, sites, config.dtype)
    trunk = Trunk(base, blocks_of(model, spec))
    ranges = group_blocks(sites, [block.stage for block in trunk.blocks], config.group_size, config.groups)
    groups = plan_groups(sites, ranges, config, dtype.itemsize)
    views = tuple(BlockView(i, block.path, block.module, tuple(s for s in sites if s.block == i))
                  for i, block in enumerate(trunk.blocks))  # fmt: skip
    cast = None if config.dtype == "auto" else dtype
    return Plan(source, model, names, tuple(groups), views, trunk, reading, found_by, device, dtype, cast,
                trust_remote_code)  # fmt: skip


def resolve_device(name: str) -> str:
    """A device that exists: "auto" takes CUDA, then MPS, then the CPU.

    Raises:
        ConfigError: If the named device is not available.
    """
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        return next(d for d in ("cuda", "mps", "cpu") if available[d])
    if not available[name]:
        raise ConfigError(f"device is {name!r}, which this machine or this torch build does not have.")
    return name


def _stored_dtype(source: Source, sites: list[Site], requested: str) -> torch.dtype:
    dtypes = {source.infos[f"{site.disk_name}.weight"].dtype for site in sites}
    if requested != "auto":
        chosen: torch.dtype = getattr(torch, requested)
        return chosen
    if len(dtypes) > 1:
        raise ConfigError(f"dtype is 'auto', but the MLP matrices have several ({dtypes}); name one with --dtype.")
    dtype = dtypes.pop()
    try:
        dtype_name(dtype)
    except FipsError as error:
        raise ConfigError(f"{source.name}: {error} Choose one with --dtype.") from error
    return dtype


def versions() -> dict[str, str]:
    """Versions, and the number of threads, that a result depends on."""
    import safetensors
    import transformers

    from fips import __version__

    return {
        "fips": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "safetensors": safetensors.__version__,
        "python": platform.python_version(),
        "threads": str(torch.get_num_threads()),
    }
