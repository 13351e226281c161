"""Read the tables [models.NAME] of the configuration: models that a request may name.

Invariant: every refusal names the table, its key and the line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from engine.errors import ConfigError, refuse

MODELS = "models"
OWN_NAMES = "short_names"
"""The table of the user's short names."""
MODEL_SETTINGS = (
    "model",
    "dtype",
    "weights",
    "offload_weights",
    "kv_dtype",
    "max_model_len",
    "kv_memory",
    "tool_parser",
    "reasoning_parser",
)
"""Settings that a model's table may set..."""
OWN_SETTINGS = (
    *("weights", "offload_weights", "max_model_len", "model_aliases"),
    *("tool_parser", "reasoning_parser"),
)
"""...and the ones that outside the tables apply to the first model alone."""


def read_tables(
    tables: object,
    parsers: Mapping[str, Callable[[object], object]],
    where: Callable[[str], str],
) -> dict[str, dict[str, Any]]:
    """Read each model's own settings, by the model's name.

    Args:
        tables: the file's value of `models`.
        parsers: how each setting is read.
        where: the place of a key in the file.

    Raises:
        ConfigError: a table has an unknown setting, or no model.
    """
    if not isinstance(tables, dict) or not all(isinstance(each, dict) for each in tables.values()):
        raise ConfigError(
            "models are tables",
            where=where(MODELS),
            hint='as [models.small], then model = "FOLDER"',
        )
    wrong: list[ConfigError] = []
    read = {
        name: _read(f"{MODELS}.{name}", table, parsers, where, wrong)
        for name, table in tables.items()
    }
    refuse(wrong)
    return read


def _read(
    name: str,
    table: Mapping[str, object],
    parsers: Mapping[str, Callable[[object], object]],
    where: Callable[[str], str],
    wrong: list[ConfigError],
) -> dict[str, Any]:
    """Read one model's settings; append the errors to the list."""
    if not name.removeprefix(f"{MODELS}.").strip():
        hint = "as [models.small]: requests name the model so"
        wrong.append(ConfigError("a model without a name", where=where(MODELS), hint=hint))
    if "model" not in table:
        wrong.append(
            ConfigError(
                "it does not say which `model`",
                where=where(name),
                hint='add model = "FOLDER or name"',
            )
        )
    values = {}
    for key, value in table.items():
        if key not in MODEL_SETTINGS:
            hint = f"a model has {', '.join(MODEL_SETTINGS)}"
            wrong.append(ConfigError(f"unknown setting {key!r}", where=where(name), hint=hint))
            continue
        try:
            values[key] = parsers[key](value)
        except ValueError as error:
            what = f"{key} = {value!r} is not allowed; give {error}"
            wrong.append(ConfigError(what, where=where(name)))
    return values
