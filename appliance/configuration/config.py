"""Build the daemon's configuration from its settings, and compare it with a new one.

Owns: the defaults of the settings, and which of them go together.
Invariant: a ServeConfig that exists is valid; every error names the setting, its value, the allowed
values and its source, to the line.
Never: imports anything slow: each `penstock status` pays for it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from appliance.configuration import paths
from appliance.configuration.setting_kinds import is_loopback, is_meant
from appliance.configuration.settings import SETTINGS
from appliance.configuration.sources import (
    DEFAULT,
    PREFIX,
    FoundSetting,
    Sources,
    named_by_source,
    read_sources,
    variable,
)
from appliance.configuration.wanted_workers import ONE_OF_EACH, WantedWorkers
from appliance.hub.model_tables import MODEL_SETTINGS, MODELS, OWN_SETTINGS
from appliance.hub.names import HubName
from engine.errors import ConfigError, refuse

SSD_FOLDER = "kv"
"""The subfolder of the state folder for blocks on disk."""
DEFAULT_OPERATORS = ("@penstock-admin",)
"""The unit's group; most machines have no such group."""


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """All settings of the daemon; built by load(), or by hand in tests. See SETTINGS."""

    socket: Path
    state_dir: Path
    model: Path | HubName | None = None
    embedding_model: Path | HubName | None = None
    rerank_model: Path | HubName | None = None
    dtype: str = "auto"
    weights: str = "stored"
    offload_weights: int | str = "auto"
    kv_dtype: str = "auto"
    exact: str = "auto"
    speculate: int | str = "auto"
    transport: str = "auto"
    roles: str = "auto"
    place: WantedWorkers = ONE_OF_EACH
    devices: str = "auto"
    eager: bool = False
    safe_kernels: bool = False
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
    page: bool = True
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
        if self.place.colocated is not None and self.roles != "colocated":
            raise ConfigError(
                "a place of the colocated worker, and roles that have none",
                where="place",
                hint="add --roles colocated",
            )
        is_named = self.place.colocated is not None or self.place == ONE_OF_EACH
        if not is_named and self.roles == "colocated":
            raise ConfigError(
                "colocated roles have one worker",
                where="place",
                hint="write colocated=0-3, or leave out --place or --roles",
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
        return paths.log_path(self.state_dir)


OTHER_VARIABLES = (
    "PENSTOCK_CONFIG",
    "PENSTOCK_HOST",
    "PENSTOCK_API_KEY",
    "PENSTOCK_INSECURE",
    "PENSTOCK_BUILD_KERNELS",
    "PENSTOCK_MEASURE",
)
"""Variables that are not settings, used by clients, setup.py and tests."""


def load(flags: Mapping[str, str | None], environ: Mapping[str, str] = os.environ) -> ServeConfig:
    """Build the daemon's configuration.

    Args:
        flags: from the command line, by setting name; `config`, the file; `port`, if it is what
            set `listen`. None: not given.
        environ: PENSTOCK_* settings, XDG and systemd directories.

    Raises:
        ConfigError: a value or file is wrong.
    """
    sources = read_sources(flags, environ)
    given = _all_parsed(sources)
    values = {SETTINGS[name].field or name: value for name, value, _ in given}
    values.setdefault("socket", _socket(sources).value)
    values.setdefault("state_dir", paths.default_state_dir(environ))
    with named_by_source(flags, environ):
        config = ServeConfig(**values)
    return replace(config, models=_models(sources, config))


def _all_parsed(sources: Sources) -> list[FoundSetting]:
    """Parse every given setting; raise all errors together, including the models' tables."""
    given, wrong = list[FoundSetting](), list(sources.file.wrong)
    for name in SETTINGS:
        try:
            if (found := sources.checked(name)) is not None:
                given.append(found)
        except ConfigError as error:
            wrong += [error] if error not in wrong else []
    try:
        sources.model_tables()
    except ConfigError as error:
        wrong.append(error)
    refuse(wrong)
    return given


def _models(sources: Sources, config: ServeConfig) -> dict[str, ServeConfig]:
    """Build the configuration of each table [models.NAME] over the shared settings."""
    defaults: dict[str, Any] = {each.name: each.default for each in fields(ServeConfig)}
    shared = replace(config, **{key: defaults[key] for key in OWN_SETTINGS})
    return {
        name: replace(shared, **{SETTINGS[key].field or key: value for key, value in own.items()})
        for name, own in sources.model_tables().items()
    }


def unknown_variables(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Describe each PENSTOCK_* variable that sets nothing, such as a misspelt one.

    They do not prevent a start, unlike misspelt keys of the file: other programs may set them. For
    example, a service of this name on Kubernetes gives every container a PENSTOCK_PORT.
    """
    known = {*(variable(name) for name in SETTINGS), *OTHER_VARIABLES}
    unknown = sorted(name for name in environ if name.startswith(PREFIX) and name not in known)
    about = "is set, but is no setting; "
    return [f"{name} {about}{is_meant(name, known)}".rstrip("; ") for name in unknown]


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


def _socket(sources: Sources) -> FoundSetting:
    found = sources.checked("socket")
    return found or FoundSetting("socket", paths.default_socket(sources.environ), DEFAULT)
