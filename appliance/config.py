"""Settings of the daemon, and where the socket is: flag, environment, TOML file, default.

Owns: every setting's name, allowed values and default. The only file that knows TOML.
Called by: cli (serve, and every client verb for the socket), boot, daemon.
Invariant: a ServeConfig that exists is valid; every refusal names the setting and where it was set.
Never: imports anything slow: each `penstock status` pays for it.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

from engine.errors import ConfigError

SYSTEM_CONFIG = Path("/etc/penstock/penstock.toml")
SYSTEM_SOCKET = Path("/run/penstock/penstock.sock")
SOCKET_NAME = "penstock.sock"
TEMPORARY_DIR = Path("/tmp")
LOOPBACK_HOSTS = ("127.0.0.1", "[::1]", "localhost")

_T = TypeVar("_T")
_BYTES = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)\s*(?:([KMGT])(iB|B)?|B)?", re.IGNORECASE)
_MIN_KV_MEMORY_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """Everything the daemon is told; built by load(), or by hand in tests."""

    socket: Path
    state_dir: Path
    cache_dir: Path
    model: Path | None = None
    """A checkpoint folder; None serves the embedded default."""
    dtype: str = "auto"
    """`auto`, `float32`, `bfloat16` or `float16`."""
    transport: str = "auto"
    """`auto`, `alias` or `shm`; auto is alias where there is a handoff."""
    roles: str = "static"
    """`static` or `colocated`."""
    max_model_len: int | None = None
    kv_memory_bytes: int | None = None
    listen: tuple[str, int] | None = None
    """A loopback address and port for TCP; None is the socket alone."""
    api_keys: Path | None = None
    """The file of the keys that TCP clients need."""
    operators: tuple[str, ...] = ("@penstock-admin",)
    """Users and @groups who may do everything; root and the daemon's own user always may."""
    viewers: tuple[str, ...] = ()
    """Users and @groups who may only look."""
    max_queued: int = 512
    """Sequences that may wait."""
    max_queued_tokens: int = 1 << 20
    """Prompt tokens that may wait."""
    max_connections: int = 512
    max_body_bytes: int = 8 << 20
    log_text: bool = False
    """Keep prompt text in the request log."""
    log_keep_days: int = 30
    log_max_bytes: int = 2 << 30
    """Beyond either the oldest rows of the request log are deleted."""

    def __post_init__(self) -> None:
        if self.transport == "shm" and self.roles == "colocated":
            raise ConfigError(
                "'shm' needs roles 'static': colocated has nothing to hand over",
                where="transport",
                hint="leave out --transport, or serve with --roles static",
            )

    @property
    def log_path(self) -> Path:
        """The request log's file."""
        return log_path(self.state_dir)


def log_path(folder: Path) -> Path:
    """The request log's file in a state folder."""
    return folder / "requests.db"


class _Setting(NamedTuple):
    """One value and the place that set it, for error messages."""

    value: object
    origin: str


def load(flags: Mapping[str, str | None], environ: Mapping[str, str] = os.environ) -> ServeConfig:
    """Build the daemon's configuration.

    Args:
        flags: from the command line, by setting name; None is a flag not given.
        environ: PENSTOCK_* settings, XDG and systemd directories.

    Raises:
        ConfigError: a value or file is wrong.
    """
    path, table = _read_toml(environ)
    parsed: dict[str, object] = {}
    for name, parse in _PARSERS.items():
        setting = _lookup(name, flags.get(name), environ, table, path)
        if setting is not None:
            parsed[name] = _checked(parse, setting)
    for name in ("kv_memory", "max_body", "log_max_size"):
        if name in parsed:
            parsed[_FIELD_BY_SIZE[name]] = parsed.pop(name)
    parsed["socket"] = socket_path(flags.get("socket"), environ)
    parsed.setdefault("state_dir", _state_dir(environ))
    parsed.setdefault("cache_dir", _cache_dir(environ))
    return ServeConfig(**parsed)  # type: ignore[arg-type]  # each parser returns its field's type


def state_dir(flag: str | None, environ: Mapping[str, str] = os.environ) -> Path:
    """Where the request log is, as serve would choose it."""
    path, table = _read_toml(environ)
    setting = _lookup("state_dir", flag, environ, table, path)
    return _state_dir(environ) if setting is None else _checked(_path, setting)


