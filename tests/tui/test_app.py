"""The console under keys, frames and losses, with a fake daemon where a socket matters."""

from __future__ import annotations

import dataclasses
import re

import pytest
from textual.events import MouseScrollDown, MouseScrollUp

from tests.recordings import frame_at, make_recording
from tests.tui import frames
from tests.tui.daemon import FakeDaemon
from tests.tui.screen import console_at, grid, resize, settled, until
from tui import feed
from tui.widgets.console_messages import FinishedArrived, FrameArrived, LinkLost
from tui.widgets.dialogs import Confirm, Detail


@pytest.fixture
def socket_path(tmp_path):
    return tmp_path / "penstock.sock"


@pytest.fixture
def busy():
    return frames.view_of(frames.busy())


def header_of(console):
    return grid(console).splitlines()[0]


def ids_on_screen(console):
    rows = [line[2:10] for line in grid(console).splitlines() if line[11:].startswith("decoding")]
    return [row for row in rows if row.strip()]


async def test_it_reconnects_when_the_daemon_dies_and_returns(socket_path):
    daemon = FakeDaemon(socket_path)
    async with console_at(80, 24, socket_path=socket_path, follow=feed.follow) as (console, pilot):
        await until(pilot, lambda: "DISCONNECTED" in header_of(console))
        assert "penstock serve" in grid(console)
        daemon.send(frames.busy(7))
        await daemon.start()
        await until(pilot, lambda: "LIVE" in header_of(console))
        await daemon.die()
        await until(pilot, lambda: "DISCONNECTED" in header_of(console))
        assert console.main.has_class("-stale")
        assert len(ids_on_screen(console)) == 9, "the last reading stays on screen"
        daemon.lines = []
        socket_path.unlink()
        daemon.send(frames.busy(8))
        await daemon.start()
        await until(pilot, lambda: "LIVE" in header_of(console))
        assert not console.main.has_class("-stale")
        assert len(set(ids_on_screen(console))) == len(ids_on_screen(console)) == 9
        await daemon.die()


async def test_requests_and_events_are_not_doubled_by_a_restart(socket_path):
    daemon = FakeDaemon(socket_path)
    ended = [frames.finished(number) for number in (41, 42, 43)]
    daemon.requests = {request.id: request for request in ended}
    async with console_at(120, 40, socket_path=socket_path, follow=feed.follow) as (console, pilot):
        await pilot.press("2")
        for pid in (500, 501):
            daemon.send(frames.draining(pid=pid, seq=10))
            await daemon.start()
            await until(
                pilot, lambda: "LIVE" in header_of(console) and console.main.table.num_rows == 6
            )
            await pilot.pause()
            rows = re.findall(r"^│ [> ] ([0-9a-f]{8}) ", grid(console), re.M)
            assert len(rows) == len(set(rows)) == 6
            await pilot.press("5")
            await pilot.pause()
            assert grid(console).count("request.cancelled") == 1
            await daemon.die()
            await until(pilot, lambda: "DISCONNECTED" in header_of(console))
            daemon.lines = []
            socket_path.unlink()
            await pilot.press("2")


async def test_a_request_that_ended_between_two_questions_is_shown_once(busy):
    live = busy.frame.requests[0]
    both = dataclasses.replace(busy, finished=(frames.finished(30, id=live.id),))
    async with console_at(120, 40, both) as (console, pilot):
        await pilot.press("2")
        await pilot.pause()
        assert console.main.table.num_rows == 30
        assert console.main.table.selected.phase == "decoding"


async def test_a_message_that_comes_while_it_closes_is_harmless(busy):
    async with console_at(80, 24, busy) as (console, _):
        pass
    assert not console.screen_stack
    console.on_link_lost(LinkLost(feed.FeedLost("gone"), 1.0))
    console.on_frame_arrived(FrameArrived(frames.busy(200)))


async def test_seconds_are_counted_while_the_daemon_is_away(busy):
    clock = frames.FakeClock()
    async with console_at(80, 24, busy, clock=clock) as (console, pilot):
        console.post_message(LinkLost(feed.FeedLost("gone"), 5.0))
        await pilot.pause()
        clock.now_s += 3
        console.post_message(LinkLost(feed.FeedLost("gone"), 2.0))
        await pilot.pause()
        assert header_of(console).endswith("DISCONNECTED 3s, retry in 2s")


async def test_a_daemon_of_another_version_is_said_in_a_banner(socket_path):
    async with FakeDaemon(socket_path) as daemon:
        daemon.send(b'{"version": 99}\n')
        async with console_at(100, 24, socket_path=socket_path, follow=feed.follow) as (
            console,
            pilot,
        ):
            await until(pilot, lambda: "INCOMPATIBLE" in header_of(console))
            assert "frames of version 99" in grid(console).splitlines()[1]


