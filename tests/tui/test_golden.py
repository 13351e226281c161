"""The whole screen, character for character, at fixed frames and sizes.

To accept a change of the screen: PENSTOCK_UPDATE_GOLDEN=1 pytest tests/tui/test_golden.py, then
read the diff.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.tui import frames
from tests.tui.screen import console_at, grid, show
from tui import plain
from tui.panels import pages
from tui.view import Link, View

GOLDEN = Path(__file__).parent / "golden"
LOST = Link("DISCONNECTED", "no daemon listens on /run/penstock/penstock.sock", 3.0, 2.0)


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
SMALL, LARGE, HUGE, TINY = (80, 24), (120, 40), (200, 60), (39, 9)
OTHERS = [(name, SMALL, False) for name in ("never-connected", "colocated", "three-pools")]
OTHERS += [("two-by-three", size, False) for size in (SMALL, LARGE, HUGE)]
OTHERS += [("eight-gpus", size, False) for size in (SMALL, LARGE)]
OTHERS += [("disconnected", size, False) for size in (SMALL, LARGE, HUGE, TINY)]
OTHERS += [("busy", size, False) for size in [(100, 30), (60, 16), (40, 10)]]
OTHERS += [("three-pools", size, True) for size in (SMALL, LARGE)]


def check(name: str, shown: str, suffix: str = "txt") -> None:
    path = GOLDEN / f"{name}.{suffix}"
    if os.environ.get("PENSTOCK_UPDATE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(shown, encoding="utf-8")
    assert shown == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("size", [SMALL, LARGE, HUGE, TINY])
async def test_overview_in_every_state(size):
    """One console through all states, as an operator's is: what was before leaves no trace."""
    width, height = size
    async with console_at(width, height, View()) as (console, pilot):
        for state in MATRIX:
            show(console, views()[state])
            await pilot.pause()
            check(f"{state}-{width}x{height}", grid(console))


@pytest.mark.parametrize(("state", "size", "is_ascii"), OTHERS)
async def test_screen(state, size, is_ascii):
    width, height = size
    async with console_at(width, height, views()[state], is_ascii=is_ascii) as (console, _):
        shown = grid(console)
    assert shown.isascii() or not is_ascii
    check(f"{state}-{width}x{height}{'-ascii' if is_ascii else ''}", shown)


@pytest.mark.parametrize("size", [SMALL, LARGE])
async def test_every_other_page(size):
    width, height = size
    finished = tuple(frames.finished(number) for number in (42, 41, 40))
    view = dataclasses.replace(views()["kv-critical"], finished=finished)
    async with console_at(width, height, view) as (console, pilot):
        for page in pages.NAMES[1:]:
            console.main.go_to(page)
            await pilot.pause()
            check(f"page-{page}-{width}x{height}", grid(console))
        console.main.go_to("power")
        show(console, views()["mig"])
        await pilot.pause()
        check(f"page-power-mig-{width}x{height}", grid(console))
        show(console, views()["eight-gpus"])
        for page in ("power", "handoff"):
            console.main.go_to(page)
            await pilot.pause()
            check(f"page-{page}-eight-gpus-{width}x{height}", grid(console))


@pytest.mark.parametrize("width", [80, 120])
def test_page_of_plain_text(width):
    check(f"page-{width}", "\n".join(plain.page(views()["three-pools"], width)) + "\n")


async def test_dialogs():
    async with console_at(80, 24, views()["busy"]) as (console, pilot):
        for name in ("question_mark", "e", "enter", "x", "slash", "r", "T", "ctrl+p"):
            await pilot.press(name)
            await pilot.pause()
            check(f"dialog-{name}-80x24", grid(console))
            await pilot.press("escape")


@pytest.mark.parametrize(
    ("name", "state", "key"),
    [("busy", "busy", "1"), ("kv", "kv-critical", "3"), ("mig", "mig", "4")],
)
async def test_colours(name, state, key):
    """What text grids cannot tell: an SVG with the terminal's palette, without its random ids."""
    async with console_at(80, 24, views()[state]) as (console, pilot):
        await pilot.press(key)
        await pilot.pause()
        svg = console.export_screenshot(title="penstock", simplify=True)
    check(name, re.sub(r"terminal-\d+", "terminal", svg), "svg")
