"""Settings of the daemon: flag, environment, TOML file, default.

Owns: every setting's name, allowed values, default and meaning. The only file that knows TOML.
Called by: cli (serve, and every client verb for the socket), boot, http.access, daemon.
Invariant: a ServeConfig that exists is valid; every refusal names the setting, its value, what is
allowed and where it was set, to the line.
Never: imports anything slow: each `penstock status` pays for it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from appliance import paths
from appliance.models.names import HubName, a_model
from appliance.setting_kinds import (
    a_duration,
    a_flag,
    a_path,
    an_address,
    at_least,
    is_meant,
    names,
    one_of,
    parse_bytes,
    some_devices,
)
from appliance.wanted_workers import ONE_OF_EACH, WantedWorkers, parse_place
from engine.errors import ConfigError

DEFAULT = "default"
PREFIX = "PENSTOCK_"
ROLES = ("elastic", "static", "colocated")
TOOL_PARSERS = (
    *("hermes", "qwen3_coder", "mistral", "mistral_list", "llama", "pythonic", "granite"),
    *("harmony", "deepseek_v3", "deepseek_v31", "deepseek_v32", "glm", "gemma", "functiongemma"),
)
"""Those of api.tool_format, which a test compares: importing that here would be slow."""
REASONING_PARSERS = ("think", "mistral", "gemma", "granite")
DEFAULT_OPERATORS = ("@penstock-admin",)
"""The unit's group; most machines have none of its name."""


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """Everything the daemon is told; built by load(), or by hand in tests. See SETTINGS."""

    socket: Path
    state_dir: Path
    model: Path | HubName | None = None
    dtype: str = "auto"
    transport: str = "auto"
    roles: str = "auto"
    place: WantedWorkers = ONE_OF_EACH
    devices: str = "auto"
    eager: bool = False
    slo_ttft_ms: int = 0
    slo_itl_ms: int = 0
    max_model_len: int | None = None
    kv_memory_bytes: int | None = None
    listen: tuple[str, int] | None = None
    api_keys: Path | None = None
    operators: tuple[str, ...] = DEFAULT_OPERATORS
    viewers: tuple[str, ...] = ()
    max_queued: int = 512
    max_queued_tokens: int = 1 << 20
    max_connections: int = 1024
    max_body_bytes: int = 8 << 20
    model_aliases: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"
    max_queue_wait_s: float = 60.0
    max_drain_s: float = 90.0
    log_text: bool = False
    log_keep_days: int = 30
    log_max_bytes: int = 2 << 30

    def __post_init__(self) -> None:
        if self.place != ONE_OF_EACH and self.roles == "colocated":
            raise ConfigError(
                "colocated roles have one worker, with all cores",
                where="place",
                hint="leave out --place, or --roles",
            )
        if self.transport in ("peer", "shm") and self.roles == "colocated":
            raise ConfigError(
                f"{self.transport!r} needs two workers: colocated roles have nothing to hand over",
                where="transport",
                hint="leave out --transport, or --roles",
            )

    @property
    def log_path(self) -> Path:
        """The request log's file."""
        return log_path(self.state_dir)


class Setting(NamedTuple):
    """One setting: how it is read, what it means, whether a running daemon can change it."""

    parse: Callable[[object], object]
    about: str
    is_reloadable: bool = False
    field: str | None = None
    """Of ServeConfig, where it is not the setting's own name."""


