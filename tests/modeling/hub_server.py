"""A Hugging Face Hub in memory, on the loopback: as much of its HTTP API as uploads and snapshot downloads use.

Repositories, commits as NDJSON with regular and LFS files, the LFS batch API with the basic transfer, revisions by
branch or commit, the tree, and `resolve` with the headers that the client's cache is keyed by.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit


class Repository:
    """`commits`: sha -> path -> content; `branches`: name -> sha."""

    def __init__(self) -> None:
        self.commits: dict[str, dict[str, bytes]] = {}
        self.branches: dict[str, str] = {}
        self.commit("main", {}, "initial commit")

    def commit(self, branch: str, files: dict[str, bytes], message: str) -> str:
        sha = hashlib.sha1(f"{branch} {len(self.commits)} {message}".encode()).hexdigest()
        self.commits[sha] = files
        self.branches[branch] = sha
        return sha

    def resolve(self, revision: str) -> str | None:
        sha = self.branches.get(revision, revision)
        return sha if sha in self.commits else None


class Hub:
    """State of the server; `requests` lists "METHOD path" of everything that was asked."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.url = ""


def is_lfs(path: str) -> bool:
    return path.endswith(".safetensors")


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *args: Any) -> None:
        """Quiet."""

    # ------------------------------------------------------------ plumbing

    def reply(self, status: int, body: Any = b"", **headers: str) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if not isinstance(body, bytes):
            self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", headers.pop("length", str(len(data))))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def missing(self, code: str) -> None:
        self.reply(404, {"error": code}, X_Error_Code=code, X_Error_Message=code)

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def repository(self, name: str) -> Repository | None:
        found = self.hub.repositories.get(name)
        if found is None:
            self.missing("RepoNotFound")
        return found

    def route(self) -> tuple[list[str], dict[str, list[str]]]:
        parts = urlsplit(self.path)
        self.hub.requests.append(f"{self.command} {parts.path}")
        return [unquote(p) for p in parts.path.strip("/").split("/")], parse_qs(parts.query)

    # ------------------------------------------------------------ writing

    def do_POST(self) -> None:
        data = self.body()
        match self.route()[0]:
            case ["api", "repos", "create"]:
                request = json.loads(data)
                name = "/".join(filter(None, (request.get("organization"), request["name"])))
                if name in self.hub.repositories:
                    self.reply(409, {"url": f"{self.hub.url}/{name}", "error": "exists"})
                    return
                self.hub.repositories[name] = Repository()
                self.reply(200, {"url": f"{self.hub.url}/{name}", "name": name, "id": name})
            case ["api", "models", owner, name, "preupload", _]:
                if self.repository(f"{owner}/{name}") is not None:
                    files = [
                        {"path": f["path"], "uploadMode": "lfs" if is_lfs(f["path"]) else "regular",
                         "shouldIgnore": False, "oid": None}
                        for f in json.loads(data)["files"]
                    ]  # fmt: skip
                    self.reply(200, {"files": files})
            case [_, git, "info", "lfs", "objects", "batch"] if git.endswith(".git"):
                objects = [
                    {"oid": o["oid"], "size": o["size"], "authenticated": True,
                     "actions": {"upload": {"href": f"{self.hub.url}/lfs/{o['oid']}"}}}
                    for o in json.loads(data)["objects"]
                ]  # fmt: skip
                self.reply(200, {"transfer": "basic", "objects": objects}, Content_Type="application/vnd.git-lfs+json")
            case ["api", "models", owner, name, "commit", branch]:
                self.commit(f"{owner}/{name}", branch, data)
            case ["api", "validate-yaml"]:
                self.reply(200, {"errors": [], "warnings": []})
            case _:
                self.missing("EntryNotFound")

    def do_PUT(self) -> None:
        data = self.body()
        oid = self.route()[0][-1]
        if hashlib.sha256(data).hexdigest() != oid:
            self.reply(400, {"error": "content does not match its hash"})
            return
        self.hub.objects[oid] = data
        self.reply(200)

    def commit(self, name: str, branch: str, data: bytes) -> None:
        repository = self.repository(name)
        if repository is None:
            return
        start = repository.resolve(branch)
        if start is None:
            self.missing("RevisionNotFound")
            return
        files = dict(repository.commits[start])
        message = ""
        for line in data.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "header":
                message = value["summary"]
            elif entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.hub.objects[value["oid"]]
            elif entry["key"] == "deletedFile":
                files.pop(value["path"], None)
        sha = repository.commit(branch, files, message)
        self.reply(200, {"success": True, "commitOid": sha, "commitUrl": f"{self.hub.url}/{name}/commit/{sha}"})

    # ------------------------------------------------------------ reading

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        parts, _ = self.route()
        match parts:
            case ["api", "models", owner, name]:
                self.info(f"{owner}/{name}", "main")
            case ["api", "models", owner, name, "revision", revision]:
                self.info(f"{owner}/{name}", revision)
            case ["api", "models", owner, name, "tree", revision, *_]:
                found = self.files(f"{owner}/{name}", revision)
                if found is not None:
                    self.reply(200, [self.entry(path, content) for path, content in sorted(found[1].items())])
            case [owner, name, "resolve", revision, *path]:
                self.download(f"{owner}/{name}", revision, "/".join(path))
            case _:
                self.missing("EntryNotFound")

    def files(self, name: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        repository = self.repository(name)
        if repository is None:
            return None
        sha = repository.resolve(revision)
        if sha is None:
            self.missing("RevisionNotFound")
            return None
        return sha, repository.commits[sha]

    def info(self, name: str, revision: str) -> None:
        found = self.files(name, revision)
        if found is not None:
            siblings = [{"rfilename": path} for path in found[1]]
            self.reply(
                200, {"_id": "0", "id": name, "modelId": name, "sha": found[0], "siblings": siblings, "private": False}
            )

    @staticmethod
    def entry(path: str, content: bytes) -> dict[str, Any]:
        entry: dict[str, Any] = {
            "type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()
        }  # fmt: skip
        if is_lfs(path):
            entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
        return entry

    def download(self, name: str, revision: str, path: str) -> None:
        found = self.files(name, revision)
        if found is None:
            return
        sha, files = found
        if path not in files:
            self.missing("EntryNotFound")
            return
        content = files[path]
        digest = hashlib.sha256(content) if is_lfs(path) else hashlib.sha1(content)
        headers = {"ETag": f'"{digest.hexdigest()}"', "X_Repo_Commit": sha, "Accept_Ranges": "bytes"}
        requested = self.headers.get("Range")
        if requested and self.command == "GET":
            first = int(requested.removeprefix("bytes=").partition("-")[0])
            part = content[first:]
            span = f"bytes {first}-{len(content) - 1}/{len(content)}"
            self.reply(206, part, Content_Range=span, **headers)
            return
        self.reply(200, content, **headers)


@contextmanager
def running_hub() -> Iterator[Hub]:
    """A Hub that serves on a free loopback port while the context is open."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("BoundHandler", (Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
