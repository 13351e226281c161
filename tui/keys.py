"""Define the console's keys: their actions, conditions and questions.

Invariant: help, hints and the list of commands come from one table; nothing is sent without a
question.
"""

from __future__ import annotations

from collections.abc import Sequence

from textual.binding import Binding

from appliance.observe.frame import figures as fig
from appliance.observe.frame.protocol import RequestFrame
from tui.lines import clean
from tui.panels.header import Hint, alerts
from tui.view import READ_ONLY, REPLAY, View
from tui.widgets.overview import LINED, NAMES, pages


def group(title: str, *keys: tuple[str, str, str]) -> list[Binding]:
    """Define the keys of one heading of the help, as (keys, action, label)."""
    heading = Binding.Group(title)
    return [Binding(key, action, label, group=heading) for key, action, label in keys]


KEYS: Sequence[Binding] = (
    *group(
        "REQUESTS",
        ("enter", "detail", "detail"),
        ("x", "cancel", "cancel"),
        ("slash", "filter", "filter"),
        ("escape", "unfilter", "clear filter"),
        ("s", "sort", "sort"),
        ("S", "reverse", "reverse"),
        ("y", "copy_id", "copy id"),
    ),
    *group(
        "VIEW",
        ("a", "alert", "alert"),
        ("e", "explain", "explain"),
        ("p,space", "pause", "pause"),
        ("w", "window", "graphs"),
        ("t", "theme", "theme"),
    ),
    *group(
        "OPERATE",
        ("D", "drain", "drain"),
        ("r", "roles", "roles"),
        ("T", "targets", "targets"),
    ),
    *group(
        "GENERAL",
        ("colon,ctrl+p", "commands", "commands"),
        ("q,ctrl+c", "quit", "quit"),
        ("question_mark,f1", "help", "help"),
    ),
    *group(
        "PAGES",
        *((str(number), f"page('{name}')", name) for number, name in enumerate(NAMES, start=1)),
    ),
)
_SIGNS = {
    "question_mark": "?",
    "f1": "F1",
    "colon": ":",
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
_ON_A_LIST = frozenset({"filter", "sort", "reverse", "unfilter"})
"""Actions on the list of requests; they have no effect on a page without a list."""


def is_allowed(action: str, view: View, selected: RequestFrame | None, page: str) -> bool:
    """Say whether an action works now, on this page and for this caller."""
    caller = view.caller
    if action in _ON_A_LIST and page in LINED:
        return False
    if action in _OF_OPERATORS:
        return caller is not None and caller.is_operator and view.frame is not None
    if action == "cancel":
        return selected is not None and caller is not None and caller.may_cancel(selected)
    if action in _ON_A_REQUEST:
        return selected is not None
    if action == "unfilter":
        return bool(view.listing.filter.text)
    if action == "alert":
        return bool(alerts(view))
    return True


def refusal(action: str, view: View, selected: RequestFrame | None, page: str) -> str:
    """Explain why a key has no effect now; empty: it has."""
    if is_allowed(action, view, selected, page):
        return ""
    if action in _ON_A_REQUEST:
        return _no_request(view, page)
    if action == "alert":
        return "no alerts now"
    if action not in _OF_OPERATORS and action != "cancel":
        return ""
    caller = view.caller
    if view.link.word == REPLAY:
        return "a recording is read-only"
    if caller is None or view.frame is None:
        return "the daemon has not answered yet"
    if caller.role == READ_ONLY:
        return "this console is read-only"
    who = f"the daemon sees you as {clean(caller.name)}, a {clean(caller.role)}"
    if action in _OF_OPERATORS:
        return f"only operators may do that; {who}"
    if selected is None:
        return _no_request(view, page)
    name = fig.short_id(selected.id)
    if selected.phase == "finished":
        return f"{name} has ended already: {clean(selected.finish_reason or 'finished')}"
    return f"only its owner or an operator may cancel {name}; {who}"


def _no_request(view: View, page: str) -> str:
    """Say what to do without a request to act on."""
    if page in LINED:
        return "no requests on this page: press 1 or 2"
    if view.frame is None:
        return "the daemon has not answered yet"
    if view.listing.filter.text:
        return "no request matches the filter; press / to change it, esc to clear it"
    return "no request yet"


def allowed(
    bindings: Sequence[Binding], view: View, selected: RequestFrame | None, page: str
) -> list[Binding]:
    """List the keys that work now."""
    hidden = {f"page('{name}')" for name in set(NAMES) - set(pages(view.frame))}
    return [
        key
        for key in bindings
        if key.action not in hidden and is_allowed(name_of(key), view, selected, page)
    ]


def name_of(key: Binding) -> str:
    """Return the name of a binding's action, without its arguments."""
    return key.action.partition("(")[0]


def of_press(bindings: Sequence[Binding], pressed: str) -> Binding | None:
    return next((key for key in bindings if pressed in key.key.split(",")), None)


def signs(key: Binding) -> list[str]:
    """Return the keys' signs for people: `q`, `^c`."""
    return [_SIGNS.get(name, name) for name in key.key.split(",")]


def label(key: Binding, view: View) -> str:
    if key.action == "drain" and view.frame is not None and view.frame.state == "draining":
        return "resume"
    if key.action == "window":
        return f"graphs {fig.whole_seconds(view.window_s)}"
    return key.description


def hints(bindings: Sequence[Binding], view: View) -> list[Hint]:
    """List the keys for the last line of the screen, which names the pages itself."""
    keys = (key for key in bindings if name_of(key) != "page")
    return [Hint(signs(key)[0], label(key, view), f"app.{key.action}") for key in keys]
