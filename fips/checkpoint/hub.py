"""The Hub as fips uses it to publish: one atomic commit of named files, compared with the local ones afterwards."""

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fips.checkpoint.sealed import Sealed, require_same
from fips.errors import ConfigError, FipsError, HubError

_MADE_BY_THE_HUB = ".gitattributes"


@dataclass(frozen=True)
class Place:
    """Where something is published.

    Attributes:
        repo_id: owner/name.
        revision: Branch; None for the default one.
        public: Whether a new repository can be read by everybody.
        create_pr: Whether a pull request is opened instead of a commit on the branch.
    """

    repo_id: str
    revision: str | None = None
    public: bool = False
    create_pr: bool = False


def check_repo_id(repo_id: str) -> None:
    """Refuses what cannot be a repository of a user or an organization.

    Raises:
        ConfigError: If it is not owner/name with letters, digits, "-", "_" and ".".
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo_id)
        valid = bool(re.fullmatch(r"[\w.-]+/[\w.-]+", repo_id, re.ASCII))
    except HFValidationError:
        valid = False
    if not valid:
        raise ConfigError(f"REPO_ID is {repo_id!r}; expected owner/name with letters, digits, '-', '_' and '.', such "
                          "as alice/small-model.")  # fmt: skip


def connect(token: str | None) -> Any:
    """The Hub's client with a token: the one given, HF_TOKEN, or the one of `hf auth login`.

    Raises:
        HubError: If there is no token, or it cannot be one. It must not get into a request: the error of the HTTP
            library would show it.
    """
    from huggingface_hub import HfApi, get_token

    found = (token or get_token() or "").strip()
    if not found:
        raise HubError("there is no token for the Hub. Log in with `hf auth login`, or set HF_TOKEN to a token with "
                       "write access.")  # fmt: skip
    if not re.fullmatch(r"[!-~]+", found):
        raise HubError("the token holds a space, a line break or a letter that no token has; copy it again.")
    return HfApi(token=found, library_name="fips")


def prepare(api: Any, place: Place) -> None:
    """Makes the repository and the branch where they are missing.

    Raises:
        HubError: If that is refused, or an existing repository has another visibility than was asked for.
    """
    with hub_errors(api, place):
        api.create_repo(place.repo_id, private=not place.public, exist_ok=True)
        private = bool(api.repo_info(place.repo_id).private)
        if private == place.public:
            raise HubError(
                f"{place.repo_id} exists and is {'private' if private else 'public'}; "
                + ("leave --public out" if private else "pass --public")
                + ", or change it in the repository's settings on the Hub first."
            )
        if place.revision is not None and not place.revision.startswith("refs/"):
            api.create_branch(place.repo_id, branch=place.revision, exist_ok=True)


def others_on(api: Any, place: Place, names: set[str]) -> list[str]:
    """Files that lie at the place and are not among these names.

    Raises:
        HubError: If the Hub does not tell.
    """
    with hub_errors(api, place):
        return sorted(set(_remote(api, place.repo_id, place.revision)) - names - {_MADE_BY_THE_HUB})


@contextmanager
def upload_bars(*, shown: bool) -> Iterator[None]:
    """Shows or hides the client's progress bars for a while."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    switch = {True: enable_progress_bars, False: disable_progress_bars}
    before = not are_progress_bars_disabled()
    switch[shown]()
    try:
        yield
    finally:
        switch[before]()


