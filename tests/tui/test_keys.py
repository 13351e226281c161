"""Every key, as a person presses it; a key without a test here fails the last test."""

from __future__ import annotations

import dataclasses

import pytest
from textual.binding import Binding

from tests.tui import frames
from tests.tui.daemon import FakeDaemon
from tests.tui.screen import console_at, grid, until
from tui import feed, keys
from tui.app import Console
from tui.view import Caller
from tui.widgets import overview
from tui.widgets.console_messages import CallerKnown, FrameArrived
from tui.widgets.dialogs import AskDialog, Choose, Confirm, Detail, Explain, Help
from tui.widgets.main_screen import THEMES
from tui.widgets.panel import Page, RequestTable

COVERED: set[str] = set()


def covers(*names):
    """Says of a test which keys it is about."""
    COVERED.update(names)
    return lambda test: test


@pytest.fixture
def busy():
    return frames.view_of(frames.busy())


@pytest.fixture
async def daemon(tmp_path, busy):
    async with FakeDaemon(tmp_path / "penstock.sock") as daemon:
        daemon.requests = {request.id: request for request in busy.frame.requests}
        yield daemon


async def press(pilot, *names):
    await pilot.press(*names)
    await pilot.pause()


@covers("1", "2", "3", "4", "5", "6", "7")
async def test_a_digit_puts_its_page_on_screen(busy):
    async with console_at(80, 24, busy) as (console, pilot):
        for number, page in reversed(list(enumerate(overview.NAMES, start=1))):
            await press(pilot, str(number))
            assert console.main.page == page
            shown = grid(console).splitlines()
            assert "LIVE" in shown[0]
            titles = [line for line in shown if line.startswith(" ─ ")]
            assert titles or page not in overview.LINED


@pytest.mark.parametrize("key", ["question_mark", "f1"])
@covers("question_mark", "f1")
async def test_help_lists_every_key_that_works_now_by_what_it_is_about(busy, key):
    async with console_at(80, 40, busy) as (console, pilot):
        await press(pilot, key)
        assert isinstance(console.screen, Help)
        shown = grid(console)
        for key in [
            *keys.allowed(keys.KEYS, console.view, console.selected, console.main.page),
            *RequestTable.BINDINGS,
        ]:
            assert keys.label(key, console.view) in shown
            assert " ".join(keys.signs(key)) in shown
        for title in ("REQUESTS", "VIEW", "OPERATE", "GENERAL", "PAGES", "MOVE"):
            assert title in shown
        assert "clear filter" not in shown
        await press(pilot, "end")
        await press(pilot, "escape")
        assert console.screen is console.main


@pytest.mark.parametrize("key", ["q", "ctrl+c"])
@covers("q", "ctrl+c")
async def test_quitting(busy, key):
    async with console_at(80, 24, busy) as (console, pilot):
        await press(pilot, key)
        assert not console.is_running or console._exit


@covers("enter")
async def test_enter_opens_the_selected_request(busy):
    async with console_at(80, 24, busy) as (console, pilot):
        await press(pilot, "j", "enter")
        assert isinstance(console.screen, Detail)
        assert console.screen.request.id == busy.frame.requests[1].id


@covers("x")
async def test_x_cancels_after_a_yes(busy, daemon):
    async with console_at(80, 24, busy, socket_path=daemon.socket_path) as (console, pilot):
        await press(pilot, "x")
        assert isinstance(console.screen, Confirm)
        await pilot.press("y")
        await until(pilot, lambda: daemon.cancelled == [busy.frame.requests[0].id])


@covers("slash", "escape")
async def test_a_filter_applies_as_it_is_typed_and_enter_keeps_it(busy):
    async with console_at(80, 24, busy) as (console, pilot):
        await press(pilot, "slash", "a", "n", "a")
        assert {line.split()[2] for line in rows(console)} == {"ana"}
        await press(pilot, "q")
        assert console.main.table.num_rows == 0, "keys are letters while a filter is typed"
        await press(pilot, "backspace", "enter")
        assert not console.main.filter_line.is_open
        assert "filter ana" in grid(console)
        await press(pilot, "j")
        assert console.selected.user == "ana", "keys go to the table again"
        await press(pilot, "slash", "escape")
        assert not console.main.filter_line.is_open
        assert console.main.table.num_rows == 30


