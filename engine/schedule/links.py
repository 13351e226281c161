"""Links between pools as they are now: what they were found to do, what they do, and which is down.

A link by which GPUs reach each other's memory was tried at start, in both directions, with a
checksum. One that failed then, or that fails or is slower than half of what it did again and again,
is taken down: what is placed from now on goes by its detour through the host. It stays down until
a worker of it starts again and has tried it anew.
Owns: rates, strikes, and which links are down.
Invariant: only a link with a detour goes down; what is under way on it stays on it.
Never: copies; chooses a pair of workers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.cache.places import Hop, Link, Places
from engine.schedule.sequence import Leg
from engine.units import size_text
from engine.wire.messages import Copied

MAX_STRIKES = 8
"""In a row: copies that failed, or that came to less than half of what the try at start did."""
SLOW_RATIO = 0.5
_NEWEST_SHARE = 0.1
"""That the newest copy has in a link's rate."""


@dataclass(slots=True)
class LinkState:
    """What is known of one link."""

    link: Link
    source: str
    """The worker that pushes, or has the blocks."""
    probe_bytes_per_s: float | None = None
    """Of blocks there and back at start; None: it is not tried at start, or not yet."""
    copy_bytes_per_s: float | None = None
    """While it copies, lately; None: it has not copied yet."""
    num_bytes: int = 0
    """Ever copied, where they go."""
    num_strikes: int = 0
    down: str | None = None
    """Why its detour is taken; None: it is not."""

    @property
    def in_force(self) -> Link:
        """How blocks go now."""
        detour = self.link.detour
        return detour if self.down is not None and detour is not None else self.link


class Links:
    """All of them.

    Args:
        places: the workers and pools.
    """

    def __init__(self, places: Places) -> None:
        self._places = places
        self.states = {
            (link.from_pool, link.to_pool): LinkState(link, link.hops[0].worker)
            for link in places.links
            if link.hops
        }

    def between(self, source: str, target: str) -> Link:
        """How blocks get from one worker's pool to another's, as things are."""
        link = self._places.link(source, target)
        state = self.states.get((link.from_pool, link.to_pool))
        return link if state is None else state.in_force

    def named(self, legs: tuple[Leg, ...]) -> str:
        """Who runs a sequence and how its blocks go, where there are several of a role to tell."""
        if len(self._places.workers) <= 2:
            return ""
        if len(legs) == 1:
            return f"; at {legs[0].worker}"
        source, target = legs[0].worker, legs[1].worker
        return f"; {source} to {target} by {self.between(source, target).transport}"

    def probed(self, worker: str, rates: Mapping[str, float]) -> None:
        """A worker has started and tried what it copies over; a rate of 0 is a try that failed."""
        for state in self.states.values():
            hops = [hop for hop in state.link.hops if hop.worker == worker]
            pools = {pool for hop in hops for pool in (hop.from_pool, hop.to_pool)}
            found = [rates[pool] for pool in sorted(pools) if pool in rates]
            if not found:
                continue
            state.probe_bytes_per_s, state.num_strikes, state.down = min(found), 0, None
            if not min(found):
                self._take_down(state, "what came back at start is not what was sent")

    def copied(self, hop: Hop, report: Copied) -> None:
        """A hop has been made, or has failed."""
        for state in self.states.values():
            if hop not in state.link.hops or (report.error is None and not report.num_bytes):
                continue
            rate = 0.0
            if report.num_bytes:
                rate = report.num_bytes / max(report.ended_ns - report.started_ns, 1) * 1e9
                usual = rate if state.copy_bytes_per_s is None else state.copy_bytes_per_s
                state.copy_bytes_per_s = usual + _NEWEST_SHARE * (rate - usual)
                state.num_bytes += report.num_bytes if hop is state.link.hops[-1] else 0
            is_slow = rate < SLOW_RATIO * (state.probe_bytes_per_s or 0)
            if report.error is None and not is_slow:
                state.num_strikes = 0
                continue
            state.num_strikes += 1
            if state.num_strikes >= MAX_STRIKES and state.down is None:
                why = report.error or f"copies come to {size_text(rate)}/s"
                self._take_down(state, f"{MAX_STRIKES} copies in a row failed or were slow: {why}")

    def _take_down(self, state: LinkState, why: str) -> None:
        if state.link.detour is not None:
            state.down = why
