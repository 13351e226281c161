"""The console over a recording: every key, the bar, the screens character for character."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest
from textual.pilot import Pilot

from tests.recordings import at, frame_at, make_recording, request_row
from tests.tui import frames
from tests.tui.screen import grid
from tests.tui.test_golden import check_screen
from tui import keys
from tui.lines import text_of, to_ascii, width_of
from tui.playback import Playback
from tui.replay import open_at
from tui.replay_bar import bar, landing
from tui.replay_console import ReplayConsole
from tui.widgets.dialogs import AskDialog, Detail

KEYS = {
    ",": "comma", ".": "full_stop", "<": "less_than_sign", ">": "greater_than_sign",
    "[": "left_square_bracket", "]": "right_square_bracket", "+": "plus", "-": "minus",
    ":": "colon",
}  # fmt: skip


@pytest.fixture(scope="module")
def incident(tmp_path_factory) -> Path:
    """Two busy minutes with eight requests and two alerts; two more requests never ended."""
    folder = tmp_path_factory.mktemp("incident")
    seen = [frame_at(second, num_requests=10) for second in range(120)]
    users = ("ana", "svc-rag", "bo", "cy")
    rows = [
        request_row(f"cmpl-{number:08x}", 39 + 1.3 * number, peer_user=users[number % 4])
        for number in range(8)
    ]
    events = [
        (at(20), "info", "daemon.ready", "serving on 2 cores"),
        (at(40), "error", "worker.died", "decode exited with signal 9"),
        (at(70), "warning", "kv.occupancy", "93% of the pool is in use"),
    ]
    return make_recording(folder, seen, rows, events)


@asynccontextmanager
async def replaying(
    path: Path, begin: str = "+45s", size: tuple[int, int] = (80, 24), **options
) -> AsyncIterator[tuple[ReplayConsole, Pilot[None]]]:
    """A console that has drawn the frame of that time."""
    replay, playback = open_at(path, begin)
    console = ReplayConsole(replay, playback, **options)
    async with console.run_test(size=size, notifications=True) as pilot:
        await pilot.pause()
        yield console, pilot
    replay.close()


async def press(pilot: Pilot[None], *keys: str) -> None:
    for key in keys:
        await pilot.press(KEYS.get(key, key))
    await pilot.pause()


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 50), (39, 9)])
async def test_screen(incident, size):
    async with replaying(incident, size=size) as (console, pilot):
        await check_screen(f"replay-{size[0]}x{size[1]}", pilot, console)


async def test_screen_in_ascii(incident):
    async with replaying(incident, is_ascii=True) as (console, pilot):
        await check_screen("replay-80x24-ascii", pilot, console)
        assert grid(console).isascii()


STEPS = (
    (".", 46), (",", 45), (",", 44), (".", 45), (">", 105), ("<", 45), ("]", 70), ("]", 70),
    ("[", 40), ("[", 40), ("<", 0), (">", 60), (">", 119), ("ctrl+home", 0), (",", 0),
    ("ctrl+end", 119), (".", 119),
)  # fmt: skip
"""Keys, one after the other, and the second that each leads to from the one before."""


async def test_keys_move_through_time(incident):
    async with replaying(incident) as (console, pilot):
        for number, (key, second) in enumerate(STEPS):
            await press(pilot, key)
            shown = grid(console).splitlines()[0]
            assert f"REPLAY 2999-11-21 {at(second)[11:19]}Z" in shown, (number, key)


async def test_an_alert_that_is_not_there_is_said(incident):
    async with replaying(incident, "+80s") as (console, pilot):
        await press(pilot, "]")
        assert "no alert after this" in grid(console)


async def test_play_pause_and_speed(incident):
    clock = frames.FakeClock()
    async with replaying(incident, now_s=clock) as (console, pilot):
        assert "PAUSED  1x" in grid(console)
        await press(pilot, "+", "+", "-", "space")
        assert "PLAYING 2x" in grid(console)
        clock.now_s += 3
        console._play()
        await pilot.pause()
        assert at(51)[11:19] in grid(console).splitlines()[0]
        await press(pilot, "p")
        clock.now_s += 30
        console._play()
        await pilot.pause()
        assert at(51)[11:19] in grid(console).splitlines()[0]
        await press(pilot, *"++++++++", "space")
        clock.now_s += 30
        console._play()
        await pilot.pause()
        assert "PAUSED  60x" in grid(console), "the end stops it"
        assert at(119)[11:19] in grid(console).splitlines()[0]


async def test_g_goes_to_a_time(incident):
    async with replaying(incident) as (console, pilot):
        for text, second in (("", 45), ("-5s", 40), ("14:01:07", 67)):
            await press(pilot, "g")
            assert isinstance(console.screen, AskDialog)
            assert "GO TO" in grid(console)
            await press(pilot, *text, "enter")
            assert at(second)[11:19] in grid(console).splitlines()[0]


async def test_a_time_that_is_none_is_refused_with_an_example(incident):
    async with replaying(incident) as (console, pilot):
        await press(pilot, "g", *"soon", "enter")
        assert "soon is not a time; give" in grid(console)
        assert at(45)[11:19] in grid(console).splitlines()[0]
        await press(pilot, "g", "escape")
        assert not isinstance(console.screen, AskDialog)


async def test_what_needs_a_daemon_is_not_offered(incident):
    async with replaying(incident, size=(200, 60)) as (console, pilot):
        for key in ("x", "D", "r", "T"):
            await press(pilot, key)
            assert console.screen is console.main
        await press(pilot, "question_mark")
        assert not {"cancel", "drain", "roles", "targets"} & set(grid(console).split())


async def test_the_detail_follows_its_request_to_its_end_and_back(incident):
    async with replaying(incident, "+46s", size=(120, 40)) as (console, pilot):
        await press(pilot, "enter")
        dialog = console.screen
        assert isinstance(dialog, Detail)
        request_id = dialog.request.id
        await press(pilot, ".")  # the keys of time work under it
        assert (dialog.request.id, dialog.request.age_ms) == (request_id, 8000.0)
        assert "decoding" in grid(console)
        await press(pilot, ".", ".", ".")
        assert (dialog.request.phase, dialog.request.e2e_ms) == ("finished", 10_000.0)
        assert "end to end" in grid(console)
        await press(pilot, ",", ",")
        assert dialog.request.phase == "decoding"
        await press(pilot, "<")
        assert "not received yet" in grid(console)
        assert dialog.request.id == request_id


async def test_page_2_lists_the_requests_that_had_ended(incident):
    async with replaying(incident, "+51s", size=(120, 40)) as (console, pilot):
        await press(pilot, "2")
        shown = grid(console)
        rows = [line for line in shown.splitlines() if "(length)" in line]
        assert [row.split()[1] for row in rows] == ["00000001", "00000000"]
        await press(pilot, "end", "enter")
        assert console.screen.request.id == "cmpl-00000000"
        await press(pilot, "escape", ",", ",", ",")
        assert "(length)" not in grid(console)


async def test_g_says_where_it_has_landed(incident):
    async with replaying(incident, size=(120, 40)) as (console, pilot):
        for text, words in (
            ("14:01:07", "at 14:01:07Z"),
            ("13:00:00", "the recording begins at 14:00:00Z, after 13:00:00Z"),
            ("15:00:00", "the recording ends at 14:01:59Z, before 15:00:00Z"),
        ):
            await press(pilot, "g", *text, "enter")
            assert words in grid(console)


def test_a_time_without_frames_is_said():
    playback = Playback([0, 1000, 60_000]).seek(30_000)
    assert re.findall(r"[\d:]+Z", landing(playback, 30_000)) == ["00:00:30Z", "00:00:01Z"]


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
async def test_a_notice_leaves_the_time_line_and_the_keys_to_be_seen(incident, size):
    async with replaying(incident, "+80s", size=size) as (console, pilot):
        before = grid(console).splitlines()[-2:]
        await press(pilot, "]")
        after = grid(console).splitlines()
        assert "no alert after this" in "\n".join(after[:-2])
        assert after[-2:] == before


async def test_help_lists_every_key_of_the_replay(incident):
    async with replaying(incident, size=(120, 40)) as (console, pilot):
        await press(pilot, "question_mark")
        shown = grid(console)
        selected = console.main.table.selected
        works = keys.allowed(ReplayConsole.BINDINGS, console.view, selected, console.main.page)
    assert {"play", "go to time", "first frame"} <= {binding.description for binding in works}
    for binding in works:
        assert binding.description in shown
    for sign in KEYS.keys() - {":"}:
        assert f" {sign} " in shown


async def test_hostile_names_are_harmless(tmp_path):
    evil = "\x1b[2J[red]bob\u202e\n"
    seen = [frame_at(second, model=evil) for second in range(3)]
    rows = [request_row(f"cmpl-{evil}", 0, peer_user=evil, endpoint=evil, model=evil)]
    events = [(at(0), "error", evil, evil), (at(1), evil, evil, evil)]
    async with replaying(make_recording(tmp_path, seen, rows, events), "+2s") as (console, pilot):
        shown = grid(console)
        await press(pilot, "e")
        shown += grid(console)
    assert "bob" in shown
    assert shown.replace("\n", "").isprintable()


async def test_a_damaged_frame_says_so_on_screen(tmp_path):
    path = make_recording(tmp_path, [frame_at(second) for second in range(5)])
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE frames SET data = x'00' WHERE seq = 3")
    async with replaying(path, "+1s") as (console, pilot):
        await press(pilot, ".")
        assert "recording is damaged" in grid(console)
        assert "1 damaged" in grid(console)
        await press(pilot, ".")
        assert "recording is damaged" not in grid(console)


@pytest.mark.parametrize("template", [b"[" * 100_000 + b"]" * 100_000, b"[1,2", b""])
async def test_a_damaged_template_damages_its_frames_and_is_no_live_console(tmp_path, template):
    path = make_recording(tmp_path, [frame_at(second) for second in range(3)])
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE frame_templates SET frame = ?", (template,))
    async with replaying(path, "+1s") as (console, _):
        assert "recording is damaged" in grid(console)
        assert "REPLAY" in grid(console).splitlines()[0]
        assert "LIVE" not in grid(console)


async def test_rows_of_nonsense_end_it_with_a_sentence(tmp_path):
    path = make_recording(tmp_path, rows=[request_row("cmpl-1", 10)])
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE requests SET num_sequences = 0")
    async with replaying(path, "+9s") as (console, pilot):
        await press(pilot, *"....")
    assert console.return_code == 8


@pytest.mark.parametrize("width", [20, 40, 60, 80, 120])
def test_the_bar_fits_and_gives_up_notes_before_its_track(width):
    playback = Playback(range(0, 60_000, 1000), [10_000]).step(30)
    line = bar(playback, ["2 live not in the log", "1 damaged"], width)
    if width >= 60:
        assert width_of(line) <= width
        assert "▲" in text_of(line)
    assert ("not in the log" in text_of(line)) == (width >= 80)
    assert to_ascii(text_of(line)).isascii()
