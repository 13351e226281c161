"""Describe one worker and its process.

Owns: what a worker's last start found.
Invariant: what a worker's start has found is that of its last start.
Never: starts or ends anything.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from appliance.fleet.placement import WorkerPlan
from engine.errors import WorkerFailed
from engine.units import size_text
from engine.wire.channel import DaemonChannel
from engine.wire.messages import (
    LogitsLoss,
    Ready,
    Setup,
)

STABLE_AFTER_S = 10.0
"""A worker that was ready this long had no short life, also without a step."""
MANY_SHORT_LIVES = 3
"""Consecutive deaths after which a worker is in a crash loop."""


@dataclass(slots=True)
class WorkerState:
    """What the daemon knows of one worker: its plan, its process, its lives."""

    plan: WorkerPlan
    setup: Setup
    state: str = "starting"
    pid: int | None = None
    ready: Ready | None = None
    """What it said when it was last ready; None: it never was."""
    num_restarts: int = 0
    num_failed_starts: int = 0
    """Restarts since it was last ready; from MAX_FAILED_STARTS on nobody waits for it."""
    num_short_lives: int = 0
    """Lives in a row without a step that ended well, failed starts among them."""
    has_stepped: bool = False
    """Its process has made a step that ended well."""
    pause_s: float = 0.0
    """Before it is started again, the last time that it was."""
    weights_loss: LogitsLoss | None = None
    """Measured at its first start; None: not by it, or there is none."""
    kv_loss: LogitsLoss | None = None
    ready_at_s: float | None = None
    """Monotonic; None: its process was not ready yet."""
    num_reports: int = 0
    """Messages from all its processes: each is a sign of progress."""
    loaded_bytes: int = 0
    total_bytes: int = 0
    has_loaded: bool = False
    """Its share of the weights is in place; stays true, since the memfd outlives it."""
    process: subprocess.Popen[bytes] | None = None
    socket: socket.socket | None = None
    channel: DaemonChannel | None = None
    failure: WorkerFailed | None = None
    """Why it ended: what it said before it exited, or why it was ended."""
    is_reaped: asyncio.Event = field(default_factory=asyncio.Event)
    """Its last process is gone, and the daemon knows."""

    @property
    def is_stable(self) -> bool:
        """Whether its process has worked: its end says nothing of the next start."""
        if self.ready_at_s is None:
            return False
        return self.has_stepped or time.monotonic() - self.ready_at_s > STABLE_AFTER_S

    @property
    def trouble(self) -> str | None:
        """What is wrong with it, for whoever waits or repairs; None: nothing."""
        name = self.plan.name
        is_looping = self.num_short_lives >= MANY_SHORT_LIVES
        so_far = f"worker {name} died {self.num_short_lives} times in a row"
        if self.state == "ready":
            return f"{so_far} and has just come back" if is_looping and not self.is_stable else None
        if not is_looping:
            return f"worker {name} is {'' if self.state == 'starting' else 're'}starting"
        return f"{so_far} and restarts within {self.pause_s:g} s"

    @property
    def stage(self) -> str:
        """How far its start is, in words."""
        if not self.total_bytes:
            return "starting"
        return "loading" if self.loaded_bytes < self.total_bytes else "preparing its first step"

    @property
    def maps_files(self) -> bool:
        """Whether its weights are the checkpoint's files themselves, mapped as all workers do."""
        return self.setup.weights is None and self.setup.gpu is None

    @property
    def uses_mps(self) -> bool:
        """Whether NVIDIA's MPS lets it compute beside another worker of its GPU."""
        return self.ready is not None and self.ready.sharing == "mps"

    @property
    def attention(self) -> str | None:
        return None if self.ready is None else self.ready.attention

    @property
    def probes(self) -> dict[str, float]:
        """By other pool: bytes a second when it started; 0: it cannot be reached."""
        return {} if self.ready is None else self.ready.probes

    @property
    def device(self) -> str:
        """What it computes on, and how it shares that."""
        sharing = None if self.ready is None else self.ready.sharing
        return ", ".join(filter(None, (self.plan.device, sharing)))

    @property
    def about(self) -> list[str]:
        """What its start has found, a line for each."""
        ready = self.ready
        lines: list[str] = []
        if ready is None:
            return lines
        lines += ready.notes
        if ready.sharing == "time-sliced":
            lines.append("time-sliced: MPS does not run, so the workers on its GPU take turns")
        if ready.max_num_batched_tokens is not None:
            lines.append(f"up to {ready.max_num_batched_tokens:,} prompt tokens in a step")
        if ready.num_graphs:
            lines.append(
                f"{ready.num_graphs} graphs of decode steps, captured in "
                f"{ready.capture_ms / 1e3:.1f} s, {size_text(ready.graph_bytes)}"
            )
        return lines


def weights_progress(workers: Iterable[WorkerState]) -> tuple[int, int]:
    """Bytes of weights that are there and that there will be, in all workers together.

    Files that several workers map are in memory once, and count once; shares and copies add up.
    """
    workers = list(workers)
    mapping = [worker for worker in workers if worker.maps_files]
    others = [worker for worker in workers if not worker.maps_files]
    loaded = min((worker.loaded_bytes for worker in mapping), default=0)
    total = max((worker.total_bytes for worker in mapping), default=0)
    return (
        loaded + sum(worker.loaded_bytes for worker in others),
        total + sum(worker.total_bytes for worker in others),
    )
