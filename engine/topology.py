"""Which worker plays which role, over which pools.

Owns: nothing; one frozen value made at start. Called by: placement (makes it), router (reads it).
Invariant: prefill and decode share one pool unless the transport moves bytes.
Never: changes while the daemon runs; what does is in roles.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Topology:
    """Roles by worker name; pools by ledger name."""

    prefill_worker: str
    decode_worker: str
    prefill_pool: str
    decode_pool: str
    transport: str | None
    """`alias`, `shm`, or None where prefill and decode are one worker."""
    shares_memory_bus: bool = True
    """Two workers that decode read the weights twice over one bus, as two sets of cores do; two
    GPUs each have their own."""

    @property
    def is_colocated(self) -> bool:
        """True if one worker plays both roles."""
        return self.prefill_worker == self.decode_worker

    @property
    def workers(self) -> list[str]:
        """Names, prefill first."""
        return list(dict.fromkeys([self.prefill_worker, self.decode_worker]))
