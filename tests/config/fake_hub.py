"""A small server that speaks what `huggingface_hub` asks of the hub: repository info, tree listings, and files with ETag and ranges."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest


class FakeHub:
    """Repositories with commits. `asked` lists the requests as `METHOD path`; `ranges` the Range headers of downloads."""

    def __init__(self) -> None:
        self.commits: dict[tuple[str, str], dict[str, bytes]] = {}
        self.refs: dict[tuple[str, str], str] = {}
        self.gated: set[str] = set()
        self.asked: list[str] = []
        self.ranges: list[str] = []
        self.break_after: int | None = None
        """Close the connection of the next long download after this many bytes."""
        self.endpoint = ""

    def commit(self, repo: str, files: dict[str, bytes] | Path, *refs: str) -> str:
        """Add a commit and move branches or tags to it (main if none is given). Returns its hash."""
        if isinstance(files, Path):
            files = {p.name: p.read_bytes() for p in files.iterdir() if p.is_file()}
        digest = hashlib.sha1(
            json.dumps({name: hashlib.sha1(data).hexdigest() for name, data in files.items()}).encode()
        )
        name = digest.hexdigest()
        self.commits[repo, name] = files
        for ref in refs or ("main",):
            self.refs[repo, ref] = name
        return name

    def files_of(self, repo: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        name = self.refs.get((repo, revision), revision)
        return (name, self.commits[repo, name]) if (repo, name) in self.commits else None

    def downloads(self) -> set[str]:
        """The names of the files that were sent."""
        return {
            line.partition("/resolve/")[2].partition("/")[2]
            for line in self.asked
            if line.startswith("GET") and "/resolve/" in line
        }


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None: ...

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append(f"{self.command} {path}")
        is_api = path.startswith("/api/models/")
        parts = path.removeprefix("/api/models/").strip("/").split("/")
        repo = "/".join(parts[:2])
        if repo in self.hub.gated:
            return self._send(403, b"{}", {"X-Error-Code": "GatedRepo"})
        if all(name != repo for name, _ in self.hub.commits):
            return self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        found = self.hub.files_of(repo, parts[3] if len(parts) > 3 else "main")
        if found is None:
            return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        commit, files = found
        if is_api and parts[2:3] == ["tree"]:
            return self._send_json(
                [{"type": "file", "path": n, "size": len(d), "oid": _blob(d)} for n, d in files.items()]
            )
        if is_api:
            return self._send_json({"id": repo, "sha": commit, "siblings": [{"rfilename": n} for n in files]})
        data = files.get("/".join(parts[4:]))
        if data is None:
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
        return self._send_file(commit, data)

    def _send_file(self, commit: str, data: bytes) -> None:
        headers = {"ETag": f'"{_blob(data)}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        span = self.headers.get("Range")
        if span is None or self.command == "HEAD":
            return self._send(200, data, headers)
        self.hub.ranges.append(span)
        first, _, last = span.removeprefix("bytes=").partition("-")
        part = data[int(first) : int(last) + 1 if last else None]
        headers["Content-Range"] = f"bytes {first}-{int(first) + len(part) - 1}/{len(data)}"
        return self._send(206, part, headers)

    def _send_json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        limit = self.hub.break_after
        if limit is not None and len(body) > limit:
            self.hub.break_after = None
            self.wfile.write(body[:limit])
            self.wfile.flush()
            self.close_connection = True
            return
        self.wfile.write(body)


def _blob(data: bytes) -> str:
    """Git's hash of a file, which the hub gives as ETag."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@contextmanager
def serve_hub() -> Iterator[FakeHub]:
    """A hub on a free port of this machine."""
    hub = FakeHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def use_hub(hub: FakeHub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process ask the hub, as HF_ENDPOINT and HF_HUB_CACHE would. `huggingface_hub` has read those when it was imported."""
    from huggingface_hub import constants

    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, hub.endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
