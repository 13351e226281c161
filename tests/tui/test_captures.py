"""The commands that make captures still work."""

from __future__ import annotations

import asyncio
import sys
from importlib.util import find_spec
from pathlib import Path

import msgspec

from tests import golden
from tests.benchmarks import console_captures
from tests.tui import frames
from tests.tui.screen import console_at
from tui.widgets import overview

ROOT = Path(__file__).parents[2]


async def test_captures_of_recorded_frames_are_written_as_text_svg_and_png(tmp_path):
    recorded = tmp_path / "frames"
    lines = [msgspec.json.encode(frames.busy(seq)) for seq in (159, 160)]
    recorded.write_bytes(b"\n".join(lines))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.benchmarks.console_captures",
        str(tmp_path / "out"), "--frames", str(recorded),
        cwd=ROOT, stdout=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    assert await process.wait() == 0
    suffixes = {".txt", ".svg", *([".png"] if find_spec("resvg_py") else [])}
    written = list((tmp_path / "out").iterdir())
    assert len(written) == len(suffixes) * len(overview.NAMES) * len(console_captures.SIZES)
    assert {path.suffix for path in written} == suffixes
    for path in written:
        start = path.read_bytes()[:4]
        assert start == {".svg": b"<svg", ".png": b"\x89PNG", ".txt": b" pen"}[path.suffix]


async def test_pictures_of_the_documentation_show_what_is_drawn_today():
    async with console_at(120, 40, console_captures.synthetic()) as (console, pilot):
        for page in ("overview", "requests", "kv", "timeline", "events", "handoff"):
            console.main.go_to(page)
            await pilot.pause()
            golden.check(ROOT / "docs" / f"{page}-120x40.svg", console_captures.drawn(console))
