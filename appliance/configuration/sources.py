"""Find a setting's value and its source: flag, environment variable, line of the file.

Invariant: an error names the flag, variable or line that set the wrong value.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

from appliance.configuration import paths
from appliance.configuration.setting_kinds import a_path
from appliance.configuration.settings import SETTINGS
from appliance.configuration.settings_file import SettingsFile, read_file
from appliance.hub.model_tables import MODELS, OWN_NAMES, read_tables
from appliance.hub.names import a_model
from engine.errors import ConfigError, refuse

DEFAULT = "default"
PREFIX = "PENSTOCK_"


def variable(name: str) -> str:
    """Return the environment variable of a setting."""
    return f"{PREFIX}{name.upper()}"


class FoundSetting(NamedTuple):
    """A setting's value, and its source: a flag, a variable, a line, `default`."""

    name: str
    value: Any
    origin: str


class Sources(NamedTuple):
    """The sources of settings, in order."""

    flags: Mapping[str, str | None]
    environ: Mapping[str, str]
    file: SettingsFile

    def lookup(self, name: str) -> FoundSetting | None:
        """Find the first source that sets it, unparsed; None: the default applies."""
        if (flag := self.flags.get(name)) is not None:
            option = "port" if name == "listen" and self.flags.get("port") else name
            option = "no-auth" if (name, str(flag).lower()) == ("auth", "false") else option
            return FoundSetting(name, flag, f"--{option.replace('_', '-')}")
        if value := self.environ.get(variable(name)):
            return FoundSetting(name, value, variable(name))
        if name in self.file.table:
            return FoundSetting(name, self.file.table[name], self.file.where(name))
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
        names = self.file.table.get(OWN_NAMES, {})
        if not isinstance(names, dict) or not all(isinstance(each, str) for each in names.values()):
            raise ConfigError(
                "short names are a table of texts",
                where=self.file.where(OWN_NAMES),
                hint='as [short_names], then "coder:7b" = "Qwen/Qwen2.5-Coder-7B-Instruct"',
            )
        return names

    def model_tables(self, tables: object = None) -> dict[str, dict[str, Any]]:
        """Parse the tables [models.NAME] of the file, or these tables alone.

        Raises:
            ConfigError: one of them is wrong.
        """
        parsers = {name: self.parser(name) for name in SETTINGS}
        tables = self.file.table.get(MODELS, {}) if tables is None else tables
        return read_tables(tables, parsers, self.file.where)

    def place_of(self, where: str) -> str:
        """Return the source of the setting, path or table of an error; otherwise unchanged."""
        if where in SETTINGS:
            found = self.lookup(where)
            return where if found is None else found.origin
        if not where.startswith(f"{MODELS}."):
            return next((f"{each.origin}: {where}" for each in self._of_path(where)), where)
        return self.file.where(where.partition(":")[0]).rpartition(": ")[0] + f": {where}"

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
            if name in self.file.unread:
                raise self.file.unread[name]
            return None
        try:
            return found._replace(value=self.parser(name)(found.value))
        except ValueError as error:
            raise ConfigError(
                f"{found.value!r} is not allowed; give {error}", where=found.origin
            ) from error


def read_sources(flags: Mapping[str, str | None], environ: Mapping[str, str]) -> Sources:
    """Read the sources with the config file that applies; a missing file is an empty one."""
    named = flags.get("config") or environ.get("PENSTOCK_CONFIG")
    path = a_path(named) if named else paths.config_file(environ)
    return Sources(flags, environ, SettingsFile() if path is None else read_file(path))


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
        sources = read_sources(flags, environ)  # raises the same error, if it is the file's
        for each in wrong:
            each.where = sources.place_of(each.where)
        refuse(wrong)
