"""Show the main screen: header, alerts, one page, keys.

Invariant: header, alerts and keys are visible at every size and over every page; only the page on
screen is drawn.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from typing import NamedTuple

from textual.app import ComposeResult
from textual.events import Key
from textual.screen import Screen
from textual.widgets import ContentSwitcher

from tui.lines import Line, Run, Tone, folded
from tui.panels import header
from tui.view import View
from tui.widgets.filter_line import FilterLine
from tui.widgets.overview import LINED, NAMES, Overview, pages
from tui.widgets.panel import Page, Panel, RequestBox, RequestTable

Hints = Callable[[], Sequence[header.Hint]]
"""The keys that work now, and what they do."""
_MIN_WIDTH, _MIN_HEIGHT = 40, 10
_MOST_FINISHED = 500


class MainScreen(Screen[None]):
    """Everything except the dialogs."""

    HORIZONTAL_BREAKPOINTS = [  # noqa: RUF012
        (0, "-tiny"),
        (_MIN_WIDTH, "-narrow"),
        (80, "-normal"),
        (110, "-wide"),
        (160, "-broad"),
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

    def __init__(self, view: View, hints: Hints, *, is_ascii: bool) -> None:
        super().__init__(classes="-ascii" if is_ascii else "")
        self._view = view
        self._hints = hints
        self.page = NAMES[0]

    def compose(self) -> ComposeResult:
        """Place header, alerts, the pages and the keys."""
        yield self._line("header", lambda width: header.header(self._view, width))
        yield self._line("alerts", lambda width: header.alert_line(self._view, width))
        yield Panel(self._paint_tiny, id="tiny", classes="-fresh")
        with ContentSwitcher(initial=_id(self.page)):
            yield Overview(id=_id("overview"))
            yield RequestBox(id=_id("requests"))
            for name in LINED:
                yield self._lined(name)
        yield FilterLine()
        yield self._line("footer", self._paint_footer)

    def _paint_footer(self, width: int) -> Line:
        return header.key_hints(self._hints(), pages(self._view.frame), self.page, width)

    def _line(self, name: str, paint: Callable[[int], Line]) -> Panel:
        """Make a line without a frame that is never greyed."""
        return Panel(lambda width, height: [paint(width)], id=name, classes="-fresh")

    def _lined(self, name: str) -> Page:
        paint = LINED[name]
        return Page(
            lambda width, height: folded(paint(self._view, width, height), width),
            id=_id(name),
            classes="page",
        )

    def on_mount(self) -> None:
        """Give the keys to the table."""
        self.go_to(self.page)

    def on_resize(self) -> None:
        self.call_after_refresh(lambda: self.show(self._view))

    def on_key(self, event: Key) -> None:
        """Answer a key that does nothing."""
        if event.is_printable and event.key not in self.active_bindings:
            what = f"{event.character} does nothing on this page; ? lists the keys"
            self.notify(what, timeout=2, markup=False)

    @property
    def table(self) -> RequestTable | None:
        return next(iter(self._current.query(RequestTable)), None)

    @property
    def num_finished_wanted(self) -> int:
        """The number of finished requests that the page can show."""
        if self.page in ("requests", "timeline", "handoff"):
            return _MOST_FINISHED
        num_live = len(self._view.frame.requests) if self._view.frame else 0
        return max(0, self.table.size.height - num_live) if self.table else 0

    @property
    def filter_line(self) -> FilterLine:
        """The line for typing filters."""
        return self.query_one(FilterLine)

    @property
    def _current(self) -> Overview | RequestBox | Page:
        page = self.query_one(f"#{_id(self.page)}")
        assert isinstance(page, Overview | RequestBox | Page)
        return page

    def go_to(self, page: str) -> None:
        """Show another page and give it the keys."""
        self.page = page
        self.query_one(ContentSwitcher).current = _id(page)
        (self.table or self._current).focus()
        self.show(self._view)
        self.call_after_refresh(lambda: self.show(self._view))  # it has its size only then

    def show(self, view: View) -> None:
        """Show another view in one update of the terminal."""
        self._view = view
        if not self.is_mounted or not self.is_running:
            return  # a daemon that is away is noticed sooner than that, and on_mount shows the view
        is_stale = view.frame is not None and not view.link.is_live
        with self.app.batch_update():
            if self.has_class("-stale") != is_stale:
                self.set_class(is_stale, "-stale")
                for widget in (*self.query(Panel), *self.query(RequestTable)):
                    widget.refresh()
            current = self._current
            if isinstance(current, Page):
                current.repaint()
            else:
                current.show(view)
            for line in self.children:  # the keys depend on what the page has selected
                if isinstance(line, Panel):
                    line.repaint()

    def _paint_tiny(self, width: int, height: int) -> list[Line]:
        need = f"need {_MIN_WIDTH}x{_MIN_HEIGHT}, have {self.size.width}x{self.size.height}"
        words = textwrap.wrap(header.summary(self._view), width)
        return [[Run(need, Tone.WARN)], *([Run(line)] for line in words)][:height]


def _id(page: str) -> str:
    return f"page-{page}"


class Theme(NamedTuple):
    """One set of colours for the tones."""

    name: str
    base: str
    """Textual's theme for input fields."""
    classes: frozenset[str]
    """CSS classes of the app, for console.tcss."""


THEMES = (
    Theme("dark", "ansi-dark", frozenset()),
    Theme("light", "ansi-light", frozenset({"-light"})),
    Theme("dark, colour-blind", "ansi-dark", frozenset({"-colour-blind"})),
    Theme("light, colour-blind", "ansi-light", frozenset({"-light", "-colour-blind"})),
)
ALL_CLASSES = frozenset().union(*(theme.classes for theme in THEMES))
