"""Free pages of the C heap go back to the machine while the loop runs."""

from __future__ import annotations

import asyncio
import contextlib
import re
from pathlib import Path

import pytest

from appliance.heap import find_trim, keep_trimmed

SIZE = 16_000
"""Bytes; too few for a mapping of its own."""


def held_kib() -> int:
    return int(re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[1])


@pytest.mark.skipif(find_trim() is None, reason="this C library has no malloc_trim")
async def test_what_lies_free_between_what_is_used_goes_back():
    start_kib = held_kib()
    blocks = [bytearray(SIZE) for _ in range(4000)]
    kept = blocks[::100]  # some, so that the heap's end does not come down
    full_kib = held_kib()
    assert full_kib - start_kib > 40_000
    del blocks
    kept.append(bytearray(SIZE))
    task = asyncio.create_task(keep_trimmed(0.01))
    try:
        async with asyncio.timeout(10):
            while held_kib() > start_kib + (full_kib - start_kib) // 2:  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(0.01)
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    assert all(len(one) == SIZE for one in kept)


async def test_another_c_library_is_left_alone(monkeypatch):
    monkeypatch.setattr("appliance.heap.find_trim", lambda: None)
    await keep_trimmed(0.0)
