"""The console: one live overview of the appliance.

Owns: the view on screen, the keys, and the worker that follows the daemon.
Called by: tui.__main__.
Invariant: all that is shown comes from one View; what the daemon says never becomes markup.
Never: computes a reading; panels do, purely.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import ClassVar

from textual.app import App
from textual.binding import Binding, BindingType
from textual.screen import Screen

from appliance.protocol import Frame, RequestFrame
from tui import feed
from tui import format as fmt
from tui.messages import FrameArrived, LinkLost
from tui.view import Link, View
from tui.widgets.dialogs import Confirm, Detail, Help
from tui.widgets.overview import Overview
from tui.widgets.request_table import RequestTable

_KEY_SIGNS = {
    "question_mark": "?",
    "comma": ",",
    "full_stop": ".",
    "less_than_sign": "<",
    "greater_than_sign": ">",
    "left_square_bracket": "[",
    "right_square_bracket": "]",
    "plus": "+",
    "equals_sign": "=",
    "minus": "-",
    "ctrl+home": "^Home",
    "ctrl+end": "^End",
    "ctrl+c": "^c",
    "pagedown": "PgDn",
    "pageup": "PgUp",
    "home": "Home",
    "end": "End",
}
Follow = Callable[
    [str, Callable[[Frame], object], Callable[[feed.FeedLost, float], object]], Awaitable[None]
]


class Console(App[None]):
    """`penstock top`.

    Args:
        socket_path: the daemon's socket.
        is_ascii: draw with ASCII only.
        follow: brings the frames; `feed.follow` but for tests.
        now_s: a monotonic clock.
        view: what to show before the first frame.
    """

    CSS_PATH = "console.tcss"
    TITLE = "penstock"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,ctrl+c", "quit", "quit"),
        Binding("question_mark", "help", "help"),
        Binding("p", "pause", "pause"),
        Binding("s", "sort", "sort"),
        Binding("e,enter", "detail", "detail"),
        Binding("x", "cancel", "cancel"),
    ]

    def __init__(
        self,
        socket_path: str,
        *,
        is_ascii: bool = False,
        follow: Follow = feed.follow,
        now_s: Callable[[], float] = time.monotonic,
        view: View | None = None,
    ) -> None:
        # the terminal's own colours: with them alone NO_COLOR leaves no colour at all
        super().__init__(ansi_color=True)
        self.theme = "ansi-dark"
        self.animation_level = "none"
        self._socket_path = socket_path
        self._is_ascii = is_ascii
        self._follow = follow
        self._now_s = now_s
        self._latest = view or View()
        self._paused: View | None = None
        self._down_since_s = now_s()
        self._retry_at_s = now_s()

    def get_default_screen(self) -> Screen[None]:
        """The overview is the screen under all dialogs."""
        hints = [(keys.split()[0], what) for keys, what in _keys(self.BINDINGS)]
        return Overview(self.view, hints, is_ascii=self._is_ascii)

    @property
    def overview(self) -> Overview:
        """The screen under all dialogs."""
        screen = self.screen_stack[0]
        assert isinstance(screen, Overview)
        return screen

    def on_mount(self) -> None:
        """Follow the daemon until the console ends."""
        self.set_interval(1, self._tick)
        self.run_worker(self._feed(), exclusive=True)

    async def _feed(self) -> None:
        await self._follow(
            self._socket_path,
            lambda frame: self.post_message(FrameArrived(frame)),
            lambda loss, retry_in_s: self.post_message(LinkLost(loss, retry_in_s)),
        )

    @property
    def view(self) -> View:
        """What is on screen."""
        paused, latest = self._paused, self._latest
        if paused is None or paused.frame is None or latest.frame is None:
            return latest
        age_s = max(0.0, latest.frame.uptime_s - paused.frame.uptime_s)
        return replace(paused, link=latest.link, paused_s=age_s)

    def on_frame_arrived(self, message: FrameArrived) -> None:
        """A newer reading; while paused only its age is shown."""
        self._latest = self._latest.after(message.frame)
        self._show()
        self._update_detail(message.frame)

    def on_link_lost(self, message: LinkLost) -> None:
        """The last reading stays, greyed."""
        now_s = self._now_s()
        if self._latest.link.is_live or not self._latest.link.why:
            self._down_since_s = now_s
        self._retry_at_s = now_s + message.retry_in_s
        self._latest = self._latest.over(Link(message.loss.word, str(message.loss)))
        self._tick()

    def _tick(self) -> None:
        """While the daemon is away, count seconds; frames are the clock otherwise."""
        link = self._latest.link
        if not link.why:
            return
        now_s = self._now_s()
        link = replace(
            link,
            down_s=now_s - self._down_since_s,
            retry_in_s=max(0.0, self._retry_at_s - now_s),
        )
        self._latest = self._latest.over(link)
        self._show()

    def _show(self) -> None:
        if self.screen_stack:  # a last message may come while the screens are being taken down
            self.overview.show(self.view)

    def action_pause(self) -> None:
        """Hold the screen; frames keep arriving behind it."""
        self._paused = self._latest if self._paused is None else None
        self._show()

    def action_sort(self) -> None:
        """Sort requests by the next column."""
        self.overview.table.sort_by_next()

    def action_help(self) -> None:
        """All keys."""
        keys = [*_keys(self.BINDINGS), *_keys(RequestTable.BINDINGS)]
        self.push_screen(Help(keys, is_ascii=self._is_ascii))

    def action_detail(self) -> None:
        """Where the selected request spends its time."""
        request = self.overview.table.selected
        if request is not None:
            self.push_screen(Detail(request, is_ascii=self._is_ascii))

    def _update_detail(self, frame: Frame) -> None:
        dialog = self.screen_stack[-1] if self.screen_stack else None
        if not isinstance(dialog, Detail) or dialog.request.finish_reason is not None:
            return
        live = {request.id: request for request in frame.requests}
        if dialog.request.id in live:
            dialog.show(live[dialog.request.id])
        else:
            self.run_worker(self._fetch_detail(dialog), group="detail", exclusive=True)

    async def _fetch_detail(self, dialog: Detail) -> None:
        """The request has ended: its final reading, once the daemon has it."""
        try:
            request = await feed.fetch_request(self._socket_path, dialog.request.id)
        except feed.FeedLost:
            return
        if request is not None and dialog.is_attached:
            dialog.show(request)

    def action_cancel(self) -> None:
        """Cancel the selected request, after a yes."""
        request = self.overview.table.selected
        if request is None:
            return

        def act(is_confirmed: bool | None) -> None:
            if is_confirmed:
                self.run_worker(self._cancel(request), group="cancel")

        user = f" of {fmt.clean(request.user)}" if request.user else ""
        question = f"Cancel request {fmt.clean(request.id)}{user}?"
        self.push_screen(Confirm(question, is_ascii=self._is_ascii), act)

    async def _cancel(self, request: RequestFrame) -> None:
        try:
            outcome = await feed.cancel(self._socket_path, request.id)
        except feed.FeedLost as error:
            self.notify(fmt.clean(str(error)), severity="error", markup=False)
        else:
            self.notify(fmt.clean(outcome), markup=False)


def _keys(bindings: list[BindingType]) -> list[tuple[str, str]]:
    """`q ^c` and `quit` for each binding, as a person reads keys."""
    return [
        (" ".join(_KEY_SIGNS.get(key, key) for key in binding.key.split(",")), binding.description)
        for binding in bindings
        if isinstance(binding, Binding)
    ]