async def test_x_then_y_cancels_the_selected_request(socket_path):
    frame = frames.busy()
    async with FakeDaemon(socket_path) as daemon:
        daemon.requests = {request.id: request for request in frame.requests}
        view = frames.view_of(frame)
        async with console_at(80, 24, view, socket_path=socket_path) as (console, pilot):
            await pilot.press("j", "x")
            assert isinstance(console.screen, Confirm)
            chosen = console.main.table.selected.id
            await pilot.pause()
            assert chosen in grid(console)
            await pilot.press("y")
            await until(pilot, lambda: "cancelled" in grid(console))
            assert daemon.cancelled == [chosen]


@pytest.mark.parametrize("key", ["n", "escape", "enter"])
async def test_any_other_answer_cancels_nothing(socket_path, key, busy):
    async with FakeDaemon(socket_path) as daemon:
        daemon.requests = {request.id: request for request in busy.frame.requests}
        async with console_at(80, 24, busy, socket_path=socket_path) as (console, pilot):
            await pilot.press("x", key)
            await pilot.pause(0.1)
            assert not isinstance(console.screen, Confirm)
            assert daemon.cancelled == []


async def test_a_cancel_that_fails_is_said(busy):
    async with console_at(80, 24, busy) as (console, pilot):
        await pilot.press("x", "y")
        await until(pilot, lambda: "not running" in grid(console))


async def test_keys_without_a_request_do_nothing():
    view = frames.view_of(frames.idle(), frames.idle)
    async with console_at(80, 24, view) as (console, pilot):
        await pilot.press("x", "y", "enter", "j", "k", "pagedown", "s", "end")
        assert console.screen is console.main


async def test_the_cursor_moves_and_the_table_scrolls_with_it(busy):
    async with console_at(80, 24, busy) as (console, pilot):
        table = console.main.table
        oldest = [request.id for request in busy.frame.requests]
        await pilot.press("j", "down", "j", "k")
        assert table.selected.id == oldest[2]
        await pilot.press("end")
        await pilot.pause()
        assert table.selected.id == oldest[-1]
        assert "22-30 by TIME" in grid(console)
        await pilot.press("pageup", "home", "up")
        await pilot.pause()
        assert table.selected.id == oldest[0]
        assert "1-9 by TIME" in grid(console)


async def test_the_mouse_chooses_a_request(busy):
    async with console_at(80, 24, busy) as (console, pilot):
        table = console.main.table
        ids = [request.id for request in busy.frame.requests]
        await pilot.click(table, offset=(5, 4))
        assert table.selected.id == ids[4]
        table.post_message(wheel(MouseScrollDown, table))
        table.post_message(wheel(MouseScrollDown, table))
        table.post_message(wheel(MouseScrollUp, table))
        await pilot.pause()
        assert table.selected.id == ids[5]


def wheel(event, table):
    return event(table, 1, 1, 0, 0, 0, False, False, False)


async def test_the_cursor_stays_on_its_request(busy):
    async with console_at(80, 24, busy) as (console, pilot):
        await pilot.press("j", "j", "j")
        chosen = console.main.table.selected.id
        later = frames.busy(161)
        console.post_message(
            FrameArrived(frames.busy(161, requests=later.requests[2:], num_requests=28))
        )
        await pilot.pause()
        assert console.main.table.selected.id == chosen
        console.post_message(FrameArrived(frames.idle(162)))
        await pilot.pause()
        assert console.main.table.selected is None


async def test_until_it_is_moved_the_cursor_stays_at_the_top(busy):
    youngest = frames.busy(160, requests=busy.frame.requests[-1:], num_requests=1)
    async with console_at(80, 24, frames.view_of(youngest)) as (console, pilot):
        console.post_message(FrameArrived(frames.busy(161)))
        await pilot.pause()
        table = console.main.table
        assert (table.selected.id, table.window[0]) == (frames.busy(161).requests[0].id, 1)


async def test_the_cursor_does_not_follow_a_request_that_ends(busy):
    async with console_at(120, 40, busy) as (console, pilot):
        await pilot.press("2", "j")
        ended = console.main.table.selected
        requests = [request for request in busy.frame.requests if request is not ended]
        console.post_message(FrameArrived(frames.busy(161, requests=requests)))
        finished = frames.finished(30, id=ended.id)
        console.post_message(FinishedArrived((finished,)))
        await pilot.pause()
        assert console.main.table.selected.id == requests[1].id
        await pilot.press("end")
        assert console.main.table.selected.id == ended.id


