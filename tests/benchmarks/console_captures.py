"""Captures of the console for the documentation: text, SVG and PNG of every page at three sizes.

usage: python -m tests.benchmarks.console_captures FOLDER [--frames FILE] [--requests FILE]

FILE holds frames as the daemon streams them, one JSON object a line; the last one is on screen and
those before it are its history. So captures can come from a recorded load:

  curl -sN --unix-socket SOCKET http://localhost/v1/penstock/stream > FILE

--requests is a saved reply of /v1/requests, for the requests that had finished by then. Without
FILE the frames are synthetic and always the same: docs/*.svg are drawn of them, which a test holds.
PNG needs the package resvg-py and is left out without it.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import msgspec

from appliance.observe.frame.protocol import Frame, RequestFrame
from tests.tui import frames
from tests.tui.screen import console_at, grid
from tui.app import Console
from tui.view import View
from tui.widgets import overview

SIZES = ((80, 24), (120, 40), (200, 50))
_PIXELS_A_CELL = 11


class _Requests(msgspec.Struct):
    data: list[RequestFrame]


def recorded(path: Path) -> View:
    """The view after the last frame of a file."""
    view = View(caller=frames.OPERATOR)
    for line in path.read_bytes().splitlines():
        view = view.after(msgspec.json.decode(line, type=Frame))
    return view


def synthetic() -> View:
    """A busy minute, and the requests that had finished by then."""
    return dataclasses.replace(frames.view_of(frames.busy()), finished=frames.minute())


def to_png(svg: str, num_columns: int) -> bytes:
    """The SVG drawn; CairoSVG would ignore the widths of texts, so that boxes shear."""
    import resvg_py

    return bytes(
        resvg_py.svg_to_bytes(
            svg_string=svg.replace("Fira Code", "DejaVu Sans Mono"),
            width=num_columns * _PIXELS_A_CELL,
            monospace_family="DejaVu Sans Mono",
        )
    )


def drawn(console: Console) -> str:
    """Draw the page that is on screen, without the random ids of its styles."""
    svg = console.export_screenshot(title="penstock top", simplify=True)
    return re.sub(r"terminal-\d+", "terminal", svg)


async def capture(view: View, folder: Path) -> list[Path]:
    """Write all captures; returns what was written."""
    written = []
    for width, height in SIZES:
        async with console_at(width, height, view) as (console, pilot):
            for page in overview.pages(view.frame):
                console.main.go_to(page)
                await pilot.pause()
                svg = drawn(console)
                contents = {"txt": grid(console).encode(), "svg": svg.encode()}
                if find_spec("resvg_py"):
                    contents["png"] = to_png(svg, width)
                for suffix, content in contents.items():
                    path = folder / f"{page}-{width}x{height}.{suffix}"
                    path.write_bytes(content)
                    written.append(path)
    return written


def main() -> None:
    """Capture and say what was written."""
    parser = argparse.ArgumentParser(prog="console_captures")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--frames", type=Path)
    parser.add_argument("--requests", type=Path)
    options = parser.parse_args()
    view = recorded(options.frames) if options.frames else synthetic()
    if options.requests:
        listed = msgspec.json.decode(options.requests.read_bytes(), type=_Requests).data
        ended = tuple(request for request in listed if request.phase == "finished")
        view = dataclasses.replace(view, finished=ended)
    options.folder.mkdir(parents=True, exist_ok=True)
    written = asyncio.run(capture(view, options.folder))
    if not find_spec("resvg_py"):
        sys.stderr.write("no PNG: the package resvg-py is not installed\n")
    print(f"{len(written)} files in {options.folder}")


if __name__ == "__main__":
    main()
