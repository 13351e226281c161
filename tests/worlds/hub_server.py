"""A model hub on loopback, with the ways of the real one and what goes wrong on the way to it.

`/api/models/...` lists, `/O/N/resolve/REVISION/FILE` serves; large files are redirected to another
origin, where a token has no business.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

LFS_BYTES = 4096
"""Larger files are kept outside git, as .safetensors are."""


@dataclass
class Repository:
    files: dict[str, bytes | Path]
    commit: str = "c" * 40
    revisions: tuple[str, ...] = ("main",)
    listed: dict[str, int] = field(default_factory=dict)
    """Large files that nobody will ask for: their sizes."""
    token: str | None = None
    """Without it the repository is not there."""
    gated: bool = False

    def content(self, path: str) -> bytes:
        kept = self.files[path]
        return kept if isinstance(kept, bytes) else kept.read_bytes()

    def listing(self) -> dict[str, Any]:
        siblings = []
        for path in self.files:
            content = self.content(path)
            row: dict[str, Any] = {"rfilename": path, "size": len(content), "blobId": git(content)}
            if len(content) > LFS_BYTES:
                sha256 = hashlib.sha256(content).hexdigest()
                row["lfs"] = {"sha256": sha256, "size": len(content), "pointerSize": 130}
            siblings.append(row)
        for path, size in self.listed.items():
            lfs = {"sha256": hashlib.sha256(path.encode()).hexdigest(), "size": size}
            row = {"rfilename": path, "size": size, "blobId": "0" * 40}
            siblings.append(row | {"lfs": lfs | {"pointerSize": 130}})
        return {"sha": self.commit, "siblings": siblings, "private": False, "tags": []}


@dataclass
class Hub:
    """What it has, what it does wrong, and what it was asked."""

    repositories: dict[str, Repository] = field(default_factory=dict)
    cuts: dict[str, list[int]] = field(default_factory=dict)
    """By file: after how many bytes each of the next replies breaks off."""
    wrong: set[str] = field(default_factory=set)
    """Files that arrive with a byte changed."""
    has_ranges: bool = True
    failing: int = 0
    """Files asked for that are answered 503."""
    endless_bytes: int = 0
    """Weights are followed by so many more, without a length."""
    sent_beyond: list[int] = field(default_factory=list)
    """How many of those went out, by reply."""
    chunk_pause: threading.Event | None = None
    """Weights wait in the middle until it is set."""
    asked: list[tuple[str, str | None, str | None]] = field(default_factory=list)
    """Path, Range, Authorization of each GET."""
    url: str = ""
    other_url: str = ""

    def ranges_of(self, file: str) -> list[str | None]:
        return [at for path, at, _ in self.asked if path.endswith(file) and "/cdn/" in path]


def git(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def folder_files(folder: Path) -> dict[str, bytes | Path]:
    return {
        str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()
    }


@contextmanager
def serving(**repositories: Repository) -> Iterator[Hub]:
    """A hub with these repositories; `owner__name` stands for owner/name."""
    hub = Hub({name.replace("__", "/"): each for name, each in repositories.items()})
    servers = [ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub)) for _ in range(2)]
    hub.url, hub.other_url = (f"http://127.0.0.1:{one.server_address[1]}" for one in servers)
    hub.other_url = hub.other_url.replace("127.0.0.1", "localhost")
    for server in servers:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield hub
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.asked.append((path, self.headers.get("range"), self.headers.get("authorization")))
            if hub.failing and "/resolve/" in path:
                hub.failing -= 1
                return self.say(503, {"error": "for a moment"})
            if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/revision/(.+)", path):
                return self.list_files(*found.groups())
            if found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
                return self.resolve(*found.groups())
            if found := re.fullmatch(r"/cdn/([^/]+/[^/]+)/(.+)", path):
                return self.send_file(hub.repositories[found[1]], found[2])
            return self.say(404, {"error": "nothing here"})

        def allowed(self, name: str) -> Repository | None:
            there = hub.repositories.get(name)
            is_theirs = there is not None and (
                there.token is None or self.headers.get("authorization") == f"Bearer {there.token}"
            )
            if there is None or (not is_theirs and not there.gated):
                self.say(401, {"error": "Repository not found"}, "RepoNotFound")
                return None
            return there

        def list_files(self, name: str, revision: str) -> None:
            if (there := self.allowed(name)) is None:
                return None
            if revision not in (*there.revisions, there.commit):
                return self.say(404, {"error": "no such revision"}, "RevisionNotFound")
            return self.say(200, {"id": name, "modelId": name, **there.listing()})

        def resolve(self, name: str, revision: str, path: str) -> None:
            if (there := self.allowed(name)) is None:
                return None
            is_theirs = self.headers.get("authorization") == f"Bearer {there.token}"
            if there.gated and not is_theirs:
                return self.say(403, {"error": "ask first"}, "GatedRepo")
            if path not in there.files:
                return self.say(404, {"error": "no such file"}, "EntryNotFound")
            if len(there.content(path)) > LFS_BYTES:
                return self.say(302, {}, location=f"{hub.other_url}/cdn/{name}/{path}")
            return self.send_file(there, path)

        def send_file(self, there: Repository, path: str) -> None:
            content = bytearray(there.content(path))
            if path in hub.wrong:
                content[-1] ^= 1
            start, total = 0, len(content)
            asked = self.headers.get("range")
            if asked and hub.has_ranges:
                start = int(asked.removeprefix("bytes=").removesuffix("-"))
                if start >= total:
                    return self.say(416, {"error": "beyond its end"})
            body = bytes(content[start:])
            self.send_response(206 if start else 200)
            is_endless = bool(hub.endless_bytes) and path.endswith(".safetensors")
            if not is_endless:
                self.send_header("content-length", str(len(body)))
            if start:
                self.send_header("content-range", f"bytes {start}-{total - 1}/{total}")
            self.end_headers()
            if self.command == "HEAD":
                return None
            cut = hub.cuts.get(path)
            length = cut.pop(0) if cut else len(body)
            half = length // 2
            self.wfile.write(body[:half])
            self.wfile.flush()
            if hub.chunk_pause is not None and path.endswith(".safetensors"):
                hub.chunk_pause.wait(30)
            self.wfile.write(body[half:length])
            if length < len(body):
                self.close_connection = True
            if is_endless:
                self.send_more()
            return None

        def send_more(self) -> None:
            self.close_connection = True
            piece, sent = bytes(1 << 16), 0
            with suppress(OSError):
                while sent < hub.endless_bytes:
                    self.wfile.write(piece)
                    sent += len(piece)
            hub.sent_beyond.append(sent)

        def say(
            self, status: int, content: dict[str, Any], code: str = "", location: str = ""
        ) -> None:
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            if code:
                self.send_header("x-error-code", code)
            if location:
                self.send_header("location", location)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

    return Handler
