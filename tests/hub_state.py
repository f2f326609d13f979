"""What the small Hub of tests/hub_server.py holds: repositories, users, large files, and the requests it got."""

import hashlib
import json
import threading
from dataclasses import dataclass, field
from typing import Any

LFS_SUFFIXES = (".safetensors", ".bin", ".png")
ATTRIBUTES = b"".join(b"*%s filter=lfs diff=lfs merge=lfs -text\n" % s.encode() for s in LFS_SUFFIXES)


@dataclass
class Repo:
    """A repository: commits are whole trees, path → content."""

    private: bool
    trees: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    titles: list[str] = field(default_factory=list)

    def commit(self, ref: str, tree: dict[str, bytes], title: str) -> str:
        digest = hashlib.sha1(f"{ref}{title}{len(self.trees)}".encode())
        for path, content in sorted(tree.items()):
            digest.update(path.encode() + content)
        oid = digest.hexdigest()
        self.trees[oid], self.refs[ref] = dict(tree), oid
        self.titles.append(title)
        return oid

    def tree(self, revision: str) -> dict[str, bytes] | None:
        return self.trees.get(self.refs.get(revision, revision))


@dataclass
class Request:
    """One request as it came in."""

    method: str
    path: str
    query: dict[str, list[str]]
    token: str | None
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class HubServer:
    """The Hub's state. `tokens` maps a token to its user, `readers` those that may not write."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.lfs: dict[str, bytes] = {}
        self.requests: list[Request] = []
        self.tokens = {"hf_alice": "alice", "hf_reader": "alice", "hf_bob": "bob"}
        self.readers = {"hf_reader"}
        self.owners = {"alice": ["alice", "bob"], "bob": ["bob"]}  # user or organization → who may write there
        self.broken: dict[str, bytes | None] = {}  # path → what every commit holds instead; None: it is lost
        self.stall: threading.Event | None = None  # uploads wait for it
        self.reached = threading.Event()
        self.fail_with: tuple[str, int] | None = None  # (part of a path, status)
        self.url = ""

    def add_repo(self, repo_id: str, files: dict[str, bytes], *, private: bool = False) -> Repo:
        repo = self.repos[repo_id] = Repo(private)
        repo.commit("main", {".gitattributes": ATTRIBUTES, **files}, "initial commit")
        return repo

    def sent(self, method: str, part: str) -> list[Request]:
        return [r for r in self.requests if r.method == method and part in r.path]


def blob_oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
