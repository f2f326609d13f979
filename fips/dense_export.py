"""export(): a compressed checkpoint as an ordinary dense one, which loads without fips."""

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fips.checkpoint.dense import open_packed
from fips.checkpoint.export import digests_of, needed_bytes, write_dense
from fips.checkpoint.source import locate
from fips.checkpoint.workdir import check_output, check_space, output_folder
from fips.config import CompressionConfig
from fips.errors import ConfigError
from fips.progress import Progress
from fips.report import format_table, human_bytes


@dataclass(frozen=True)
class Export:
    """What an export wrote.

    Attributes:
        model: The compressed checkpoint.
        out: The dense folder.
        tensors: Tensors written.
        rebuilt: Those of them that were packed.
        compressed_bytes: Bytes of the compressed checkpoint's tensors.
        dense_bytes: Bytes of the written ones.
        files: File → SHA-256.
    """

    model: str
    out: str
    tensors: int
    rebuilt: int
    compressed_bytes: int
    dense_bytes: int
    files: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)

    def table(self) -> str:
        """For a terminal."""
        rows = [
            ["tensors", "", str(self.tensors)],
            ["rebuilt from factors", "", str(self.rebuilt)],
            ["bytes of tensors", human_bytes(self.compressed_bytes), human_bytes(self.dense_bytes)],
        ]
        return f"{self.out}: dense export of {self.model}\n\n" + format_table(["", "compressed", "dense"], rows)


def export(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    revision: str | None = None,
    max_shard_size: int = CompressionConfig.max_shard_size,
    overwrite: bool = False,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> Export:
    """Writes a compressed checkpoint as an ordinary dense one.

    It loads without fips and gives the logits of the compressed checkpoint, bit by bit when both are loaded on a CPU:
    matrices are rebuilt there, and another device rounds differently. Other tensors and files stay as they are. One
    matrix at a time is rebuilt; the result is read back and appears only when it is right.

    Args:
        path: Folder written by `compress`, or the Hub id of one.
        out: New folder.
        revision: Branch, tag or commit of a Hub id.
        max_shard_size: Largest weights file in bytes.
        overwrite: Whether `out` may hold an older model, which is then replaced whole.
        trust_remote_code: Whether Python code in the checkpoint may run.
        progress: Where progress goes; silent by default.

    Raises:
        FipsError: If the checkpoint is not compressed by fips or is damaged, or `out` cannot be written; nothing is
            left there then.
    """
    progress, out = progress or Progress(-1), Path(out)
    if max_shard_size < 1:
        raise ConfigError(f"max_shard_size is {max_shard_size}; expected a positive number of bytes.")
    opened = open_packed(locate(str(path), revision), trust_remote_code=trust_remote_code)
    check_output(out, opened.folder, overwrite=overwrite)
    check_space(out, needed_bytes(opened))
    rebuilt, kept = opened.rebuilt(), opened.kept()
    with output_folder(out, overwrite=overwrite) as folder:
        progress.note(f"writing {len(rebuilt) + len(kept)} tensors, {len(rebuilt)} of them rebuilt")
        write_dense(opened, folder, out.resolve().name, max_shard_size)
        files = digests_of(folder)
    packed = sum(info.bytes for _, info in opened.stored.values())
    dense = sum(entry.info.bytes for entry in (*rebuilt.values(), *kept.values()))
    return Export(str(path), str(out), len(rebuilt) + len(kept), len(rebuilt), packed, dense, files)
