"""Read the daemon's settings: flag, environment, TOML file, default.

Owns: the defaults of the settings and their sources; the folders that they name, and the folders'
modes. The only file that knows TOML.
Invariant: a ServeConfig that exists is valid; every error names the setting, its value, the allowed
values and its source, to the line.
Never: imports anything slow: each `penstock status` pays for it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from appliance.configuration import paths
from appliance.configuration.setting_kinds import a_path, is_loopback, is_meant
from appliance.configuration.settings import SETTINGS
from appliance.configuration.wanted_workers import ONE_OF_EACH, WantedWorkers
from appliance.models.names import (
    MODEL_SETTINGS,
    MODELS,
    OWN_NAMES,
    OWN_SETTINGS,
    HubName,
    a_model,
    model_name,
    read_tables,
)
from engine.errors import ConfigError, UsageError, refuse

DEFAULT = "default"
SSD_FOLDER = "kv"
"""The subfolder of the state folder for blocks on disk."""
Warn = Callable[[ConfigError], None]
_STATEMENT = re.compile(r"""\s*(\[|["']?[\w.-]+["']?\s*=)""")
"""Matches the beginning of a new TOML statement."""
PREFIX = "PENSTOCK_"
MAX_FILE_BYTES = 1 << 20
DEFAULT_OPERATORS = ("@penstock-admin",)
"""The unit's group; most machines have no such group."""


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """All settings of the daemon; built by load(), or by hand in tests. See SETTINGS."""

    socket: Path
    state_dir: Path
    model: Path | HubName | None = None
    dtype: str = "auto"
    weights: str = "stored"
    kv_dtype: str = "auto"
    exact: str = "auto"
    speculate: int | str = "auto"
    transport: str = "auto"
    roles: str = "auto"
    place: WantedWorkers = ONE_OF_EACH
    devices: str = "auto"
    eager: bool = False
    slo_ttft_ms: int = 0
    slo_itl_ms: int = 0
    max_model_len: int | None = None
    default_max_tokens: int | None = None
    kv_memory_bytes: int | None = None
    prefix_cache: bool = True
    cache_isolation: str = "none"
    dram_cache: int | str = "off"
    ssd_cache: int | str = "auto"
    ssd_dir: Path | None = None
    listen: tuple[str, int] | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    open_metrics: bool = False
    api_keys: Path | None = None
    auth: bool = True
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
    priorities: tuple[tuple[str, float], ...] = ()
    max_drain_s: float = 90.0
    log_text: bool = False
    log_keep_days: int = 30
    log_max_bytes: int = 2 << 30
    min_stay_s: float = 10.0
    keep_resident: int = 1
    keep_alive_s: float = 300.0
    models: Mapping[str, ServeConfig] = field(default_factory=dict)
    """The other models that a request may name, each with its own settings."""

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

        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError(
                "a certificate and its key go together",
                where="tls_cert" if self.tls_key is None else "tls_key",
                hint="name both: --tls-cert CHAIN.pem --tls-key KEY.pem",
            )
        if self.listen is not None and self.tls is None and not is_loopback(self.listen[0]):
            raise ConfigError(
                f"{self.listen[0]} is reached from beyond this machine, which needs TLS",
                where="listen",
                hint="add --tls-cert CHAIN.pem --tls-key KEY.pem, or listen on 127.0.0.1",
            )
        if not self.auth and (self.listen is None or self.is_open_to_network):
            raise ConfigError(
                "TCP without API keys is for a port on loopback",
                where="auth",
                hint="add --port 8000" if self.listen is None else "leave out --no-auth",
            )

    @property
    def max_drafted(self) -> int | None:
        """Guessed tokens per sequence in a decode step; None: as many as pay."""
        if isinstance(self.speculate, int):
            return self.speculate
        return None if self.speculate == "auto" else 0

    @property
    def tls(self) -> tuple[Path, Path] | None:
        """The certificate and key for TLS on TCP."""
        both = self.tls_cert, self.tls_key
        return None if both[0] is None or both[1] is None else (both[0], both[1])

    @property
    def is_open_to_network(self) -> bool:
        """Whether other machines can reach it."""
        return self.listen is not None and not is_loopback(self.listen[0])

    @property
    def ssd_folder(self) -> Path:
        """The folder of blocks on disk."""
        return self.ssd_dir or self.state_dir / SSD_FOLDER

    @property
    def log_path(self) -> Path:
        """The request log's file."""
        return log_path(self.state_dir)


OTHER_VARIABLES = (
    "PENSTOCK_CONFIG",
    "PENSTOCK_HOST",
    "PENSTOCK_API_KEY",
    "PENSTOCK_BUILD_KERNELS",
    "PENSTOCK_MEASURE",
)
"""Variables that are not settings, used by clients, setup.py and tests."""


class FoundSetting(NamedTuple):
    """A setting's value, and its source: a flag, a variable, a line, `default`."""

    name: str
    value: Any
    origin: str


class _Sources(NamedTuple):
    """The sources of settings, in order."""

    flags: Mapping[str, str | None]
    environ: Mapping[str, str]
    file: Path | None
    table: Mapping[str, object]
    text: str
    wrong: tuple[ConfigError, ...] = ()
    """Parts of the file that are not TOML or not a setting."""
    unread: Mapping[str, ConfigError] = MappingProxyType({})
    """The errors in place of a setting's value, by its name."""

    def lookup(self, name: str) -> FoundSetting | None:
        """Find the first source that sets it, unparsed; None: the default applies."""
        if (flag := self.flags.get(name)) is not None:
            option = "port" if name == "listen" and self.flags.get("port") else name
            option = "no-auth" if (name, str(flag).lower()) == ("auth", "false") else option
            return FoundSetting(name, flag, f"--{option.replace('_', '-')}")
        if value := self.environ.get(variable(name)):
            return FoundSetting(name, value, variable(name))
        if name in self.table:
            return FoundSetting(
                name, self.table[name], f"{self.file}:{_line_of(self.text, name)}: {name}"
            )
        return None

    def parser(self, name: str) -> Callable[[object], object]:
        """Return the parser of a setting; for models it knows the user's short names."""
        parse = SETTINGS[name].parse
        return partial(a_model, own_names=self.own_names) if parse is a_model else parse

    @property
    def own_names(self) -> dict[str, str]:
        """Read the file's table [short_names].

        Raises:
            ConfigError: it is not a table of names.
        """
        names = self.table.get(OWN_NAMES, {})
        if not isinstance(names, dict) or not all(isinstance(each, str) for each in names.values()):
            raise ConfigError(
                "short names are a table of texts",
                where=f"{self.file}:{_line_of(self.text, OWN_NAMES)}: {OWN_NAMES}",
                hint='as [short_names], then "coder:7b" = "Qwen/Qwen2.5-Coder-7B-Instruct"',
            )
        return names

    def place_of(self, where: str) -> str:
        """Return the source of the setting, path or table of an error; otherwise unchanged."""
        if where in SETTINGS:
            found = self.lookup(where)
            return where if found is None else found.origin
        if not where.startswith(f"{MODELS}."):
            return next((f"{each.origin}: {where}" for each in self._of_path(where)), where)
        return f"{self.file}:{_line_of(self.text, where.partition(':')[0])}: {where}"

    def _of_path(self, path: str) -> Iterator[FoundSetting]:
        """Yield the settings with this path or model as their value."""
        for name, setting in SETTINGS.items():
            found = self.lookup(name) if setting.parse in (a_path, a_model) else None
            with suppress(ValueError):
                if found is not None and str(self.parser(name)(found.value)) == path:
                    yield found

    def checked(self, name: str) -> FoundSetting | None:
        """Return the setting with its value parsed, ignoring other faults of the file."""
        if (found := self.lookup(name)) is None:
            if name in self.unread:
                raise self.unread[name]
            return None
        try:
            return found._replace(value=self.parser(name)(found.value))
        except ValueError as error:
            raise ConfigError(
                f"{found.value!r} is not allowed; give {error}", where=found.origin
            ) from error


@contextmanager
def named_by_source(
    flags: Mapping[str, str | None], environ: Mapping[str, str] = os.environ
) -> Iterator[None]:
    """Name the flag, variable or line that set a wrong setting, in errors raised meanwhile.

    Args:
        flags: as for load().
        environ: as for load().
    """
    try:
        yield
    except ConfigError as error:
        wrong = getattr(error, "errors", (error,))
        sources = _read(flags, environ)  # raises the same error, if it is the file's
        for each in wrong:
            each.where = sources.place_of(each.where)
        refuse(wrong)


def load(flags: Mapping[str, str | None], environ: Mapping[str, str] = os.environ) -> ServeConfig:
    """Build the daemon's configuration.

    Args:
        flags: from the command line, by setting name; `config`, the file; `port`, if it is what
            set `listen`. None: not given.
        environ: PENSTOCK_* settings, XDG and systemd directories.

    Raises:
        ConfigError: a value or file is wrong.
    """
    sources = _read(flags, environ)
    given = _all_parsed(sources)
    values = {SETTINGS[name].field or name: value for name, value, _ in given}
    values.setdefault("socket", _socket(sources).value)
    values.setdefault("state_dir", paths.default_state_dir(environ))
    with named_by_source(flags, environ):
        config = ServeConfig(**values)
    return replace(config, models=_models(sources, config))


def _all_parsed(sources: _Sources) -> list[FoundSetting]:
    """Parse every given setting; raise all errors together, including the models' tables."""
    given, wrong = list[FoundSetting](), list(sources.wrong)
    for name in SETTINGS:
        try:
            if (found := sources.checked(name)) is not None:
                given.append(found)
        except ConfigError as error:
            wrong += [error] if error not in wrong else []
    try:
        _model_tables(sources)
    except ConfigError as error:
        wrong.append(error)
    refuse(wrong)
    return given


def _models(sources: _Sources, config: ServeConfig) -> dict[str, ServeConfig]:
    """Build the configuration of each table [models.NAME] over the shared settings."""
    defaults: dict[str, Any] = {each.name: each.default for each in fields(ServeConfig)}
    shared = replace(config, **{key: defaults[key] for key in OWN_SETTINGS})
    return {
        name: replace(shared, **{SETTINGS[key].field or key: value for key, value in own.items()})
        for name, own in _model_tables(sources).items()
    }


def _model_tables(sources: _Sources) -> dict[str, dict[str, Any]]:
    """Parse the tables [models.NAME] alone."""
    return _tables_read(sources, sources.table.get(MODELS, {}))


def _tables_read(sources: _Sources, tables: object) -> dict[str, dict[str, Any]]:
    parsers = {name: sources.parser(name) for name in SETTINGS}
    return read_tables(tables, parsers, lambda key: _where(sources, key))


def _where(sources: _Sources, key: str) -> str:
    return f"{sources.file}:{_line_of(sources.text, key)}: {key}"


def explain(
    flags: Mapping[str, str | None], environ: Mapping[str, str] = os.environ
) -> list[FoundSetting]:
    """List every setting with its source, then the settings of the models' tables.

    If a client would ask the unit's daemon, the unit's folders are shown.

    Raises:
        ConfigError: as load().
    """
    environ = _environ_of_asked(flags, environ)
    config, sources = load(flags, environ), _read(flags, environ)
    everybodys = [
        FoundSetting(
            name, getattr(config, setting.field or name), found.origin if found else DEFAULT
        )
        for name, setting in SETTINGS.items()
        for found in (sources.lookup(name),)
    ]
    of_models = [
        FoundSetting(f"{MODELS}.{name}.{key}", value, _where(sources, f"{MODELS}.{name}"))
        for name, own in _model_tables(sources).items()
        for key, value in own.items()
    ]
    return everybodys + of_models


def unknown_variables(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Describe each PENSTOCK_* variable that sets nothing, such as a misspelt one.

    They do not prevent a start, unlike misspelt keys of the file: other programs may set them. For
    example, a service of this name on Kubernetes gives every container a PENSTOCK_PORT.
    """
    known = {*(variable(name) for name in SETTINGS), *OTHER_VARIABLES}
    unknown = sorted(name for name in environ if name.startswith(PREFIX) and name not in known)
    about = "is set, but is no setting; "
    return [f"{name} {about}{is_meant(name, known)}".rstrip("; ") for name in unknown]


def variable(name: str) -> str:
    """Return the environment variable of a setting."""
    return f"{PREFIX}{name.upper()}"


def changes(old: ServeConfig, new: ServeConfig) -> tuple[list[str], list[str]]:
    """List the changed settings: the reloadable ones, then the ones that need a restart."""
    changed = [
        name
        for name, setting in SETTINGS.items()
        if getattr(old, setting.field or name) != getattr(new, setting.field or name)
    ]
    can = [name for name in changed if SETTINGS[name].is_reloadable]
    fixed = [name for name in changed if name not in can]
    return can, [*fixed, *([MODELS] if _tables(old) != _tables(new) else [])]


def _tables(config: ServeConfig) -> dict[str, list[object]]:
    """Return the values of the tables [models.NAME]."""
    own = [SETTINGS[key].field or key for key in MODEL_SETTINGS]
    return {name: [getattr(each, f) for f in own] for name, each in config.models.items()}


def take_over(old: ServeConfig, new: ServeConfig) -> ServeConfig:
    """Apply the reloadable changes of a new configuration."""
    kept = {field.name: getattr(old, field.name) for field in fields(old)}
    for name in changes(old, new)[0]:
        field_name = SETTINGS[name].field or name
        kept[field_name] = getattr(new, field_name)
    return ServeConfig(**kept)


def load_asked(
    flags: Mapping[str, str | None], environ: Mapping[str, str] = os.environ
) -> ServeConfig:
    """Load the configuration of the daemon that a client would ask: the unit's, or the user's."""
    return load(flags, _environ_of_asked(flags, environ))


def _environ_of_asked(
    flags: Mapping[str, str | None], environ: Mapping[str, str]
) -> Mapping[str, str]:
    found = _read(flags, environ).checked("socket")
    asked = paths.client_socket(environ) if found is None else found.value
    if asked != paths.SYSTEM_SOCKET or "STATE_DIRECTORY" in environ:
        return environ
    state, run = str(paths.SYSTEM_STATE_DIR), str(paths.SYSTEM_SOCKET.parent)
    return {**environ, "STATE_DIRECTORY": state, "RUNTIME_DIRECTORY": run}


def state_dir(
    flag: str | None, environ: Mapping[str, str] = os.environ, warn: Warn | None = None
) -> Path:
    """Find the state folder of the daemon that a client would ask; `warn` as in find()."""
    environ = _environ_of_asked({}, environ)
    found = _one({"state_dir": flag}, environ, "state_dir", warn)
    return paths.default_state_dir(environ) if found is None else Path(found.value)


def ssd_folder(
    ssd_dir: str | None,
    state_dir_flag: str | None,
    environ: Mapping[str, str] = os.environ,
    warn: Warn | None = None,
) -> Path:
    """Find the folder of blocks on disk of the daemon that a client would ask."""
    environ = _environ_of_asked({}, environ)
    found = _one({"ssd_dir": ssd_dir}, environ, "ssd_dir", warn)
    if found is None:
        return state_dir(state_dir_flag, environ, warn) / SSD_FOLDER
    return Path(found.value)


def models_named(
    warn: Warn, environ: Mapping[str, str] = os.environ
) -> tuple[Path | HubName | None, dict[str, Path | HubName]]:
    """Return the model served first, if set, and the models of the tables by name.

    `warn` takes faults of the file; faulty models are left out.
    """
    sources, first = _read({}, environ), None
    wrong, tables = [*sources.wrong], dict[str, Path | HubName]()
    try:
        found = sources.checked("model")
        first = None if found is None else found.value
    except ConfigError as error:
        wrong += [] if error in wrong else [error]
    of_models = sources.table.get(MODELS, {})
    parts = of_models.items() if isinstance(of_models, dict) else [(MODELS, of_models)]
    for name, table in parts:
        try:
            tables[name] = _tables_read(sources, {name: table})[name]["model"]
        except ConfigError as error:
            wrong.append(error)
    for each in wrong:
        warn(each)
    return first, tables


def model_named(text: str, warn: Warn, environ: Mapping[str, str] = os.environ) -> Path | HubName:
    """Read a model's name as typed: of [models.NAME], a short name, a path, owner/name.

    `warn` as in find().
    """
    try:
        own_names = _read({}, environ).own_names
    except ConfigError as error:
        warn(error)
        own_names = {}
    try:
        return models_named(warn, environ)[1].get(text) or a_model(text, own_names)
    except ValueError as error:
        raise UsageError(f"a model's name is {error}", where=repr(text)) from error


def ids_of(text: str, warn: Warn, environ: Mapping[str, str] = os.environ) -> set[str]:
    """List the ids under which a daemon may serve a model named as for model_named()."""
    meant = model_named(text, warn, environ)
    tables = models_named(warn, environ)[1]
    return {text, model_name(meant), *(name for name, model in tables.items() if model == meant)}


def own_state_dir(environ: Mapping[str, str] = os.environ, warn: Warn | None = None) -> Path:
    """Return a writable state folder for this user's own files.

    The machine's settings may name a folder of the service. `warn` as in find().
    """
    found = _one({}, environ, "state_dir", warn)
    folder = paths.default_state_dir(environ) if found is None else Path(found.value)
    if folder.exists() and not os.access(folder, os.W_OK):
        return paths.default_state_dir(environ)
    return folder


def log_path(folder: Path) -> Path:
    """Return the request log's file in a state folder."""
    return folder / "requests.db"


def configured_socket(environ: Mapping[str, str], warn: Warn | None = None) -> Path | None:
    """Return the socket that the config file names; None: it names none.

    Args:
        environ: may name the file.
        warn: takes other faults of the file, which stop no client; None: they are raised.

    Raises:
        ConfigError: the file cannot be read, or its socket is invalid.
    """
    found = _one({}, environ, "socket", warn)
    return None if found is None else Path(found.value)


def _one(
    flags: Mapping[str, str | None], environ: Mapping[str, str], name: str, warn: Warn | None
) -> FoundSetting | None:
    """Read a single setting for a client, despite faults of other settings."""
    sources = _read(flags, environ)
    if warn is None:
        refuse(sources.wrong)
        return sources.checked(name)
    found = sources.checked(name)
    for error in sources.wrong:
        warn(error)
    return found


def _socket(sources: _Sources) -> FoundSetting:
    found = sources.checked("socket")
    return found or FoundSetting("socket", paths.default_socket(sources.environ), DEFAULT)


def _read(flags: Mapping[str, str | None], environ: Mapping[str, str]) -> _Sources:
    """Read the sources with the config file that applies; a missing file is an empty table."""
    named = flags.get("config") or environ.get("PENSTOCK_CONFIG")
    path = a_path(named) if named else paths.config_file(environ)
    if path is None:
        return _Sources(flags, environ, None, {}, "")
    import tomllib  # most machines have no file, and every client verb passes here

    text = None
    wrong, unread = list[ConfigError](), dict[str, ConfigError]()
    try:
        if path.is_fifo():  # a reader of a pipe without a writer would wait for ever
            raise ConfigError(
                "it is a pipe, which a reload cannot read again",
                where=str(path),
                hint="write them to a file",
            )
        with path.open("rb") as file:  # which may be a device without an end
            raw = file.read(MAX_FILE_BYTES + 1)
        if len(raw) > MAX_FILE_BYTES:
            raise ValueError(f"longer than {MAX_FILE_BYTES} bytes")
        text = raw.decode()
        table = tomllib.loads(text)
    except OSError as error:
        hint = "correct --config or PENSTOCK_CONFIG, or leave it out"
        raise ConfigError(f"cannot read: {error.strerror}", where=str(path), hint=hint) from error
    except (ValueError, RecursionError) as error:  # malformed (names its line) or not UTF-8
        if text is None:
            hint = 'it is a TOML file with lines such as dtype = "bfloat16"'
            raise ConfigError(f"not valid TOML: {error}", where=str(path), hint=hint) from error
        table, wrong, unread = _salvaged(path, text)
    unknown = _unknown(path, table, text)
    return _Sources(flags, environ, path, table, text, (*wrong, *unknown), unread)


def _salvaged(
    path: Path, text: str
) -> tuple[dict[str, object], list[ConfigError], dict[str, ConfigError]]:
    """Read the valid statements of a file that is not valid TOML.

    Returns:
        the valid part, the errors, and the errors of setting values by key.
    """
    import tomllib

    good, wrong, unread = list[str](), list[ConfigError](), dict[str, ConfigError]()
    is_in_bad_table = False
    header = ""
    for start, statement in _statements(text):
        is_header = statement.lstrip().startswith("[")
        try:
            tomllib.loads("\n" * start + statement)
            header = statement if is_header else header
            is_in_bad_table = not is_header and is_in_bad_table
        except (ValueError, RecursionError) as error:
            wrong.append(_not_toml(path, str(error), start))
            is_in_bad_table = is_header or is_in_bad_table
            if not header and not is_in_bad_table:
                unread[statement.partition("=")[0].strip().strip("\"'")] = wrong[-1]
        else:
            good += [] if is_in_bad_table else [statement]
    try:
        return tomllib.loads("\n".join(good)), wrong, unread
    except (ValueError, RecursionError) as error:  # each is good, but not all together
        what = re.sub(r" \(at .*\)$", "", str(error))
        return {}, [*wrong, _not_toml(path, what, 0)], unread


def _statements(text: str) -> Iterator[tuple[int, str]]:
    """Yield each `key = value` and `[table]` with its lines, and the number of lines before it."""
    start, lines = 0, list[str]()
    for number, line in enumerate(text.split("\n")):
        if _STATEMENT.match(line) and lines:
            yield start, "\n".join(lines)
            start, lines = number, []
        lines.append(line)
    yield start, "\n".join(lines)


def _not_toml(path: Path, reason: str, start: int) -> ConfigError:
    """Make the error of an invalid TOML statement, with the line of the file."""
    reason = reason.replace("(at end of document)", f"(at line {start + 1})")
    at = re.search(r"\(at line (\d+)", reason)
    return ConfigError(
        f"not valid TOML: {reason}",
        where=f"{path}:{at[1] if at else start + 1}",
        hint='put text in quotes: dtype = "bfloat16"; not numbers, true and false',
    )


def _unknown(path: Path, table: Mapping[str, object], text: str) -> list[ConfigError]:
    """Make the errors for a file's unknown keys."""
    return [
        ConfigError(
            f"unknown setting {key!r}",
            where=f"{path}:{_line_of(text, key)}",
            hint=is_meant(key, SETTINGS).rstrip("; ")
            or "`penstock serve --help` lists the settings; in the file - is _",
        )
        for key in table
        if key not in SETTINGS and key not in (MODELS, OWN_NAMES)
    ]


def _line_of(text: str, key: str) -> int:
    """Find the line on which a key of the file begins."""
    name = r"""["']?\s*\.\s*["']?""".join(map(re.escape, key.split(".", 1)))
    start = re.compile(rf"""\s*\[*\s*["']?{name}["']?\s*[\].=]""")
    numbered = enumerate(text.splitlines(), start=1)
    return next((number for number, line in numbered if start.match(line)), 1)


# Folders: existing ones stay unchanged; new ones are for their owner and the socket's group.


def prepare_directories(config: ServeConfig, environ: Mapping[str, str] = os.environ) -> None:
    """Create the missing folders that the daemon writes to; existing ones stay unchanged.

    Only their owner may enter them, but a folder configured for the socket may be entered by the
    group, like the socket itself.

    Raises:
        ConfigError: one cannot be created.
    """
    run_dir = config.socket.parent
    is_private = run_dir in (paths.private_dir(environ), paths.own_temporary_dir())
    modes = {run_dir: 0o700 if is_private else 0o750, config.state_dir: 0o700}
    for folder, mode in modes.items():
        try:
            _make_folder(folder, mode)
        except OSError as error:
            raise ConfigError(
                f"cannot create the folder: {error.strerror}",
                where=str(folder),
                hint="choose others with --socket and --state-dir",
            ) from error
    if run_dir == paths.own_temporary_dir():
        paths.check_private(run_dir)


def check_directories(config: ServeConfig, environ: Mapping[str, str] = os.environ) -> None:
    """Check that prepare_directories() would succeed, and that files can be made there.

    An existing socket needs no writable folder: systemd may have made it in a folder of its own. A
    folder configured for the socket must exist, since no client would find a socket elsewhere.
    Below the system's folders for sockets, which are empty after each boot, it is made.

    Raises:
        ConfigError: all faults together.
    """
    wrong = list[ConfigError]()
    folders, run_dir = [config.state_dir], config.socket.parent
    if not os.access(config.socket, os.F_OK):
        folders.insert(0, run_dir)
    if not run_dir.exists() and not paths.is_for_sockets(run_dir, environ):
        hint = f"mkdir -p {run_dir}, or name another path with --socket"
        wrong.append(ConfigError("there is no such folder", where=str(run_dir), hint=hint))
        folders.remove(run_dir)
    for folder in folders:
        there = next(path for path in (folder, *folder.parents) if path.exists())
        if not there.is_dir():
            problem = f"{there} is not a folder" if there != folder else "it is not a folder"
        elif not os.access(there, os.W_OK | os.X_OK):
            problem = "nothing can be made in it" if there == folder else f"{there} takes no files"
        else:
            continue
        hint = "choose others with --socket and --state-dir"
        wrong.append(ConfigError(problem, where=str(folder), hint=hint))
    refuse(wrong)


def _make_folder(folder: Path, mode: int) -> None:
    """Make a folder and its missing parents, with any umask."""
    if folder.is_dir():
        return
    _make_folder(folder.parent, mode)
    try:
        folder.mkdir(mode)
        folder.chmod(mode)
    except FileExistsError:
        if not folder.is_dir():  # otherwise another process was faster
            raise
