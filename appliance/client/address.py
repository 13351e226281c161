"""Parse a daemon's address (Unix socket, TCP or ssh), and connect to it.

Invariant: each kind of address yields a line that carries plain HTTP to one daemon.
"""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from appliance.configuration import paths
from appliance.configuration.setting_kinds import a_path, is_loopback
from engine.errors import ConfigError, PenstockError, UsageError

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

    Warn = Callable[[ConfigError], None]

DEFAULT_PORT = 8000
HTTPS_PORT = 443
_HOST_AND_PORT = re.compile(r"(\[[0-9a-fA-F:]+\]|[\w.-]+):\d{1,5}", re.ASCII)
_NO_HOST = re.compile(r"[\x00-\x20\x7f]")
_SECRET_PART = re.compile(r"^(\w+://)?.*@", re.DOTALL)
_KEY = re.compile(r"[!-~]+")
"""What an Authorization header can carry."""
SSH_PATIENCE_S = 30.0
"""Maximum seconds to log in by ssh, which is slower than any daemon's answer."""


class DaemonLine(NamedTuple):
    """An open connection, and the process that carries it, if any."""

    socket: socket.socket
    process: subprocess.Popen[bytes] | None = None

    def hang_up(self) -> None:
        """Close the connection; its process ends when its input does."""
        self.socket.close()
        if self.process is not None:
            import subprocess  # most lines need none, and every client verb passes here

            try:
                self.process.wait(1)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


