"""Requests as a table with a cursor, in a box with its heading.

A ScrollView that draws single lines: a DataTable draws itself whole for each changed cell, which
costs some twenty times as much.
Owns: cursor and scroll position.
Invariant: the cursor stays on its request while that is live, whatever the order.
Never: cancels or fetches anything.
"""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container
from textual.events import Click, MouseScrollDown, MouseScrollUp, Resize
from textual.geometry import Region, Size
from textual.scroll_view import ScrollView
from textual.strip import Strip

from appliance.frame.protocol import RequestFrame
from tui.feed_messages import WindowMoved
from tui.lines import Line
from tui.panels import requests as rows
from tui.panels.requests import detail
from tui.view import View
from tui.widgets.panel import Panel, Toned, entitle

_TITLE_EDGES = 4
"""Cells of a box's upper edge that its title leaves free, blanks about it included."""


class RequestTable(ScrollView, Toned, can_focus=True):
    """Rows under a heading that the box around them draws."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {*Toned.COMPONENT_CLASSES, "tone--cursor"}
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down,j", "move(1)", "next request", show=False),
        Binding("up,k", "move(-1)", "previous request", show=False),
        Binding("pagedown", "page(1)", "one page down", show=False),
        Binding("pageup", "page(-1)", "one page up", show=False),
        Binding("home", "move(-1000000)", "first request", show=False),
        Binding("end", "move(1000000)", "last request", show=False),
    ]

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._requests: list[RequestFrame] = []
        self._lines: dict[int, Line] = {}
        self._placeholder: Line = []
        self._cursor = 0

    @property
    def selected(self) -> RequestFrame | None:
        """The request under the cursor."""
        return self._requests[self._cursor] if self._requests else None

    @property
    def num_rows(self) -> int:
        """Requests in the table, on screen or not."""
        return len(self._requests)

    @property
    def window(self) -> tuple[int, int]:
        """First and last row on screen, counted from 1."""
        first = self.scroll_offset.y
        return first + 1, min(len(self._requests), first + self.size.height)

    def show(self, requests: list[RequestFrame], placeholder: Line) -> None:
        """Take new readings, in order; the cursor follows its request until that ends."""
        selected = self.selected
        self._requests = requests
        self._placeholder = placeholder
        for index, request in enumerate(requests):
            if selected is not None and request.id == selected.id:
                has_ended = request.phase == "finished" != selected.phase
                self._cursor = self._cursor if has_ended else index
                break
        self._cursor = max(0, min(self._cursor, len(self._requests) - 1))
        self._repaint()

    def action_move(self, num_rows: int) -> None:
        """Move the cursor by so many rows, not beyond the ends."""
        self._cursor = max(0, min(self._cursor + num_rows, len(self._requests) - 1))
        self._repaint()

    def to_top(self) -> None:
        """Put the cursor on the first row."""
        self.action_move(-len(self._requests))

    def action_page(self, num_pages: int) -> None:
        """Move the cursor by as many rows as are on screen."""
        self.action_move(num_pages * max(1, self.size.height - 1))

    def on_click(self, event: Click) -> None:
        """Put the cursor on the row."""
        self.action_move(self.scroll_offset.y + event.y - self._cursor)

    def on_mouse_scroll_down(self, event: MouseScrollDown) -> None:
        """The wheel moves the cursor, and the cursor the rows."""
        event.prevent_default().stop()
        self.action_move(1)

    def on_mouse_scroll_up(self, event: MouseScrollUp) -> None:
        """The wheel moves the cursor up by a row."""
        event.prevent_default().stop()
        self.action_move(-1)

    def on_resize(self, event: Resize) -> None:
        """Columns depend on the width."""
        self._repaint()

    def _repaint(self) -> None:
        width, height = self.size
        if not width or not height:
            return
        num_lines = max(1, len(self._requests))
        if num_lines != self.virtual_size.height:
            self.virtual_size = Size(width, num_lines)
        top = self.scroll_offset.y
        target = max(
            0, min(max(self._cursor - height + 1, min(top, self._cursor)), num_lines - height)
        )
        if target != top:
            self.scroll_to(y=target, animate=False, immediate=True, force=True)
        old, self._lines = self._lines, self._window_lines(target, width, height)
        for y in range(height):
            if self._lines.get(target + y) != old.get(target + y):
                self.refresh(Region(0, y, width, 1))
        self.post_message(WindowMoved())

    def _window_lines(self, top: int, width: int, height: int) -> dict[int, Line]:
        """The rows on screen, by their place in the order."""
        if not self._requests:
            return {0: self._placeholder}
        columns = rows.columns_for(width)
        return {
            index: rows.row(self._requests[index], columns, is_selected=index == self._cursor)
            for index in range(top, min(top + height, len(self._requests)))
        }

    def render_line(self, y: int) -> Strip:
        """Textual's question for one row."""
        index = self.scroll_offset.y + y
        line = self._lines.get(index, [])
        is_cursor = index == self._cursor and bool(self._requests)
        return self.strip_of(line, self.size.width, style="tone--cursor" if is_cursor else None)


class RequestBox(Container):
    """The table under its heading, and beside it, where there is room, the selected request."""

    def __init__(self, *, id: str, with_finished: bool) -> None:
        super().__init__(id=id, classes="requests framed")
        self._with_finished = with_finished
        self._view = View()

    def compose(self) -> ComposeResult:
        """The table at the left."""
        with Container(classes="listed"):
            yield Panel(self._paint_heading, classes="heading")
            yield RequestTable()
        yield Panel(self._paint_selected, classes="selected")

    @property
    def table(self) -> RequestTable:
        """The table that the box frames."""
        return self.query_one(RequestTable)

    def show(self, view: View) -> None:
        """Repaint the requests of what is known now."""
        self._view = view
        live = view.frame.requests if view.frame else []
        finished = view.finished if self._with_finished else ()
        self.table.show(view.listing.arranged(live, finished), rows.placeholder(view))
        self.query_one(".heading", Panel).repaint()

    def on_window_moved(self, message: WindowMoved) -> None:
        """The title says which rows are on screen; the side pane follows the cursor."""
        message.stop()
        first, last = self.table.window
        room = self.outer_size.width - _TITLE_EDGES
        entitle(self, rows.title(self._view, self.table.num_rows, first, last, room))
        self.query_one(".selected", Panel).repaint()

    def _paint_heading(self, width: int, height: int) -> list[Line]:
        return [rows.heading(rows.columns_for(width), self._view.listing)]

    def _paint_selected(self, width: int, height: int) -> list[Line]:
        selected = self.table.selected
        return [] if selected is None else detail(selected, width)[:height]
