"""Dialogs over the overview: help, one request in detail, and the question before a cancel.

Owns: nothing that outlives it. Called by: app.
Invariant: each says which key leaves it.
Never: acts; a question is answered to the app.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import ModalScreen

from appliance.protocol import RequestFrame
from tui import format as fmt
from tui.lines import Line, Span, Tone
from tui.panels.waterfall import detail
from tui.widgets.panel import Panel, entitle


class Dialog(ModalScreen[bool]):
    """A framed panel in the middle."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,enter,e,question_mark,ctrl+c", "dismiss(False)", "close", show=False)
    ]

    def __init__(self, title: str, paint: Callable[[int], list[Line]], *, is_ascii: bool) -> None:
        super().__init__(classes="-ascii" if is_ascii else "")
        self._title = title
        self._paint = paint

    def compose(self) -> ComposeResult:
        """One panel."""
        yield Panel(lambda width, height: self._paint(width), id="dialog")

    def on_mount(self) -> None:
        """As high as its lines, as far as the terminal goes."""
        panel = self.query_one(Panel)
        entitle(panel, self._title)
        panel.styles.height = len(self._paint(72)) + 2

    def on_resize(self) -> None:
        """Lines depend on the width."""
        self.repaint()

    def repaint(self) -> None:
        """Draw what changed."""
        self.query_one(Panel).repaint()


class Help(Dialog):
    """All keys, from the bindings themselves."""

    def __init__(self, keys: Sequence[tuple[str, str]], *, is_ascii: bool) -> None:
        lines: list[Line] = [
            [Span(fmt.pad(key, 20), Tone.ACCENT), Span(what)] for key, what in keys
        ]
        lines += [[], [Span("gap: time between two tokens; ttft: time to first token", Tone.MUTED)]]
        super().__init__("KEYS  esc closes", lambda width: lines, is_ascii=is_ascii)


class Detail(Dialog):
    """One request and where its time went."""

    def __init__(self, request: RequestFrame, *, is_ascii: bool) -> None:
        self.request = request
        super().__init__(
            "REQUEST  esc closes", lambda width: detail(self.request, width), is_ascii=is_ascii
        )

    def show(self, request: RequestFrame) -> None:
        """A newer reading of the same request."""
        self.request = request
        self.query_one(Panel).styles.height = len(detail(request, 72)) + 2
        self.repaint()


class Confirm(Dialog):
    """A question; only `y` is a yes."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "dismiss(True)", "yes", show=False),
        Binding("n", "dismiss(False)", "no", show=False),
    ]

    def __init__(self, question: str, *, is_ascii: bool) -> None:
        lines: list[Line] = [
            [Span(question)],
            [Span("y", Tone.ACCENT), Span(" yes   "), Span("N", Tone.ACCENT), Span(" no")],
        ]
        super().__init__("CONFIRM", lambda width: lines, is_ascii=is_ascii)
