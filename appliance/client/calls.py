"""Call the daemon over HTTP with the standard library alone.

Invariant: everything that goes wrong between here and the daemon is raised as a ClientError.
"""

from __future__ import annotations

import http.client
import json
import select
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import quote, urlencode

from appliance.client.address import Address, DaemonLine, SshAddress, TcpAddress, UnixAddress
from appliance.configuration import paths
from engine.errors import PenstockError

_EXIT_CODES = MappingProxyType({400: 2, 413: 2, 422: 2, 401: 4, 403: 4, 404: 5, 429: 6, 503: 6})
"""Exit code by HTTP status; for every other error it is 1."""
_CHUNK_BYTES = 1 << 18
_MAX_WHY_CHARS = 200
_BYTES = "surrogateescape"
"""Bytes of the command line that are no UTF-8 go out as they are."""
_RETRY = "try again in a moment"
_CUT = "the reply is incomplete; `penstock status` and `penstock events` say why"
_NO_PENSTOCK = "check the address: --host or PENSTOCK_HOST"
_CERTIFICATE = "SSL_CERT_FILE=CHAIN.pem trusts a certificate of your own; its names must fit, too"
_KEY = "set PENSTOCK_API_KEY to a key that `penstock keys add` made"
JOIN_GROUP = "sudo usermod -aG penstock-users $USER, then log in again"
"""Hint for users without access to the socket."""
_HINTS = MappingProxyType({401: _KEY, 429: _RETRY, 503: _RETRY})


class ClientError(PenstockError):
    """Something between this client and the daemon failed."""


class DaemonUnreachable(ClientError):
    """No daemon answers at the address."""

    exit_code = 3


class DaemonAbsent(DaemonUnreachable):
    """No daemon runs at the address: nothing listens there."""


class UnusableAnswer(ClientError):
    """Something answers at the address, and not as a Penstock daemon does."""

    exit_code = DaemonUnreachable.exit_code

    def __init__(self, why: str, where: object) -> None:
        what = f"the answer is not of a Penstock daemon: {why[:_MAX_WHY_CHARS]}"
        super().__init__(what, where=str(where), hint=_NO_PENSTOCK)


class PermissionRefused(ClientError):
    """The socket, or the daemon, does not let this user in."""

    exit_code = 4


class GenerationFailed(ClientError):
    """The daemon took the request and could not finish it; what came before is incomplete."""

    exit_code = 7


class ReplyError(ClientError):
    """The daemon answered with an error object; `status` and `code` are its own."""

    def __init__(self, what: str, *, status: int, code: str | None) -> None:
        hint = "" if code == "draining" else _HINTS.get(status, "")  # the daemon says what ends it
        super().__init__(what, hint=hint)
        self.status = status
        self.code = code
        self.exit_code = _EXIT_CODES.get(status, 1)