@covers("escape")
async def test_escape_drops_a_filter_that_was_kept(busy):
    async with console_at(80, 24, busy) as (console, pilot):
        await press(pilot, "slash", "b", "o", "enter", "escape")
        assert console.main.table.num_rows == 30
        assert "filter bo" not in grid(console)


async def test_a_wrong_filter_is_said_while_it_is_typed_and_not_taken(busy):
    async with console_at(120, 40, busy) as (console, pilot):
        await press(pilot, "slash", "i", "n", "colon", "enter")
        assert console.main.filter_line.is_open
        assert "in is a number" in grid(console)
        await press(pilot, "escape")
        assert console.main.table.num_rows == 30


def rows(console):
    phases = ("queued", "prefilling", "handing", "decoding")
    lines = grid(console).splitlines()
    return [line[2:] for line in lines if line[11:].startswith(phases)]


@covers("s", "S")
async def test_s_goes_through_the_orders_and_upper_s_turns_them_round(busy):
    async with console_at(80, 24, busy) as (console, pilot):
        for sort in ("in", "out", "ttft", "tpot", "blocks", "j", "time"):
            await press(pilot, "s")
            assert f"by {sort.upper()} ↓" in grid(console)
        oldest = rows(console)[0]
        await press(pilot, "S")
        assert "by TIME ↑" in grid(console)
        assert rows(console)[0] != oldest


@pytest.mark.parametrize("key", ["p", "space"])
@covers("p", "space")
async def test_pause_holds_the_screen_and_says_for_how_long(busy, key):
    async with console_at(80, 24, busy) as (console, pilot):
        await press(pilot, key)
        before = grid(console).splitlines()[2:]
        console.post_message(FrameArrived(frames.busy(172)))
        await pilot.pause()
        assert "PAUSED +12s" in grid(console).splitlines()[0]
        assert grid(console).splitlines()[2:] == before
        await press(pilot, key)
        assert "LIVE" in grid(console).splitlines()[0]
        assert grid(console).splitlines()[2:] != before


@covers("e")
async def test_e_explains_the_page(busy):
    async with console_at(80, 24, busy) as (console, pilot):
        for page in overview.NAMES:
            console.main.go_to(page)
            await press(pilot, "e")
            assert isinstance(console.screen, Explain)
            assert f"EXPLAIN {page}" in grid(console)
            await press(pilot, "e")
            assert console.screen is console.main


@covers("e")
async def test_e_explains_the_stages_of_a_request(busy):
    async with console_at(80, 24, busy) as (console, pilot):
        console.main.go_to("requests")
        await press(pilot, "enter")
        assert "e explains" in grid(console)
        await press(pilot, "e")
        assert isinstance(console.screen, Explain)
        assert "decode wait" in " ".join(grid(console).split())
        await press(pilot, "escape")
        assert isinstance(console.screen, Detail)


@covers("D")
async def test_upper_d_drains_and_then_resumes(busy, daemon):
    async with console_at(80, 24, busy, socket_path=daemon.socket_path) as (console, pilot):
        await press(pilot, "D")
        assert "30 live requests continue" in grid(console)
        await pilot.press("y")
        await until(pilot, lambda: "new requests are rejected" in grid(console))
        console.post_message(FrameArrived(frames.draining()))
        await pilot.pause()
        await press(pilot, "D", "y")
        await until(pilot, lambda: "new requests are accepted" in grid(console))
        assert daemon.changes == [("/v1/penstock/drain", b""), ("/v1/penstock/resume", b"")]


