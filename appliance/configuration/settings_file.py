"""Read the TOML file of settings; of a file with errors, keep the valid statements.

Invariant: every error names its line and what to write there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from appliance.configuration.setting_kinds import is_meant
from appliance.configuration.settings import SETTINGS
from appliance.hub.model_tables import MODELS, OWN_NAMES
from engine.errors import ConfigError

_STATEMENT = re.compile(r"""\s*(\[|["']?[\w.-]+["']?\s*=)""")
"""Matches the beginning of a new TOML statement."""
MAX_FILE_BYTES = 1 << 20


class SettingsFile(NamedTuple):
    """The valid part of a file of settings; empty without a path."""

    path: Path | None = None
    table: Mapping[str, object] = MappingProxyType({})
    text: str = ""
    wrong: tuple[ConfigError, ...] = ()
    """Parts of the file that are not TOML or not a setting."""
    unread: Mapping[str, ConfigError] = MappingProxyType({})
    """The errors in place of a setting's value, by its name."""

    def where(self, key: str) -> str:
        """Name a key of the file by its line."""
        return f"{self.path}:{_line_of(self.text, key)}: {key}"


def read_file(path: Path) -> SettingsFile:
    """Read a file of settings.

    Raises:
        ConfigError: it cannot be read at all.
    """
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
    return SettingsFile(path, table, text, (*wrong, *unknown), unread)


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
