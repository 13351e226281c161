"""The tables [models.NAME] of the configuration: models that a request may name.

Owns: what such a table may say.
Invariant: every refusal names the table, its key and the line. Never: reads a file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from engine.errors import ConfigError, refuse

MODELS = "models"
MODEL_SETTINGS = ("model", "dtype", "weights", "max_model_len", "kv_memory")
"""The rest is everybody's."""


def read_tables(
    tables: object,
    parsers: Mapping[str, Callable[[object], object]],
    where: Callable[[str], str],
) -> dict[str, dict[str, Any]]:
    """Each model's own settings, by the model's name.

    Args:
        tables: what the file has under `models`.
        parsers: how each setting is read.
        where: the place of a key in the file.

    Raises:
        ConfigError: a table says what it may not, or not which model.
    """
    if not isinstance(tables, dict) or not all(isinstance(each, dict) for each in tables.values()):
        raise ConfigError("models are tables, as [models.small]", where=where(MODELS))
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
    """One model's settings; what is wrong with them goes onto the list."""
    if "model" not in table:
        wrong.append(ConfigError("it does not say which `model`", where=where(name)))
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