@covers("r")
async def test_roles_are_chosen_and_confirmed(busy, daemon):
    async with console_at(80, 24, busy, socket_path=daemon.socket_path) as (console, pilot):
        await press(pilot, "r")
        assert isinstance(console.screen, Choose)
        await pilot.press(*"coloc", "enter")
        await pilot.pause()
        assert "static to colocated?" in grid(console)
        await pilot.press("y")
        await until(pilot, lambda: "set: roles colocated" in grid(console))
        assert daemon.changes == [("/v1/penstock/roles", b'{"roles":"colocated"}')]


@covers("T")
async def test_targets_are_typed_and_confirmed(busy, daemon):
    async with console_at(80, 24, busy, socket_path=daemon.socket_path) as (console, pilot):
        await press(pilot, "T")
        assert isinstance(console.screen, AskDialog)
        await pilot.press(*"900", "space", "x", "enter")  # what was there is replaced
        await pilot.pause()
        assert "two whole numbers" in grid(console)
        await pilot.press("backspace", *"30", "enter")
        await pilot.pause()
        assert "TTFT 900 ms" in grid(console)
        await pilot.press("y")
        await until(pilot, lambda: "slo_itl_ms 30" in grid(console))
        assert daemon.changes == [("/v1/penstock/roles", b'{"slo_ttft_ms":900,"slo_itl_ms":30}')]


@covers("w")
async def test_w_changes_what_the_graphs_span(busy):
    async with console_at(200, 60, busy) as (console, pilot):
        await press(pilot, "3")
        assert "last 60s" in grid(console)
        await press(pilot, "w")
        assert "last 5m00s" in grid(console)
        assert "graphs 5m00s" in grid(console).splitlines()[-1]


@covers("a")
async def test_a_shows_the_request_that_the_worst_alert_names_even_if_a_filter_hides_it():
    late = frames.busy().requests[9]
    told = [frames.alert(), frames.alert("queue.wait", request_id=late.id)]
    async with console_at(80, 24, frames.view_of(frames.busy(alerts=told))) as (console, pilot):
        await press(pilot, "slash", *"zoe", "enter", "3", "a")
        assert isinstance(console.screen, Detail)
        assert console.screen.request.id == console.selected.id == late.id
        await press(pilot, "escape")
        assert console.main.page == "overview"


@covers("a")
async def test_a_shows_alerts_that_name_no_request_and_says_that_there_are_none(busy):
    async with console_at(80, 24, frames.view_of(frames.kv_critical())) as (console, pilot):
        await press(pilot, "a")
        assert console.main.page == "events"
    async with console_at(80, 24, busy) as (console, pilot):
        await press(pilot, "a")
        assert console.main.page == "overview"
        assert "no alerts" in "".join(grid(console).splitlines()[2:])


async def test_a_key_without_a_meaning_is_answered(busy):
    async with console_at(80, 24, busy) as (console, pilot):
        await press(pilot, "z")
        assert "z does nothing" in grid(console)
        await press(pilot, "slash", "z")
        assert grid(console).count("z does nothing") == 1, "it is a letter of the filter"


@covers("y")
async def test_y_copies_the_id(busy):
    async with console_at(80, 24, busy) as (console, pilot):
        await press(pilot, "y")
        assert console.clipboard == busy.frame.requests[0].id


@covers("t")
async def test_t_goes_through_the_themes_and_back(busy):
    async with console_at(80, 24, busy) as (console, pilot):
        looks = []
        for _ in THEMES:
            looks.append(console.main.table.get_component_rich_style("tone--bad"))
            await press(pilot, "t")
        assert console.main.table.get_component_rich_style("tone--bad") == looks[0]
        assert len({str(look) for look in looks}) > 2


@pytest.mark.parametrize("key", ["colon", "ctrl+p"])
@covers("colon", "ctrl+p")
async def test_commands_are_narrowed_chosen_and_run(busy, key):
    async with console_at(80, 24, busy) as (console, pilot):
        await press(pilot, key)
        assert isinstance(console.screen, Choose)
        await pilot.press(*"power", "enter")
        await pilot.pause()
        assert console.main.page == "power"
        await press(pilot, "ctrl+p", "down", "down", "up", "enter")
        assert console.view.paused_s is not None, "the second one is pause"


