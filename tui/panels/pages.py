"""The pages of the console in the order of their keys.

Owns: the names of the pages.
Invariant: a page of lines is a pure function of a view and a size; the other two are widgets.
Never: draws.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from tui.lines import Line
from tui.panels import handoff, kv, log, power
from tui.view import View

NAMES = ("overview", "requests", "kv", "power", "handoff", "log")
"""`1` to `6`."""
Paint = Callable[[View, int, int], list[Line]]
"""Lines for a view, a width and a height; there may be more of them, a page scrolls."""
LINED: Mapping[str, Paint] = MappingProxyType(
    {"kv": kv.page, "power": power.page, "handoff": handoff.page, "log": log.page}
)
"""Pages that are lines and nothing else."""
