"""Provide the widgets' parts: lines, rows and messages.

The one place where tones become terminal styles.

Invariant: only changed rows are drawn again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from rich.segment import Segment
from rich.style import Style
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container
from textual.content import Content
from textual.events import Click, MouseScrollDown, MouseScrollUp, Resize
from textual.geometry import Region, Size
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widget import Widget

from appliance.observe.frame.protocol import RequestFrame
from tui.history import has_meter
from tui.lines import Line, Run, Tone, clean, fit, to_ascii
from tui.panels import requests as rows
from tui.panels.request_page import detail
from tui.view import View
from tui.widgets.console_messages import WindowMoved

Painter = Callable[[int, int], list[Line]]
"""Lines for a width and a height."""


class Toned(Widget):
    """The common part of widgets with runs: tones, ASCII and staleness."""

    COMPONENT_CLASSES = {f"tone--{tone}" for tone in Tone} | {"tone--stale"}

    def strip_of(self, line: Iterable[Run], width: int, style: str | None = None) -> Strip:
        """Turn a line into exactly `width` cells; `style` is a component class over all tones."""
        if self.screen.has_class("-stale") and not self.has_class("-fresh"):
            style = "tone--stale"
        is_ascii = self.screen.has_class("-ascii")
        segments = []
        for span in fit(line, width, is_ascii=is_ascii):
            look = self.get_component_rich_style(style or f"tone--{span.tone}")
            if span.action:
                look += Style.from_meta({"@click": span.action})
            segments.append(Segment(span.text, look))
        return Strip(segments, width)


class Panel(Toned):
    """Lines in a frame."""

    def __init__(self, painter: Painter, *, id: str | None = None, classes: str = "") -> None:
        super().__init__(id=id, classes=classes)
        self._painter = painter
        self._lines: list[Line] = []

    def repaint(self) -> None:
        """Ask the painter again and draw the rows that changed."""
        width, height = self.size
        lines = self.shown(self._painter(width, height), height) if width and height else []
        old, self._lines = self._lines, lines
        for y in range(min(height, max(len(lines), len(old)))):
            if lines[y : y + 1] != old[y : y + 1]:
                self.refresh(Region(0, y, width, 1))

    def shown(self, lines: list[Line], height: int) -> list[Line]:
        return lines

    def on_resize(self) -> None:
        self.repaint()

    def render_line(self, y: int) -> Strip:
        """Return one row for Textual."""
        line = self._lines[y] if y < len(self._lines) else []
        return self.strip_of(line, self.size.width)


class Page(Panel, can_focus=True):
    """Lines that scroll if they do not fit."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down,j", "scroll_lines(1)", "one line down", show=False),
        Binding("up,k", "scroll_lines(-1)", "one line up", show=False),
        Binding("pagedown", "scroll_pages(1)", "one page down", show=False),
        Binding("pageup", "scroll_pages(-1)", "one page up", show=False),
        Binding("home", "scroll_lines(-1000000)", "to the top", show=False),
        Binding("end", "scroll_lines(1000000)", "to the end", show=False),
    ]

    def __init__(self, painter: Painter, *, id: str | None = None, classes: str = "") -> None:
        super().__init__(painter, id=id, classes=classes)
        self._top = 0

    def shown(self, lines: list[Line], height: int) -> list[Line]:
        """Return the lines from the scroll position on; the last row counts the hidden ones."""
        self._top = max(0, min(self._top, len(lines) - height))
        num_below = len(lines) - self._top - height
        if num_below <= 0:
            return lines[self._top :]
        more = [Run(f"▼ {num_below + 1} more lines", Tone.MUTED)]
        return [*lines[self._top : self._top + height - 1], more]

    def action_scroll_lines(self, num_lines: int) -> None:
        """Move by lines, as far as there are any."""
        self._top = max(0, self._top + num_lines)
        self.repaint()

    def action_scroll_pages(self, num_pages: int) -> None:
        """Move by as many lines as are on screen."""
        self.action_scroll_lines(num_pages * max(1, self.size.height - 2))

    def on_mouse_scroll_down(self, event: MouseScrollDown) -> None:
        """Scroll down by a line."""
        event.prevent_default().stop()
        self.action_scroll_lines(1)

    def on_mouse_scroll_up(self, event: MouseScrollUp) -> None:
        """Scroll up by a line."""
        event.prevent_default().stop()
        self.action_scroll_lines(-1)


class _AsciiTitle(Content):
    """A title cut off without the ellipsis, which is not ASCII."""

    def expand_tabs(self, tab_size: int = 8) -> Content:
        return self

    def split(self, *args: Any, **options: Any) -> list[Content]:
        return [self]

    def truncate(self, max_width: int, *, ellipsis: bool = False, pad: bool = False) -> Content:
        return super().truncate(max_width, ellipsis=False, pad=pad)


def entitle(widget: Widget, title: str) -> None:
    """Set the title in the widget's border, never as markup; an unchanged one draws nothing."""
    is_ascii = widget.screen.has_class("-ascii")
    text = to_ascii(title) if is_ascii else clean(title)
    if not widget.styles.border_left[0]:
        text = f" {text} "  # Textual sets titles off only in a whole box
    content = _AsciiTitle(text) if is_ascii else Content(text)
    if widget.border_title != content.markup:
        widget.border_title = content


