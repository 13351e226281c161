"""Define the verb serve, with a flag for each setting."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import typer

from appliance.cli import terminal
from appliance.cli.serve_help import GroupedHelp, show_all
from appliance.configuration import config, sources
from appliance.configuration.setting_kinds import a_flag
from appliance.configuration.settings import SETTINGS, ServeConfig, Setting
from engine.printable import printable

_VALUES = {
    **dict.fromkeys(("one_of", "a_number_or"), "CHOICE"),
    **dict.fromkeys(("parse_bytes", "a_size_or"), "SIZE"),
    **dict.fromkeys(("a_duration", "a_stay"), "TIME"),
    **dict.fromkeys(("names", "aliases"), "NAMES"),
    "at_least": "NUMBER",
    "on_or_off": "on|off",
    "a_path": "PATH",
    "an_address": "ADDRESS",
    "origins": "ORIGINS",
    "some_weights": "SHARES",
    "some_devices": "DEVICES",
    "parse_place": "WORKERS",
    "a_model": "MODEL",
}
"""Names of values in help, by the parser or the function that makes it."""


def _value(setting: Setting) -> str:
    return _VALUES[setting.parse.__qualname__.partition(".")[0]]


def _with_settings(verb: Callable[..., None]) -> Callable[..., None]:
    """Give a verb an option for each setting."""
    flags = {
        name: Annotated[
            bool | None if setting.parse is a_flag else str | None,
            typer.Option(
                *_decls(name),
                metavar=None if setting.parse is a_flag else _value(setting),
                help=f"{setting.about[0].upper()}{setting.about[1:]}.",
            ),
        ]
        for name, setting in SETTINGS.items()
    }
    return terminal.with_options(verb, flags)


def _decls(name: str) -> list[str]:
    """Return the option's spellings, if it has more than its name."""
    return ["--model", "-m"] if name == "model" else []


@_with_settings
def serve(
    folder: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="The same as --model.")
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(
            "--host", metavar="IP", help="IP address for --port. Default: both of localhost."
        ),
    ] = None,
    port: Annotated[
        str | None,
        typer.Option(
            "--port", "-p", metavar="PORT", help="TCP port: short for --listen HOST:PORT."
        ),
    ] = None,
    config_file: Annotated[
        str | None, typer.Option("--config", metavar="FILE", help="A TOML file of settings.")
    ] = None,
    check_config: Annotated[
        bool, typer.Option("--check-config", help="Only check the settings and the model.")
    ] = False,
    help_all: Annotated[
        bool,
        typer.Option("--help-all", is_eager=True, callback=show_all, help="Show all options."),
    ] = False,
    **given: Any,
) -> None:
    """Run the daemon in the foreground; SIGTERM stops it after a drain, SIGHUP reloads settings."""
    if folder is not None and given["model"] is not None:
        raise typer.BadParameter("give the model once: as an argument, or with --model")
    model = given["model"] if folder is None else folder
    listen = _listen_address(given["listen"], host, port)
    flags = {**given, "model": model, "listen": listen, "port": port, "config": config_file}
    load_config = partial(config.load, flags)
    with sources.named_by_source(flags):
        if check_config:
            _check(load_config())
            return
        from appliance.daemon.survival.keeper import keep_daemon

        keep_daemon(_end_replies)
        from appliance.daemon.process.core_dumps import forbid_core_dumps
        from engine.text.reading import READER

        forbid_core_dumps()
        READER.start()  # it imports while the daemon does
        from appliance.daemon import start as daemon
        from appliance.daemon.process import limits as process

        process.keep_small()
        raise typer.Exit(daemon.serve(load_config))


serve.help_class = GroupedHelp  # type: ignore[attr-defined]


def _end_replies(kept: dict[str, list[int]]) -> None:
    from appliance.daemon.survival.kept_replies import (
        end_kept,  # the keeper needs it at its end alone
    )

    end_kept(kept)


def _listen_address(listen: str | None, host: str | None, port: str | None) -> str | None:
    """Return the setting `listen`, which --host and --port say in two words."""
    if host is None and port is None:
        return listen
    if listen is not None:
        raise typer.BadParameter("give either --listen, or --host and --port")
    if port is None:
        raise typer.BadParameter("--host needs --port, as --port 8000")
    host = host or "localhost"  # both families: another user may not have the other one
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _check(settings: ServeConfig) -> None:
    from appliance.daemon import start as daemon
    from appliance.fleet.boot_check import check_files, check_plan, dram_forecast
    from appliance.fleet.model_files import is_to_be_fetched
    from appliance.fleet.placed_model import place
    from appliance.fleet.ssd_cache import ssd_forecast
    from appliance.fleet.text_models import load_texts

    for sentence in config.unknown_variables():
        terminal.note(f"penstock: {printable(sentence)}")
    _, placed, others = daemon.check(settings)
    placed = placed or place(settings)  # which says what to pull, where a start pulls it
    sentence, where = check_plan(settings, placed)
    is_on_gpu = any(worker.gpu is not None for worker in placed.placement.workers)
    where += [each.about for each in load_texts(placed.text_models, has_gpu=is_on_gpu)]
    for each in (settings, *settings.models.values()):  # a start finds it when the model is loaded
        if not is_to_be_fetched(each.model):
            others += [f"{each.model}: {about}" for about in check_files(each).misfits]
    asked = dram_forecast(settings, placed), ssd_forecast(settings, placed.placement)
    caches = [each for each in asked if each is not None]
    verdict = "the configuration is good"
    if any(each.is_missed for each in caches):
        verdict = "a start would serve, but without a configured cache"
    lines = (f"{verdict}; {sentence}", *where, *(each.text for each in caches), *others)
    terminal.write("".join(f"{printable(line)}\n" for line in lines))
