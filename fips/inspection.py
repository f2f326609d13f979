"""inspect(): what a compressed checkpoint holds, or what would be compressed in a dense one."""

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fips.checkpoint.format import QUANT_METHOD, PackedGroupInfo, parse
from fips.checkpoint.reload import as_stored, check_packed, stored_tensors
from fips.checkpoint.source import locate, open_source, read_config, weight_paths
from fips.config import CompressionConfig
from fips.metrics.footprint import compressed_sizes, dense_sizes
from fips.plan import Plan, make_plan
from fips.report import Sizes, format_table


@dataclass(frozen=True)
class Inspection:
    """What is in a checkpoint.

    Attributes:
        model: Its path or Hub id.
        compressed: Whether it was compressed by fips.
        groups: Per group, JSON values.
        sizes: The three sizes; of a dense checkpoint, the planned ones.
        found_by: How the matrices of a dense checkpoint were found: "table" of architectures or "structure".
    """

    model: str
    compressed: bool
    groups: list[dict[str, Any]]
    sizes: Sizes
    found_by: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {**asdict(self), "sizes": self.sizes.to_dict()}

    def table(self) -> str:
        """For a terminal: one row per matrix, then the sizes."""
        rows = [
            [m["name"], group["name"], m["role"], f"{group['d']}x{m['f']}", group["basis"], str(group["rank"]),
             str(group["columns"]), f"{m['sparsity']:.3f}"]
            for group in self.groups
            for m in group["matrices"]
        ]
        head = ["matrix", "group", "role", "d x f", "basis", "rank", "stored", "sparsity"]
        what = "compressed" if self.compressed else "planned"
        planned = f"dense; would be compressed as follows (matrices found by {self.found_by})"
        if any(group.get("candidates", 1) > 1 for group in self.groups):
            planned += "; expected basis and rank, chosen for every group when it is compressed"
        title = f"{self.model}: {'compressed by fips' if self.compressed else planned}"
        return "\n\n".join(
            [title, format_table(head, rows), format_table(["size", what, "dense", "kept"], self.sizes.rows())]
        )


def inspect(
    model: str | os.PathLike[str],
    config: CompressionConfig | None = None,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Inspection:
    """Describes a checkpoint without loading its weights.

    Args:
        model: Folder or Hub id, compressed or dense.
        config: Settings a dense checkpoint would be compressed with.
        revision: Branch, tag or commit of a Hub id.
        trust_remote_code: Whether Python code in the checkpoint may run.

    Raises:
        FipsError: If the checkpoint is damaged, or cannot be compressed with these settings.
    """
    folder = locate(str(model), revision)
    description = read_config(folder).get("quantization_config")
    if isinstance(description, dict) and description.get("quant_method") == QUANT_METHOD:
        stored = stored_tensors(weight_paths(folder))
        groups = as_stored(parse(description), stored)
        check_packed(groups, stored)
        sizes = compressed_sizes(groups, {name: info for name, (_, info) in stored.items()})
        return Inspection(str(model), compressed=True, groups=[_packed(group) for group in groups], sizes=sizes)
    plan = make_plan(open_source(model, revision), config or CompressionConfig(), trust_remote_code=trust_remote_code)
    return Inspection(str(model), compressed=False, groups=_planned(plan), sizes=_planned_sizes(plan),
                      found_by=plan.found_by)  # fmt: skip


def sizes_of(folder: Path, *, trust_remote_code: bool = False) -> Sizes:
    """The three sizes of a checkpoint folder, compressed or dense.

    Raises:
        FipsError: If the checkpoint is damaged.
    """
    description = read_config(folder).get("quantization_config")
    if isinstance(description, dict) and description.get("quant_method") == QUANT_METHOD:
        stored = stored_tensors(weight_paths(folder))
        groups = as_stored(parse(description), stored)
        return compressed_sizes(groups, {name: info for name, (_, info) in stored.items()})
    source = open_source(folder)
    # Budget and dtype do not matter for what is there; a small budget passes every check of the plan.
    plan = make_plan(source, CompressionConfig(budget=0.1, dtype="float32", device="cpu"),
                     trust_remote_code=trust_remote_code)  # fmt: skip
    return dense_sizes([f"{site.disk_name}.weight" for site in plan.sites], source.infos)


def _packed(group: PackedGroupInfo) -> dict[str, Any]:
    matrices = [
        {"name": m.name, "role": m.role, "f": m.f, "nnz": m.nnz, "sparsity": 1 - m.nnz / (group.rank * m.f)}
        for m in group.members
    ]
    return {"name": group.name, "d": group.d, "rank": group.rank, "columns": group.columns, "basis": group.basis,
            "identity": group.identity, "dtype": group.dtype, "matrices": matrices}  # fmt: skip


def _planned(plan: Plan) -> list[dict[str, Any]]:
    groups = []
    for group in plan.groups:
        if group.plan is None:
            continue
        sparsity = group.plan.sparsity
        matrices = [{"name": s.disk_name, "role": s.role, "f": s.f, "sparsity": sparsity} for s in group.sites]
        dtype = str(plan.dtype).removeprefix("torch.")
        groups.append({"name": group.name, "d": group.plan.d, "rank": group.plan.rank, "columns": group.plan.columns,
                       "basis": group.plan.basis, "identity": group.plan.identity, "dtype": dtype,
                       "candidates": len(group.plans), "matrices": matrices})  # fmt: skip
    return groups


def _planned_sizes(plan: Plan) -> Sizes:
    plans = [group.plan for group in plan.groups if group.plan]
    size = plan.dtype.itemsize
    packed, dense = sum(p.packed_bytes(size) for p in plans), sum(p.dense_bytes(size) for p in plans)
    total = plan.output_bytes()
    return Sizes(sum(p.parameters for p in plans), sum(p.dense_parameters for p in plans), packed, dense, total,
                 total - packed + dense)  # fmt: skip
