"""Describe one worker and its process.

Invariant: what a worker's start has found is that of its last start.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from appliance.fleet.placement import WorkerPlan
from engine.errors import WorkerFailed, WorkerUnfit
from engine.units import part_text, size_text
from engine.wire.beats import Beats
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
    """Its message when it last became ready; None: never ready."""
    num_restarts: int = 0
    num_failed_starts: int = 0
    """Failed restarts in a row; at MAX_FAILED_STARTS requests stop waiting for it."""
    num_short_lives: int = 0
    """Lives in a row without a completed step, failed starts included."""
    has_stepped: bool = False
    """True once its process has completed a step."""
    pause_s: float = 0.0
    """The pause before its last restart."""
    weights_loss: LogitsLoss | None = None
    """Measured at its first start; None: not measured by this worker."""
    kv_loss: LogitsLoss | None = None
    ready_at_s: float | None = None
    """Monotonic time; None: its process was not ready yet."""
    beats: Beats | None = None
    """The counter of its last process; None: on a GPU a step has no beats."""
    num_reports: int = 0
    """Messages from all its processes: each is a sign of progress."""
    loaded_bytes: int = 0
    total_bytes: int = 0
    has_loaded: bool = False
    """True once its share of the weights is loaded; the memfd outlives the worker."""
    process: subprocess.Popen[bytes] | None = None
    others: list[subprocess.Popen[bytes]] = field(default_factory=list)
    """The processes of a group besides the first, in the order of their ranks."""
    socket: socket.socket | None = None
    channel: DaemonChannel | None = None
    failure: WorkerFailed | None = None
    """The cause of its end, from the worker or from the daemon that ended it."""
    is_reaped: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when its last process has ended and the daemon has handled it."""

    @property
    def is_stable(self) -> bool:
        """Whether its process has worked, so that its end does not predict the next start."""
        if self.ready_at_s is None:
            return False
        return self.has_stepped or time.monotonic() - self.ready_at_s > STABLE_AFTER_S

    @property
    def pids(self) -> list[int]:
        """Its processes, the first before the others; empty: it has none."""
        return [] if self.pid is None else [self.pid, *(each.pid for each in self.others)]

    def cpus_used(self, told: Collection[int]) -> list[int]:
        """Return the cores that it computes on now.

        Args:
            told: the cores that the router has given to it; it gives none to a group.
        """
        if not self.plan.ranks:
            return list(told)
        return list(self.plan.cpus) if self.state == "ready" else []

    @property
    def num_beats(self) -> int:
        """Beats of its last process; a GPU's has none."""
        return 0 if self.beats is None else self.beats.count

    @property
    def trouble(self) -> str | None:
        """A description of its trouble, for people; None: it serves."""
        name = self.plan.name
        if isinstance(self.failure, WorkerUnfit):
            return f"worker {name} is not started again: {self.failure}"
        is_looping = self.num_short_lives >= MANY_SHORT_LIVES
        so_far = f"worker {name} died {self.num_short_lives} times in a row"
        if self.state == "ready":
            return f"{so_far} and has just restarted" if is_looping and not self.is_stable else None
        if not is_looping:
            return f"worker {name} is {'' if self.state == 'starting' else 're'}starting"
        return f"{so_far} and restarts within {self.pause_s:g} s"

    @property
    def stage(self) -> str:
        """The stage of its start, in words."""
        if not self.total_bytes:
            return "loading PyTorch and the tokenizer"
        if self.loaded_bytes < self.total_bytes:
            return f"reading weights, {part_text(self.loaded_bytes, self.total_bytes)}"
        return "preparing the first step"

    @property
    def maps_files(self) -> bool:
        """Whether it maps the checkpoint's files as its weights."""
        return self.setup.weights is None and self.setup.gpu is None

    @property
    def uses_mps(self) -> bool:
        """Whether NVIDIA's MPS lets it compute beside another worker of its GPU."""
        return self.ready is not None and self.ready.sharing == "mps"

    @property
    def attention(self) -> str | None:
        return None if self.ready is None else self.ready.attention

    @property
    def num_refused(self) -> int:
        """Kernels that the self-test found wrong."""
        proof = None if self.ready is None else self.ready.proof
        return 0 if proof is None else len(proof.refused)

    @property
    def probes(self) -> dict[str, float]:
        """Copy rates to other pools in bytes per second, measured at start; 0: unreachable."""
        return {} if self.ready is None else self.ready.probes

    @property
    def device(self) -> str:
        """Its device, and how it shares it."""
        sharing = None if self.ready is None else self.ready.sharing
        return ", ".join(filter(None, (self.plan.device, sharing)))

    @property
    def about(self) -> list[str]:
        """Findings of its start, a line for each."""
        ready = self.ready
        lines: list[str] = []
        if ready is None:
            return lines
        lines += ready.notes
        if ready.sharing == "time-sliced":
            lines.append("time-sliced: without MPS the workers of a GPU take turns")
        if ready.max_num_batched_tokens is not None:
            lines.append(f"up to {ready.max_num_batched_tokens:,} prompt tokens in a step")
        if ready.num_graphs:
            lines.append(
                f"{ready.num_graphs} graphs of decode steps, captured in "
                f"{ready.capture_ms / 1e3:.1f} s, {size_text(ready.graph_bytes)}"
            )
        return lines


def weights_progress(workers: Iterable[WorkerState]) -> tuple[int, int]:
    """Return the loaded and total bytes of weights, over all workers.

    Files that several workers map are in memory once and count once; shares and copies add up.
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
