"""Show dialogs over the pages: text, questions, choices, input.

Invariant: each names the key that leaves it; an answer is a text, None is no answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.events import Key
from textual.screen import ModalScreen
from textual.widgets import Input

from appliance.observe.frame.protocol import RequestFrame
from tui.lines import Line, Run, Tone, beside, clip, pad, wrap
from tui.panels.glossary import REQUEST, glossary
from tui.panels.request_page import detail
from tui.widgets.console_messages import KeyUnderDialog
from tui.widgets.panel import Page, Panel, entitle

YES = "yes"
_KEY_WIDTH = 14
_TWO_COLUMNS = 60
_NAME_WIDTH = 20
_WIDTH = 72
"""Maximum width of lines inside the frame."""
_EDGES = 4
"""Cells of a row for the frame and its blanks."""
_MIN_BESIDE = 8
"""Minimum cells beside a dialog; with fewer left it fills the row."""


class Dialog(ModalScreen[str]):
    """A framed page in the middle."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,ctrl+c", "dismiss", "close", show=False)
    ]

    def __init__(self, title: str, paint: Callable[[int], list[Line]], *, is_ascii: bool) -> None:
        super().__init__(classes="-ascii" if is_ascii else "")
        self._title = title
        self._paint = paint

    def compose(self) -> ComposeResult:
        yield Page(lambda width, height: self._paint(width), id="dialog")

    def on_mount(self) -> None:
        """Show the frame, as high as its lines."""
        self.app.clear_notifications()
        entitle(self.query_one("#dialog"), self._title)
        self.repaint()

    def on_resize(self) -> None:
        self.repaint()

    def on_key(self, event: Key) -> None:
        """Pass unused keys to the page below."""
        if event.key not in self.active_bindings:
            event.stop()
            self.post_message(KeyUnderDialog(event.key))

    def repaint(self) -> None:
        """Draw the changes, as high as the lines and the terminal allow."""
        page = self.query_one(Panel)
        fills_row = self.size.width < _WIDTH + _EDGES + _MIN_BESIDE
        width = self.size.width - _EDGES if fills_row else _WIDTH
        page.styles.width = width + _EDGES
        page.styles.height = len(self._paint(width)) + self.frame_height
        page.repaint()

    @property
    def frame_height(self) -> int:
        """Rows of the page besides the lines."""
        return 2


class Reader(Dialog):
    """A text to read; the key that opens it closes it, too."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,enter,e,question_mark,f1", "dismiss", "close", show=False)
    ]


class Help(Reader):
    """All keys by topic, from the bindings themselves."""

    def __init__(self, groups: Mapping[str, Sequence[tuple[str, str]]], *, is_ascii: bool) -> None:
        self._groups = groups
        super().__init__("KEYS  esc or q closes", self._lines, is_ascii=is_ascii)

    def _lines(self, width: int) -> list[Line]:
        """Arrange the groups in two columns of about equal height, if they fit."""
        blocks = [self._block(title, keys) for title, keys in self._groups.items()]
        if width < _TWO_COLUMNS:
            return [line for block in blocks for line in block]
        left: list[Line] = []
        while blocks and len(left) + len(blocks[0]) <= sum(map(len, blocks)):
            left += blocks.pop(0)
        return beside(left, [line for block in blocks for line in block], width // 2 - 1)

    def _block(self, title: str, keys: Sequence[tuple[str, str]]) -> list[Line]:
        named = [[Run(pad(key, _KEY_WIDTH), Tone.ACCENT), Run(what)] for key, what in keys]
        return [[Run(title, Tone.STRONG)], *named]


class Explain(Reader):
    """The glossary of a page, or of a request's dialog."""

    def __init__(self, page: str, *, is_ascii: bool) -> None:
        title = f"EXPLAIN {page}  esc or q closes"
        super().__init__(title, lambda width: glossary(page, width), is_ascii=is_ascii)


class Detail(Reader):
    """One request with its stages."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("e", "explain", "explain", show=False)]

    def __init__(self, request: RequestFrame, *, is_ascii: bool, may_cancel: bool) -> None:
        self.request = request
        self._is_there = True
        self._is_ascii = is_ascii
        cancels = "x cancels, " if may_cancel else ""
        title = f"REQUEST  {cancels}e explains, esc or q closes"
        super().__init__(title, self._lines, is_ascii=is_ascii)

    def action_explain(self) -> None:
        """Explain the stages."""
        self.app.push_screen(Explain(REQUEST, is_ascii=self._is_ascii))

    def _lines(self, width: int) -> list[Line]:
        if self._is_there:
            return detail(self.request, width)
        name = Run(clip(self.request.id, width), Tone.STRONG)
        return [[name], [Run("not received yet", Tone.MUTED)]]

    def show(self, request: RequestFrame | None) -> None:
        """Show another reading of the request; None: it had not come yet."""
        self._is_there = request is not None
        self.request = request or self.request
        self.repaint()


class Confirm(Dialog):
    """A question; only `y` is a yes."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", f"dismiss('{YES}')", "yes", show=False),
        Binding("n,q,enter", "dismiss", "no", show=False),
    ]

    def __init__(self, question: str, *, is_ascii: bool) -> None:
        yes, no = f"screen.dismiss('{YES}')", "screen.dismiss"
        answers: Line = [
            Run("y", Tone.ACCENT, yes),
            Run(" yes   ", action=yes),
            Run("N", Tone.ACCENT, no),
            Run(" no", action=no),
        ]
        super().__init__(
            "CONFIRM", lambda width: [*wrap(question, width), answers], is_ascii=is_ascii
        )


