"""Files as they were verified: what is sent is that, whatever happens to the folder in the meantime."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fips.checkpoint.folder import file_digest, require_inside
from fips.errors import FormatError

_SMALL = 2**24  # read once, and sent from memory. The Hub takes larger files by their SHA-256 alone


@dataclass(frozen=True)
class Sealed:
    """A file.

    Attributes:
        content: What it holds; of a large one where it lies.
        size: Bytes.
        sha256: SHA-256 of what was verified.
    """

    content: Path | bytes
    size: int
    sha256: str

    def git_hash(self) -> str:
        """What git calls this content."""
        content = self.content if isinstance(self.content, bytes) else self.content.read_bytes()
        return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def seal(folder: Path, names: list[str], recorded: Mapping[str, str]) -> dict[str, Sealed]:
    """Takes files as a verification has found them.

    Args:
        folder: The folder.
        names: Files in it.
        recorded: File → SHA-256 that was verified; files without one are taken as they are now.

    Raises:
        FipsError: If a file is a link that leads out or nowhere, cannot be read, or has changed since.
    """
    found = {}
    for name in names:
        path = folder / name
        require_inside(path, folder)
        try:
            size = path.stat().st_size
            content = path.read_bytes() if size <= _SMALL else path
            digest = hashlib.sha256(content).hexdigest() if isinstance(content, bytes) else recorded.get(name)
            found[name] = Sealed(content, size, digest or file_digest(path))
        except OSError as error:
            raise FormatError(f"{path} cannot be read: {error}") from error
        require_same(name, found[name].sha256, recorded.get(name))
    return found


def require_same(name: str, found: str, verified: str | None) -> None:
    """Refuses a file whose SHA-256 is no longer the verified one.

    Raises:
        FormatError: Naming the file.
    """
    if verified is not None and found != verified:
        raise FormatError(f"{name} has changed since it was verified; nothing was sent. Verify the folder again.")
