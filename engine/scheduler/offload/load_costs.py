"""Compare the cost of loading blocks from a tier with computing them.

Invariant: a load is worth it only where it is predicted to take less than computing would;
excess load time is the time that loads took beyond what computing was predicted to.
"""

from __future__ import annotations

from dataclasses import dataclass

_NEWEST_SHARE = 0.3
"""Weight of the newest load in the rate."""
OVERHEAD_MS = 2.0
"""Fixed cost of a load: waking threads, and the loop."""
DEADLINE_RATIO = 4.0
"""Deadline of a load, relative to its prediction."""


@dataclass(slots=True)
class Costs:
    """Predict and record the load times of one tier.

    Args:
        bytes_per_s: the read rate from a probe.
    """

    bytes_per_s: float
    write_bytes_per_s: float | None = None
    """A thread's store rate; None: nothing stored yet, assumed equal to the read rate."""
    num_loads: int = 0
    """Loads predicted to be worth it, done or given up."""
    num_declined: int = 0
    """Loads declined because computing was predicted to be faster."""
    num_declined_in_a_row: int = 0
    """Loads declined since the last load or probe: an unused rate is never learnt."""
    load_ms: float = 0.0
    """Total time of all loads."""
    compute_ms: float = 0.0
    """What computing the same was predicted to take."""
    excess_load_ms: float = 0.0

    def predict_ms(self, num_bytes: int) -> float:
        return OVERHEAD_MS + num_bytes / self.bytes_per_s * 1e3

    def deadline_ms(self, load_ms: float, least_ms: float) -> float:
        """Return the deadline of a load with this prediction."""
        return max(DEADLINE_RATIO * load_ms, least_ms)

    def is_worth_it(self, load_ms: float, compute_ms: float | None) -> bool:
        """Say whether to load, by both predictions; without a measured computing time, load."""
        if compute_ms is None or load_ms < compute_ms:
            self.num_declined_in_a_row = 0
            return True
        self.num_declined += 1
        self.num_declined_in_a_row += 1
        return False

    def is_worth_storing(self, num_stored: int, num_loaded: int, compute_ms: float) -> bool:
        """Say whether storing and later loading beats computing."""
        store_ms = num_stored / (self.write_bytes_per_s or self.bytes_per_s) * 1e3
        return OVERHEAD_MS + store_ms + self.predict_ms(num_loaded) < compute_ms

    def stored(self, num_bytes: int, elapsed_ms: float) -> None:
        """Learn from a thread's store."""
        rate = num_bytes / max(elapsed_ms, 1e-3) * 1e3
        before = rate if self.write_bytes_per_s is None else self.write_bytes_per_s
        self.write_bytes_per_s = _NEWEST_SHARE * rate + (1 - _NEWEST_SHARE) * before

    def loaded(self, num_bytes: int, elapsed_ms: float, compute_ms: float | None) -> None:
        """Learn from a completed or abandoned load.

        Args:
            compute_ms: predicted for the wanted blocks; None: unknown.
        """
        self.num_loads += 1
        self.load_ms += elapsed_ms
        if num_bytes and elapsed_ms > 0:
            rate = num_bytes / max(elapsed_ms - OVERHEAD_MS, elapsed_ms / 4) * 1e3
            self.bytes_per_s = _NEWEST_SHARE * rate + (1 - _NEWEST_SHARE) * self.bytes_per_s
        else:  # nothing came in that time: it is slower than that
            self.bytes_per_s *= 1 - _NEWEST_SHARE
        self.compute_ms += compute_ms or 0.0
        self.excess_load_ms += self.excess_load_ms_of(bool(num_bytes), elapsed_ms, compute_ms)

    def excess_load_ms_of(
        self, has_come: bool, elapsed_ms: float, compute_ms: float | None
    ) -> float:
        """Return a load's excess time over computing; failed blocks are computed besides."""
        if compute_ms is None:
            return 0.0
        return max(elapsed_ms - (compute_ms if has_come else 0.0), 0.0)
