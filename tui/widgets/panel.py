"""Widgets that show lines: the one place where tones become terminal styles.

Owns: the lines on screen.
Invariant: only rows whose line changed are drawn again.
Never: decides what to show; its painter does, from a view and a size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from rich.segment import Segment
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.events import MouseScrollDown, MouseScrollUp
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from tui.lines import Line, Run, Tone, clean, fit, to_ascii

Painter = Callable[[int, int], list[Line]]
"""Lines for a width and a height."""


class Toned(Widget):
    """What every widget that shows spans has: tones, ASCII and staleness."""

    COMPONENT_CLASSES = {f"tone--{tone}" for tone in Tone} | {"tone--stale"}

    def strip_of(self, line: Iterable[Run], width: int, style: str | None = None) -> Strip:
        """The line in exactly `width` cells; `style` is a component class over all its tones."""
        if self.screen.has_class("-stale") and not self.has_class("-fresh"):
            style = "tone--stale"
        is_ascii = self.screen.has_class("-ascii")
        return Strip(
            [
                Segment(span.text, self.get_component_rich_style(style or f"tone--{span.tone}"))
                for span in fit(line, width, is_ascii=is_ascii)
            ],
            width,
        )


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
        """Of all lines those that stand in the panel."""
        return lines

    def on_resize(self) -> None:
        """Lines depend on the size."""
        self.repaint()

    def render_line(self, y: int) -> Strip:
        """Textual's question for one row."""
        line = self._lines[y] if y < len(self._lines) else []
        return self.strip_of(line, self.size.width)


class Page(Panel, can_focus=True):
    """Lines that may be more than there is room for."""

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
        """From the line scrolled to; the last row says how many there are below it."""
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
        """The wheel scrolls as the key for a line down does."""
        event.prevent_default().stop()
        self.action_scroll_lines(1)

    def on_mouse_scroll_up(self, event: MouseScrollUp) -> None:
        """The wheel scrolls as the key for a line up does."""
        event.prevent_default().stop()
        self.action_scroll_lines(-1)


class _AsciiTitle(Content):
    """A title that is cut off without an ellipsis where it does not fit: that one is no ASCII."""

    def expand_tabs(self, tab_size: int = 8) -> Content:
        return self

    def split(self, *args: Any, **options: Any) -> list[Content]:
        return [self]

    def truncate(self, max_width: int, *, ellipsis: bool = False, pad: bool = False) -> Content:
        return super().truncate(max_width, ellipsis=False, pad=pad)


def entitle(widget: Widget, title: str) -> None:
    """Set the title in the widget's border, never as markup; the same title draws nothing."""
    is_ascii = widget.screen.has_class("-ascii")
    text = to_ascii(title) if is_ascii else clean(title)
    if not widget.styles.border_left[0]:
        text = f" {text} "  # Textual sets titles off only in a whole box
    content = _AsciiTitle(text) if is_ascii else Content(text)
    if widget.border_title != content.markup:
        widget.border_title = content
