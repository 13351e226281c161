"""A headless Chromium that tests drive through a pipe; without Chromium they are skipped."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

NAMES = ("chromium-headless-shell", "chromium", "google-chrome", "chrome")
SAID = ("Runtime.exceptionThrown", "Log.entryAdded")


class Browser:
    """One tab, by Chrome's DevTools protocol."""

    def __init__(self, reader: asyncio.StreamReader, to: int) -> None:
        self._reader, self._to = reader, to
        self._numbers = itertools.count(1)
        self._session: dict[str, str] = {}
        self.problems: list[str] = []
        """Exceptions, and what the page's policy has blocked; not what the server refused."""

    async def call(self, method: str, **params: object) -> dict:
        """Call a method, and return its result."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params, **self._session}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            got = json.loads((await self._reader.readuntil(b"\0"))[:-1])
            entry = got.get("params", {}).get("entry", {"source": ""})
            if got.get("method") in SAID and entry["source"] != "network":
                self.problems.append(json.dumps(got["params"]))
            if got.get("id") == number:
                assert "error" not in got, got
                return got["result"]

    async def begin(self) -> None:
        """Open the tab."""
        target = await self.call("Target.createTarget", url="about:blank")
        attached = await self.call(
            "Target.attachToTarget", targetId=target["targetId"], flatten=True
        )
        self._session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Runtime", "Log"):
            await self.call(f"{domain}.enable")

    async def run(self, script: str) -> object:
        """Evaluate an expression in the page, and await its value."""
        said = await self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in said, said
        return said["result"].get("value")

    async def until(self, script: str) -> None:
        """Wait until an expression is true."""
        for _ in range(1200):
            if await self.run(script):
                return
            await asyncio.sleep(0.05)
        shown = await self.run("document.body.innerText")
        raise AssertionError(f"never: {script}; {self.problems}; {shown}")

    async def open(self, url: str) -> None:
        """Open a page, perhaps the same again, and wait until its script has run."""
        await self.run("window.isOld = true")
        await self.call("Page.navigate", url=url)
        await self.until("!window.isOld && document.readyState === 'complete'")

    async def size(self, width: int, height: int) -> None:
        """Make the tab so many pixels large."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )


@asynccontextmanager
async def browser(folder: Path) -> AsyncIterator[Browser]:
    """Start one with an empty profile in this folder."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip("no Chromium here")
    (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()
    words = [program, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
    words += ["--disable-dev-shm-usage", "--no-proxy-server", f"--user-data-dir={folder}"]
    process = await asyncio.create_subprocess_exec(
        *("bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out} 2>/dev/null', "bash", *words),
        pass_fds=(theirs_in, theirs_out),
    )
    os.close(theirs_in)
    os.close(theirs_out)
    reader = asyncio.StreamReader(limit=1 << 26)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(ours_in, "rb")
    )
    tab = Browser(reader, ours_out)
    try:
        await tab.begin()
        yield tab
    finally:
        process.terminate()
        await process.wait()
        transport.close()
        os.close(ours_out)
