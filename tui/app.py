"""Run the console's application: live pages, and keys that act on the daemon.

Invariant: all that is shown comes from one View; what the daemon says never becomes markup.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import ClassVar

from textual import work
from textual.app import App
from textual.binding import Binding, BindingType
from textual.screen import Screen

from appliance.observe.frame.protocol import Frame, RequestFrame
from tui import actions, feed, filters, keys
from tui.history import HISTORY_FRAMES, has_meter
from tui.lines import clean
from tui.panels import header
from tui.request_order import RequestListing
from tui.view import READ_ONLY, WINDOWS_S, Caller, View
from tui.widgets.console_messages import (
    CallerKnown,
    FinishedArrived,
    FrameArrived,
    KeyUnderDialog,
    LinkLost,
    PastArrived,
)
from tui.widgets.dialogs import YES, AskDialog, Choose, Confirm, Detail, Explain, Help, Reader
from tui.widgets.filter_line import FilterLine
from tui.widgets.main_screen import ALL_CLASSES, THEMES, MainScreen
from tui.widgets.overview import pages
from tui.widgets.panel import RequestTable

Follow = Callable[
    [str, Callable[[Frame], object], Callable[[feed.FeedLost, float], object]], Awaitable[None]
]


class Console(App[None]):
    """Run `penstock top`.

    Args:
        is_ascii: draw with ASCII only.
        is_read_only: hide all keys that change anything.
        follow: brings the frames; tests replace `feed.follow`.
        now_s: a monotonic clock.
        view: what to show before the first frame.
    """

    CSS_PATH = "console.tcss"
    TITLE = "penstock"
    ENABLE_COMMAND_PALETTE = False
    UNDER_READERS: ClassVar[frozenset[str]] = frozenset({"cancel", "copy_id", "pause", "theme"})
    """Keys that work while a text is open on top."""
    BINDINGS: ClassVar[list[BindingType]] = [*keys.KEYS]

    def __init__(
        self,
        socket_path: str,
        *,
        is_ascii: bool = False,
        is_read_only: bool = False,
        follow: Follow = feed.follow,
        now_s: Callable[[], float] = time.monotonic,
        view: View | None = None,
    ) -> None:
        # the terminal's own colours: with them alone NO_COLOR leaves no colour at all
        super().__init__(ansi_color=True)
        self.theme = THEMES[0].base
        self.animation_level = "none"
        self._theme = THEMES[0]
        self._socket_path = socket_path
        self._is_ascii = is_ascii
        self._is_read_only = is_read_only
        self._follow = follow
        self._now_s = now_s
        self._latest = view or View()
        self._paused: View | None = None
        self._down_since_s = now_s() - (self._latest.link.down_s or 0.0)
        self._retry_at_s = now_s() + (self._latest.link.retry_in_s or 0.0)
        self._fetched: tuple[int, int, int] | None = None

    def get_default_screen(self) -> Screen[None]:
        """Return the main screen, which lies under all dialogs."""
        return MainScreen(self.view, self._hints, is_ascii=self._is_ascii)

    @property
    def main(self) -> MainScreen:
        """The screen under all dialogs."""
        screen = self.screen_stack[0]
        assert isinstance(screen, MainScreen)
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

    # What is shown

    @property
    def view(self) -> View:
        return self._latest if self._paused is None else self._latest.held(self._paused)

    def on_frame_arrived(self, message: FrameArrived) -> None:
        """Show a newer reading; while paused, only its age."""
        if self._latest.frame is None:
            self._fetch_past(message.frame.at)
        was_live = self._latest.link.is_live
        self._latest = self._latest.after(message.frame)
        if not was_live:
            self._fetch_caller()
        self._show()
        self._fetch_finished_if_newer()
        self._update_detail(message.frame)

    def on_link_lost(self, message: LinkLost) -> None:
        """Keep the last reading on screen, in grey."""
        now_s = self._now_s()
        if self._latest.link.is_live or not self._latest.link.why:
            self._down_since_s = now_s
        self._retry_at_s = now_s + message.retry_in_s
        self._latest = self._latest.over(message.loss.link)
        self._tick()

    def on_caller_known(self, message: CallerKnown) -> None:
        """Hide the keys that the caller may not use."""
        caller = message.caller
        self._latest = replace(
            self._latest,
            caller=Caller(caller.name, READ_ONLY) if self._is_read_only else caller,
        )
        self._show()

    def on_finished_arrived(self, message: FinishedArrived) -> None:
        """Show the requests that have ended."""
        self._latest = replace(self._latest, finished=message.requests)
        self._show()

    def on_past_arrived(self, message: PastArrived) -> None:
        """Fill the graphs with what was before."""
        self._latest = self._latest.preceded(message.frames, message.begin)
        self._show()

    def _tick(self) -> None:
        """Count seconds while the daemon is away; otherwise frames are the clock."""
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
            self.main.show(self.view)

    @work(group="caller", exclusive=True)
    async def _fetch_caller(self) -> None:
        try:
            self.post_message(CallerKnown(await feed.fetch_caller(self._socket_path)))
        except feed.FeedLost:
            return  # the stream will say so, too

    @work(group="past", exclusive=True)
    async def _fetch_past(self, begin: str) -> None:
        """Fetch what was before the first frame; where nothing was recorded, graphs begin there."""
        from appliance.observe.frame.recording import (
            RecordingError,  # sqlite, which the first frame need not wait for
        )
        from tui.replay import past_frames

        try:
            recording = await feed.fetch_recording(self._socket_path, HISTORY_FRAMES)
            frames = await asyncio.to_thread(past_frames, recording)
        except (feed.FeedLost, RecordingError, OSError):
            return
        self.post_message(PastArrived(frames, begin))

    def _fetch_finished_if_newer(self) -> None:
        """Fetch as many as the page has room for, if some have ended since."""
        frame = self._latest.frame
        if frame is None or not self.screen_stack:
            return
        totals, num = frame.totals, self.main.num_finished_wanted
        newest = (frame.pid, num, totals.finished + totals.aborted + totals.failed)
        if num and newest != self._fetched:
            self._fetched = newest
            self._fetch_finished(frame.num_requests + num)

    @work(group="finished", exclusive=True)
    async def _fetch_finished(self, most: int) -> None:
        try:
            self.post_message(FinishedArrived(await feed.fetch_finished(self._socket_path, most)))
        except feed.FeedLost:
            self._fetched = None

    # Keys

    @property
    def selected(self) -> RequestFrame | None:
        """The request in the top dialog, or under the cursor of a page with a table."""
        if isinstance(self.screen_stack[-1], Detail):
            return self.screen_stack[-1].request
        table = self.main.table
        return table.selected if table else None

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Say whether an action is available; disabled ones that can explain themselves count."""
        if action == "page":
            return parameters[0] in pages(self._latest.frame)
        if action == "unfilter" and self.main.filter_line.is_open:
            return True
        now = action, self.view, self.selected, self.main.page
        return keys.is_allowed(*now) or bool(keys.refusal(*now))

    def _refuses(self, action: str) -> bool:
        """Say whether an action is impossible now, and show why."""
        if why := keys.refusal(action, self.view, self.selected, self.main.page):
            self.notify(why, severity="warning", markup=False)
        return bool(why)

    async def on_key_under_dialog(self, message: KeyUnderDialog) -> None:
        """Run keys that work under an open text; for others say that they wait."""
        is_detail = isinstance(self.screen, Detail)
        key = keys.of_press(self._every_key if is_detail else self._keys, message.key)
        if key is None:
            return
        if isinstance(self.screen, Reader) and keys.name_of(key) in self.UNDER_READERS:
            await self.run_action(key.action)
        else:
            what = f"{keys.signs(key)[0]} ({keys.label(key, self.view)})"
            self.notify(f"{what} waits until this is closed: esc", timeout=2, markup=False)

    def _hints(self) -> list[header.Hint]:
        return keys.hints(self._keys, self.view)

    @property
    def _keys(self) -> list[Binding]:
        return keys.allowed(self._every_key, self.view, self.selected, self.main.page)

    @property
    def _every_key(self) -> list[Binding]:
        return [key for key in self.BINDINGS if isinstance(key, Binding)]

    def action_page(self, page: str) -> None:
        """Put another page on screen."""
        self.main.go_to(page)
        self._fetch_finished_if_newer()

    def action_pause(self) -> None:
        """Hold the screen; frames keep arriving behind it."""
        self._paused = self._latest if self._paused is None else None
        self._show()

    def action_window(self) -> None:
        """Let the graphs span another time."""
        index = WINDOWS_S.index(self._latest.window_s) + 1
        self._latest = replace(self._latest, window_s=WINDOWS_S[index % len(WINDOWS_S)])
        self._show()

    def action_theme(self) -> None:
        """Switch to the next colours."""
        self._theme = THEMES[(THEMES.index(self._theme) + 1) % len(THEMES)]
        self.theme = self._theme.base
        for name in ALL_CLASSES:
            self.set_class(name in self._theme.classes, name)
        self.refresh_css(animate=False)
        self.notify(f"theme: {self._theme.name}", timeout=2, markup=False)

    def action_help(self) -> None:
        """Show a dialog with the keys that work now, by topic."""
        table = [binding for binding in RequestTable.BINDINGS if isinstance(binding, Binding)]
        groups: dict[str, list[tuple[str, str]]] = {}
        for key in [*self._keys, *table]:
            title = key.group.description if key.group else "MOVE"
            about = " ".join(keys.signs(key)), keys.label(key, self.view)
            groups.setdefault(title, []).append(about)
        self.push_screen(Help(groups, is_ascii=self._is_ascii))

    def action_explain(self) -> None:
        """Explain the words on this page."""
        self.push_screen(Explain(self.main.page, is_ascii=self._is_ascii))

    def action_commands(self) -> None:
        """Show all keys as a list to choose from."""
        others = [key for key in self._keys if key.action != "commands"]
        action_by_label = {keys.label(key, self.view): key.action for key in others}
        options = [(keys.label(key, self.view), f"key {keys.signs(key)[0]}") for key in others]

        async def run(label: str | None) -> None:
            if label is not None:
                await self.run_action(action_by_label[label])

        self.push_screen(Choose("COMMANDS", options, is_ascii=self._is_ascii), run)

    def action_alert(self, index: int | None = None) -> None:
        """Show what an alert is about: its request, else the page of alerts.

        Args:
            index: in the order of the alerts; None: the worst one that names a request.
        """
        if self._refuses("alert"):
            return
        found = header.alerts(self.view)
        ids = [alert.request_id for alert in (found if index is None else found[index : index + 1])]
        request_id = next(filter(None, ids), "")
        if not request_id:
            self.action_page("events")
            return
        if self.main.table is None:
            self.action_page("overview")
        if not self._choose(request_id):  # the filter hides it
            self.action_unfilter()
            self._choose(request_id)
        self.action_detail()

    def _choose(self, request_id: str) -> bool:
        table = self.main.table
        return table is not None and table.to_request(request_id)

    # Requests

    def action_sort_by(self, name: str) -> None:
        """Sort requests by a column; by the same again, reverse the order."""
        listing = self._latest.listing
        if listing.sort == name:
            self.action_reverse()
        else:
            self._list_anew(replace(listing, sort=name, is_reversed=False))

    def action_sort(self) -> None:
        """Sort requests by the next column."""
        self._list_anew(self._latest.listing.sorted_by_next(has_meter(self._latest.frame)))

    def action_reverse(self) -> None:
        """Reverse the order."""
        listing = self._latest.listing
        self._list_anew(replace(listing, is_reversed=not listing.is_reversed))

    def action_unfilter(self) -> None:
        """Show all requests again."""
        self._list_anew(replace(self._latest.listing, filter=filters.Filter()))
        self.on_filter_line_kept()

    def action_filter(self) -> None:
        """Open the filter, which applies while it is typed."""
        if not self._refuses("filter"):
            self.main.filter_line.open(self._latest.listing.filter.text)

    def on_filter_line_typed(self, message: FilterLine.Typed) -> None:
        """Show the requests that the text admits so far."""
        self._list_anew(replace(self._latest.listing, filter=filters.parse(message.text)))

    def on_filter_line_kept(self) -> None:
        """Give the keys back to the requests."""
        self.main.filter_line.close()
        if self.main.table is not None:
            self.main.table.focus()

    def _list_anew(self, listing: RequestListing) -> None:
        self._latest = replace(self._latest, listing=listing)
        self._show()
        if self.main.table is not None:
            self.main.table.to_top()

    def action_copy_id(self) -> None:
        """Put the selected request's id into the terminal's clipboard."""
        request = self.selected
        if not self._refuses("copy_id") and request is not None:
            self.copy_to_clipboard(clean(request.id))
            self.notify(f"copied {clean(request.id)}", timeout=2, markup=False)

    def action_detail(self) -> None:
        """Show the stages of the selected request."""
        request = self.selected
        if not self._refuses("detail") and request is not None:
            self._open(request)

    def action_look(self, request_id: str) -> None:
        """Show the stages of a request, live or ended."""
        live = self.view.frame.requests if self.view.frame else []
        known = {request.id: request for request in (*self.view.finished, *live)}
        if request_id in known:
            self._open(known[request_id])

    def _open(self, request: RequestFrame) -> None:
        caller = self.view.caller
        is_selected = self.selected is not None and self.selected.id == request.id
        may_cancel = is_selected and caller is not None and caller.may_cancel(request)
        self.push_screen(Detail(request, is_ascii=self._is_ascii, may_cancel=may_cancel))

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
        """Fetch an ended request's final reading, once the daemon has it."""
        try:
            request = await feed.fetch_request(self._socket_path, dialog.request.id)
        except feed.FeedLost:
            return
        if request is not None and dialog.is_attached:
            dialog.show(request)

    # What changes something

    def action_cancel(self) -> None:
        """Cancel the selected request, after a yes."""
        request = self.selected
        if not self._refuses("cancel") and request is not None:
            self._confirm(actions.cancel(request))

    def action_drain(self) -> None:
        """Reject new requests, or accept them again, after a yes."""
        if not self._refuses("drain") and self._latest.frame is not None:
            self._confirm(actions.drain_or_resume(self._latest.frame))

    def action_roles(self) -> None:
        """Choose other roles for the workers."""
        frame = self._latest.frame
        if self._refuses("roles") or frame is None:
            return

        def choose(roles: str | None) -> None:
            if roles is not None:
                self._confirm(actions.switch_roles(frame, roles))

        now = f"ROLES  {clean(frame.roles)} now"
        self.push_screen(Choose(now, actions.ROLE_CHOICES, is_ascii=self._is_ascii), choose)

    def action_targets(self) -> None:
        """Ask for other targets of TTFT and ITL."""
        frame = self._latest.frame
        if self._refuses("targets") or frame is None:
            return

        def aim(text: str | None) -> None:
            if text is not None:
                self._confirm(actions.set_targets(text))

        text, check = actions.targets_text(frame), actions.problem_of(actions.targets)
        ask = AskDialog("TARGETS", actions.TARGETS_HINT, text, check, True, is_ascii=self._is_ascii)
        self.push_screen(ask, aim)

    def _confirm(self, action: actions.Action) -> None:
        def answered(answer: str | None) -> None:
            if answer == YES:
                self._act(action)

        self.push_screen(Confirm(action.question, is_ascii=self._is_ascii), answered)

    @work(group="act")
    async def _act(self, action: actions.Action) -> None:
        try:
            outcome = await action.act(self._socket_path)
        except feed.FeedLost as error:
            self.notify(clean(str(error)), severity="error", markup=False)
        else:
            self.notify(clean(outcome), markup=False)
