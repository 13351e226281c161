"""Build the daemon's configuration from its settings, and compare it with a new one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from appliance.configuration import paths
from appliance.configuration.setting_kinds import is_meant
from appliance.configuration.settings import SETTINGS, ServeConfig
from appliance.configuration.sources import (
    DEFAULT,
    PREFIX,
    FoundSetting,
    Sources,
    named_by_source,
    read_sources,
    variable,
)
from appliance.hub.model_tables import MODEL_SETTINGS, MODELS, OWN_SETTINGS
from engine.errors import ConfigError, refuse

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
    values = {SETTINGS[name].field: value for name, value, _ in given}
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
        name: replace(shared, **{SETTINGS[key].field: value for key, value in own.items()})
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
        if getattr(old, setting.field) != getattr(new, setting.field)
    ]
    can = [name for name in changed if SETTINGS[name].is_reloadable]
    fixed = [name for name in changed if name not in can]
    return can, [*fixed, *([MODELS] if _tables(old) != _tables(new) else [])]


def _tables(config: ServeConfig) -> dict[str, list[object]]:
    """Return the values of the tables [models.NAME]."""
    own = [SETTINGS[key].field for key in MODEL_SETTINGS]
    return {name: [getattr(each, f) for f in own] for name, each in config.models.items()}


def take_over(old: ServeConfig, new: ServeConfig) -> ServeConfig:
    """Apply the reloadable changes of a new configuration."""
    kept = {field.name: getattr(old, field.name) for field in fields(old)}
    for name in changes(old, new)[0]:
        field_name = SETTINGS[name].field
        kept[field_name] = getattr(new, field_name)
    return ServeConfig(**kept)


def _socket(sources: Sources) -> FoundSetting:
    found = sources.checked("socket")
    return found or FoundSetting("socket", paths.default_socket(sources.environ), DEFAULT)