@covers("j", "down", "k", "up", "pagedown", "pageup", "home", "end")
async def test_moving_in_the_table(busy):
    async with console_at(80, 24, busy) as (console, pilot):
        table, ids = console.main.table, [request.id for request in busy.frame.requests]
        await press(pilot, "j", "down", "j", "k")
        assert table.selected.id == ids[2]
        await press(pilot, "up", "pagedown")
        assert table.selected.id == ids[9]
        await press(pilot, "end")
        assert table.selected.id == ids[-1]
        await press(pilot, "pageup", "home")
        assert table.selected.id == ids[0]


@covers("j", "down", "k", "up", "pagedown", "pageup", "home", "end")
async def test_scrolling_a_page_that_is_too_long():
    async with console_at(80, 14, frames.view_of(frames.kv_critical())) as (console, pilot):
        await press(pilot, "3")
        assert "POOLS" in grid(console).splitlines()[2]
        assert "more lines" in grid(console)
        await press(pilot, "j", "down", "k", "up", "pagedown")
        assert "POOLS" not in grid(console)
        await press(pilot, "end")
        assert "PREFIX CACHE" in grid(console)
        assert "more lines" not in grid(console)
        await press(pilot, "pageup", "home")
        assert "POOLS" in grid(console).splitlines()[2]


@covers("x")
async def test_x_on_a_request_that_has_ended_says_so(busy):
    view = dataclasses.replace(busy, finished=(frames.finished(41),))
    async with console_at(120, 40, view) as (console, pilot):
        await press(pilot, "2", "end", "x")
        assert console.screen is console.main
        assert "has ended already: stop" in grid(console)


@pytest.mark.parametrize(
    ("caller", "key", "words"),
    [
        (Caller("zoe", "user"), "x", "only its owner"),
        (Caller("zoe", "user"), "D", "only operators"),
        (Caller("zoe", "read-only"), "r", "this console is read-only"),
        (None, "T", "has not answered"),
    ],
)
async def test_a_key_that_does_nothing_says_why(busy, caller, key, words):
    view = dataclasses.replace(busy, caller=caller)
    async with console_at(120, 40, view) as (console, pilot):
        await press(pilot, key)
        assert words in grid(console)


async def test_a_key_on_a_page_without_requests_says_why(busy):
    async with console_at(120, 40, busy) as (console, pilot):
        await press(pilot, "4", "enter")
        assert "press 1 or 2" in " ".join(grid(console).split())


@covers("s", "S", "slash", "escape")
async def test_a_page_without_requests_neither_offers_nor_takes_keys_of_their_list(busy):
    async with console_at(120, 40, busy) as (console, pilot):
        assert {"filter", "sort", "reverse"} <= hinted(console)
        listing = console.view.listing
        for page in "34567":
            await press(pilot, page, "s", "S", "slash")
            assert console.screen is console.main
            assert not {"filter", "sort", "reverse", "unfilter"} & hinted(console)
            assert "│ e explain" in grid(console).splitlines()[-1]
        assert console.view.listing == listing


async def test_a_toast_says_what_to_do_and_does_not_lie_over_a_dialog():
    async with console_at(80, 24, frames.view_of(frames.idle())) as (console, pilot):
        await press(pilot, "enter")
        assert "no request yet" in " ".join(grid(console).split())
        await press(pilot, "question_mark", "x", "y")
        assert isinstance(console.screen, Help)
        assert "no request" not in grid(console)
        assert "waits until" not in grid(console)


async def test_a_key_that_waits_for_a_dialog_to_be_closed_is_answered(busy):
    async with console_at(120, 40, busy) as (console, pilot):
        await press(pilot, "question_mark", "s")
        assert isinstance(console.screen, Help)
        assert "s (sort) waits" in grid(console)
        assert console.view.listing.sort == "time"


async def test_x_in_a_requests_detail_cancels_that_one(busy, daemon):
    async with console_at(120, 40, busy, socket_path=daemon.socket_path) as (console, pilot):
        await press(pilot, "j", "enter", "x")
        assert isinstance(console.screen, Confirm)
        await pilot.press("y")
        await until(pilot, lambda: daemon.cancelled == [busy.frame.requests[1].id])
        assert isinstance(console.screen, Detail)