@dataclass(frozen=True, slots=True)
class UnixAddress:
    """A daemon on this machine, by its socket."""

    path: Path

    def __str__(self) -> str:
        return f"unix://{self.path}"

    def dial(self, timeout_s: float | None) -> DaemonLine:
        """Open a connection to the daemon.

        Raises:
            OSError: the daemon cannot be reached; dial() of the other addresses raises it, too.
        """
        line = DaemonLine(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        line.socket.settimeout(timeout_s)
        try:
            line.socket.connect(str(self.path))
        except BaseException:
            line.hang_up()
            raise
        return line

    def listener_pid(self) -> int:
        """Return the pid that opened the socket: the daemon's, or systemd's.

        Raises:
            OSError: nothing listens there.
        """
        line = self.dial(None)
        try:
            credentials = line.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        finally:
            line.hang_up()
        return int.from_bytes(credentials[:4], sys.byteorder)


INSECURE = "PENSTOCK_INSECURE"
"""If set, API keys go to other machines over plain HTTP, too."""


class KeyInClear(PenstockError):
    """A key would cross a network in clear."""

    exit_code = ConfigError.exit_code


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """A daemon that listens on TCP and asks for a key."""

    host: str
    port: int
    is_tls: bool = False
    key: str | None = field(default=None, repr=False)
    """API key in http://x:KEY@host, which overrides PENSTOCK_API_KEY. Never printed."""

    def shown_key(self) -> str | None:
        """Return the API key to send, if there is one.

        Raises:
            ConfigError: no header can carry it; the error does not quote it.
        """
        key = self.key or os.environ.get("PENSTOCK_API_KEY") or None
        if key is not None and not _KEY.fullmatch(key):
            where = "PENSTOCK_HOST" if self.key else "PENSTOCK_API_KEY"
            raise ConfigError("the API key has characters that no key has", where=where)
        return key

    def __str__(self) -> str:
        scheme = "https" if self.is_tls else "http"
        return f"{scheme}://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    def dial(self, timeout_s: float | None) -> DaemonLine:
        """Open a connection to the daemon."""
        connection = socket.create_connection((self.host, self.port), timeout_s)
        try:
            self._check_way(connection.getpeername()[0])
        except PenstockError:
            connection.close()
            raise
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self.is_tls:
            import ssl  # few need it, and it takes a moment

            # trusted roots: this machine's, and SSL_CERT_FILE's
            context = ssl.create_default_context()
            connection = context.wrap_socket(connection, server_hostname=self.host)
        return DaemonLine(connection)

    def _check_way(self, peer: str) -> None:
        """Refuse to send a key where others can read it; a name says little of the way.

        Raises:
            KeyInClear: over plain HTTP to another machine, without --insecure.
        """
        if self.is_tls or os.environ.get(INSECURE) or self.shown_key() is None:
            return
        if not is_loopback(peer):
            raise KeyInClear(
                "the API key would be sent in clear, so it was not",
                where=f"{self} ({peer})",
                hint=f"use https:// or ssh://; --insecure or {INSECURE}=1 sends it",
            )


@dataclass(frozen=True, slots=True)
class SshAddress:
    """A daemon on another machine: ssh runs `penstock dial-stdio` there."""

    destination: str
    """The destination for ssh: a host of ~/.ssh/config, optionally with a user."""
    port: int | None = None
    path: str = ""
    """The socket's path there; empty: from that machine's configuration."""

    def __str__(self) -> str:
        port = "" if self.port is None else f":{self.port}"
        return f"ssh://{self.destination}{port}{self.path}"

    def command(self, *verb: str, options: tuple[str, ...] = ()) -> list[str]:
        """Build the ssh command that runs a verb there, on that machine's socket."""
        import shlex

        port = [] if self.port is None else ["-p", str(self.port)]
        there = [*verb, *(["--host", self.path] if self.path else [])]
        quoted = [shlex.quote(word) for word in there]  # ssh hands them to a shell
        return ["ssh", *port, *options, "--", self.destination, "penstock", *quoted]

    def dial(self, timeout_s: float | None) -> DaemonLine:
        """Start ssh with one end of a socket pair as its input and output."""
        import subprocess

        ours, theirs = socket.socketpair()
        with theirs:
            try:
                command = self.command("dial-stdio", options=("-T",))
                process = subprocess.Popen(command, stdin=theirs.fileno(), stdout=theirs.fileno())
            except OSError as error:
                ours.close()
                raise ConnectionError(f"cannot run ssh: {error.strerror}") from error
        ours.settimeout(None if timeout_s is None else max(timeout_s, SSH_PATIENCE_S))
        return DaemonLine(ours, process)


Address = UnixAddress | TcpAddress | SshAddress


def is_of_this_machine(address: Address) -> bool:
    """Say whether the daemon runs on this machine: by its socket, or over loopback."""
    if isinstance(address, TcpAddress):
        return (
            address.host == "localhost" or address.host.startswith("127.") or address.host == "::1"
        )
    return isinstance(address, UnixAddress)


def find(
    host: str | None, environ: Mapping[str, str] = os.environ, warn: Warn | None = None
) -> Address:
    """Find the daemon's address for a client verb.

    It comes from --host, PENSTOCK_HOST, or socket_path(). Text that is not a URL is a socket's path
    or `host:port`.

    Args:
        warn: takes faults of the config file that do not concern the socket; None: they are raised.

    Raises:
        ConfigError: the text is no address, or the configuration file is wrong.
    """
    text = host or environ.get("PENSTOCK_HOST")
    is_url = text is not None and "://" in text
    if text and not is_url and _HOST_AND_PORT.fullmatch(text.rpartition("@")[2]):
        text, is_url = f"http://{text}", True
    if text is None or not is_url:
        return UnixAddress(socket_path(text, environ, warn))
    return parse(text, where="--host" if host else "PENSTOCK_HOST")


def socket_path(
    given: str | None, environ: Mapping[str, str] = os.environ, warn: Warn | None = None
) -> Path:
    """Find the path where clients look for the daemon's socket.

    It comes from --host, PENSTOCK_SOCKET, the config file, or paths.client_socket(). The file is
    only read if needed; `warn` as in find().

    Raises:
        ConfigError: the config file is wrong, or the folder in /tmp is another user's.
    """
    if given or environ.get("PENSTOCK_SOCKET"):
        return a_path(given or environ["PENSTOCK_SOCKET"])
    configured = None
    if environ.get("PENSTOCK_CONFIG") or paths.config_file(environ) is not None:
        # all settings, where most client verbs need none
        from appliance.configuration import client_settings

        configured = client_settings.configured_socket(environ, warn)
    return configured or paths.client_socket(environ)


def parse(text: str, *, where: str) -> Address:
    """Parse an address from its URL.

    Args:
        text: `unix:///path`, `http://[x:KEY@]host:port`, `https://[x:KEY@]host:port` or
            `ssh://[user@]host[:port][/path]`. HTTP URLs may end with `/v1`, like the base URL of
            OpenAI's API.
        where: the flag or variable that set it, for the error.

    Raises:
        ConfigError: it has another form.
    """
    from urllib.parse import unquote, urlsplit

    try:
        url = urlsplit(text)
        if _NO_HOST.search(url.netloc):
            raise _wrong(text, where)
        port, path = url.port, unquote(url.path)
    except ValueError:  # it may quote a key
        raise _wrong(text, where) from None
    if url.scheme == "unix" and not url.netloc and path:
        return UnixAddress(Path(path))
    if url.scheme in ("http", "https") and url.hostname and path.rstrip("/") in ("", "/v1"):
        if url.username and not url.password:
            raise _wrong(text, where)
        is_tls = url.scheme == "https"
        default = HTTPS_PORT if is_tls else DEFAULT_PORT
        key = unquote(url.password) if url.password else None
        return TcpAddress(url.hostname, default if port is None else port, is_tls, key)
    if url.scheme == "ssh" and url.hostname and not url.password:
        user = f"{unquote(url.username)}@" if url.username else ""
        return SshAddress(f"{user}{url.hostname}", port, path.rstrip("/"))
    raise _wrong(text, where)


def _wrong(text: str, where: str) -> ConfigError:
    kind = ConfigError if where.isupper() else UsageError
    return kind(
        f"{_SECRET_PART.sub(lambda found: f'{found[1] or str()}***@', text)!r} is not an address",
        where=where,
        hint="give unix:///path, http://127.0.0.1:8000, http://x:KEY@host or ssh://user@host",
    )
