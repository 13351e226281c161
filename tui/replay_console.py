"""Show a recording in the console, with a time bar.

Invariant: the screen shows one frame of the recording, with its own requests and events.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

from textual.binding import BindingType

from appliance.observe.frame.recording import RecordingError
from tui import keys
from tui.app import Console
from tui.lines import Line, clean
from tui.playback import Playback, parse_moment
from tui.replay import Replay
from tui.replay_bar import bar, landing
from tui.widgets.dialogs import AskDialog, Detail
from tui.widgets.panel import Panel

TICK_S = 0.25


class ReplayConsole(Console, inherit_bindings=False):
    """Run `penstock top --replay`.

    Args:
        replay: what is shown; the caller closes it.
        playback: where to begin.
        is_ascii: draw with ASCII only.
        now_s: a monotonic clock.
    """

    UNDER_READERS = Console.UNDER_READERS | {"step", "skip", "mark", "speed", "first", "last"}
    BINDINGS: ClassVar[list[BindingType]] = [
        *keys.group(
            "REPLAY",
            ("space", "pause", "play"),
            ("comma", "step(-1)", "-1 s"),
            ("full_stop", "step(1)", "+1 s"),
            ("less_than_sign", "skip(-60)", "-60 s"),
            ("greater_than_sign", "skip(60)", "+60 s"),
            ("left_square_bracket", "mark(-1)", "previous alert"),
            ("right_square_bracket", "mark(1)", "next alert"),
            ("plus,equals_sign", "speed(1)", "faster"),
            ("minus", "speed(-1)", "slower"),
            ("g", "go", "go to time"),
            ("ctrl+home", "first", "first frame"),
            ("ctrl+end", "last", "last frame"),
        ),
        *Console.BINDINGS,
    ]

    def __init__(
        self,
        replay: Replay,
        playback: Playback,
        *,
        is_ascii: bool = False,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        view = replay.view_at(playback.index)
        super().__init__("", is_ascii=is_ascii, now_s=now_s, view=view)
        self._replay = replay
        self._playback = playback
        self._shown_s = now_s()

    async def on_ready(self) -> None:
        """Put the bar above the keys, and start the clock."""
        await self.main.mount(
            Panel(self._paint_bar, id="replay", classes="-fresh"), before="#footer"
        )
        self.set_interval(TICK_S, self._play)

    async def _feed(self) -> None:
        """Do nothing: no frames arrive."""

    def _tick(self) -> None:
        """Do nothing: no link can be lost."""

    def _paint_bar(self, width: int, height: int) -> list[Line]:
        notes = []
        if num_damaged := self._replay.num_damaged:
            notes.append(f"{num_damaged} damaged")
        if num_unlogged := self._replay.num_unlogged(self._latest):
            notes.append(f"{num_unlogged} live not in the log")
        return [bar(self._playback, notes, width)]

    def _play(self) -> None:
        now_s = self._now_s()
        elapsed_s, self._shown_s = now_s - self._shown_s, now_s
        if self._playback.is_playing:
            self._move(self._playback.after(elapsed_s))

    def _move(self, playback: Playback) -> None:
        before, self._playback = self._playback, playback
        try:
            if playback.index != before.index:
                self._latest = self._replay.view_at(playback.index, (before.index, self._latest))
                self._find_finished()
            self._show()
            if isinstance(self.screen, Detail):
                request_id = self.screen.request.id
                self.screen.show(self._replay.request_at(request_id, playback.index))
        except RecordingError as error:
            self.exit(return_code=error.exit_code, message=clean(str(error)))

    def _find_finished(self) -> None:
        """Find the requests that had ended by this time, as many as the page shows."""
        if num := self.main.num_finished_wanted:
            finished = self._replay.finished_at(self._playback.index)[:num]
            self._latest = replace(self._latest, finished=finished)

    def _fetch_finished_if_newer(self) -> None:
        """Find the ended requests again after a change of page."""
        try:
            self._find_finished()
        except RecordingError as error:
            self.exit(return_code=error.exit_code, message=clean(str(error)))
        self._show()

    def action_pause(self) -> None:
        """Start or stop the clock."""
        self._shown_s = self._now_s()
        self._move(self._playback.toggled())

    def action_step(self, num_frames: int) -> None:
        """Move to the next or the previous frame."""
        self._move(self._playback.step(num_frames))

    def action_skip(self, num_s: int) -> None:
        """Move by a time."""
        self._move(self._playback.skip(num_s * 1000))

    def action_mark(self, direction: int) -> None:
        """Move to the next or the previous warning or error."""
        here = self._playback
        there = here.next_mark() if direction > 0 else here.previous_mark()
        if there.index == here.index:
            self.notify(f"no alert {'after' if direction > 0 else 'before'} this", markup=False)
        self._move(there)

    def action_speed(self, num_steps: int) -> None:
        """Change the speed."""
        self._move(self._playback.faster(num_steps))

    def action_first(self) -> None:
        """Go to the recording's first frame."""
        self._move(self._playback.seek(self._playback.moments_ms[0]))

    def action_last(self) -> None:
        """Go to the recording's last frame."""
        self._move(self._playback.seek(self._playback.moments_ms[-1]))

    def action_go(self) -> None:
        """Ask for a time and go there."""
        hint = "14:02:11, -5m, +30s (UTC)"
        self.push_screen(
            AskDialog("GO TO", hint, "", lambda _: "", is_ascii=self._is_ascii), self._go
        )

    def _go(self, text: str | None) -> None:
        if not text:
            return
        at_ms = parse_moment(text, self._playback.at_ms)
        if at_ms is None:
            about = f"{clean(text)} is not a time; give 14:02:11, -5m or +30s"
            self.notify(about, severity="error", markup=False)
        else:
            self._move(self._playback.seek(at_ms))
            self.notify(landing(self._playback, at_ms), markup=False)
