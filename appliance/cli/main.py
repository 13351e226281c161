"""Parse the `penstock` command and run its verb.

Invariant: stdout carries the answer alone; progress, notes and errors go to stderr as
`penstock: ...` and `hint: ...`.
Never: imports torch, textual, the daemon or another verb before the verb asked for needs it.

Exit codes: docs/cli.md has the table; each error of engine.errors and appliance.client has its own.
"""

from __future__ import annotations

import errno
import gc
import os
import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from appliance.cli import completion, terminal
from appliance.client.address import INSECURE
from appliance.configuration.setting_kinds import nearest
from engine.errors import PenstockError

GROUPS: Mapping[str, Mapping[str, str]] = {
    "Talk and serve": {
        "run": "run",
        "chat": "chat",
        "embed": "texts",
        "rerank": "texts",
        "serve": "serve",
        "stop": "control",
    },
    "Models": {
        "pull": "models.pull_model",
        "list": "models.list_models",
        "rm": "models.remove",
        "models": "models",
    },
    "Watch": {
        "status": "status",
        "ps": "live",
        "show": "live",
        "top": "live",
        "log": "activity",
        "events": "activity",
        "usage": "activity",
        "metrics": "status",
        "record": "record",
    },
    "Operate": {
        "cancel": "control",
        "drain": "control",
        "resume": "control",
        "restart": "control",
        "roles": "control",
        "config": "config_show",
        "keys": "keys",
        "cache": "cache",
        "db": "request_log",
        "install-service": "install_service",
        "worker": "dynamo_worker.worker",
    },
    "Check and measure": {
        "doctor": "doctor",
        "devices": "devices",
        "profile": "profile",
        "bench": "bench",
    },
    "Other": {
        "whoami": "live",
        "version": "live",
        "completion": "completion",
        "dial-stdio": "dial.dial_stdio",
    },
}
"""Each verb's file in this folder; its function or group there, if named differently."""
VERBS = {name: place for group in GROUPS.values() for name, place in group.items()}
ALIASES: Mapping[str, str] = {"ls": "list", "logs": "log", "kill": "cancel"}
"""Words of other programs for our verbs."""
_HIDDEN = ("dial-stdio",)
HOST_OPTIONS = ("--host", "-H", "--socket")
"""Options of most verbs that may also stand before the verb."""
KINDS: Mapping[str, str] = {
    **dict.fromkeys(("int", "integer", "int range", "integer range"), "whole number"),
    **dict.fromkeys(("float", "float range"), "number"),
    **dict.fromkeys(("str", "text"), "text"),
}
"""Names of value types in help and errors, by typer's names."""
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors of a full disk."""
_LONGEST = 1000
"""Maximum characters of a sentence in help."""


class Verbs(TyperGroup):
    """A group with a help text of each verb's first sentence."""

    def get_command(self, ctx: Any, name: str) -> Any:
        """Return a verb with plain names of value types, which suggests options for wrong ones."""
        verb = super().get_command(ctx, name)
        for param in [] if verb is None else verb.params:
            param.type.name = KINDS.get(param.type.name, param.type.name)
        if verb is not None:
            make = verb.make_parser
            verb.make_parser = lambda ctx: _suggesting(make(ctx), ctx)  # type: ignore[method-assign]
        return verb

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write a paragraph for each visible verb, in groups."""
        verbs = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        shown = {name: verb for name, verb in verbs.items() if not verb.hidden}
        groups = GROUPS if ctx.parent is None else {"Commands": shown}
        for title, names in groups.items():
            rows = [(n, shown[n].get_short_help_str(_LONGEST)) for n in names if n in shown]
            with formatter.section(title):
                formatter.write_dl(rows)


def _suggesting(parser: Any, ctx: Any) -> Any:
    """Make a parser suggest only options that a wrong one may well stand for."""
    parse = parser.parse_args

    def suggesting(args: list[str]) -> Any:
        try:
            return parse(args)
        except Exception as error:
            if hasattr(error, "possibilities"):  # click's NoSuchOption; typer may bring its own
                known = [name for param in ctx.command.params for name in param.opts]
                error.possibilities = meant_options(getattr(error, "option_name", ""), known)
            raise

    parser.parse_args = suggesting
    return parser


def meant_options(typed: str, known: list[str]) -> list[str]:
    """List the options that a wrong one abbreviates, or else the nearest."""
    from appliance.cli.tables import Format  # only a wrong option needs it

    if "--output" in known and typed in [f"--{each}" for each in Format]:
        return [f"--output {typed.strip('-')}"]
    if begun := [name for name in known if name.startswith(typed) and len(typed) > len("--")]:
        return begun
    near = nearest(typed.strip("-"), (name.strip("-") for name in known))
    return [f"--{near}"] if near else []


def main() -> None:
    """Run one verb; the process's entry point."""
    terminal.prepare()
    completion.prepare()
    words = sys.argv[1:]
    if words[:1] == ["--insecure"]:  # as for every verb, it stands before it
        os.environ[INSECURE] = "1"
        words = words[1:]
    words = _verb_first(words)
    if words and words[0] in ALIASES:
        words = [ALIASES[words[0]], *words[1:]]
    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    try:
        command = build(words[0] if words else "")
        gc.enable()
        command(words, prog_name="penstock")
    except PenstockError as error:
        sys.exit(terminal.report(error))
    except OSError as error:
        if error.errno not in _UNWRITABLE:
            raise
        terminal.drop_output()
        terminal.note(f"penstock: cannot write: {error.strerror}")
        sys.exit(PenstockError.exit_code)


def _verb_first(words: list[str]) -> list[str]:
    """Turn `--host X ps` into `ps --host X`."""
    name, has_value, _ = words[0].partition("=") if words else ("", "", "")
    if name not in HOST_OPTIONS:
        return words
    taken = 1 if has_value else 2
    return [*words[taken : taken + 1], *words[:taken], *words[taken + 1 :]]


def build(asked: str) -> typer.Typer:
    """Build the command with the wanted verb, or with all verbs if none is known.

    Importing and describing all would double the start of a small one such as `status`.
    """
    app = typer.Typer(
        cls=Verbs,
        help="Serve a language model with prefill and decode on separate devices.",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["--help", "-h"]},
    )
    app.callback()(_group)
    for name in [asked] if asked in VERBS else VERBS:
        file, _, function = VERBS[name].partition(".")
        verb = getattr(import_module(f"appliance.cli.{file}"), function or name.replace("-", "_"))
        if isinstance(verb, typer.Typer):
            app.add_typer(verb, name=name, cls=Verbs)
        else:
            shown_by = getattr(verb, "help_class", TyperCommand)
            app.command(name, hidden=name in _HIDDEN, cls=shown_by)(verb)
    return app


def _version(is_asked: bool) -> None:
    if is_asked:
        from appliance.cli import live

        live.version()
        raise typer.Exit


def _group(
    version: Annotated[
        bool,
        typer.Option(
            "--version", "-V", is_eager=True, callback=_version, help="Show the version and exit."
        ),
    ] = False,
    insecure: Annotated[
        bool,
        typer.Option("--insecure", help="Send the API key also over plain HTTP to other machines."),
    ] = False,
) -> None:
    """Make typer treat an app of one verb as a group; main() has taken --insecure."""
