"""What the router has done since the daemon started, as numbers.

Owns: the numbers.
Invariant: none of them ever falls.
Never: decides anything.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Since the daemon started; read by telemetry."""

    handoffs: int = 0
    handoff_bytes: int = 0
    failed_handoffs: int = 0
    """Whose blocks could not be copied, or were lost on the way, and were computed again."""
    prefix_cache_queries: int = 0
    """Prompt tokens of sequences that could use what others have computed; of these..."""
    prefix_cache_hits: int = 0
    """...those that were not computed."""
    prefix_cache_fetches: int = 0
    """Tokens whose blocks were copied to where a prompt was about to compute them again."""
    prefix_cache_ns: int = 0
    """Time spent in hashing, finding and publishing blocks."""
    stale_messages: int = 0
    recovered_sequences: int = 0
    preemptions: int = 0
    """Times that a sequence's blocks were taken away for others."""
