"""What the appliance is while its model is being downloaded: it answers, and takes no work.

Owns: the process that pulls, and how far that is, in the words of /ready, console and journal.
Invariant: the process ends with the daemon, and with whoever waits for it.
Never: imports huggingface_hub.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from appliance.api.appliance import Readings
from appliance.fleet.roles_change import RolesChange
from appliance.frame.latency import Histograms
from appliance.frame.protocol import (
    FRAME_VERSION,
    EventFrame,
    Frame,
    HostFrame,
    LatencyFrame,
    QueueFrame,
    TotalsFrame,
    utc_now,
)
from appliance.journal import notify
from appliance.log.request_log import RequestLog
from appliance.log.row import frame_of_row
from appliance.models.names import HubName
from appliance.request import ModelInfo, Request
from engine.cache.prefix_index import PrefixChain
from engine.errors import CheckpointError, PenstockError, Unavailable
from engine.schedule.sequence import Sequence
from engine.text.tokenizer import Tokenizer
from engine.units import part_text, size_text

log = logging.getLogger("penstock")

PROGRAM = (sys.executable, "-P", "-m", "appliance.models.pull")
FRAME_S = 1.0
LOG_S = 5.0
EXTEND_US = 60_000_000
"""More time that systemd is asked for, again and again, while bytes come."""


class Fetching:
    """One download, and what clients see of it."""

    def __init__(self, name: HubName, request_log: RequestLog) -> None:
        self._name = name
        self._log = request_log
        self.log_rows, self.log_events = request_log.rows, request_log.events
        self.log_usage, self.log_recording = request_log.usage, request_log.recording
        self._about = f"looking for {name} on the hub"
        self._started_s = self._logged_s = time.monotonic()
        self._events = [EventFrame(utc_now(), "info", "model.fetching", self._about)]

    async def run(self) -> Path:
        """Download it; returns its folder. Cancelled, it ends the process.

        Raises:
            PenstockError: it cannot be had, as models.pull says.
        """
        log.info("%s", self._about)
        process = await asyncio.create_subprocess_exec(
            *PROGRAM, str(self._name), stdin=asyncio.subprocess.DEVNULL,
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
        log.info("downloaded %s in %.1f s", self._name, time.monotonic() - self._started_s)
        return Path(said["folder"])

    async def has_fetched(self, *, unless: asyncio.Event) -> bool:
        """Download it; False if something else came first.

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
    cache_contents = None

    def not_ready_reason(self) -> str | None:
        """How far the download is."""
        return self._about

    def degraded_reason(self) -> str | None:
        """None: while a model is fetched no other serves."""
        return None

    def check_available(self) -> None:
        """Raise Unavailable: there is no model yet."""
        self._refuse()

    def check_room(self, owner: str, num_bytes: int) -> None:
        """Nothing is taken that could lack room."""

    @property
    def model(self) -> ModelInfo:
        """Raise Unavailable: nothing is known of it yet."""
        self._refuse()

    @property
    def tokenizer(self) -> Tokenizer:
        """Raise Unavailable: nothing is known of it yet."""
        self._refuse()

    @property
    def max_per_request(self) -> int:
        """0: no request may bring a sequence yet."""
        return 0

    @property
    def max_tokens_per_request(self) -> int:
        """0: no request may bring a prompt yet."""
        return 0

    def hash_prompt(self, token_ids: list[int], salt: str | None, user: str) -> PrefixChain | None:
        """None: there is no cache yet."""
        return None

    def next_seq_id(self) -> int:
        """Raise Unavailable: nothing is accepted yet."""
        self._refuse()

    def submit(self, request: Request) -> None:
        """Raise Unavailable: there is no model yet."""
        self._refuse()

    def stop_sequence(self, sequence: Sequence, num_kept_tokens: int) -> None:
        """Raise Unavailable: no sequence runs yet."""
        self._refuse()

    def queue_place(self, request: Request) -> int | None:
        """None: nothing waits yet."""
        return None

    def owner_of(self, request_id: str) -> str | None:
        """None: no request is live yet."""
        return None

    def cancel(self, request_id: str, by: str) -> bool:
        """False: no request is live yet."""
        return False

    def drain(self, by: str) -> None:
        """Raise Unavailable: there is nothing to drain; SIGTERM ends the download."""
        self._refuse()

    def resume(self, by: str) -> None:
        """Raise Unavailable: nothing is drained yet."""
        self._refuse()

    def set_roles(self, change: RolesChange, by: str | None) -> dict[str, object]:
        """Raise Unavailable: there are no workers yet."""
        self._refuse()

    def close(self, request: Request, http_status: int) -> None:
        """Raise Unavailable: no request is live."""
        self._refuse()

    def request_frames(self) -> list[dict[str, object]]:
        """An empty list: no request is live yet."""
        return []

    def request_frame(self, request_id: str) -> dict[str, object] | None:
        """None: no request is live yet."""
        return None

    def logged_frame(self, request_id: str) -> dict[str, object] | None:
        """A finished request of an earlier run, from the log; blocking."""
        row = self._log.row(request_id)
        return None if row is None else msgspec.to_builtins(frame_of_row(row))

    def frame_json(self) -> bytes:
        """A frame that says how far the download is, as JSON."""
        return msgspec.json.encode(self._frame())

    def readings(self) -> Readings:
        """The frame, and histograms in which nothing was counted yet."""
        return Readings(self._frame(), Histograms(1))

    async def next_frame_json(self, after_seq: int) -> tuple[int, bytes]:
        """Wait for the next frame, which comes once a second."""
        if self._seq <= after_seq:
            await asyncio.sleep(FRAME_S)
        return self._seq, self.frame_json()

    @property
    def _seq(self) -> int:
        return 1 + int((time.monotonic() - self._started_s) / FRAME_S)

    def _refuse(self) -> NoReturn:
        raise Unavailable(self._about, code="model_loading")

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
    """What the process has said last, as an error of this one."""
    words = said.get("error")
    if words is None:
        hint = "its last words are above"
        return PenstockError(f"the download ended with exit code {code}", hint=hint)
    if said.get("exit_code") == CheckpointError.exit_code:
        return CheckpointError(words["what"], where=words["where"], hint=words["hint"])
    error = PenstockError(words["what"], where=words["where"], hint=words["hint"])
    error.exit_code = said.get("exit_code", error.exit_code)  # as `models pull` ends
    return error
