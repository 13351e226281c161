"""The whole screen, character for character, at fixed frames and sizes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from textual.pilot import Pilot

from tests import golden
from tests.tui import frames
from tests.tui.screen import console_at, grid, show, until
from tui import plain
from tui.app import Console
from tui.view import DaemonLink, View
from tui.widgets import overview

GOLDEN = Path(__file__).parent / "golden"
LOST = DaemonLink(
    "DISCONNECTED", "no daemon listens on /run/penstock/penstock.sock", 3.0, 2.0, True
)


@functools.cache
def views() -> Mapping[str, View]:
    return {
        "idle": frames.view_of(frames.idle(), frames.idle),
        "busy": frames.view_of(frames.busy()),
        "kv-critical": frames.view_of(frames.kv_critical(), frames.kv_critical),
        "worker-dead": frames.view_of(frames.worker_dead()),
        "disconnected": frames.view_of(frames.busy()).over(LOST),
        "never-connected": View(link=LOST),
        "loading": frames.view_of(frames.loading(), frames.idle),
        "draining": frames.view_of(frames.draining()),
        "colocated": frames.view_of(frames.colocated()),
        "three-pools": frames.view_of(frames.three_pools()),
        "two-by-three": frames.view_of(frames.two_by_three()),
        "eight-gpus": frames.view_of(frames.eight_gpus()),
        "no-gpu": frames.view_of(frames.no_gpu()),
        "mig": frames.view_of(frames.mig()),
    }


MATRIX = (
    "idle",
    "busy",
    "kv-critical",
    "worker-dead",
    "loading",
    "draining",
    "no-gpu",
    "mig",
)
SMALL, LARGE, HUGE, TINY = (80, 24), (120, 40), (200, 50), (39, 9)
OTHERS = [(name, SMALL, False) for name in ("never-connected", "colocated", "three-pools")]
OTHERS += [("two-by-three", size, False) for size in (SMALL, LARGE, HUGE)]
OTHERS += [("eight-gpus", size, False) for size in (SMALL, LARGE)]
OTHERS += [("disconnected", size, False) for size in (SMALL, LARGE, TINY)]
OTHERS += [("busy", size, False) for size in [HUGE, (100, 30), (60, 16), (40, 10)]]
OTHERS += [("three-pools", size, True) for size in (SMALL, LARGE)]


async def check_screen(name: str, pilot: Pilot[None], console: Console) -> None:
    """The screen once it has come to rest: its parts tell each other what they show."""
    await check_drawn(name, pilot, lambda: grid(console))


async def check_drawn(
    name: str, pilot: Pilot[None], drawn: Callable[[], str], suffix: str = "txt"
) -> None:
    path = GOLDEN / f"{name}.{suffix}"
    if os.environ.get("PENSTOCK_UPDATE_GOLDEN"):
        await pilot.pause(0.3)
    else:
        with contextlib.suppress(TimeoutError):  # what it is then is shown by the comparison
            await until(pilot, lambda: drawn() == path.read_text(encoding="utf-8"))
    golden.check(path, drawn())


@pytest.mark.parametrize("size", [SMALL, LARGE, TINY])
async def test_overview_in_every_state(size):
    """One console through all states, as an operator's is: what was before leaves no trace."""
    width, height = size
    async with console_at(width, height, View()) as (console, pilot):
        for state in MATRIX:
            show(console, views()[state])
            await check_screen(f"{state}-{width}x{height}", pilot, console)


@pytest.mark.parametrize(("state", "size", "is_ascii"), OTHERS)
async def test_screen(state, size, is_ascii):
    width, height = size
    async with console_at(width, height, views()[state], is_ascii=is_ascii) as (console, pilot):
        name = f"{state}-{width}x{height}{'-ascii' if is_ascii else ''}"
        await check_screen(name, pilot, console)
        assert grid(console).isascii() or not is_ascii


@pytest.mark.parametrize("size", [SMALL, LARGE, HUGE])
async def test_every_other_page(size):
    width, height = size
    view = dataclasses.replace(views()["kv-critical"], finished=frames.minute())
    async with console_at(width, height, view) as (console, pilot):
        for page in overview.NAMES[1:]:
            console.main.go_to(page)
            await check_screen(f"page-{page}-{width}x{height}", pilot, console)
        console.main.go_to("power")
        show(console, views()["mig"])
        await check_screen(f"page-power-mig-{width}x{height}", pilot, console)
        show(console, views()["eight-gpus"])
        for page in ("power", "handoff"):
            console.main.go_to(page)
            await check_screen(f"page-{page}-eight-gpus-{width}x{height}", pilot, console)


@pytest.mark.parametrize("width", [80, 120])
def test_page_of_plain_text(width):
    golden.check(
        GOLDEN / f"page-{width}.txt", "\n".join(plain.page(views()["three-pools"], width)) + "\n"
    )


async def test_dialogs():
    async with console_at(80, 24, views()["busy"]) as (console, pilot):
        for name in ("question_mark", "e", "enter", "x", "slash", "r", "T", "ctrl+p"):
            await pilot.press(name)
            await check_screen(f"dialog-{name}-80x24", pilot, console)
            await pilot.press("escape")


@pytest.mark.parametrize(
    ("name", "state", "key"),
    [("busy", "busy", "1"), ("kv", "kv-critical", "3"), ("timeline", "busy", "4")],
)
async def test_colours(name, state, key):
    """What text grids cannot tell: an SVG with the terminal's palette, without its random ids."""
    async with console_at(80, 24, views()[state]) as (console, pilot):
        await pilot.press(key)

        def drawn() -> str:
            svg = console.export_screenshot(title="penstock", simplify=True)
            return re.sub(r"terminal-\d+", "terminal", svg)

        await check_drawn(name, pilot, drawn, "svg")
