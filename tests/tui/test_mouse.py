"""What a click does: the same as the key that is written there."""

from __future__ import annotations

import dataclasses

import pytest
from textual.events import MouseScrollDown

from tests.tui import frames
from tests.tui.daemon import FakeDaemon
from tests.tui.screen import console_at, grid, until
from tui.widgets.dialogs import Choose, Confirm, Detail, Help


@pytest.fixture
def busy():
    return frames.view_of(frames.busy())


async def click(console, pilot, text, times=1):
    """Click the first cell of a text on screen."""
    lines = grid(console).splitlines()
    y = next(index for index, line in enumerate(lines) if text in line)
    await pilot.click(offset=(lines[y].index(text), y), times=times)
    await pilot.pause()


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 50)])
async def test_a_click_on_a_pages_name_or_digit_shows_it(busy, size):
    async with console_at(*size, busy) as (console, pilot):
        names = {"3 kv": "kv", "timeline": "timeline", "6 handoff": "handoff", "1 over": "overview"}
        for text, page in names.items():
            await click(console, pilot, text)
            assert console.main.page == page


async def test_a_click_on_a_keys_label_does_what_the_key_does(busy):
    async with console_at(120, 40, busy) as (console, pilot):
        await click(console, pilot, "for more")
        assert isinstance(console.screen, Help)
        await pilot.press("escape")
        await click(console, pilot, "enter detail")
        assert isinstance(console.screen, Detail)


async def test_a_click_on_a_columns_title_sorts_by_it_and_another_turns_the_order_round(busy):
    async with console_at(80, 24, busy) as (console, pilot):
        for order in ("by TTFT ↓", "by TTFT ↑", "by TTFT ↓"):
            await click(console, pilot, "TTFT   TPOT")
            assert order in grid(console)
        await click(console, pilot, "PHASE")
        assert "by TTFT ↓" in grid(console), "there is no order by phase"


async def test_a_double_click_shows_the_request(busy):
    async with console_at(80, 24, busy) as (console, pilot):
        third = busy.frame.requests[2].id
        await click(console, pilot, third[5:13], times=2)
        assert isinstance(console.screen, Detail)
        assert console.screen.request.id == third


async def test_a_click_on_an_alert_shows_its_request_else_all_alerts():
    named = frames.busy().requests[9].id
    alerts = [
        frames.alert(message="the pool is full", severity="error"),
        frames.alert("queue.wait", message="a request waits", request_id=named),
    ]
    async with console_at(120, 40, frames.view_of(frames.busy(alerts=alerts))) as (console, pilot):
        await click(console, pilot, "the pool is")
        assert console.main.page == "events"
        await pilot.press("3")
        await click(console, pilot, "a request waits")
        assert isinstance(console.screen, Detail)
        assert console.screen.request.id == console.selected.id == named


async def test_a_question_is_answered_by_a_click(busy, tmp_path):
    async with FakeDaemon(tmp_path / "penstock.sock") as daemon:
        daemon.requests = {request.id: request for request in busy.frame.requests}
        async with console_at(120, 40, busy, socket_path=daemon.socket_path) as (console, pilot):
            for answer in ("N no", "y yes"):
                await pilot.press("x")
                await pilot.pause()
                await click(console, pilot, answer)
                assert not isinstance(console.screen, Confirm)
            await until(pilot, lambda: daemon.cancelled == [busy.frame.requests[0].id])


async def test_an_option_is_taken_by_a_click(busy):
    async with console_at(120, 40, busy) as (console, pilot):
        await pilot.press("colon")
        await pilot.pause()
        assert isinstance(console.screen, Choose)
        await click(console, pilot, "explain")
        assert "EXPLAIN overview" in grid(console)


async def test_the_wheel_moves_through_options(busy):
    async with console_at(80, 24, busy) as (console, pilot):
        await pilot.press("colon")
        await pilot.pause()
        assert "7 " not in grid(console).splitlines()[-2]
        for _ in range(21):
            console.screen.post_message(wheel(console.screen))
        await pilot.pause()
        assert "key 7" in grid(console)


def wheel(widget):
    return MouseScrollDown(widget, 1, 1, 0, 0, 0, False, False, False)


async def test_a_click_on_a_bar_of_the_timeline_shows_its_request_live_or_ended(busy):
    ended = frames.minute()
    view = dataclasses.replace(busy, finished=ended)
    async with console_at(200, 50, view) as (console, pilot):
        await pilot.press("4")
        await pilot.pause()
        for request in (busy.frame.requests[0], ended[3]):
            await click(console, pilot, request.id[5:13])
            assert isinstance(console.screen, Detail)
            assert console.screen.request.id == request.id
            await pilot.press("escape")
            await pilot.pause()


async def test_names_of_strangers_are_no_actions():
    hostile = "a');quit('b"
    request = frames.request(1, id=hostile, user="@click=app.quit", age_ms=20_000.0)
    view = frames.view_of(frames.busy(requests=[request]))
    async with console_at(120, 40, view) as (console, pilot):
        await click(console, pilot, hostile[:8])
        await pilot.press("4")
        await pilot.pause()
        await click(console, pilot, hostile[:8])
        assert console.screen is console.main
        assert console.is_running
