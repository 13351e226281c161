"""Define `penstock config show`: the settings that `serve` would take, and their sources.

Invariant: it shows what `serve` would take.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from appliance.cli import terminal
from appliance.cli.tables import Format, TableColumn, yes_or_no
from appliance.cli.terminal import Output
from appliance.configuration import paths
from appliance.configuration.client_settings import explain
from appliance.configuration.setting_kinds import (
    a_duration,
    a_stay,
    on_or_off,
    parse_bytes,
    size_setting,
    some_weights,
)
from appliance.configuration.settings import SETTINGS, SSD_FOLDER, Setting
from appliance.configuration.sources import FoundSetting
from engine.printable import printable

config = typer.Typer(
    help="The daemon's settings.", no_args_is_help=True, callback=terminal.of_this_machine
)

_UNSET = {
    "model": "the built-in starter model",
    "embedding_model": "none",
    "rerank_model": "none",
    "max_model_len": "default: the model's limit, or what the KV cache holds",
    "default_max_tokens": "default: the context left",
    "kv_memory": "default: from the free memory",
    "ssd_dir": f"default: {SSD_FOLDER} in the state folder",
    "listen": "none: only the Unix socket",
    "priorities": "default: 1 each",
}
"""What a setting without a value means."""
_CACHES = ("dram_cache", "ssd_cache")


@config.command()
def show(
    origin: Annotated[bool, typer.Option("--origin", help="Also show what set each one.")] = False,
    config_file: Annotated[
        str | None, typer.Option("--config", metavar="FILE", help="A TOML file of settings.")
    ] = None,
    output: Output = Format.TABLE,
) -> None:
    """Show every setting with the value that `penstock serve` would use."""
    written = _for_people if output.is_for_people else _plain
    settings = explain({"config": config_file})
    rows = [_row(found, written) for found in settings]
    columns = [TableColumn("SETTING", "name"), TableColumn("VALUE", "value")]
    columns += [TableColumn("ORIGIN", "origin", is_wide=not origin)]
    columns += [TableColumn("RELOADS", "is_reloadable", yes_or_no, is_wide=True)]
    columns += [TableColumn("MEANING", "about", is_wide=True)]
    terminal.write(terminal.listing("config", tuple(columns), output).render(rows))
    values = {found.name: found.value for found in settings}
    _tell_other_socket(Path(values["state_dir"]), Path(values["socket"]))


def _tell_other_socket(state_dir: Path, socket: Path) -> None:
    """Name the socket of the daemon that runs with this state folder, if it is another."""
    told = paths.socket_of(state_dir)
    if told and paths.is_daemon_alive(state_dir) and not paths.is_of_socket(state_dir, socket):
        terminal.note(f"penstock: the running daemon has another socket: {printable(told)}")


def _row(found: FoundSetting, written: Callable[[FoundSetting], Any]) -> dict[str, Any]:
    setting = _setting(found)
    return {
        "name": found.name,
        "value": written(found),
        "origin": found.origin,
        "is_reloadable": setting.is_reloadable and found.name in SETTINGS,
        "about": setting.about,
    }


def _setting(found: FoundSetting) -> Setting:
    """Find the setting; `models.small.dtype` is the setting `dtype` of one model."""
    return SETTINGS[found.name.rpartition(".")[2]]


def _for_people(found: FoundSetting) -> Any:
    """Format the value as a user would type it: a size or a time with its unit."""
    parse = _setting(found).parse
    if found.value is None or found.value == ():
        return _UNSET.get(found.name, "none")
    if parse in (a_duration, a_stay):
        return "forever" if math.isinf(found.value) else f"{found.value:g}s"
    if parse is on_or_off:
        return "on" if found.value else "off"
    if parse is parse_bytes or (found.name in _CACHES and isinstance(found.value, int)):
        return size_setting(found.value)
    return _plain(found)


def _plain(found: FoundSetting) -> Any:
    """Format the value for JSON; an address and a list as in the file and the environment."""
    match found.value:
        case None | bool() | int() | float():
            return found.value
        case (str(host), int(port)):
            return f"{host}:{port}"
        case tuple() as pairs if _setting(found).parse is some_weights:
            return ",".join(f"{name}={weight:g}" for name, weight in pairs)
        case tuple() as names:
            return ",".join(map(str, names))
    return str(found.value)