def upload(api: Any, place: Place, files: dict[str, Sealed], removed: list[str], message: str) -> Any:
    """Sends files in one commit: it is there whole, or not at all.

    `HfApi.upload_folder` would take whatever lies in the folder by then, and may make several commits. A file that is
    no longer the one that was verified ends it before anything is sent.

    Returns:
        The client's CommitInfo.

    Raises:
        FipsError: If it fails; the branch is then as it was.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    with hub_errors(api, place):
        added = [CommitOperationAdd(name, file.content) for name, file in files.items()]
        for operation in added:
            name = operation.path_in_repo
            require_same(name, operation.upload_info.sha256.hex(), files[name].sha256)
        # One file at a time: the client sends several from threads, which an interrupt would have to wait for.
        for file in added:
            api.preupload_lfs_files(place.repo_id, [file], revision=place.revision, create_pr=place.create_pr,
                                    free_memory=False)  # fmt: skip
        return api.create_commit(place.repo_id, [*(CommitOperationDelete(name) for name in removed), *added],
                                 commit_message=message, revision=place.revision,
                                 create_pr=place.create_pr)  # fmt: skip


def compare(api: Any, place: Place, revision: str, files: dict[str, Sealed]) -> None:
    """Compares names, sizes and contents (SHA-256 of large files, git's hash of the others) at a revision.

    Raises:
        HubError: Naming the first difference.
    """
    with hub_errors(api, place):
        remote = _remote(api, place.repo_id, revision)
    for name, file in files.items():
        found = remote.get(name)
        if found is None:
            raise HubError(f"{place.repo_id} does not hold {name} after the upload; push again.")
        if found.size != file.size:
            raise HubError(f"{place.repo_id}: {name} has {found.size:,} bytes on the Hub and {file.size:,} here; push "
                           "again.")  # fmt: skip
        same = found.lfs.sha256 == file.sha256 if found.lfs else found.blob_id == file.git_hash()
        if not same:
            raise HubError(f"{place.repo_id}: {name} has another content on the Hub than here; push again.")
    more = sorted(set(remote) - set(files) - {_MADE_BY_THE_HUB})
    if more:
        raise HubError(f"{place.repo_id} holds {', '.join(more)} beside the model after the upload; push again.")


def _remote(api: Any, repo_id: str, revision: str | None) -> dict[str, Any]:
    entries = api.list_repo_tree(repo_id, recursive=True, revision=revision)
    return {entry.path: entry for entry in entries if hasattr(entry, "blob_id")}


@contextmanager
def hub_errors(api: Any, place: Place) -> Iterator[None]:
    """Turns what the client raises, of many kinds and in several layers, into one sentence."""
    try:
        yield
    except FipsError:
        raise
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt(
            f"Interrupted; {place.repo_id} may exist by now, and holds the whole commit or nothing of it. Push again: "
            "what was uploaded is not sent twice."
        ) from stop
    except Exception as error:
        shown = api.token in "".join(traceback.format_exception(error))
        raise HubError(_explain(api, place, error).replace(api.token, "(the token)")) from (None if shown else error)


def _explain(api: Any, place: Place, error: BaseException) -> str:
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    layers: list[BaseException] = [error]
    while (inner := layers[-1].__cause__ or layers[-1].__context__) is not None:
        layers.append(inner)
    for layer in layers:
        if isinstance(layer, HfHubHTTPError) and getattr(layer, "response", None) is not None:
            return _refused(api, place, layer)
        if isinstance(layer, OfflineModeIsEnabled):
            return "the Hub is switched off here: HF_HUB_OFFLINE is set. Unset it to push."
    transport = HfHubHTTPError.__mro__[1]  # HTTPError of the HTTP library, which differs between releases
    network = next((e for e in layers if isinstance(e, (transport, ConnectionError, TimeoutError))), None)
    if network is not None and "HTTP status" not in str(network):  # hf_xet calls a refusal a connection error too
        return f"{api.endpoint} cannot be reached ({_first_line(network)}). Is there a network? Then push again."
    return f"{place.repo_id}: pushing failed: {_first_line(layers[-1])}"


def _refused(api: Any, place: Place, error: Any) -> str:
    status, owner = error.response.status_code, place.repo_id.split("/")[0]
    said = _first_line(error.server_message or error)
    if status == 401:
        return ("the Hub does not accept the token: it is wrong or expired. Make one with write access, then "
                "`hf auth login` or HF_TOKEN.")  # fmt: skip
    if status in (403, 404) and not _exists(api, owner):
        return f"{place.repo_id}: the Hub has no user or organization {owner}; is it spelled correctly?"
    if status == 403:
        return (f"{place.repo_id}: the token may not do this ({said}). It needs write access, and {owner} has to be "
                "you or an organization you may write to.")  # fmt: skip
    return f"{place.repo_id}: the Hub refuses with status {status} ({said})."


def _exists(api: Any, owner: str) -> bool:
    """Whether there is such a user or organization; true where the Hub does not tell."""
    from huggingface_hub.errors import HfHubHTTPError

    for ask in (api.get_user_overview, api.get_organization_overview):
        try:
            ask(owner)
            return True
        except HfHubHTTPError as error:
            if error.response.status_code != 404:
                return True
        except Exception:
            return True
    return False


def _first_line(error: object) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].strip().rstrip(".") if lines else type(error).__name__
