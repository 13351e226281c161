"""Download a missing model, while the daemon answers but takes no work.

Invariant: the download ends with the daemon, and when nothing waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NoReturn

import msgspec

from appliance.api.core.appliance import Readings
from appliance.daemon.requests.text_encoder import TextEncoder
from appliance.daemon.survival.keeper_channel import notify
from appliance.hub.cache import download_text, hub_cache
from appliance.hub.names import HubName
from appliance.json.lines import encode_line
from appliance.observe.frame.histograms import Histograms
from appliance.observe.frame.logged_requests import ended_frame
from appliance.observe.frame.protocol import (
    FRAME_VERSION,
    EventFrame,
    Frame,
    HostFrame,
    LatencyFrame,
    QueueFrame,
    TotalsFrame,
    utc_now,
)
from appliance.observe.log.writer import RequestLog
from engine.errors import CheckpointError, PenstockError, Unavailable
from engine.scheduler.cache.hashes import PrefixHasher
from engine.system.python_child import python_command
from engine.units import part_text, size_text

log = logging.getLogger("penstock")

PROGRAM = python_command("-m", "appliance.hub.download")
FRAME_S = 1.0
LOG_S = 5.0
EXTEND_US = 60_000_000
"""Time that systemd is asked to add to the start while bytes come."""


class Fetching:
    """Downloads that follow each other, and what clients see of them.

    Args:
        names: at least one.
    """

    def __init__(self, names: list[HubName], request_log: RequestLog) -> None:
        self._names, self._name = names, names[0]
        self._log = request_log
        self.event = request_log.event
        self.log_rows, self.log_events = request_log.rows, request_log.events
        self.log_usage, self.log_recording = request_log.usage, request_log.recording
        self._about = f"looking for {self._name} on the hub"
        self._total_bytes: int | None = None
        self._started_s = self._logged_s = time.monotonic()
        self._events = [EventFrame(utc_now(), "info", "model.fetching", self._about)]

    async def run(self) -> None:
        """Download all. Cancelled, it ends the process.

        Raises:
            PenstockError: one cannot be had, as models.pull says.
        """
        for name in self._names:
            await self._fetch(name)

    async def _fetch(self, name: HubName) -> None:
        self._name, self._total_bytes = name, None
        self._about, started_s = f"looking for {name} on the hub", time.monotonic()
        log.info("%s", self._about)
        process = await asyncio.create_subprocess_exec(
            *PROGRAM, str(name), stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE, start_new_session=True,  # Ctrl-C is the daemon's
        )  # fmt: skip
        said: dict[str, Any] = {}
        try:
            assert process.stdout is not None
            async for line in process.stdout:
                said = json.loads(line)
                if "done_bytes" in said:
                    self._progressed(**said)
            await process.wait()
        finally:
            if process.returncode is None:
                process.terminate()
                await process.wait()
        if "folder" not in said:
            raise _error(said, process.returncode)
        log.info("downloaded %s in %.1f s", name, time.monotonic() - started_s)

    async def has_fetched(self, *, unless: asyncio.Event) -> bool:
        """Download all; False if `unless` was set first.

        Raises:
            PenstockError: as run().
        """
        coming = asyncio.create_task(self.run())
        stopping = asyncio.create_task(unless.wait())
        try:
            await asyncio.wait({coming, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            coming.cancel()
        if not coming.done():
            with contextlib.suppress(asyncio.CancelledError):
                await coming
            return False
        coming.result()
        return True

    def _progressed(self, done_bytes: int, total_bytes: int, bytes_per_s: float) -> None:
        if self._total_bytes != total_bytes:
            self._total_bytes = total_bytes
            about = download_text(self._name, total_bytes, hub_cache(os.environ), os.environ)
            log.info("%s", about)
        self._about = (
            f"downloading {self._name}: {part_text(done_bytes, total_bytes)} "
            f"at {size_text(bytes_per_s)}/s"
        )
        now_s = time.monotonic()
        if now_s - self._logged_s >= LOG_S or done_bytes == total_bytes:
            self._logged_s = now_s
            log.info("%s", self._about)
            notify(STATUS=self._about, EXTEND_TIMEOUT_USEC=str(EXTEND_US))

    # What the api asks

    swaps = None
    text_encoders: Mapping[str, TextEncoder] = MappingProxyType({})
    hasher: PrefixHasher | None = None
    cache_contents = None
    max_per_request = max_tokens_per_request = 0

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise Unavailable(self._about, code="model_loading")

    def _nothing(self, *_: object, **__: object) -> None:
        return None

    model = tokenizer = property(_refuse)
    check_available = next_seq_id = submit = stop_sequence = close = cancel = _refuse
    open_texts = close_texts = _refuse
    drain = resume = set_roles = measurement = measure = _refuse
    refused = check_room = queue_place = owner_of = request_frame = degraded_reason = _nothing

    def not_ready_reason(self) -> str:
        return self._about

    def request_frames(self) -> list[dict[str, object]]:
        return []

    def logged_frame(self, request_id: str) -> dict[str, object] | None:
        """Read a finished request of an earlier run from the log; blocks."""
        row = self._log.row(request_id)
        return None if row is None else msgspec.to_builtins(ended_frame(row))

    def frame_json(self) -> bytes:
        """Encode a frame with the download's progress."""
        return encode_line(self._frame())

    def readings(self) -> Readings:
        """Return the frame with empty histograms."""
        return Readings(self._frame(), Histograms(1))

    async def next_frame_json(self, after_seq: int) -> tuple[int, bytes]:
        """Wait for the next frame, which comes once a second."""
        if self._seq <= after_seq:
            await asyncio.sleep(FRAME_S)
        return self._seq, self.frame_json()

    @property
    def _seq(self) -> int:
        return 1 + int((time.monotonic() - self._started_s) / FRAME_S)

    def _frame(self) -> Frame:
        return Frame(
            version=FRAME_VERSION,
            at=utc_now(),
            seq=self._seq,
            uptime_s=time.monotonic() - self._started_s,
            state="loading",
            state_reason=self._about,
            model=str(self._name),
            model_note=None,
            dtype="",
            max_model_len=None,
            roles="",
            transport=None,
            pid=os.getpid(),
            queue=QueueFrame(0, 0, 0, 0, 0, None),
            workers=[],
            pools=[],
            latency=LatencyFrame(0.0, 0, None, None, None, None, None, None, None, None),
            totals=TotalsFrame(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0),
            devices=[],
            host=HostFrame(None, None, None, None, None),
            requests=[],
            num_requests=0,
            events=self._events,
            limit=self._about,
        )


def _error(said: dict[str, Any], code: int | None) -> PenstockError:
    """Turn the download process's last output into an error."""
    words = said.get("error")
    if words is None:
        hint = "see its output above"
        return PenstockError(f"the download ended with exit code {code}", hint=hint)
    if said.get("exit_code") == CheckpointError.exit_code:
        return CheckpointError(words["what"], where=words["where"], hint=words["hint"])
    error = PenstockError(words["what"], where=words["where"], hint=words["hint"])
    error.exit_code = said.get("exit_code", error.exit_code)  # as `models pull` ends
    return error