SETTINGS: Mapping[str, Setting] = {
    "model": Setting(
        a_model,
        "model to serve: a folder, or a name on the hub such as Qwen/Qwen3-0.6B; without one the "
        "embedded starter model",
    ),
    "dtype": Setting(
        one_of("auto", "float32", "bfloat16", "float16"),
        "dtype to serve in: auto, float32, bfloat16 or float16",
    ),
    "transport": Setting(
        one_of("auto", "alias", "peer", "shm"),
        "how the KV is handed over: auto, alias (nothing moves), peer or shm",
    ),
    "roles": Setting(
        one_of("auto", *ROLES),
        "workers: elastic lets each do what pays, static has one for each phase, colocated one; "
        "auto is elastic on CPU cores and colocated on a GPU",
    ),
    "place": Setting(
        parse_place,
        "workers by role: 2x1, or their cores as 'prefill=0,1 decode=2-3'; auto is one of each",
    ),
    "devices": Setting(some_devices, "what to serve on: auto, cpu, or a GPU by name, as gpu0"),
    "eager": Setting(a_flag, "launch decode steps on a GPU piece by piece: true or false"),
    "slo_ttft_ms": Setting(
        at_least(0, "milliseconds"),
        "target for the first token, and for a turn; 0 is relative to the prompt's own time",
        True,
    ),
    "slo_itl_ms": Setting(
        at_least(0, "milliseconds"),
        "target for the gaps between tokens, likewise; 0 is relative to an undisturbed step",
        True,
    ),
    "max_model_len": Setting(
        at_least(2, "tokens"), "most tokens of a prompt and its reply together"
    ),
    "kv_memory": Setting(parse_bytes, "memory for KV blocks, as 2GiB", field="kv_memory_bytes"),
    "socket": Setting(a_path, "the Unix socket to listen on"),
    "state_dir": Setting(a_path, "folder for the request log"),
    "listen": Setting(an_address, "loopback TCP beside the socket, as 127.0.0.1:8000"),
    "api_keys": Setting(a_path, "file of the keys that clients on TCP need", True),
    "operators": Setting(
        names, "users and @groups who may cancel anything and drain, with commas", True
    ),
    "viewers": Setting(names, "users and @groups who may only look, with commas", True),
    "max_queued": Setting(at_least(1, "sequences"), "most sequences that may wait", True),
    "max_queued_tokens": Setting(at_least(1, "tokens"), "most prompt tokens that may wait", True),
    "max_connections": Setting(at_least(1, "connections"), "most connections open at once", True),
    "max_body": Setting(parse_bytes, "largest body of a request, as 8MiB", True, "max_body_bytes"),
    "model_aliases": Setting(
        names, "other names of the model for clients, with commas; * is any text, as claude-*"
    ),
    "cors_origins": Setting(
        names,
        "web pages that may use the API in a browser, as https://app.example; * is all",
        True,
    ),
    "tool_parser": Setting(
        one_of("auto", *TOOL_PARSERS), "how the model writes tool calls; auto: by its chat template"
    ),
    "reasoning_parser": Setting(
        one_of("auto", "none", *REASONING_PARSERS), "how the model marks its reasoning, likewise"
    ),
    "max_queue_wait": Setting(
        a_duration,
        "longest wait for a turn, as 60s: who would wait longer is refused at once, with a time to "
        "come back; 0 lets everybody wait",
        True,
        "max_queue_wait_s",
    ),
    "max_drain": Setting(
        a_duration,
        "longest drain at a stop, as 90s, before replies are ended with a word; 0: no limit",
        True,
        "max_drain_s",
    ),
    "log_text": Setting(a_flag, "keep prompts in the request log: true or false", True),
    "log_keep_days": Setting(
        at_least(1, "days"), "days after which the log forgets a request", True
    ),
    "log_max_size": Setting(
        parse_bytes,
        "largest request log, as 2GiB; beyond it the oldest are forgotten",
        True,
        "log_max_bytes",
    ),
}
"""By the one name that a setting has in the file, as a flag and as PENSTOCK_NAME."""


OTHER_VARIABLES = ("PENSTOCK_CONFIG", "PENSTOCK_HOST", "PENSTOCK_API_KEY")
"""The file of settings, and what clients read."""


class Found(NamedTuple):
    """A setting as it stands, and the place that set it: a flag, a variable, a line, `default`."""

    name: str
    value: Any
    origin: str


class _Sources(NamedTuple):
    """Where settings come from, in order."""

    flags: Mapping[str, str | None]
    environ: Mapping[str, str]
    file: Path | None
    table: Mapping[str, object]
    text: str

    def lookup(self, name: str) -> Found | None:
        """The first source that sets it, unparsed; None leaves the default."""
        if (flag := self.flags.get(name)) is not None:
            return Found(name, flag, f"--{name.replace('_', '-')}")
        if value := self.environ.get(variable(name)):
            return Found(name, value, variable(name))
        if name in self.table:
            return Found(name, self.table[name], f"{self.file}:{_line_of(self.text, name)}: {name}")
        return None

    def parsed(self, name: str) -> Found | None:
        """The same with its value checked."""
        found = self.lookup(name)
        if found is None:
            return None
        try:
            return found._replace(value=SETTINGS[name].parse(found.value))
        except ValueError as error:
            raise ConfigError(
                f"{found.value!r} is not allowed; give {error}", where=found.origin
            ) from error


def load(flags: Mapping[str, str | None], environ: Mapping[str, str] = os.environ) -> ServeConfig:
    """Build the daemon's configuration.

    Args:
        flags: from the command line, by setting name, and `config`, the file; None is not given.
        environ: PENSTOCK_* settings, XDG and systemd directories.

    Raises:
        ConfigError: a value or file is wrong.
    """
    sources = _read(flags, environ)
    given = [found for name in SETTINGS if (found := sources.parsed(name)) is not None]
    values = {SETTINGS[name].field or name: value for name, value, _ in given}
    values.setdefault("socket", _socket(sources).value)
    values.setdefault("state_dir", paths.default_state_dir(environ))
    return ServeConfig(**values)