def socket_path(flag: str | None, environ: Mapping[str, str] = os.environ) -> Path:
    """Where the socket is; the daemon and its clients look in this same order.

    --socket, PENSTOCK_SOCKET, the config file, systemd's RUNTIME_DIRECTORY, the system socket if
    it exists, XDG_RUNTIME_DIR, a folder of this user's in /tmp. The file is not read unless needed.

    Raises:
        ConfigError: the config file is wrong, or the folder in /tmp is someone else's.
    """
    if flag or environ.get("PENSTOCK_SOCKET"):
        return _path(flag or environ["PENSTOCK_SOCKET"])
    path, table = _read_toml(environ)
    setting = _lookup("socket", None, environ, table, path)
    if setting is not None:
        return _checked(_path, setting)
    if runtime := _systemd_dir(environ, "RUNTIME_DIRECTORY"):
        return runtime / SOCKET_NAME
    if os.path.exists(SYSTEM_SOCKET):
        return SYSTEM_SOCKET
    if runtime_home := environ.get("XDG_RUNTIME_DIR"):
        return Path(runtime_home, "penstock", SOCKET_NAME)
    folder = _own_temporary_dir()
    if os.path.lexists(folder):
        _check_private(folder)
    return folder / SOCKET_NAME


def prepare_directories(config: ServeConfig) -> None:
    """Create the folders that the daemon writes to; those that exist stay as they are.

    Raises:
        ConfigError: one cannot be created.
    """
    for folder in (config.socket.parent, config.state_dir, config.cache_dir):
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"cannot create the folder: {error.strerror}",
                where=str(folder),
                hint="choose others with --socket and --state-dir",
            ) from error
    if config.socket.parent == _own_temporary_dir():
        _check_private(config.socket.parent)


def parse_bytes(text: object) -> int:
    """`2GiB`, `512MiB`, `4G` and plain bytes; K M G T are powers of 1024, KB MB GB TB of 1000.

    Raises:
        ValueError: with what is allowed.
    """
    match = _BYTES.fullmatch(str(text).strip())
    if match is None or isinstance(text, bool):
        raise ValueError("a size such as 2GiB, 512MiB or 4G")
    number, unit, suffix = match.groups()
    base = 1000 if (suffix or "").lower() == "b" else 1024
    num_bytes = int(float(number) * base ** (" KMGT".index(unit.upper()) if unit else 0))
    if num_bytes < _MIN_KV_MEMORY_BYTES:
        raise ValueError("a size of 1MiB or more")
    return num_bytes


def _read_toml(environ: Mapping[str, str]) -> tuple[Path | None, Mapping[str, object]]:
    """The config file that applies and what it says; no file is an empty table."""
    named = environ.get("PENSTOCK_CONFIG")
    home = _xdg(environ, "XDG_CONFIG_HOME", ".config") / "penstock" / "penstock.toml"
    found = next((path for path in (SYSTEM_CONFIG, home) if os.path.exists(path)), None)
    path = _path(named) if named else found
    if path is None:
        return None, {}
    import tomllib  # most machines have no file, and every client verb passes here

    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read: {error.strerror}", where=str(path)) from error
    except ValueError as error:  # malformed TOML (names its line) or not UTF-8
        raise ConfigError(f"not valid TOML: {error}", where=str(path)) from error
    for key in table:
        if key not in _PARSERS:
            raise ConfigError(
                f"unknown setting {key!r}",
                where=str(path),
                hint=f"the settings are {', '.join(sorted(_PARSERS))}",
            )
    return path, table


def _lookup(
    name: str,
    flag: str | None,
    environ: Mapping[str, str],
    table: Mapping[str, object],
    path: Path | None,
) -> _Setting | None:
    variable = f"PENSTOCK_{name.upper()}"
    if flag is not None:
        return _Setting(flag, f"--{name.replace('_', '-')}")
    if environ.get(variable):
        return _Setting(environ[variable], variable)
    if name in table:
        return _Setting(table[name], f"{path}: {name}")
    return None


def _checked(parse: Callable[[object], _T], setting: _Setting) -> _T:
    try:
        return parse(setting.value)
    except ValueError as error:
        raise ConfigError(
            f"{setting.value!r} is not allowed; give {error}", where=setting.origin
        ) from error