async def test_the_detail_follows_its_request_to_the_end(socket_path, busy):
    async with (
        FakeDaemon(socket_path) as daemon,
        console_at(80, 24, busy, socket_path=socket_path) as (console, pilot),
    ):
        await pilot.press("enter")
        await pilot.pause()
        assert isinstance(console.screen, Detail)
        assert "decoding…" in grid(console)
        request_id = console.screen.request.id
        daemon.requests[request_id] = frames.request(
            30, "finished", id=request_id, finish_reason="length", decode_ms=1.0, e2e_ms=400.0
        )
        console.post_message(FrameArrived(frames.idle(161)))
        await until(pilot, lambda: "unattributed" in grid(console))
        await pilot.press("escape")
        assert console.screen is console.main


async def test_frames_keep_coming_under_a_dialog(busy):
    async with console_at(80, 24, busy) as (console, pilot):
        await pilot.press("question_mark")
        console.post_message(FrameArrived(frames.busy(161)))
        await pilot.press("escape")
        await pilot.pause()
        assert console.view.frame.seq == 161


async def test_a_live_resize_lays_the_screen_out_anew(busy):
    async with console_at(120, 40, busy) as (console, pilot):
        large = await settled(console, pilot)
        for width, height in ((60, 16), (39, 9), (80, 24), (120, 40)):
            await resize(console, pilot, width, height)
            lines = grid(console).splitlines()
            assert max(map(len, lines)) <= width
            assert width < 40 or lines[-1].endswith("? for more")
        await until(pilot, lambda: grid(console) == large)


async def test_header_alerts_and_keys_stay_at_every_size(busy):
    async with console_at(120, 40, busy) as (console, pilot):
        for height in range(10, 30):
            await resize(console, pilot, 80, height)
            lines = grid(console).splitlines()
            assert "LIVE" in lines[0]
            assert "ok" in lines[1]
            assert lines[-1].endswith("? for more")
            assert any(line.startswith("> ") for line in lines)


HOSTILE = "[bold red]x[/]\x1b[31m\n\x9b2J\u202e[@click=app.quit()]y"


@pytest.mark.parametrize("size", [(80, 24), (200, 60)])
async def test_hostile_names_are_shown_as_plain_text(size):
    request = frames.request(1, id=f"cmpl-{HOSTILE}", user=HOSTILE, worker=HOSTILE, error=HOSTILE)
    frame = frames.busy(
        model=HOSTILE,
        model_note=HOSTILE,
        state_reason=HOSTILE,
        state="draining",
        transport=HOSTILE,
        limit=HOSTILE,
        alerts=[frames.alert(HOSTILE, message=HOSTILE, subject=HOSTILE, since=HOSTILE)],
        workers=[frames.worker("prefill", device=HOSTILE), frames.worker(HOSTILE, state=HOSTILE)],
        pools=[frames.pool(HOSTILE, [frames.OwnerFrame(HOSTILE, 1, 1)])],
        requests=[request],
        num_requests=1,
        events=[frames.EventFrame(HOSTILE, HOSTILE, HOSTILE, HOSTILE)],
    )
    async with console_at(*size, frames.view_of(frame)) as (console, pilot):
        for key in ("1", "2", "3", "4", "5", "6", "7", "1", "enter", "escape", "x", "y"):
            await pilot.press(key)
            await pilot.pause()
            shown = grid(console)
            assert all(line.isprintable() for line in shown.split("\n"))
            assert "[bold red]" in shown
        assert console.is_running


@pytest.mark.parametrize("recording", ["whole", "damaged", "absent"])
async def test_graphs_begin_with_what_the_daemon_recorded_before(socket_path, tmp_path, recording):
    seen = [frame_at(second) for second in range(30)]
    async with FakeDaemon(socket_path) as daemon:
        if recording != "absent":
            daemon.recording = make_recording(tmp_path, seen).read_bytes()
        if recording == "damaged":
            daemon.recording = daemon.recording[:4096]
        daemon.send(frame_at(32))
        async with console_at(120, 40, socket_path=socket_path, follow=feed.follow) as (
            console,
            pilot,
        ):
            await until(pilot, lambda: "LIVE" in header_of(console))
            if recording == "whole":
                await until(pilot, lambda: len(console.view.history.queued) == 33)
                assert console.view.history.queued.count(None) == 2
            daemon.send(frame_at(33))
            await until(pilot, lambda: "up 33.0s" in header_of(console))
            await until(pilot, lambda: "LIVE" in header_of(console))