def explain(
    flags: Mapping[str, str | None], environ: Mapping[str, str] = os.environ
) -> list[Found]:
    """Every setting as load() would have it, with its origin.

    Where the daemon that a client would ask is the unit's, its folders are what is shown.

    Raises:
        ConfigError: as load().
    """
    environ = _environ_of_asked(flags, environ)
    config, sources = load(flags, environ), _read(flags, environ)
    return [
        Found(name, getattr(config, setting.field or name), found.origin if found else DEFAULT)
        for name, setting in SETTINGS.items()
        for found in (sources.lookup(name),)
    ]


def unknown_variables(environ: Mapping[str, str] = os.environ) -> list[str]:
    """A sentence for each PENSTOCK_* variable that sets nothing, as those that are misspelt."""
    known = {*(variable(name) for name in SETTINGS), *OTHER_VARIABLES}
    unknown = sorted(name for name in environ if name.startswith(PREFIX) and name not in known)
    about = "is set, and is no setting; "
    return [f"{name} {about}{is_meant(name, known)}".rstrip("; ") for name in unknown]


def variable(name: str) -> str:
    """The environment variable of a setting."""
    return f"{PREFIX}{name.upper()}"


def changes(old: ServeConfig, new: ServeConfig) -> tuple[list[str], list[str]]:
    """Settings that differ: those that a running daemon can take over, and those it cannot."""
    changed = [
        name
        for name, setting in SETTINGS.items()
        if getattr(old, setting.field or name) != getattr(new, setting.field or name)
    ]
    can = [name for name in changed if SETTINGS[name].is_reloadable]
    return can, [name for name in changed if name not in can]


def take_over(old: ServeConfig, new: ServeConfig) -> ServeConfig:
    """The new configuration as far as a running daemon can have it."""
    kept = {field.name: getattr(old, field.name) for field in fields(old)}
    for name in changes(old, new)[0]:
        field_name = SETTINGS[name].field or name
        kept[field_name] = getattr(new, field_name)
    return ServeConfig(**kept)


def load_asked(
    flags: Mapping[str, str | None], environ: Mapping[str, str] = os.environ
) -> ServeConfig:
    """load(), of the daemon that a client here would ask: the unit's, or one's own."""
    return load(flags, _environ_of_asked(flags, environ))


def _environ_of_asked(
    flags: Mapping[str, str | None], environ: Mapping[str, str]
) -> Mapping[str, str]:
    found = _read(flags, environ).parsed("socket")
    asked = paths.client_socket(environ) if found is None else found.value
    if asked != paths.SYSTEM_SOCKET or "STATE_DIRECTORY" in environ:
        return environ
    state, run = str(paths.SYSTEM_STATE_DIR), str(paths.SYSTEM_SOCKET.parent)
    return {**environ, "STATE_DIRECTORY": state, "RUNTIME_DIRECTORY": run}


def state_dir(flag: str | None, environ: Mapping[str, str] = os.environ) -> Path:
    """Where the request log is of the daemon that a client here would ask."""
    environ = _environ_of_asked({}, environ)
    found = _read({"state_dir": flag}, environ).parsed("state_dir")
    return paths.default_state_dir(environ) if found is None else Path(found.value)


def log_path(folder: Path) -> Path:
    """The request log's file in a state folder."""
    return folder / "requests.db"


def configured_socket(environ: Mapping[str, str]) -> Path | None:
    """The socket that the config file names; None if it names none.

    Raises:
        ConfigError: the config file is wrong.
    """
    found = _read({}, environ).parsed("socket")
    return None if found is None else Path(found.value)


def _socket(sources: _Sources) -> Found:
    found = sources.parsed("socket")
    return found or Found("socket", paths.default_socket(sources.environ), DEFAULT)


def _read(flags: Mapping[str, str | None], environ: Mapping[str, str]) -> _Sources:
    """The sources, with the config file that applies; no file is an empty table."""
    named = flags.get("config") or environ.get("PENSTOCK_CONFIG")
    path = a_path(named) if named else paths.config_file(environ)
    if path is None:
        return _Sources(flags, environ, None, {}, "")
    import tomllib  # most machines have no file, and every client verb passes here

    try:
        text = path.read_text(encoding="utf-8")
        table = tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"cannot read: {error.strerror}", where=str(path)) from error
    except (ValueError, RecursionError) as error:  # malformed (names its line) or not UTF-8
        raise ConfigError(f"not valid TOML: {error}", where=str(path)) from error
    for key in table:
        if key not in SETTINGS:
            raise ConfigError(
                f"unknown setting {key!r}",
                where=f"{path}:{_line_of(text, key)}",
                hint=f"{is_meant(key, SETTINGS)}the settings are {', '.join(sorted(SETTINGS))}",
            )
    return _Sources(flags, environ, path, table, text)


def _line_of(text: str, key: str) -> int:
    """The line on which a key of the file's one flat table begins."""
    name = re.escape(key)
    start = re.compile(rf"""\s*\[*\s*["']?{name}["']?\s*[\].=]""")
    numbered = enumerate(text.splitlines(), start=1)
    return next((number for number, line in numbered if start.match(line)), 1)
