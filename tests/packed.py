"""Compressed tiny checkpoints written directly from random factors, without a solver."""

from pathlib import Path

import torch

from fips.checkpoint.pack import PackedGroup, pack_group
from fips.checkpoint.reload import verify_written
from fips.checkpoint.save import CheckpointWriter
from fips.checkpoint.source import open_source
from fips.models.sites import Site

D, F = 32, 80  # of tests/families.py
COLUMNS = {"whole": 40, "more": 7, "alone": 0}  # all of U stored; [I | A]; the identity alone


def sites(family: str, block: int) -> list[Site]:
    """The matrices of one block of a tiny Llama or GPT-2, whose Conv1D stores the transpose."""
    if family == "gpt2":
        found = {f"transformer.h.{block}.mlp.{n}": role for n, role in (("c_fc", "up"), ("c_proj", "down"))}
    else:
        names = (("gate_proj", "up"), ("up_proj", "up"), ("down_proj", "down"))
        found = {f"model.layers.{block}.mlp.{n}": role for n, role in names}
    return [Site(n, n, block, role, D, F, (role == "up") != (family == "gpt2")) for n, role in found.items()]


def random_group(name: str, members: list[Site], kind: str, biases: dict[str, torch.Tensor],
                 dtype: torch.dtype) -> PackedGroup:  # fmt: skip
    """A group of random factors whose basis is stored in one of the ways of `COLUMNS`."""
    generator = torch.Generator().manual_seed(sum(map(ord, name + kind)))
    columns = COLUMNS[kind]
    rows = columns if kind == "whole" else D + columns
    V = {s.name: 0.2 * torch.randn(rows, F, generator=generator) for s in members}
    kept = {n: v * (torch.rand(v.shape, generator=generator) < 0.4) for n, v in V.items()}
    return pack_group(name, members, 0.2 * torch.randn(D, columns, generator=generator), kept, biases, dtype)


def write_packed(family: str, dense: Path, out: Path, kinds: tuple[str, ...],
                 dtype: torch.dtype = torch.float32) -> list[tuple[Site, PackedGroup]]:  # fmt: skip
    """Writes and verifies a compressed checkpoint of one group per block, and returns what was packed."""
    out.mkdir(parents=True)
    source = open_source(dense)
    writer, packed = CheckpointWriter(source, out, dtype), []
    for block, kind in enumerate(kinds):
        members = sites(family, block)
        found = {s.name: source.read(f"{s.name}.bias") for s in members if f"{s.name}.bias" in source.infos}
        group = random_group(f"blocks_{block}_{block}", members, kind, found, dtype)
        writer.add(group)
        packed += [(site, group) for site in members]
    writer.finish(10**9)
    verify_written(writer)
    return packed
