"""Compare the cost of loading blocks from a tier with computing them.

Owns: the rate of loads, and what predictions were off by.
Invariant: a load is worth it only where it is predicted to take less than computing would;
excess load time is the time that loads took beyond what computing was predicted to.
Never: reads a clock.
"""

from __future__ import annotations

from dataclasses import dataclass

_NEWEST_SHARE = 0.3
"""That the newest load has in the rate."""
OVERHEAD_MS = 2.0
"""Of a load, however small: threads that wake up, and the loop."""
DEADLINE_RATIO = 4.0
"""A load is given up after so many times what was predicted of it."""


@dataclass(slots=True)
class Costs:
    """What loads of one tier are predicted to take, and what they took.

    Args:
        bytes_per_s: at which it is read, as a probe found.
    """

    bytes_per_s: float
    write_bytes_per_s: float | None = None
    """At which a thread stores; None: it has not stored yet, and is taken to be as fast."""
    num_loads: int = 0
    """That were worth it, as predicted, and have been done or given up."""
    num_declined: int = 0
    """Where computing was predicted to take less."""
    num_declined_in_a_row: int = 0
    """Since a load, or since the disk was last probed: a rate that nobody uses is never learnt."""
    load_ms: float = 0.0
    """What all loads took together."""
    compute_ms: float = 0.0
    """What computing the same was predicted to take."""
    excess_load_ms: float = 0.0

    def predict_ms(self, num_bytes: int) -> float:
        return OVERHEAD_MS + num_bytes / self.bytes_per_s * 1e3

    def deadline_ms(self, load_ms: float, least_ms: float) -> float:
        """After which a load that was predicted to take so long is given up."""
        return max(DEADLINE_RATIO * load_ms, least_ms)

    def is_worth_it(self, load_ms: float, compute_ms: float | None) -> bool:
        """Whether to load, by both predictions; where computing was never measured, it is tried."""
        if compute_ms is None or load_ms < compute_ms:
            self.num_declined_in_a_row = 0
            return True
        self.num_declined += 1
        self.num_declined_in_a_row += 1
        return False

    def is_worth_storing(self, num_stored: int, num_loaded: int, compute_ms: float) -> bool:
        """Whether to store so many bytes and load so many later, rather than to compute them."""
        store_ms = num_stored / (self.write_bytes_per_s or self.bytes_per_s) * 1e3
        return OVERHEAD_MS + store_ms + self.predict_ms(num_loaded) < compute_ms

    def stored(self, num_bytes: int, elapsed_ms: float) -> None:
        """A thread has stored so many bytes."""
        rate = num_bytes / max(elapsed_ms, 1e-3) * 1e3
        before = rate if self.write_bytes_per_s is None else self.write_bytes_per_s
        self.write_bytes_per_s = _NEWEST_SHARE * rate + (1 - _NEWEST_SHARE) * before

    def loaded(self, num_bytes: int, elapsed_ms: float, compute_ms: float | None) -> None:
        """A load is over, or was given up.

        Args:
            num_bytes: that are there.
            elapsed_ms: that somebody waited for them.
            compute_ms: predicted for what was to be loaded; None: unknown.
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
        """What a load took beyond computing; what has not come is computed after all."""
        if compute_ms is None:
            return 0.0
        return max(elapsed_ms - (compute_ms if has_come else 0.0), 0.0)