class Client:
    """Talks to the daemon at one address. Connects anew for each call.

    Args:
        address: as appliance.client.address.find() has it.
        timeout_s: for replies to get() and post(); a stream may take its time.
        on_silence: told once of a reply to stream() or awaited() that has not begun after that
            time; it is waited on.
    """

    def __init__(
        self,
        address: Address,
        *,
        timeout_s: float = 10.0,
        on_silence: Callable[[], None] | None = None,
    ) -> None:
        self.address = address
        self.timeout_s = timeout_s
        self._on_silence = on_silence

    def get(
        self, path: str, query: Mapping[str, str] | None = None, *, has: str | None = None
    ) -> dict[str, Any]:
        """GET a JSON object.

        Args:
            has: a field that every Penstock daemon's answer has.

        Raises:
            ClientError: no daemon, no permission, an error reply, or an answer without that field.
        """
        return self._with_field(self._call("GET", _with_query(path, query or {}), None), has)

    def rows(self, path: str, query: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
        """GET a list of objects.

        Raises:
            ClientError: as get().
        """
        return self.listed(self.get(path, query))

    def listed(self, answer: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the objects that an answer lists.

        Raises:
            UnusableAnswer: it lists none.
        """
        rows = answer.get("data")
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise UnusableAnswer("`data` is not a list of objects", self.address)
        return rows

    def state(self) -> dict[str, Any]:
        """GET the daemon's frame.

        Raises:
            ClientError: as get().
        """
        return self.get("/v1/penstock/state", has="state")

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Explain what an answer without a field, or with one of another type, makes of reading it.

        Raises:
            UnusableAnswer: the answer cannot be read.
        """
        try:
            yield
        except (LookupError, TypeError, AttributeError, ValueError, OverflowError) as error:
            raise UnusableAnswer(f"{type(error).__name__}: {error}", self.address) from error

    def awaited(self, path: str) -> dict[str, Any]:
        """GET a JSON object from a daemon that may be restarting, however long that takes.

        Raises:
            ClientError: as get().
        """
        return self._call("GET", path, None, is_patient=True)

    def request(self, request_id: str) -> dict[str, Any]:
        """Fetch a request's frame, live or finished.

        Raises:
            ReplyError: status 404 if it knows none of that id.
        """
        return self.get(f"/v1/requests/{quote(request_id, safe='', errors=_BYTES)}", has="id")

    def post(
        self, path: str, body: dict[str, Any] | None = None, *, has: str | None = None
    ) -> dict[str, Any]:
        """POST a JSON object and read one; `has` as of get().

        Raises:
            ClientError: as get().
        """
        return self._with_field(self._call("POST", path, body or {}), has)

    def cancel(self, request_id: str) -> None:
        """Ask the daemon to end a request.

        Raises:
            ReplyError: status 404 if it is not live.
        """
        path = f"/v1/requests/{quote(request_id, safe='', errors=_BYTES)}/cancel"
        self.post(path, has="status")

    def text(self, path: str) -> str:
        """GET something that is no JSON; raises as get(), also of JSON."""
        content = self._read("GET", path, None)
        with suppress(ValueError, RecursionError):
            _object(json.loads(content), path, self.address)
            raise ClientError("the reply is JSON, not text", where=path, hint=_NO_PENSTOCK)
        with _explained(self.address):
            return content.decode()

    def chunks(self, path: str, query: Mapping[str, str]) -> Iterator[bytes]:
        """GET a file, as it comes.

        Raises:
            ClientError: as get(), or the file ends before its announced length.
        """
        connection = _Connection(self.address, self.timeout_s)
        try:
            with _explained(self.address):
                response = _send(connection, "GET", _with_query(path, query), None)
                if response.status >= 400:
                    raise _reply_error(response)
            while chunk := self._next_chunk(response):
                yield chunk
        finally:
            connection.hang_up()

    def _next_chunk(self, response: http.client.HTTPResponse) -> bytes:
        with _explained(self.address):
            chunk = response.read(_CHUNK_BYTES)
            if not chunk and response.length:
                raise http.client.IncompleteRead(chunk, response.length)
        return chunk

    def stream(self, path: str, body: dict[str, Any] | None = None) -> Stream:
        """POST, or GET without a body, and read events or lines of JSON; use it in a `with`.

        Raises:
            ClientError: as get(), before the first event.
        """
        connection = _Connection(self.address, None)
        try:
            with _explained(self.address):
                _request(connection, "GET" if body is None else "POST", path, body)
                self._await_reply(connection)
                response = connection.getresponse()
                if response.status >= 400:
                    raise _reply_error(response, is_generation=body is not None)
        except BaseException:
            connection.hang_up()
            raise
        return Stream(connection, response)

    def _with_field(self, answer: dict[str, Any], name: str | None) -> dict[str, Any]:
        if name is not None and answer.get(name) in (None, ""):
            raise UnusableAnswer(f"it has no `{name}`", self.address)
        return answer

    def _call(
        self, method: str, path: str, body: dict[str, Any] | None, *, is_patient: bool = False
    ) -> dict[str, Any]:
        content = self._read(method, path, body, is_patient=is_patient)
        with _explained(self.address):
            return _object(json.loads(content), path, self.address)

    def _read(
        self, method: str, path: str, body: dict[str, Any] | None, *, is_patient: bool = False
    ) -> bytes:
        connection = _Connection(self.address, self.timeout_s)
        try:
            with _explained(self.address):
                _request(connection, method, path, body)
                if is_patient:
                    self._await_reply(connection)
                response = connection.getresponse()
                if response.status >= 400:
                    raise _reply_error(response)
                return response.read()
        finally:
            connection.hang_up()

    def _await_reply(self, connection: _Connection) -> None:
        """Let a reply begin late; if it has not begun after `timeout_s`, tell of it."""
        if self._on_silence is not None and _is_silent(connection, self.timeout_s):
            self._on_silence()
            connection.sock.settimeout(None)


class Stream:
    """An open reply, one dictionary per event. Closing it early makes the daemon cancel."""

    def __init__(self, connection: _Connection, response: http.client.HTTPResponse) -> None:
        self._connection = connection
        self._response = response
        self._is_sse = response.headers.get_content_type() == "text/event-stream"
        self.request_id = response.headers.get("x-request-id")

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
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
            if event.get("error") is not None:
                raise GenerationFailed(_message(event["error"]))
            yield event
        if self._is_sse:
            raise GenerationFailed("the daemon closed the connection early", hint=_CUT)

    def close(self) -> None:
        """End the stream and its connection."""
        self._response.close()
        self._connection.hang_up()

    def _data(self) -> Iterator[bytes]:
        try:
            for line in self._response:
                if not self._is_sse and line.strip():
                    yield line
                elif line.startswith(b"data:"):
                    yield line[5:].strip()
        except (OSError, http.client.HTTPException) as error:
            raise GenerationFailed("the connection broke before the end", hint=_CUT) from error


class _Connection(http.client.HTTPConnection):
    """Speaks HTTP on a dialled line."""

    def __init__(self, address: Address, timeout_s: float | None) -> None:
        super().__init__(address.host if isinstance(address, TcpAddress) else "localhost")
        self._address = address
        self._timeout_s = timeout_s
        self._line: DaemonLine | None = None

    def connect(self) -> None:
        self._line = self._address.dial(self._timeout_s)
        self.sock = self._line.socket

    def hang_up(self) -> None:
        """Close for good; http.client calls close() while it still reads the reply."""
        self.close()
        if self._line is not None:
            self._line.hang_up()

    @property
    def key(self) -> str | None:
        """Return the API key; None for a Unix socket, where the daemon sees the user."""
        return self._address.shown_key() if isinstance(self._address, TcpAddress) else None


def _with_query(path: str, query: Mapping[str, str]) -> str:
    return f"{path}?{urlencode(query, errors=_BYTES)}" if query else path


def _send(
    connection: _Connection, method: str, path: str, body: dict[str, Any] | None
) -> http.client.HTTPResponse:
    _request(connection, method, path, body)
    return connection.getresponse()


def _is_silent(connection: _Connection, patience_s: float) -> bool:
    """Say whether no reply has come within `patience_s`."""
    waiting = select.poll()
    waiting.register(connection.sock, select.POLLIN)
    return not waiting.poll(patience_s * 1000)


def _request(connection: _Connection, method: str, path: str, body: dict[str, Any] | None) -> None:
    payload = None if body is None else json.dumps(body).encode()
    headers = {} if body is None else {"Content-Type": "application/json"}
    if key := connection.key:
        headers["Authorization"] = f"Bearer {key}"
    connection.request(method, path, payload, headers)


def _reply_error(response: http.client.HTTPResponse, *, is_generation: bool = False) -> ClientError:
    try:
        error = json.loads(response.read())["error"]
        message, code = _message(error), error.get("code")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        message, code = f"HTTP {response.status} {response.reason}", None
    if is_generation and response.status >= 500 and response.status != 503:
        return GenerationFailed(message)
    return ReplyError(message, status=response.status, code=code)


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except (ValueError, RecursionError) as error:
        what = "the daemon sent something that is not JSON"
        raise GenerationFailed(what, hint=_NO_PENSTOCK) from error
    if not isinstance(event, dict):
        raise GenerationFailed("the daemon sent something that is no object", hint=_NO_PENSTOCK)
    return event


def _object(reply: Any, path: str, address: Address) -> dict[str, Any]:
    """Return a reply of status 200.

    Raises:
        ClientError: it is no JSON object, or an error's.
    """
    if not isinstance(reply, dict):
        raise UnusableAnswer("it is not a JSON object", address)
    if isinstance(error := reply.get("error"), dict):  # a request has a text there
        raise ClientError(_message(error), where=path, hint=_NO_PENSTOCK)
    return reply


def _message(error: Any) -> str:
    return str(error["message"] if isinstance(error, dict) and "message" in error else error)


def start_hint(socket: Path | None) -> str:
    """Say how the daemon of a socket is started; None: it is asked over TCP."""
    command = "penstock serve"
    if socket == paths.SYSTEM_SOCKET and paths.has_unit():
        command = f"systemctl start {paths.SOCKET_UNIT_NAME} {paths.UNIT_NAME}"
    return f"start it with '{command}', or say where it is with --host"


@contextmanager
def _explained(address: Address) -> Iterator[None]:
    """Turn what the line and the reply can do wrong into words and exit codes."""
    where = str(address)
    start_it = start_hint(address.path if isinstance(address, UnixAddress) else None)
    try:
        yield
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DaemonAbsent(
            "the daemon is not running (no such socket)", where=where, hint=start_it
        ) from error
    except ConnectionRefusedError as error:
        raise DaemonAbsent(
            "the daemon is not running (connection refused)", where=where, hint=start_it
        ) from error
    except PermissionError as error:
        raise PermissionRefused(
            "permission denied: you are not in the socket's group",
            where=where,
            hint=JOIN_GROUP,
        ) from error
    except TimeoutError as error:
        hint = "it is overloaded or hangs; `penstock doctor` and its journal say more"
        raise DaemonUnreachable("the daemon does not answer", where=where, hint=hint) from error
    except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
        is_ssh = isinstance(address, SshAddress)
        hint = "ssh or the remote penstock printed the reason above" if is_ssh else ""
        if hasattr(error, "verify_message"):  # ssl's own error, without importing ssl
            hint = _CERTIFICATE
        raise DaemonUnreachable(f"no usable reply ({error})", where=where, hint=hint) from error
