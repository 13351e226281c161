"""Run the console without a terminal and read its screen as text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from textual.pilot import Pilot

from tests.tui.frames import FakeClock
from tui.app import Console
from tui.view import View


async def no_feed(*args: object) -> None:
    """Stands in for the feed where a test brings the frames itself."""
    await asyncio.Event().wait()


def grid(console: Console) -> str:
    """The screen as lines; the one place that touches a private name of Textual."""
    strips = console.screen._compositor.render_strips()
    return "\n".join("".join(segment.text for segment in strip).rstrip() for strip in strips) + "\n"


def show(console: Console, view: View) -> None:
    """Put a view on screen that no daemon has sent."""
    console._latest = view
    console._show()


@asynccontextmanager
async def console_at(
    width: int,
    height: int,
    view: View | None = None,
    *,
    socket_path: Path = Path("/nowhere"),
    follow: Callable[..., Any] = no_feed,
    is_ascii: bool = False,
    is_read_only: bool = False,
    clock: FakeClock | None = None,
) -> AsyncIterator[tuple[Console, Pilot[None]]]:
    """A console that has drawn the view."""
    console = Console(
        str(socket_path),
        is_ascii=is_ascii,
        is_read_only=is_read_only,
        follow=follow,
        now_s=clock or FakeClock(),
        view=view,
    )
    console.NOTIFICATION_TIMEOUT = 600.0  # a busy machine may be late to look at a toast
    async with console.run_test(size=(width, height), notifications=True) as pilot:
        await pilot.pause()
        yield console, pilot


async def until(pilot: Pilot[None], condition: Callable[[], bool]) -> None:
    """Wait for something that comes through a real socket."""
    async with asyncio.timeout(60):
        while not condition():
            await pilot.pause(0.02)


async def resize(console: Console, pilot: Pilot[None], width: int, height: int) -> None:
    """Resize the terminal, and wait until the console is drawn to its last line."""
    await pilot.resize_terminal(width, height)

    def is_drawn() -> bool:
        lines = grid(console).splitlines()
        return len(lines) == height and (width < 40 or lines[-1].endswith("? for more"))

    await until(pilot, is_drawn)


async def settled(console: Console, pilot: Pilot[None]) -> str:
    """Return the screen once it no longer changes: a busy machine draws it in parts."""
    seen = [grid(console)]
    while len(seen) < 5 or len(set(seen[-5:])) > 1:
        await pilot.pause(0.02)
        seen.append(grid(console))
    return seen[-1]
