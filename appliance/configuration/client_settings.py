"""Find the settings that clients need of the daemon that they would ask.

Invariant: a fault of a setting that a client does not need stops no client.
"""

from __future__ import annotations

# nothing slow: each `penstock status` pays for these imports
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from appliance.configuration import paths
from appliance.configuration.config import load
from appliance.configuration.settings import SETTINGS, SSD_FOLDER, ServeConfig
from appliance.configuration.sources import DEFAULT, FoundSetting, read_sources
from appliance.hub.model_tables import MODELS
from appliance.hub.names import HubName, a_model, model_name
from engine.errors import ConfigError, UsageError, refuse

Warn = Callable[[ConfigError], None]


def explain(
    flags: Mapping[str, str | None], environ: Mapping[str, str] = os.environ
) -> list[FoundSetting]:
    """List every setting with its source, then the settings of the models' tables.

    If a client would ask the unit's daemon, and has no settings of its own, the unit's folders are
    shown.

    Raises:
        ConfigError: as load().
    """
    environ = _environ_of_asked(flags, environ)
    config, sources = load(flags, environ), read_sources(flags, environ)
    everybodys = [
        FoundSetting(name, getattr(config, setting.field), found.origin if found else DEFAULT)
        for name, setting in SETTINGS.items()
        for found in (sources.lookup(name),)
    ]
    of_models = [
        FoundSetting(f"{MODELS}.{name}.{key}", value, sources.file.where(f"{MODELS}.{name}"))
        for name, own in sources.model_tables().items()
        for key, value in own.items()
    ]
    return everybodys + of_models


def load_asked(flags: Mapping[str, str | None]) -> ServeConfig:
    """Load the configuration of the daemon that a client would ask: the unit's, or the user's."""
    return load(flags, _environ_of_asked(flags, os.environ))


def _environ_of_asked(
    flags: Mapping[str, str | None], environ: Mapping[str, str]
) -> Mapping[str, str]:
    found = read_sources(flags, environ).checked("socket")
    asked = paths.client_socket(environ) if found is None else found.value
    if asked != paths.SYSTEM_SOCKET or "STATE_DIRECTORY" in environ:
        return environ
    if paths.config_file(environ) not in (None, paths.SYSTEM_CONFIG):
        return environ  # a user with settings of his own means the daemon that has them
    state, run = str(paths.SYSTEM_STATE_DIR), str(paths.SYSTEM_SOCKET.parent)
    return {**environ, "STATE_DIRECTORY": state, "RUNTIME_DIRECTORY": run}


def state_dir(
    flag: str | None, environ: Mapping[str, str] = os.environ, warn: Warn | None = None
) -> Path:
    """Find the state folder of the daemon that a client would ask.

    `warn` as for configured_socket().
    """
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
    sources, first = read_sources({}, environ), None
    wrong, tables = [*sources.file.wrong], dict[str, Path | HubName]()
    try:
        found = sources.checked("model")
        first = None if found is None else found.value
    except ConfigError as error:
        wrong += [] if error in wrong else [error]
    of_models = sources.file.table.get(MODELS, {})
    parts = of_models.items() if isinstance(of_models, dict) else [(MODELS, of_models)]
    for name, table in parts:
        try:
            tables[name] = sources.model_tables({name: table})[name]["model"]
        except ConfigError as error:
            wrong.append(error)
    for each in wrong:
        warn(each)
    return first, tables


def model_named(text: str, warn: Warn, environ: Mapping[str, str] = os.environ) -> Path | HubName:
    """Read a model's name as typed: of [models.NAME], a short name, a path, owner/name.

    `warn` as for configured_socket().
    """
    try:
        own_names = read_sources({}, environ).own_names
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


def own_state_dir(warn: Warn | None = None) -> Path:
    """Return a writable state folder for this user's own files.

    The machine's settings may name a folder of the service. `warn` as for configured_socket().
    """
    found = _one({}, os.environ, "state_dir", warn)
    folder = paths.default_state_dir(os.environ) if found is None else Path(found.value)
    if folder.exists() and not os.access(folder, os.W_OK):
        return paths.default_state_dir(os.environ)
    return folder


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
    sources = read_sources(flags, environ)
    if warn is None:
        refuse(sources.file.wrong)
        return sources.checked(name)
    found = sources.checked(name)
    for error in sources.file.wrong:
        warn(error)
    return found
