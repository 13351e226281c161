"""Complete verbs, options and ids for the shell.

Invariant: on any error, completion offers nothing and prints nothing.
"""

from __future__ import annotations

import os
import re
from enum import StrEnum
from typing import Annotated

import typer

from appliance.cli import terminal
from appliance.client.address import UnixAddress, find
from appliance.client.calls import Client
from engine.errors import PenstockError

DEADLINE_S = 0.15
VARIABLE = "_PENSTOCK_COMPLETE"
_PLAIN = re.compile(r"[\w.:/@+-]+", re.ASCII)
"""Names that no shell takes for more; zsh evaluates what it is offered."""


class Shell(StrEnum):
    """The supported shells."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def completion(shell: Annotated[Shell, typer.Argument(help="The shell.")]) -> None:
    """Print a shell's completion script: source <(penstock completion bash)."""
    from typer import completion as typers

    script = typers.get_completion_script(  # type: ignore[attr-defined]
        prog_name="penstock", complete_var=VARIABLE, shell=shell.value
    )
    terminal.write(script + "\n")


def prepare() -> None:
    """Teach typer the shells, if a shell runs us to complete a line.

    Typer does so only for its own options --install-completion and --show-completion, which the
    verb replaces.
    """
    if VARIABLE in os.environ:
        from typer import completion as typers

        typers.completion_init()  # type: ignore[attr-defined]


def request_ids(incomplete: str) -> list[str]:
    """List ids of live and recently finished requests."""
    return [name for name in _names("/v1/requests") if name.startswith(incomplete)]


def live_request_ids(incomplete: str) -> list[str]:
    """List ids of requests that can still be cancelled."""
    names = _names("/v1/requests", live_only=True)
    return [name for name in names if name.startswith(incomplete)]


def model_ids(incomplete: str) -> list[str]:
    """List ids of the served models."""
    return [name for name in _names("/v1/models") if name.startswith(incomplete)]


def _names(path: str, *, live_only: bool = False) -> list[str]:
    try:
        address = find(None, warn=lambda _: None)
        if not isinstance(address, UnixAddress):
            return []
        listed = Client(address, timeout_s=DEADLINE_S).get(path).get("data", [])
        return [
            item["id"]
            for item in listed
            if _PLAIN.fullmatch(item["id"]) and not (live_only and item.get("phase") == "finished")
        ]
    except (PenstockError, KeyError, TypeError, AttributeError):
        return []