_TITLE_EDGES = 4
"""Cells of a box's upper edge beside its title."""
_DOUBLE = 2
"""Clicks in a row that open a request."""


class RequestTable(ScrollView, Toned, can_focus=True):
    """Request rows under a heading that the surrounding box draws."""

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
        self._is_metered = True
        self._cursor = 0
        self._is_moved = False
        """Whether a person has put the cursor somewhere; until then it stays on the first row."""

    @property
    def selected(self) -> RequestFrame | None:
        return self._requests[self._cursor] if self._requests else None

    @property
    def num_rows(self) -> int:
        return len(self._requests)

    @property
    def window(self) -> tuple[int, int]:
        """First and last row on screen, counted from 1."""
        first = self.scroll_offset.y
        return first + 1, min(len(self._requests), first + self.size.height)

    def show(
        self, requests: list[RequestFrame], placeholder: Line, is_metered: bool = True
    ) -> None:
        """Show new readings, in order; a cursor that was moved follows its request."""
        selected = self.selected
        self._is_metered = is_metered
        self._requests = requests
        self._placeholder = placeholder
        for index, request in enumerate(requests):
            if self._is_moved and selected is not None and request.id == selected.id:
                has_ended = request.phase == "finished" != selected.phase
                self._cursor = self._cursor if has_ended else index
                break
        self._cursor = max(0, min(self._cursor, len(self._requests) - 1))
        self._repaint()

    def action_move(self, num_rows: int) -> None:
        """Move the cursor by a number of rows, within the ends."""
        self._is_moved = True
        self._cursor = max(0, min(self._cursor + num_rows, len(self._requests) - 1))
        self._repaint()

    def to_top(self) -> None:
        """Put the cursor on the first row."""
        self.action_move(-len(self._requests))

    def to_request(self, request_id: str) -> bool:
        """Put the cursor on a request, if it is listed."""
        ids = [request.id for request in self._requests]
        if request_id in ids:
            self.action_move(ids.index(request_id) - self._cursor)
        return request_id in ids

    def action_page(self, num_pages: int) -> None:
        """Move the cursor by as many rows as are on screen."""
        self.action_move(num_pages * max(1, self.size.height - 1))

    async def on_click(self, event: Click) -> None:
        """Put the cursor on the row; a double click shows its request."""
        self.action_move(self.scroll_offset.y + event.y - self._cursor)
        if event.chain == _DOUBLE:
            await self.run_action("app.detail")

    def on_mouse_scroll_down(self, event: MouseScrollDown) -> None:
        """Move the cursor down by a row."""
        event.prevent_default().stop()
        self.action_move(1)

    def on_mouse_scroll_up(self, event: MouseScrollUp) -> None:
        """Move the cursor up by a row."""
        event.prevent_default().stop()
        self.action_move(-1)

    def on_resize(self, event: Resize) -> None:
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
        """Draw the rows on screen, by their index."""
        if not self._requests:
            return {0: self._placeholder}
        columns = rows.columns_for(width, self._is_metered)
        return {
            index: rows.row(self._requests[index], columns, is_selected=index == self._cursor)
            for index in range(top, min(top + height, len(self._requests)))
        }

    def render_line(self, y: int) -> Strip:
        """Return one row for Textual."""
        index = self.scroll_offset.y + y
        line = self._lines.get(index, [])
        is_cursor = index == self._cursor and bool(self._requests)
        return self.strip_of(line, self.size.width, style="tone--cursor" if is_cursor else None)


class RequestBox(Container):
    """The table under its heading, and beside it, if it fits, the selected request."""

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id, classes="requests framed")
        self._view = View()

    def compose(self) -> ComposeResult:
        """Place the table at the left, and the selected request beside it."""
        with Container(classes="listed"):
            yield Panel(lambda width, height: [rows.summary(self._view, width)], classes="summary")
            yield Panel(self._paint_heading, classes="heading")
            yield RequestTable()
        yield Panel(self._paint_selected, classes="selected")

    @property
    def table(self) -> RequestTable:
        return self.query_one(RequestTable)

    def show(self, view: View) -> None:
        """Repaint the requests for another view."""
        self._view = view
        live = view.frame.requests if view.frame else []
        listed = view.listing.arranged(live, view.finished)
        self.table.show(listed, rows.placeholder(view), has_meter(view.frame))
        for panel in self.query(Panel):
            panel.repaint()

    def on_window_moved(self, message: WindowMoved) -> None:
        """Update the title's row numbers and the side pane."""
        message.stop()
        first, last = self.table.window
        room = self.outer_size.width - _TITLE_EDGES
        entitle(self, rows.title(self._view, self.table.num_rows, first, last, room))
        self.query_one(".selected", Panel).repaint()

    def _paint_heading(self, width: int, height: int) -> list[Line]:
        return [rows.heading(self._columns(width), self._view.listing)]

    def _columns(self, width: int) -> list[rows.RequestColumn]:
        return rows.columns_for(width, has_meter(self._view.frame))

    def _paint_selected(self, width: int, height: int) -> list[Line]:
        selected = self.table.selected
        return [] if selected is None else detail(selected, width)[:height]
