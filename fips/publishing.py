"""push(): a compressed checkpoint onto the Hub, exactly as it was verified."""

import fnmatch
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from fips.checkpoint.card import CARD_NAME
from fips.checkpoint.dense import description_of
from fips.checkpoint.format import REPORT_NAME
from fips.checkpoint.hub import Place, check_repo_id, compare, connect, others_on, prepare, upload, upload_bars
from fips.checkpoint.origin import metadata_of
from fips.checkpoint.record import read_report
from fips.checkpoint.sealed import Sealed, seal
from fips.checkpoint.source import SIDE_PATTERNS, read_config
from fips.errors import ConfigError, FormatError, HubError, SourceError
from fips.progress import Progress
from fips.report import format_table, human_bytes
from fips.verification import verify


@dataclass(frozen=True)
class PushConfig:
    """How a checkpoint is published.

    Attributes:
        public: Whether everybody can read the repository; it is private otherwise.
        revision: Branch to push to, made when it is missing; the default branch otherwise.
        commit_message: Title of the commit.
        create_pr: Open a pull request instead of committing to the default branch.
        overwrite: Remove files that lie at the place and are not part of this checkpoint. They stay in its history.

    Raises:
        ConfigError: If the settings exclude each other.
    """

    public: bool = False
    revision: str | None = None
    commit_message: str = "Upload a checkpoint compressed by fips"
    create_pr: bool = False
    overwrite: bool = False

    def __post_init__(self) -> None:
        """Refuses settings that cannot work."""
        if self.create_pr and self.revision is not None:
            raise ConfigError("revision and create_pr exclude each other: a pull request goes to the default branch.")
        if self.revision is not None and not self.revision.strip():
            raise ConfigError("revision is empty; name a branch, or leave it out for the default one.")
        if not self.commit_message.strip():
            raise ConfigError("commit_message is empty; give the commit a title, or leave it out.")


@dataclass(frozen=True)
class PushResult:
    """What was published.

    Attributes:
        repo_id: owner/name.
        url: Page of the repository, or of the pull request.
        commit: Commit that holds the files; None in a dry run.
        files: File → bytes.
        private: Whether only the owner can read it.
        dry_run: Whether nothing was sent.
    """

    repo_id: str
    url: str | None
    commit: str | None
    files: dict[str, int]
    private: bool
    dry_run: bool = False

    @property
    def bytes(self) -> int:
        """Bytes of all files."""
        return sum(self.files.values())

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {**asdict(self), "bytes": self.bytes}

    def table(self) -> str:
        """For a terminal: one row per file, then where they are."""
        rows = [[name, f"{size:,}"] for name, size in self.files.items()]
        kind = "private" if self.private else "public"
        what = f"{len(self.files)} files, {human_bytes(self.bytes)}"
        last = (f"dry run: {what} would go to {self.repo_id} ({kind}); nothing was sent" if self.dry_run
                else f"{what}, compared with the Hub's: {self.url} ({kind}), commit {self.commit}")  # fmt: skip
        return f"{format_table(['file', 'bytes'], rows)}\n\n{last}"


