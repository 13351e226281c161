"""The keys of the console: what each does, and whether it does it now, for this caller.

Owns: the bindings and the order of their hints. Called by: app, tests.
Invariant: help, hints and the list of commands come from the same table as the keys themselves.
Never: acts.
"""

from __future__ import annotations

from collections.abc import Sequence

from textual.binding import Binding

from appliance.protocol import RequestFrame
from tui import format as fmt
from tui.panels import pages
from tui.view import View

KEYS: Sequence[Binding] = (
    Binding("question_mark", "help", "help"),
    Binding("q,ctrl+c", "quit", "quit"),
    Binding("enter", "detail", "detail"),
    Binding("x", "cancel", "cancel"),
    Binding("slash", "filter", "filter"),
    Binding("s", "sort", "sort"),
    Binding("p,space", "pause", "pause"),
    Binding("e", "explain", "explain"),
    Binding("D", "drain", "drain"),
    Binding("r", "roles", "roles"),
    Binding("T", "targets", "targets"),
    Binding("S", "reverse", "reverse"),
    Binding("w", "window", "graphs"),
    Binding("y", "copy_id", "copy id"),
    Binding("t", "theme", "theme"),
    Binding("ctrl+p", "commands", "commands"),
    Binding("escape", "unfilter", "clear filter"),
    *(
        Binding(str(number), f"page('{name}')", name, show=False)
        for number, name in enumerate(pages.NAMES, start=1)
    ),
)
_SIGNS = {
    "question_mark": "?",
    "slash": "/",
    "comma": ",",
    "full_stop": ".",
    "less_than_sign": "<",
    "greater_than_sign": ">",
    "left_square_bracket": "[",
    "right_square_bracket": "]",
    "plus": "+",
    "equals_sign": "=",
    "minus": "-",
    "ctrl+home": "^Home",
    "ctrl+end": "^End",
    "ctrl+c": "^c",
    "ctrl+p": "^p",
    "escape": "esc",
    "pagedown": "PgDn",
    "pageup": "PgUp",
    "home": "Home",
    "end": "End",
}
_OF_OPERATORS = frozenset({"drain", "roles", "targets"})
_ON_A_REQUEST = frozenset({"detail", "copy_id"})


def is_allowed(action: str, view: View, selected: RequestFrame | None) -> bool:
    """False for what cannot be done now, or not by this caller."""
    caller = view.caller
    if action in _OF_OPERATORS:
        return caller is not None and caller.is_operator and view.frame is not None
    if action == "cancel":
        return selected is not None and caller is not None and caller.may_cancel(selected)
    if action in _ON_A_REQUEST:
        return selected is not None
    if action == "unfilter":
        return bool(view.listing.filter.text)
    return True


def allowed(
    bindings: Sequence[Binding], view: View, selected: RequestFrame | None
) -> list[Binding]:
    """Those of the keys that work now."""
    return [key for key in bindings if is_allowed(key.action.partition("(")[0], view, selected)]


def signs(key: Binding) -> list[str]:
    """`q`, `^c`: as a person reads them."""
    return [_SIGNS.get(name, name) for name in key.key.split(",")]


def label(key: Binding, view: View) -> str:
    """What it does now."""
    if key.action == "drain" and view.frame is not None and view.frame.state == "draining":
        return "resume"
    if key.action == "window":
        return f"graphs {fmt.whole_seconds(view.window_s)}"
    return key.description


def hints(bindings: Sequence[Binding], view: View) -> list[tuple[str, str]]:
    """A sign and what it does, for the last line of the screen."""
    return [(signs(key)[0], label(key, view)) for key in bindings if key.show]
