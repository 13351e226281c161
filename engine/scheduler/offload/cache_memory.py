"""Divide the DRAM cache's memory between the models that are served in turns.

The memory is cut into segments, and each belongs to one model. A model's blocks lie at multiples of
its own block size, counted from the memory's start; only blocks that lie wholly within one of its
segments are used. So every worker maps the memory as an ordinary pool of its own blocks.

Invariants: no byte belongs to two models; what lies in a segment is out of its model's index before
another model gets it; the memory outlives every worker.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from engine.scheduler.offload.files import ModelShare
from engine.scheduler.offload.index import RecordPlace, SlabIndex
from engine.scheduler.offload.records import PAGE, SlabHead

NUM_SEGMENTS = 16
"""Segments of a memory that several models share; a lone model has one segment."""
MIN_SEGMENT_BLOCKS = 8
"""Minimum blocks per segment: up to two at its ends are lost."""
PADDING_BYTES = 32 << 20
"""Address space before the first segment for block 0 of every model, which probes write.

Only the pages that are written take memory."""


@dataclass(slots=True)
class _Tenant:
    """A model that has been served, and its blocks."""

    name: str
    block_bytes: int
    index: SlabIndex


class CacheMemory:
    """The DRAM cache's memory, for as long as the daemon runs.

    Args:
        cap_bytes: of all models' blocks together.
        is_shared: several models are served in turns.
    """

    def __init__(self, cap_bytes: int, *, is_shared: bool) -> None:
        self.cap_bytes = cap_bytes
        self._is_shared = is_shared
        self.fd: int | None = None
        """A memfd, once a model needs it."""
        self._padding_bytes = self._segment_bytes = 0
        self._owners: dict[int, bytes] = {}
        """Fingerprints of the models that have segments, by segment."""
        self._tenants: dict[bytes, _Tenant] = {}
        self._served: bytes = b""

    def make_room(self, block_bytes: int, num_others: int) -> int:
        """Size the memory for a model's blocks; return how many it spans. The first need makes it.

        Args:
            num_others: blocks behind the cache, for other uses.
        """
        if not self._segment_bytes:
            wanted = max(self.cap_bytes // NUM_SEGMENTS, MIN_SEGMENT_BLOCKS * block_bytes)
            is_cut = self._is_shared and wanted < self.cap_bytes
            self._segment_bytes = wanted if is_cut else self.cap_bytes // block_bytes * block_bytes
            self._padding_bytes = PADDING_BYTES if is_cut else block_bytes
        if not self.num_segments and not num_others:
            return 0
        end = self._padding_bytes + self.num_segments * self._segment_bytes
        num_blocks = max(-(-end // block_bytes), 1) + num_others
        if self.fd is None:
            self.fd = os.memfd_create("penstock-dram", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, num_blocks * block_bytes)
        return num_blocks

    def serve(self, fingerprint: bytes, name: str, block_bytes: int, now_s: int) -> SlabIndex:
        """Return the index of the model that is served from now on, with what it has left here.

        Args:
            fingerprint: of everything that a block's bytes depend on.
            name: of the model, for people.
            now_s: the Unix time.
        """
        if (before := self._tenants.get(self._served)) is not None:
            before.index.keep_finished(now_s)
        # its block 0 is written at each start of a worker
        for segment in [s for s in self._owners if self._start(s) < block_bytes]:
            self._take(segment)
        self._served = fingerprint
        tenant = self._tenants.setdefault(fingerprint, _Tenant(name, block_bytes, SlabIndex()))
        return tenant.index

    def max_places(self, block_bytes: int) -> int:
        """Count a model's blocks if all segments were its own."""
        return sum(len(self._blocks(s, block_bytes)) for s in range(self.num_segments))

    @property
    def num_bytes(self) -> int:
        """The memory that is taken now."""
        return 0 if self.fd is None else os.fstat(self.fd).st_blocks * 512

    @property
    def num_segments(self) -> int:
        return self.cap_bytes // self._segment_bytes if self._segment_bytes else 0

    def shares(self) -> list[ModelShare]:
        """List what is kept of the models that are not served."""
        return [
            ModelShare(tenant.name, len(tenant.index), len(tenant.index) * tenant.block_bytes)
            for fingerprint, tenant in self._tenants.items()
            if fingerprint != self._served and len(tenant.index)
        ]

    def grow(self, unused_since_s: int | None) -> SlabHead | None:
        """Give the served model another segment; None: it has all, or the others' are newer.

        Args:
            unused_since_s: another model's segment with newer blocks stays; None: any may go.
        """
        size = self._tenants[self._served].block_bytes
        usable = [s for s in range(self.num_segments) if len(self._blocks(s, size))]
        free = next((s for s in usable if s not in self._owners), None)
        if free is None:
            others = [s for s in usable if self._owners[s] != self._served]
            free = min(others, key=self._age_s, default=None)
            if free is None or (unused_since_s is not None and self._age_s(free) > unused_since_s):
                return None
            self._take(free)
        self._owners[free] = self._served
        return SlabHead(free, PAGE, len(self._blocks(free, size)), self._served)

    def block_of(self, place: RecordPlace) -> int:
        """Return a place of the served model as a block of the whole memory."""
        size = self._tenants[self._served].block_bytes
        return self._blocks(place.slab, size)[place.record]

    def close(self) -> None:
        """Free the memory, once no worker has it."""
        if self.fd is not None:
            os.close(self.fd)

    def _start(self, segment: int) -> int:
        return self._padding_bytes + segment * self._segment_bytes

    def _blocks(self, segment: int, block_bytes: int) -> range:
        """Return a model's blocks that lie wholly within a segment; block 0 is in none."""
        first = max(-(-self._start(segment) // block_bytes), 1)
        return range(first, self._start(segment + 1) // block_bytes)

    def _age_s(self, segment: int) -> int:
        return self._tenants[self._owners[segment]].index.newest_s(segment)

    def _take(self, segment: int) -> None:
        """Take a segment from its model."""
        owner = self._owners.pop(segment)
        index = self._tenants[owner].index
        index.remove_slab(segment)
        if not index.num_places and owner != self._served:
            del self._tenants[owner]
