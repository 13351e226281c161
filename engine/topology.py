"""Which worker plays which role, over which pools.

Owns: nothing; one frozen value made at start. Called by: placement (makes it), router (reads it).
Invariant: prefill and decode share one pool unless the transport moves bytes.
Never: changes while the daemon runs; what does is in roles.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


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
    homes: Mapping[str, str] = field(default_factory=dict)
    """Workers that hold a pool in their own memory, by pool: the worker's death ends what is in it.
    Other pools outlive all workers."""

    @property
    def is_colocated(self) -> bool:
        """True if one worker plays both roles."""
        return self.prefill_worker == self.decode_worker

    def pool_of(self, worker: str) -> str:
        """Where a worker's sequences have their blocks."""
        return self.prefill_pool if worker == self.prefill_worker else self.decode_pool

    @property
    def workers(self) -> list[str]:
        """Names, prefill first."""
        return list(dict.fromkeys([self.prefill_worker, self.decode_worker]))