async def test_the_power_page_and_its_key_need_a_meter(busy):
    async with console_at(80, 24, frames.view_of(frames.no_gpu())) as (console, pilot):
        await press(pilot, "7")
        assert console.main.page == "overview"
        assert "power" not in grid(console).splitlines()[-1]
        await press(pilot, "question_mark")
        assert "power" not in grid(console)
        await press(pilot, "escape")
        for _ in range(6):
            await press(pilot, "s")
        assert console.view.listing.sort == "time", "nor is there energy to sort by"


@pytest.mark.parametrize("width", [40, 80, 120, 200])
async def test_keys_that_do_not_fit_are_announced(busy, width):
    async with console_at(width, 40, busy) as (console, _):
        footer = grid(console).splitlines()[-1]
        shown = [keys.label(key, console.view) in footer for key in console._keys]
        assert footer.endswith("? help" if all(shown) else "? for more")


async def test_finished_requests_fill_the_room_that_live_ones_leave(daemon):
    few = frames.busy(requests=[frames.request(1)], num_requests=1)
    daemon.requests = {one.id: one for one in map(frames.finished, range(40, 60))}
    view = frames.view_of(few)
    async with console_at(120, 40, view, socket_path=daemon.socket_path) as (console, pilot):
        console.post_message(FrameArrived(frames.busy(161, requests=few.requests, num_requests=1)))
        await until(pilot, lambda: "done (stop)" in grid(console))


def hinted(console):
    return {
        key.action
        for key in keys.allowed(keys.KEYS, console.view, console.selected, console.main.page)
    }


@pytest.mark.parametrize(
    ("caller", "missing"),
    [
        (None, {"cancel", "drain", "roles", "targets"}),
        (Caller("ana", "viewer"), {"cancel", "drain", "roles", "targets"}),
        (Caller("zoe", "user"), {"cancel", "drain", "roles", "targets"}),
        (Caller("bo", "user"), {"drain", "roles", "targets"}),
        (Caller("zoe", "operator"), set()),
    ],
)
async def test_what_a_caller_may_not_do_has_no_key_and_no_hint(busy, daemon, caller, missing):
    view = dataclasses.replace(busy, caller=caller)
    async with console_at(240, 50, view, socket_path=daemon.socket_path) as (console, pilot):
        assert {"cancel", "drain", "roles", "targets"} - hinted(console) == missing
        for key, action in (("x", "cancel"), ("D", "drain"), ("r", "roles"), ("T", "targets")):
            await pilot.press(key)
            await pilot.pause()
            assert (console.screen is console.main) == (action in missing)
            await pilot.press("escape")
            await pilot.pause()
            assert (f" {key} {action}" in grid(console).splitlines()[-1]) != (action in missing)
        assert daemon.changes == daemon.cancelled == []


async def test_the_daemon_says_who_asks_when_it_is_reached(busy, daemon):
    daemon.caller = b'{"name": "bo", "role": "user", "uid": 7, "key": null}'
    daemon.send(busy.frame)
    following = {"socket_path": daemon.socket_path, "follow": feed.follow}
    async with console_at(120, 40, **following) as (console, pilot):
        await until(pilot, lambda: "bo user" in grid(console))
        assert "drain" not in hinted(console)


async def test_read_only_offers_nothing_that_changes_anything(busy, daemon):
    async with console_at(120, 40, busy, is_read_only=True) as (console, pilot):
        console.post_message(CallerKnown(Caller("ana", "operator")))
        await pilot.pause()
        assert "ana read-only" in grid(console)
        assert not {"cancel", "drain", "roles", "targets"} & hinted(console)


def test_every_key_has_a_test():
    bindings = [*Console.BINDINGS, *RequestTable.BINDINGS, *Page.BINDINGS]
    names = {
        name
        for binding in bindings
        if isinstance(binding, Binding)
        for name in binding.key.split(",")
    }
    assert names == COVERED
