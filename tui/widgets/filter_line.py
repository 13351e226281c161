"""Take a filter while it is typed; the request tables follow every letter.

Invariant: an invalid text changes nothing; the line says why.
"""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Container
from textual.message import Message
from textual.widgets import Input

from tui.filters import GRAMMAR, FilterError, parse
from tui.lines import Line, Run, Tone
from tui.widgets.panel import Panel


class FilterLine(Container):
    """The filter's input, hidden until opened; enter keeps the filter."""

    class Typed(Message):
        """The filter has changed."""

        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    class Kept(Message):
        """The line is closed, and the filter stays."""

    def __init__(self) -> None:
        super().__init__(id="filter")
        self._problem = ""

    def compose(self) -> ComposeResult:
        """Place the input, then a hint on the syntax."""
        yield Panel(lambda width, height: [[Run(" / ", Tone.ACCENT)]], id="slash", classes="-fresh")
        yield Input(compact=True)
        yield Panel(self._paint_hint, id="hint", classes="-fresh")

    @property
    def is_open(self) -> bool:
        """Whether a filter is being typed."""
        return self.has_class("-open")

    def open(self, text: str) -> None:
        """Continue typing at the end of `text`."""
        self.add_class("-open")
        line = self.query_one(Input)
        line.value = text
        line.cursor_position = len(text)
        line.focus()

    def close(self) -> None:
        """Hide the line; the caller moves the focus."""
        self.remove_class("-open")

    def on_input_changed(self, event: Input.Changed) -> None:
        """Pass a valid filter on."""
        event.stop()
        try:
            parse(event.value)
        except FilterError as error:
            self._problem = str(error)
        else:
            self._problem = ""
            if self.is_open:
                self.post_message(self.Typed(event.value))
        for panel in self.query(Panel):
            panel.repaint()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Keep the filter, unless it is invalid."""
        event.stop()
        if not self._problem:
            self.post_message(self.Kept())

    def _paint_hint(self, width: int, height: int) -> list[Line]:
        if self._problem:
            return [[Run(self._problem, Tone.WARN)]]
        return [[Run(f"enter keeps, esc drops   {GRAMMAR}", Tone.MUTED)]]
