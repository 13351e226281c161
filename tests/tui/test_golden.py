"""The whole screen, character for character, at fixed frames and sizes.

To accept a change of the screen: PENSTOCK_UPDATE_GOLDEN=1 pytest tests/tui/test_golden.py, then
read the diff.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.tui import frames
from tests.tui.screen import console_at, grid
from tui import plain
from tui.view import Link, View

GOLDEN = Path(__file__).parent / "golden"
LOST = Link("DISCONNECTED", "no daemon listens on /run/penstock/penstock.sock", 3.0, 2.0)


def views() -> dict[str, View]:
    return {
        "idle": frames.view_of(frames.idle(), frames.idle),
        "busy": frames.view_of(frames.busy()),
        "disconnected": frames.view_of(frames.busy()).over(LOST),
        "never-connected": View(link=LOST),
        "loading": frames.view_of(frames.loading(), frames.idle),
        "draining": frames.view_of(frames.draining()),
        "colocated": frames.view_of(frames.colocated()),
        "three-pools": frames.view_of(frames.three_pools()),
        "no-power": frames.view_of(frames.busy(devices=[])),
    }


SMALL_AND_LARGE = [(80, 24), (120, 40)]
CASES = [(name, size, False) for name in views() for size in SMALL_AND_LARGE]
CASES += [("busy", size, False) for size in [(200, 60), (100, 30), (60, 16), (40, 10), (39, 9)]]
CASES += [("three-pools", size, True) for size in SMALL_AND_LARGE]


def check(name: str, shown: str) -> None:
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("PENSTOCK_UPDATE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(shown, encoding="utf-8")
    assert shown == path.read_text(encoding="utf-8")


@pytest.mark.parametrize(("state", "size", "is_ascii"), CASES)
async def test_screen(state, size, is_ascii):
    width, height = size
    async with console_at(width, height, views()[state], is_ascii=is_ascii) as (console, _):
        shown = grid(console)
    assert shown.isascii() or not is_ascii
    check(f"{state}-{width}x{height}{'-ascii' if is_ascii else ''}", shown)


@pytest.mark.parametrize("width", [80, 120])
def test_page_of_plain_text(width):
    check(f"page-{width}", "\n".join(plain.page(views()["three-pools"], width)) + "\n")


@pytest.mark.parametrize("key", ["question_mark", "e", "x"])
async def test_dialog(key):
    async with console_at(80, 24, views()["busy"]) as (console, pilot):
        await pilot.press(key)
        await pilot.pause()
        check(f"dialog-{key}-80x24", grid(console))
