"""A client of the daemon: HTTP over its Unix socket, with the standard library alone.

Owns: what a failed connection or an error reply means to a person, and its exit code.
Called by: cli.
Invariant: everything that goes wrong between here and the daemon is raised as a ClientError.
Never: retries, prints, or keeps a connection between calls.
"""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any
from urllib.parse import quote

from engine.errors import PenstockError

_EXIT_CODES = MappingProxyType({400: 2, 413: 2, 422: 2, 401: 4, 403: 4, 404: 5, 429: 6, 503: 6})
"""By HTTP status; every other error is 1."""


class ClientError(PenstockError):
    """Something between this client and the daemon failed."""


class DaemonUnreachable(ClientError):
    """No daemon answers at the socket."""

    exit_code = 3


class PermissionRefused(ClientError):
    """The socket, or the daemon, does not let this user in."""

    exit_code = 4


class GenerationFailed(ClientError):
    """The daemon took the request and could not finish it; what came before is incomplete."""

    exit_code = 7


class ReplyError(ClientError):
    """The daemon answered with an error object; `status` and `code` are its own."""

    def __init__(self, what: str, *, status: int, code: str | None, where: str = "") -> None:
        hint = "try again in a moment" if status in (429, 503) else ""
        super().__init__(what, where=where, hint=hint)
        self.status = status
        self.code = code
        self.exit_code = _EXIT_CODES.get(status, 1)


class Client:
    """Talks to the daemon at one socket. Connects anew for each call.

    Args:
        socket_path: as appliance.config.socket_path() finds it.
        timeout_s: for replies to get() and post(); a stream may take its time.
    """

    def __init__(self, socket_path: Path, *, timeout_s: float = 10.0) -> None:
        self.socket_path = socket_path
        self.timeout_s = timeout_s

    def get(self, path: str) -> dict[str, Any]:
        """GET a JSON object.

        Raises:
            ClientError: no daemon, no permission, or an error reply.
        """
        return self._call("GET", path, None)

    def post(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """POST a JSON object, read one.

        Raises:
            ClientError: as get().
        """
        return self._call("POST", path, body or {})

    def cancel(self, request_id: str) -> None:
        """Ask the daemon to end a request.

        Raises:
            ReplyError: status 404 if it is not live.
        """
        self.post(f"/v1/requests/{quote(request_id, safe='')}/cancel")

    def stream(self, path: str, body: dict[str, Any]) -> Stream:
        """POST and read server-sent events or lines of JSON as they come; use it in a `with`.

        Raises:
            ClientError: as get(), before the first event.
        """
        connection = _UnixConnection(self.socket_path, None)
        try:
            with _explained(self.socket_path):
                response = _send(connection, "POST", path, body)
                if response.status >= 400:
                    raise _reply_error(response, is_generation=True)
        except BaseException:
            connection.close()
            raise
        return Stream(connection, response)

    def _call(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        connection = _UnixConnection(self.socket_path, self.timeout_s)
        try:
            with _explained(self.socket_path):
                response = _send(connection, method, path, body)
                if response.status >= 400:
                    raise _reply_error(response)
                reply = json.loads(response.read())
        finally:
            connection.close()
        if not isinstance(reply, dict):
            raise ClientError("the reply is not a JSON object", where=path)
        return reply


class Stream:
    """An open reply, one dictionary per event. Closing it early makes the daemon cancel."""

    def __init__(
        self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse
    ) -> None:
        self._connection = connection
        self._response = response
        self._is_sse = response.headers.get_content_type() == "text/event-stream"
        self.request_id = response.headers.get("x-request-id")

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Events until the end that the daemon announces.

        Raises:
            GenerationFailed: an error object came, or the connection ended before that.
        """
        for data in self._data():
            if data == b"[DONE]":
                return
            event = _parsed(data)
            if "error" in event:
                raise GenerationFailed(_message(event["error"]))
            yield event
        if self._is_sse:
            raise GenerationFailed("the daemon closed the connection before the end")

    def close(self) -> None:
        """Hang up."""
        self._response.close()
        self._connection.close()

    def _data(self) -> Iterator[bytes]:
        try:
            for line in self._response:
                if not self._is_sse and line.strip():
                    yield line
                elif line.startswith(b"data:"):
                    yield line[5:].strip()
        except (OSError, http.client.HTTPException) as error:
            raise GenerationFailed("the connection broke before the end") from error


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, socket_path: Path, timeout_s: float | None) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._socket_path = socket_path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._socket_path))


def _send(
    connection: http.client.HTTPConnection, method: str, path: str, body: dict[str, Any] | None
) -> http.client.HTTPResponse:
    payload = None if body is None else json.dumps(body).encode()
    headers = {} if body is None else {"Content-Type": "application/json"}
    connection.request(method, path, payload, headers)
    return connection.getresponse()


def _reply_error(response: http.client.HTTPResponse, *, is_generation: bool = False) -> ClientError:
    try:
        error = json.loads(response.read())["error"]
        message, code = _message(error), error.get("code")
    except (ValueError, KeyError, TypeError, AttributeError):
        message, code = f"HTTP {response.status} {response.reason}", None
    if is_generation and response.status >= 500 and response.status != 503:
        return GenerationFailed(message)
    return ReplyError(message, status=response.status, code=code)


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        return dict(json.loads(data))
    except (ValueError, TypeError) as error:
        raise GenerationFailed("the daemon sent something that is not JSON") from error


def _message(error: Any) -> str:
    return str(error["message"] if isinstance(error, dict) and "message" in error else error)


@contextmanager
def _explained(socket_path: Path) -> Iterator[None]:
    """Turn what the socket and the reply can do wrong into words and exit codes."""
    where = f"unix://{socket_path}"
    start_it = "start it with 'penstock serve', or name its socket with --socket"
    try:
        yield
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DaemonUnreachable(
            "the daemon is not running (no such socket)", where=where, hint=start_it
        ) from error
    except ConnectionRefusedError as error:
        raise DaemonUnreachable(
            "the daemon is not running (nobody listens there)", where=where, hint=start_it
        ) from error
    except PermissionError as error:
        raise PermissionRefused(
            "permission denied: you are not in the socket's group",
            where=where,
            hint="sudo usermod -aG penstock-users $USER, then log in again",
        ) from error
    except TimeoutError as error:
        raise DaemonUnreachable("the daemon does not answer", where=where) from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise DaemonUnreachable(f"no usable reply ({error})", where=where) from error
