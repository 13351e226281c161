"""Track each link between pools: its rate, its failures, and when it is down.

Invariant: only a link with a fallback goes down; copies under way on it stay on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.scheduler.cache.topology import Hop, Link, Topology
from engine.scheduler.sequences.sequence import RouteStage
from engine.units import size_text
from engine.wire.messages import Copied

MAX_STRIKES = 8
"""Maximum consecutive strikes.

A strike is a failed copy, or JUDGED_BYTES below SLOW_RATIO of the rate at start."""
SLOW_RATIO = 0.5
JUDGED_BYTES = 64 << 20
"""Bytes timed together: NVLink carries one block in less time than a copy's start."""
_NEWEST_SHARE = 0.1
"""Weight of the newest copy in a link's rate."""


@dataclass(slots=True)
class LinkState:
    """What is known of one link."""

    link: Link
    source: str
    """The worker that pushes, or has the blocks."""
    probe_bytes_per_s: float | None = None
    """Rate of blocks there and back at start; None: not tried at start, or not yet."""
    copy_bytes_per_s: float | None = None
    """While it copies, lately, times when the host was too busy left out; None: not known yet."""
    num_bytes: int = 0
    """Ever copied, where they go."""
    num_failed: int = 0
    """Copies in a row."""
    num_slow: int = 0
    """Times in a row that JUDGED_BYTES were slow."""
    timed_bytes: int = 0
    """Since it was judged last."""
    timed_ns: int = 0
    down: str | None = None
    """Why the fallback is taken; None: it is not."""

    @property
    def num_strikes(self) -> int:
        return max(self.num_failed, self.num_slow)

    @property
    def in_force(self) -> Link:
        """The link now in use: the fallback while this one is down."""
        fallback = self.link.fallback
        return fallback if self.down is not None and fallback is not None else self.link


class Links:
    """The state of every link between pools: rates, failures, and which is down."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self.states = {
            (link.from_pool, link.to_pool): LinkState(link, link.hops[0].worker)
            for link in topology.links
            if link.hops
        }

    def between(self, source: str, target: str) -> Link:
        """Return the link now in use from one worker's pool to another's."""
        link = self._topology.link(source, target)
        state = self.states.get((link.from_pool, link.to_pool))
        return link if state is None else state.in_force

    def named(self, stages: tuple[RouteStage, ...]) -> str:
        """Name a sequence's workers and links: `prefill0,decode1`, `peer`."""
        if len(self._topology.workers) <= 2:
            return ""
        if len(stages) == 1:
            return f"; at {stages[0].worker}"
        source, target = stages[0].worker, stages[1].worker
        return f"; {source} to {target} by {self.between(source, target).transport}"

    def probed(self, worker: str, rates: Mapping[str, float]) -> None:
        """Record a starting worker's trial rates; 0 is a failed trial."""
        for state in self.states.values():
            hops = [hop for hop in state.link.hops if hop.worker == worker]
            pools = {pool for hop in hops for pool in (hop.from_pool, hop.to_pool)}
            found = [rates[pool] for pool in sorted(pools) if pool in rates]
            if not found:
                continue
            state.probe_bytes_per_s, state.down = min(found), None
            state.num_failed = state.num_slow = state.timed_bytes = state.timed_ns = 0
            if not min(found):
                self._take_down(state, "the data came back changed at start")

    def copied(self, hop: Hop, report: Copied) -> None:
        """Record a hop's copy or failure."""
        for state in self.states.values():
            if hop not in state.link.hops or (report.error is None and not report.num_bytes):
                continue
            state.num_bytes += report.num_bytes if hop is state.link.hops[-1] else 0
            state.num_failed = 0 if report.error is None else state.num_failed + 1
            if report.error is not None:
                self._strike(state, state.num_failed, report.error)
            elif report.link_ns is not None:
                self._timed(state, report.num_bytes, max(report.link_ns, 1))

    def _timed(self, state: LinkState, num_bytes: int, elapsed_ns: int) -> None:
        """Take in what a copy took; judge the link when enough bytes have been timed."""
        rate = num_bytes / elapsed_ns * 1e9
        usual = rate if state.copy_bytes_per_s is None else state.copy_bytes_per_s
        state.copy_bytes_per_s = usual + _NEWEST_SHARE * (rate - usual)
        state.timed_bytes += num_bytes
        state.timed_ns += elapsed_ns
        if state.timed_bytes < JUDGED_BYTES:
            return
        rate = state.timed_bytes / state.timed_ns * 1e9
        state.timed_bytes = state.timed_ns = 0
        is_slow = rate < SLOW_RATIO * (state.probe_bytes_per_s or 0)
        state.num_slow = state.num_slow + 1 if is_slow else 0
        self._strike(state, state.num_slow, f"copies run at {size_text(rate)}/s")

    def _strike(self, state: LinkState, count: int, why: str) -> None:
        if count >= MAX_STRIKES and state.down is None:
            self._take_down(state, f"{MAX_STRIKES} copies in a row failed or were slow: {why}")

    def _take_down(self, state: LinkState, why: str) -> None:
        if state.link.fallback is not None:
            state.down = why
