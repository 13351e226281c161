"""A question that is answered with a line of text.

Owns: nothing that outlives it. Called by: replay_console.
Invariant: escape answers nothing. Never: acts; the answer goes to who asked.
"""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container
from textual.screen import ModalScreen
from textual.widgets import Input

from tui.widgets.panel import entitle


class Prompt(ModalScreen[str]):
    """One line, in the middle."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,ctrl+c", "dismiss('')", "close", show=False)
    ]

    def __init__(self, title: str, hint: str, *, is_ascii: bool) -> None:
        super().__init__(classes="-ascii" if is_ascii else "")
        self._title = title
        self._hint = hint

    def compose(self) -> ComposeResult:
        """One field in a frame."""
        with Container(id="prompt"):
            yield Input(placeholder=self._hint, compact=True)

    def on_mount(self) -> None:
        """Say what is asked."""
        entitle(self.query_one("#prompt"), self._title)

    def on_input_submitted(self, submitted: Input.Submitted) -> None:
        """Enter answers."""
        self.dismiss(submitted.value)