def push(
    path: str | os.PathLike[str],
    repo_id: str,
    config: PushConfig | None = None,
    *,
    token: str | None = None,
    dry_run: bool = False,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> PushResult:
    """Publishes a compressed checkpoint on the Hub: exactly the verified folder, in one commit.

    Args:
        path: Folder written by `fips compress`.
        repo_id: owner/name; the repository is made when it is missing.
        config: Visibility, branch, commit.
        token: Token with write access; by default HF_TOKEN, or that of `hf auth login`.
        dry_run: Only tell what would be sent; the Hub is not contacted.
        trust_remote_code: Whether Python code in the checkpoint may run, which verifying a model of such code needs.
        progress: Where progress goes; silent by default.

    Raises:
        FipsError: If the folder is not as it was verified, or the Hub refuses. Nothing is sent in the first case.
    """
    config, progress, folder = config or PushConfig(), progress or Progress(-1), Path(path)
    check_repo_id(repo_id)
    api = None if dry_run else connect(token)
    progress.note(f"checking {folder}")
    report = _require_verified(folder, trust_remote_code=trust_remote_code)
    names = _known_files(folder, report)
    recorded = {**report["files"], **report.get("side_files", {})}
    files = seal(folder, names, recorded)
    _check_texts(files, report)
    unsure = [name for name in names if name not in recorded and name not in (CARD_NAME, REPORT_NAME)]
    if unsure:
        progress.note(f"{REPORT_NAME}, of an earlier version, has no checksums of {', '.join(unsure)}: not verified")
    sizes = {name: file.size for name, file in files.items()}
    if api is None:
        return PushResult(repo_id, None, None, sizes, not config.public, dry_run=True)
    place = Place(repo_id, config.revision, config.public, config.create_pr)
    prepare(api, place)
    others = others_on(api, place, set(files))
    if others and not config.overwrite:
        raise HubError(f"{repo_id} holds {', '.join(others)}, not part of this checkpoint. Remove them with "
                       "--overwrite, or push to another repository or --revision.")  # fmt: skip
    progress.note(f"uploading {len(files)} files, {human_bytes(sum(sizes.values()))}, to {repo_id}")
    with upload_bars(shown=progress.verbosity >= 0):
        commit = upload(api, place, files, others, config.commit_message)
    compare(api, place, commit.pr_revision or commit.oid, files)
    url = commit.pr_url or str(commit.repo_url)
    return PushResult(repo_id, url, commit.oid, sizes, not config.public)


def _check_texts(files: dict[str, Sealed], report: dict[str, Any]) -> None:
    """Refuses a report other than the verified one, and a card whose metadata the Hub would refuse after all uploads.

    Raises:
        FormatError: Naming the file.
    """
    content = files[REPORT_NAME].content
    try:
        same = isinstance(content, bytes) and repr(json.loads(content)) == repr(report)  # NaN is not equal to itself
    except (ValueError, RecursionError):
        same = False
    if not same:
        raise FormatError(
            f"{REPORT_NAME} has changed since it was verified; nothing was sent. Verify the folder again."
        )
    card = files[CARD_NAME].content if CARD_NAME in files else b""
    try:
        if not isinstance(card, bytes) or not isinstance(metadata_of(card.decode()), dict | None):
            raise ValueError("expected keys and values in a file of less than 16 MB")
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        first = " ".join(str(error).split())[:200]
        raise FormatError(f"{CARD_NAME}: its YAML block cannot be read ({first}); repair it.") from error


def _require_verified(folder: Path, *, trust_remote_code: bool) -> dict[str, Any]:
    """Refuses a folder that is not what `fips compress` verified, and returns its report.

    Raises:
        FipsError: Naming what is missing, damaged or different.
    """
    if not folder.is_dir():
        raise SourceError(f"{folder}: no such folder; expected one written by `fips compress`.")
    description_of(folder, read_config(folder))
    report = read_report(folder)
    found = verify(folder, load=False, trust_remote_code=trust_remote_code)
    if not found.ok:
        more = f" ({len(found.problems) - 1} more; see `fips verify`)" if len(found.problems) > 1 else ""
        raise FormatError(f"{folder} is not what was verified: {found.problems[0]}{more}")
    return report


def _known_files(folder: Path, report: dict[str, Any]) -> list[str]:
    """Every file of a folder, all of them known: listed in its report, the report itself, or the model card.

    Reports of earlier versions list the weights only; files that a model usually has are known then.

    Raises:
        FormatError: Naming the files that came from somewhere else.
    """
    files = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if not path.is_dir()]
    known = {*report["files"], *report.get("side_files", {}), CARD_NAME, REPORT_NAME}
    if "side_files" not in report:
        known |= {name for name in files if any(fnmatch.fnmatch(name, pattern) for pattern in SIDE_PATTERNS)}
    foreign = [name for name in files if name not in known or any(p.startswith(".") for p in name.split("/"))]
    if foreign:
        raise FormatError(f"{folder} holds {', '.join(foreign)}, which {REPORT_NAME} does not list; only what was "
                          "verified is pushed. Move it elsewhere.")  # fmt: skip
    return files
