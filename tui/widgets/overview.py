"""The overview screen: which panel stands where, and one call to show a view in all of them.

Owns: the layout (with console.tcss) and the view being shown.
Called by: app.
Invariant: `show` draws only rows that changed, in one update of the terminal.
Never: talks to the daemon.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence

from textual.app import ComposeResult
from textual.containers import Container
from textual.screen import Screen

from tui.lines import Line, Span, Tone
from tui.panels import gauges, header, lanes
from tui.panels import requests as table
from tui.view import View
from tui.widgets.panel import Panel, entitle
from tui.widgets.request_table import RequestTable

_Title = Callable[[View, int, int], str]
"""A title for a view, a width and a height."""
_Paint = Callable[[View, int, int], list[Line]]
_FRAMED: dict[str, tuple[_Title, _Paint]] = {
    "prefill": (lambda view, width, height: lanes.prefill_title(view), lanes.prefill),
    "handoff": (lambda view, width, height: lanes.handoff_title(view), lanes.handoff),
    "decode": (lambda view, width, height: lanes.decode_title(view), lanes.decode),
    "kv": (gauges.kv_title, gauges.kv),
    "latency": (lambda view, width, height: gauges.latency_title(view), gauges.latency),
    "machine": (lambda view, width, height: "MACHINE", gauges.machine),
    "events": (lambda view, width, height: "EVENTS", header.events),
}
_MAX_POOLS = 3
_MIN_WIDTH, _MIN_HEIGHT = 40, 10


class Overview(Screen[None]):
    """Header, alerts, lanes, gauges, requests, events, keys."""

    HORIZONTAL_BREAKPOINTS = [  # noqa: RUF012
        (0, "-tiny"),
        (_MIN_WIDTH, "-narrow"),
        (80, "-normal"),
        (110, "-wide"),
    ]
    VERTICAL_BREAKPOINTS = [  # noqa: RUF012
        (0, "-tiny"),
        (_MIN_HEIGHT, "-short-4"),
        (14, "-short-3"),
        (18, "-short-2"),
        (22, "-short-1"),
        (24, "-low"),
        (36, "-tall"),
        (50, "-high"),
    ]

    def __init__(self, view: View, hints: Sequence[tuple[str, str]], *, is_ascii: bool) -> None:
        super().__init__(classes="-ascii" if is_ascii else "")
        self._view = view
        self._hints = hints

    def compose(self) -> ComposeResult:
        """From top to bottom."""
        yield self._plain("header", lambda width: header.header(self._view, width))
        yield self._plain("alerts", lambda width: header.alert_line(self._view, width))
        yield Panel(self._paint_tiny, id="tiny", classes="-fresh")
        with Container(id="lanes"):
            yield from map(self._framed, ("prefill", "handoff", "decode"))
        with Container(id="gauges"):
            yield self._framed("kv")
            with Container(id="pair"):
                yield from map(self._framed, ("latency", "machine"))
        with Container(id="requests", classes="framed"):
            yield Panel(self._paint_heading, id="heading")
            yield RequestTable(id="table")
        yield self._framed("events")
        yield self._plain("footer", lambda width: header.key_hints(self._hints, width))

    def _plain(self, name: str, paint: Callable[[int], Line]) -> Panel:
        """A line without a frame, that is never greyed."""
        return Panel(lambda width, height: [paint(width)], id=name, classes="-fresh")

    def _framed(self, name: str) -> Panel:
        paint = _FRAMED[name][1]
        return Panel(
            lambda width, height: paint(self._view, width, height), id=name, classes="framed"
        )

    def on_mount(self) -> None:
        """Keys go to the table."""
        self.table.focus()
        self.show(self._view)

    def on_resize(self) -> None:
        """Titles depend on the size, too."""
        self.call_after_refresh(lambda: self.show(self._view))

    @property
    def table(self) -> RequestTable:
        """The request table."""
        return self.query_one(RequestTable)

    def show(self, view: View) -> None:
        """Show another view."""
        self._view = view
        if not self.is_mounted:  # a daemon that is away is noticed sooner; on_mount shows the view
            return
        frame = view.frame
        is_stale = frame is not None and not view.link.is_live
        with self.app.batch_update():
            if self.has_class("-stale") != is_stale:
                self.set_class(is_stale, "-stale")
                for widget in self.query(Panel):
                    widget.refresh()
                self.table.refresh()
            num_pools = min(_MAX_POOLS, len(frame.pools)) if frame else 1
            for num in range(2, _MAX_POOLS + 1):
                self.set_class(num_pools == num, f"-pools-{num}")
            for name, (title, _) in _FRAMED.items():
                panel = self.query_one(f"#{name}", Panel)
                entitle(panel, title(view, *panel.size))
            self.table.show(frame.requests if frame else [], table.placeholder(view))
            for panel in self.query(Panel):
                panel.repaint()

    def on_window_moved(self) -> None:
        """The title of the table says which rows are on screen, and in which order."""
        first, last = self.table.window
        title = table.title(self._view, self.table.sort, first, last)
        entitle(self.query_one("#requests"), title)
        self.query_one("#heading", Panel).repaint()

    def _paint_heading(self, width: int, height: int) -> list[Line]:
        return [table.heading(table.columns_for(width), self.table.sort)]

    def _paint_tiny(self, width: int, height: int) -> list[Line]:
        need = f"need {_MIN_WIDTH}x{_MIN_HEIGHT}, have {self.size.width}x{self.size.height}"
        words = textwrap.wrap(header.summary(self._view), width)
        return [[Span(need, Tone.WARN)], *([Span(line)] for line in words)][:height]
