"""Lay out the overview page's panels.

Invariant: `show` draws only changed rows.
Invariant: a page of lines is a pure function of a view and a size; the other two are widgets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from textual.app import ComposeResult
from textual.containers import Container

from appliance.observe.frame.protocol import Frame
from tui.history import has_meter
from tui.lines import Line
from tui.panels import events, gauges, handoff, kv, lanes, latencies, power, timeline
from tui.view import View, copies, workers_for
from tui.widgets.panel import Panel, RequestBox, entitle

_Title = Callable[[View, int, int], str]
"""A title for a view, a width and a height."""
_Paint = Callable[[View, int, int], list[Line]]
FRAMED: dict[str, tuple[_Title, _Paint]] = {
    "latency": (lambda view, width, height: latencies.title(view, width), latencies.latency),
    "prefill": (lambda view, width, height: lanes.prefill_title(view), lanes.prefill),
    "decode": (lambda view, width, height: lanes.decode_title(view), lanes.decode),
    "kv": (gauges.kv_title, gauges.kv),
    "handoff": (lambda view, width, height: lanes.handoff_title(view), lanes.handoff),
    "machine": (lambda view, width, height: "MACHINE", gauges.machine),
    "events": (lambda view, width, height: "EVENTS", events.events),
}
_MAX_POOLS = 4
_MANY_EVENTS = 4
"""Events from which on a high screen has more room for them."""
_MAX_WORKERS = 4
"""Maximum workers of one phase that make its lane higher."""


class Overview(Container):
    """Latency and lanes, gauges, requests, events."""

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id)
        self._view = View()

    def compose(self) -> ComposeResult:
        """Place what clients feel, then its causes, requests and events."""
        with Container(id="lanes"):
            yield from map(self._framed, ("latency", "prefill", "decode"))
        with Container(id="gauges"):
            yield self._framed("kv")
            with Container(id="pair"):
                yield from map(self._framed, ("handoff", "machine"))
        yield RequestBox(id="live")
        yield self._framed("events")

    def _framed(self, name: str) -> Panel:
        paint = FRAMED[name][1]
        return Panel(
            lambda width, height: paint(self._view, width, height), id=name, classes="framed"
        )

    def show(self, view: View) -> None:
        """Repaint for another view."""
        self._view = view
        frame = view.frame
        num_pools = min(_MAX_POOLS, len(frame.pools)) if frame else 1
        for num in range(2, _MAX_POOLS + 1):
            self.set_class(num_pools == num, f"-pools-{num}")
        if self.has_class("-copies") != copies(frame):
            self.set_class(copies(frame), "-copies")
            self.call_after_refresh(lambda: self.show(self._view))  # titles tell other widths
        num_workers = max(len(workers_for(frame, role)) for role in ("prefill", "decode"))
        for num in range(2, _MAX_WORKERS + 1):
            self.set_class(min(num_workers, _MAX_WORKERS) == num, f"-workers-{num}")
        for name, (title, _) in FRAMED.items():
            panel = self.query_one(f"#{name}", Panel)
            entitle(panel, title(view, *panel.size))
            panel.repaint()
        num_events = len(events.events(view, 1, _MANY_EVENTS))
        self.set_class(not num_events, "-no-events")
        self.set_class(num_events < _MANY_EVENTS, "-few-events")
        self.query_one(RequestBox).show(view)


NAMES = ("overview", "requests", "kv", "timeline", "events", "handoff", "power")
"""The pages by their digits, from 1."""
Paint = Callable[[View, int, int], list[Line]]
"""Lines for a view, a width and a height; a page scrolls if there are more."""
LINED: Mapping[str, Paint] = MappingProxyType(
    {
        "kv": kv.page,
        "timeline": timeline.page,
        "events": events.page,
        "handoff": handoff.page,
        "power": power.page,
    }
)
"""Pages made of lines only."""


def pages(frame: Frame | None) -> tuple[str, ...]:
    """List the visible pages: power needs a meter."""
    return tuple(name for name in NAMES if name != "power" or has_meter(frame))