class AskDialog(Dialog):
    """A line to type, with its error shown while typing."""

    def __init__(
        self,
        title: str,
        hint: str,
        value: str,
        check: Callable[[str], str],
        is_replaced: bool = False,
        *,
        is_ascii: bool,
    ) -> None:
        """Begin with a value; typing appends to it or replaces it."""
        self._is_replaced = is_replaced
        self._value = value
        self._check = check
        self._hint = hint
        super().__init__(f"{title}  enter sets, esc leaves", self._lines, is_ascii=is_ascii)

    def compose(self) -> ComposeResult:
        """Place the input line above its hint."""
        with Panel(lambda width, height: [[], *self._paint(width)], id="dialog"):
            yield Input(self._value, compact=True, select_on_focus=self._is_replaced)

    def _lines(self, width: int) -> list[Line]:
        problem = self._check(self._value)
        return wrap(problem, width, 0, Tone.WARN) if problem else wrap(self._hint, width, 0)

    @property
    def frame_height(self) -> int:
        """Rows for the frame and the input line."""
        return 3

    def on_input_changed(self, event: Input.Changed) -> None:
        """Check the text after every letter."""
        self._value = event.value
        self.repaint()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Answer with the line if it has no error."""
        if not self._check(event.value):
            self.dismiss(event.value)


class Choose(Dialog):
    """Options, narrowed by typing; up and down choose among them."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down", "move(1)", "next", show=False),
        Binding("up", "move(-1)", "previous", show=False),
    ]

    def __init__(self, title: str, options: Sequence[tuple[str, str]], *, is_ascii: bool) -> None:
        self._options = options
        self._text = ""
        self._cursor = 0
        super().__init__(f"{title}  enter takes, esc leaves", self._lines, is_ascii=is_ascii)

    def compose(self) -> ComposeResult:
        """Place the input line above the options."""
        with Panel(lambda width, height: [[], *self._around(width, height - 1)], id="dialog"):
            yield Input(placeholder="type to narrow", compact=True)

    @property
    def frame_height(self) -> int:
        """Rows for the frame and the input line."""
        return 3

    @property
    def _matches(self) -> list[tuple[str, str]]:
        words = self._text.lower().split()
        return [
            (name, what)
            for name, what in self._options
            if all(word in f"{name} {what}".lower() for word in words)
        ]

    def _lines(self, width: int) -> list[Line]:
        rows: list[Line] = [
            [
                Run("> " if index == self._cursor else "  ", Tone.ACCENT),
                Run(pad(name, _NAME_WIDTH), Tone.STRONG, f"screen.take({index})"),
                Run(what, Tone.MUTED, f"screen.take({index})"),
            ]
            for index, (name, what) in enumerate(self._matches)
        ]
        return rows or [[Run("nothing matches", Tone.MUTED)]]

    def _around(self, width: int, height: int) -> list[Line]:
        """Return the options around the cursor, if not all fit."""
        top = max(0, self._cursor - height + 1)
        return self._paint(width)[top : top + height]

    def action_move(self, num_rows: int) -> None:
        """Move the cursor by a number of options, within the ends."""
        self._cursor = max(0, min(self._cursor + num_rows, len(self._matches) - 1))
        self.repaint()

    def on_mouse_scroll_down(self) -> None:
        """Move the cursor down by an option."""
        self.action_move(1)

    def on_mouse_scroll_up(self) -> None:
        """Move the cursor up by an option."""
        self.action_move(-1)

    def on_input_changed(self, event: Input.Changed) -> None:
        """Match the options again."""
        self._text, self._cursor = event.value, 0
        self.repaint()

    def on_input_submitted(self) -> None:
        """Take the option at the cursor, if there is one."""
        self.action_take(self._cursor)

    def action_take(self, index: int) -> None:
        """Take a matching option by its place, if there is one."""
        matches = self._matches
        if matches:
            self.dismiss(matches[index][0])
