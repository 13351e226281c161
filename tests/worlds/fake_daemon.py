"""A daemon of the tests' own: HTTP on a Unix socket that answers what a test puts into it."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingMixIn, UnixStreamServer
from typing import Any

RID = "cmpl-1"
READINGS = {"GET /v1/models": {"data": [{"id": "m"}]}}
"""What is answered where a script says nothing else; it is not counted as asked."""


@dataclass
class Script:
    """What the daemon answers, and what it was asked."""

    replies: dict[str, tuple[int, object]] = field(default_factory=dict)
    """Status and JSON by `METHOD path`."""
    events: list[object] = field(default_factory=list)
    """Of a stream: dictionaries as JSON, bytes as they are."""
    content_type: str = "text/event-stream"
    pause_after: int | None = None
    """Events after which the stream waits to be cancelled or hung up on."""
    asked: list[tuple[str, dict[str, Any] | None]] = field(default_factory=list)
    cancelled: threading.Event = field(default_factory=threading.Event)
    paused: threading.Event = field(default_factory=threading.Event)
    told_reader: threading.Event = field(default_factory=threading.Event)
    """The stream was still open when it was cancelled, and took the end of it."""

    def asked_for(self, line: str) -> list[dict[str, Any] | None]:
        """The bodies of each request of that method and path."""
        return [body for asked, body in self.asked if asked == line]


def text_event(text: str, finish_reason: str | None = None) -> dict[str, object]:
    choice = {"index": 0, "text": text, "finish_reason": finish_reason}
    return {"id": RID, "object": "text_completion", "choices": [choice]}


def chat_event(text: str, finish_reason: str | None = None) -> dict[str, object]:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish_reason}
    return {"id": RID, "object": "chat.completion.chunk", "choices": [choice]}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeDaemon

    def do_GET(self) -> None:  # the base class's name
        self._answer(None)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(json.loads(body))

    def _answer(self, body: dict[str, Any] | None) -> None:
        script, line = self.server.script, f"{self.command} {self.path}"
        if line in READINGS and line not in script.replies:
            self._reply(200, READINGS[line])
            return
        script.asked.append((line, body))
        if line in script.replies:
            self._reply(*script.replies[line])
        elif self.path.endswith("/stream") or (body is not None and body.get("stream")):
            self._stream(script)
        elif self.path.endswith("/cancel"):
            script.cancelled.set()
            if script.paused.is_set():
                script.told_reader.wait(5)
            self._reply(200, {"id": self.path.split("/")[3], "status": "cancelled"})
        else:
            error = {"message": "no such thing", "code": "not_found", "type": "x", "param": None}
            self._reply(404, {"error": error})

    def _reply(self, status: int, content: object) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _stream(self, script: Script) -> None:
        self.send_response(200)
        self.send_header("Content-Type", script.content_type)
        self.send_header("Transfer-Encoding", "chunked")
        self.send_header("x-request-id", RID)
        self.end_headers()
        for index, event in enumerate(script.events):
            if index == script.pause_after:
                script.paused.set()
                script.cancelled.wait(20)
                self.wfile.write(b"0\r\n\r\n")
                script.told_reader.set()
                return
            data = event if isinstance(event, bytes) else b"data: " + json.dumps(event).encode()
            self.wfile.write(b"%x\r\n%b\n\n\r\n" % (len(data) + 2, data))
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *args: object) -> None:
        """Keep stderr for the tests."""


class FakeDaemon(ThreadingMixIn, UnixStreamServer):
    """Serves a Script in a thread, from `with` to its end."""

    daemon_threads = True

    def __init__(self, socket_path: Path) -> None:
        super().__init__(str(socket_path), _Handler)
        self.socket_path = socket_path
        self.script = Script()
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,))

    def __enter__(self) -> FakeDaemon:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.script.cancelled.set()
        self.shutdown()
        self.server_close()
        self._thread.join()

    def handle_error(self, *args: object) -> None:
        """A client that hangs up is part of the tests."""