def _one_of(*allowed: str) -> Callable[[object], str]:
    def parse(value: object) -> str:
        if value not in allowed:
            raise ValueError(f"one of {', '.join(allowed)}")
        return str(value)

    return parse


def _path(value: object) -> Path:
    if not isinstance(value, (str, Path)) or not str(value):
        raise ValueError("a path")
    return Path(value).expanduser().absolute()


def _model_len(value: object) -> int:
    text = str(value)
    if not text.isascii() or not text.isdigit() or int(text) < 2:
        raise ValueError("a number of tokens, 2 or more")
    return int(text)


def _count(value: object) -> int:
    text = str(value)
    if isinstance(value, bool) or not text.isascii() or not text.isdigit() or len(text) > 12:
        raise ValueError("a whole number from 1 to 999999999999")
    if not int(text):
        raise ValueError("a whole number of 1 or more")
    return int(text)


def _address(value: object) -> tuple[str, int]:
    host, colon, port = str(value).rpartition(":")
    if not colon or host not in LOOPBACK_HOSTS or not port.isdigit() or len(port) > 5:
        raise ValueError("a loopback address and port, such as 127.0.0.1:8000")
    if int(port) > 65535:
        raise ValueError("a port up to 65535")
    return host.strip("[]"), int(port)


def _names(value: object) -> tuple[str, ...]:
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError("a list of user names and @groups")
    return tuple(name.strip() for name in names if name.strip())


def _flag(value: object) -> bool:
    words = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    if str(value).lower() not in words:
        raise ValueError("true or false")
    return words[str(value).lower()]


_PARSERS: Mapping[str, Callable[[object], object]] = {
    "model": _path,
    "dtype": _one_of("auto", "float32", "bfloat16", "float16"),
    "transport": _one_of("auto", "alias", "shm"),
    "roles": _one_of("static", "colocated"),
    "socket": _path,
    "state_dir": _path,
    "cache_dir": _path,
    "max_model_len": _model_len,
    "kv_memory": parse_bytes,
    "listen": _address,
    "api_keys": _path,
    "operators": _names,
    "viewers": _names,
    "max_queued": _count,
    "max_queued_tokens": _count,
    "max_connections": _count,
    "max_body": parse_bytes,
    "log_text": _flag,
    "log_keep_days": _count,
    "log_max_size": parse_bytes,
}
"""Every setting under the one name it has in the file, as a flag and as PENSTOCK_NAME."""

_FIELD_BY_SIZE = {
    "kv_memory": "kv_memory_bytes",
    "max_body": "max_body_bytes",
    "log_max_size": "log_max_bytes",
}
"""Sizes are written with their unit, and kept in bytes."""


def _state_dir(environ: Mapping[str, str]) -> Path:
    given = _systemd_dir(environ, "STATE_DIRECTORY")
    return given or _xdg(environ, "XDG_STATE_HOME", ".local/state") / "penstock"


def _cache_dir(environ: Mapping[str, str]) -> Path:
    given = _systemd_dir(environ, "CACHE_DIRECTORY")
    return given or _xdg(environ, "XDG_CACHE_HOME", ".cache") / "penstock"


def _systemd_dir(environ: Mapping[str, str], variable: str) -> Path | None:
    """What systemd made for the unit: a list, separated by colons; ours has one entry."""
    first = environ.get(variable, "").split(":")[0]
    return Path(first) if first else None


def _xdg(environ: Mapping[str, str], variable: str, default: str) -> Path:
    """The standard says to ignore a relative path."""
    given = environ.get(variable, "")
    return Path(given) if given.startswith("/") else Path.home() / default


def _own_temporary_dir() -> Path:
    return TEMPORARY_DIR / f"penstock-{os.getuid()}"


def _check_private(folder: Path) -> None:
    """Refuse a folder in a place where everyone may write, unless it is ours alone.

    Whoever made it could put a socket of theirs there and read every prompt.
    """
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise ConfigError(
            f"not a folder of yours (owner uid {status.st_uid})",
            where=str(folder),
            hint="remove it, or choose another socket with --socket",
        )
    if status.st_mode & 0o077:
        raise ConfigError(
            f"other users may enter it (mode {stat.S_IMODE(status.st_mode):04o})",
            where=str(folder),
            hint=f"chmod 700 {folder}",
        )
