"""A small Hub on this machine: the HTTP endpoints that huggingface_hub uses to publish and to download models.

Written after what the client really sends; nothing of the client is replaced. Every request is kept in `requests`.
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.hub_state import LFS_SUFFIXES, HubServer, Repo, Request, blob_oid


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_args: object) -> None:
        """A client that went away in the middle is part of the tests."""


@contextmanager
def hub_server() -> Iterator[HubServer]:
    """A running server."""
    hub = HubServer()
    server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        if hub.stall is not None:
            hub.stall.set()
        server.shutdown()
        server.server_close()


class _Answer(Exception):
    """No error: how a handler says what to send."""

    def __init__(self, status: int, body: Any = None, code: str = "", headers: dict[str, str] | None = None) -> None:
        self.status, self.headers = status, dict(headers or {})
        self.body = body if isinstance(body, bytes) else json.dumps(body if body is not None else {}).encode()
        if code:
            self.headers["X-Error-Code"] = code
        if isinstance(body, dict) and "error" in body:
            self.headers["X-Error-Message"] = body["error"]


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_args: object) -> None:
        pass

    def _serve(self) -> None:
        parts = urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        authorization = self.headers.get("Authorization") or ""
        self.request_ = Request(self.command, unquote(parts.path), parse_qs(parts.query),
                                authorization.removeprefix("Bearer ") or None, body)  # fmt: skip
        self.hub.requests.append(self.request_)
        try:
            self._route()
            raise _Answer(404, {"error": f"no such endpoint: {self.command} {self.path}"})
        except _Answer as answer:
            self.send_response(answer.status)
            for name, value in {"Content-Type": "application/json", "Content-Length": str(len(answer.body)),
                                **answer.headers}.items():  # fmt: skip
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(answer.body)

    do_GET = do_POST = do_PUT = do_HEAD = _serve

    def _route(self) -> None:
        path, repo = self.request_.path, r"(?P<repo>[^/]+/[^/]+)"
        if self.hub.fail_with and self.hub.fail_with[0] in path:
            raise _Answer(self.hub.fail_with[1], {"error": "the server has a bad day"})
        routes = {
            r"POST /api/repos/create": self._create,
            r"POST /api/validate-yaml": self._validate,
            r"GET /api/(users|organizations)/(?P<owner>[^/]+)/overview": self._overview,
            rf"GET /api/models/{repo}(/revision/(?P<ref>.+))?": self._info,
            rf"POST /api/models/{repo}/branch/(?P<ref>.+)": self._branch,
            rf"POST /api/models/{repo}/preupload/(?P<ref>.+)": self._preupload,
            rf"POST /api/models/{repo}/commit/(?P<ref>.+)": self._commit,
            rf"GET /api/models/{repo}/tree/(?P<ref>.+)": self._tree,
            rf"POST /{repo}\.git/info/lfs/objects/batch": self._batch,
            r"PUT /lfs/(?P<oid>\w+)": self._put,
            r"POST /lfs-verify": self._verify,
            rf"(GET|HEAD) /{repo}/resolve/(?P<ref>refs/pr/\d+|[^/]+)/(?P<file>.+)": self._resolve,
        }
        for pattern, answer in routes.items():
            if match := re.fullmatch(pattern, f"{self.command} {path}"):
                answer(**match.groupdict())

    def _user(self) -> str:
        user = self.hub.tokens.get(self.request_.token or "")
        if user is None:
            raise _Answer(401, {"error": "Invalid username or password."})
        return user

    def _may_write(self, owner: str) -> None:
        user = self._user()
        if user not in self.hub.owners.get(owner, []) or self.request_.token in self.hub.readers:
            raise _Answer(403, {"error": f'You don\'t have the rights to create a model under the namespace "{owner}"'})

    def _repo(self, repo: str) -> Repo:
        found = self.hub.repos.get(repo)
        hidden = found is not None and found.private
        if hidden and self.hub.tokens.get(self.request_.token or "") not in self.hub.owners[repo.split("/")[0]]:
            raise _Answer(401, {"error": "Repository not found"}, "RepoNotFound")
        if found is None:
            raise _Answer(404, {"error": "Repository not found"}, "RepoNotFound")
        return found

    def _at(self, repo: str, ref: str) -> tuple[Repo, str, dict[str, bytes]]:
        found = self._repo(repo)
        tree = found.tree(ref)
        if tree is None:
            raise _Answer(404, {"error": f"Invalid rev id: {ref}"}, "RevisionNotFound")
        return found, found.refs.get(ref, ref), tree

    def _create(self) -> None:
        wanted = self.request_.json()
        owner = wanted["organization"] or self._user()
        self._user()
        self._may_write(owner)
        repo_id = f"{owner}/{wanted['name']}"
        url = {"url": f"{self.hub.url}/{repo_id}"}
        if repo_id in self.hub.repos:
            raise _Answer(409, {"error": "You already created this model repo", **url})
        self.hub.add_repo(repo_id, {}, private=wanted.get("visibility") == "private" or wanted.get("private", False))
        raise _Answer(200, url)

    def _validate(self) -> None:
        raise _Answer(200, {"errors": [], "warnings": []})

    def _overview(self, owner: str) -> None:
        if owner not in self.hub.owners:
            raise _Answer(404, {"error": "This user does not exist"})
        raise _Answer(200, {"user": owner, "name": owner, "fullname": owner, "avatarUrl": "", "type": "user"})

    def _info(self, repo: str, ref: str | None) -> None:
        found, oid, tree = self._at(repo, ref or "main")
        raise _Answer(200, {"id": repo, "modelId": repo, "sha": oid, "private": found.private, "tags": [],
                            "siblings": [{"rfilename": name} for name in tree]})  # fmt: skip

    def _branch(self, repo: str, ref: str) -> None:
        found = self._repo(repo)
        self._may_write(repo.split("/")[0])
        if ref in found.refs:
            raise _Answer(409, {"error": f"Reference already exists: {ref}"})
        found.refs[ref] = found.refs["main"]
        raise _Answer(201)

    def _preupload(self, repo: str, ref: str) -> None:
        _, _, tree = self._at(repo, ref)
        if "create_pr" not in self.request_.query:
            self._may_write(repo.split("/")[0])
        self._user()
        files = []
        for file in self.request_.json()["files"]:
            lfs, held = file["path"].endswith(LFS_SUFFIXES), tree.get(file["path"])
            oid = None if held is None else hashlib.sha256(held).hexdigest() if lfs else blob_oid(held)
            files.append({"path": file["path"], "uploadMode": "lfs" if lfs else "regular", "shouldIgnore": False,
                          "oid": oid})  # fmt: skip
        raise _Answer(200, {"files": files})

    def _batch(self, repo: str) -> None:
        self._repo(repo)
        self._user()
        objects = []
        for wanted in self.request_.json()["objects"]:
            answer = {"oid": wanted["oid"], "size": wanted["size"]}
            if wanted["oid"] not in self.hub.lfs:
                answer["actions"] = {"upload": {"href": f"{self.hub.url}/lfs/{wanted['oid']}"},
                                     "verify": {"href": f"{self.hub.url}/lfs-verify"}}  # fmt: skip
            objects.append(answer)
        raise _Answer(200, {"transfer": "basic", "objects": objects})

    def _put(self, oid: str) -> None:
        self.hub.reached.set()
        if self.hub.stall is not None:
            self.hub.stall.wait(60)
        if hashlib.sha256(self.request_.body).hexdigest() != oid:
            raise _Answer(400, {"error": "content does not match its hash"})
        self.hub.lfs[oid] = self.request_.body
        raise _Answer(200)

    def _verify(self) -> None:
        wanted = self.request_.json()
        ok = len(self.hub.lfs.get(wanted["oid"], b"")) == wanted["size"]
        raise _Answer(200 if ok else 404)

    def _commit(self, repo: str, ref: str) -> None:
        found, _, tree = self._at(repo, ref)
        pull = "create_pr" in self.request_.query
        if not pull:
            self._may_write(repo.split("/")[0])
        tree, title = dict(tree), ""
        for line in self.request_.body.splitlines():
            item = json.loads(line)
            key, value = item["key"], item["value"]
            if key == "header":
                title = value["summary"]
            elif key == "file":
                tree[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile":
                tree[value["path"]] = self.hub.lfs[value["oid"]]
            elif key == "deletedFile":
                del tree[value["path"]]
        tree = {path: content for path, content in {**tree, **self.hub.broken}.items() if content is not None}
        number = 1 + sum(name.startswith("refs/pr/") for name in found.refs)
        oid = found.commit(f"refs/pr/{number}" if pull else ref, tree, title)
        answer = {"commitUrl": f"{self.hub.url}/{repo}/commit/{oid}", "commitOid": oid, "success": True}
        if pull:
            answer["pullRequestUrl"] = f"{self.hub.url}/{repo}/discussions/{number}"
        raise _Answer(200, answer)

    def _tree(self, repo: str, ref: str) -> None:
        _, _, tree = self._at(repo, ref)
        entries: list[dict[str, Any]] = []
        for path, content in sorted(tree.items()):
            entry: dict[str, Any] = {"type": "file", "path": path, "size": len(content), "oid": blob_oid(content)}
            if path.endswith(LFS_SUFFIXES):
                entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
            entries.append(entry)
        for folder in sorted({path.rsplit("/", 1)[0] for path in tree if "/" in path}):
            entries.append({"type": "directory", "path": folder, "size": 0, "oid": blob_oid(folder.encode())})
        raise _Answer(200, entries)

    def _resolve(self, repo: str, ref: str, file: str) -> None:
        _, oid, tree = self._at(repo, ref)
        if file not in tree:
            raise _Answer(404, {"error": "Entry not found"}, "EntryNotFound", {"X-Repo-Commit": oid})
        content = tree[file]
        tag = hashlib.sha256(content).hexdigest() if file.endswith(LFS_SUFFIXES) else blob_oid(content)
        raise _Answer(200, content, headers={"X-Repo-Commit": oid, "ETag": f'"{tag}"',
                                             "Content-Type": "application/octet-stream"})  # fmt: skip
