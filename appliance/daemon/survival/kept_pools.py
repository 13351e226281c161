"""Keep the KV pools in host memory for the next daemon, and adopt a dead daemon's pools.

The keeper holds two memfds for each pool: its memory, and the record of its published blocks.
Pools on GPUs and pools with window blocks are not kept.

Invariant: memory is adopted only when no worker has it mapped any more. A block is found again only
if its entry counts, and model, dtype, kernels, block size and pool are unchanged.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterable, Mapping

from appliance.daemon.survival.keeper_channel import POOL, notify
from appliance.observe.frame.figures import things
from engine.scheduler.cache.block_pool import BlockPool
from engine.scheduler.cache.published_blocks import (
    FD_NAME,
    Damaged,
    PoolShape,
    PublishedBlocks,
    make_record,
)


class KeptPools:
    """The pools of the model that is served first.

    Args:
        passed: descriptors of a dead daemon's pools, by the names under which they are kept.
    """

    def __init__(self, passed: Mapping[str, Iterable[int]]) -> None:
        self._left: dict[str, tuple[int, PublishedBlocks]] = {}
        """Memory and record of a dead daemon's pools."""
        self._names_to_drop = list[str]()
        self._problems = dict[str, None]()
        """Why pools are dropped."""
        self._records: dict[str, PublishedBlocks] = {}
        """The records of this daemon's pools."""
        self._unkept: dict[str, tuple[int, int]] = {}
        """Memory and record of new pools, which the keeper does not have yet."""
        for name, fds in passed.items():
            try:
                self._left[name] = _read(list(fds))
            except Damaged as error:
                self._drop(name, str(error))

    @property
    def free_bytes(self) -> int | None:
        """The free memory that the dead daemon sized its pools by; None: it left no pool."""
        return next((record.shape.free_bytes for _, record in self._left.values()), None)

    def memory_of(self, pool: str, shape: PoolShape) -> int:
        """Return a dead daemon's memory for a pool of this shape, or new memory."""
        name = POOL + pool
        left = self._left.get(name)
        if left is not None and left[1].shape == shape:
            memory_fd, self._records[name] = self._left.pop(name)
            return memory_fd
        memory_fd = memfd(f"penstock-{pool}", shape.num_blocks * shape.block_bytes)
        record_fd = make_record(shape)
        self._records[name] = PublishedBlocks(record_fd)
        self._unkept[name] = memory_fd, record_fd
        return memory_fd

    def give_to_keeper(self) -> None:
        """Give new pools to the keeper, and have it drop the ones that were not adopted."""
        for name, (memory_fd, _) in self._left.items():
            os.close(memory_fd)
            self._drop(name, "the pools have changed")
        self._left.clear()
        while self._names_to_drop:
            notify(FDSTOREREMOVE=1, FDNAME=self._names_to_drop.pop())
        for name, fds in self._unkept.items():
            notify(*fds, FDSTORE=1, FDNAME=name)
            os.close(fds[1])
        self._unkept.clear()

    def adopt(
        self,
        pools: Mapping[str, BlockPool],
        fingerprint: bytes,
        tell: Callable[[str, str, str], None],
    ) -> None:
        """Find a dead daemon's blocks again, and record this daemon's.

        Args:
            pools: by name; none of their blocks was ever allocated.
            fingerprint: of all that the content of blocks depends on.
            tell: takes severity, code and message of an event.
        """
        num_found = 0
        for name, record in self._records.items():
            if record.fingerprint != fingerprint:
                if any(record.fingerprint):
                    self._problems["the model or its settings are others"] = None
                record.begin(fingerprint)
            pool = pools[name.removeprefix(POOL)]
            try:
                num_found += pool.adopt(record)
            except Damaged as error:
                self._problems[str(error)] = None
                record.begin(fingerprint)
                pool.adopt(record)
        if num_found:
            about = f"Adopted {things(num_found, 'cached block')} from the previous daemon"
            tell("info", "pool.adopted", about)
        if self._problems:
            about = f"Dropped the previous daemon's KV pool: {'; '.join(self._problems)}"
            tell("warning", "pool.dropped", about)
            self._problems.clear()

    def close(self) -> None:
        """Have the keeper drop the pools: their model is unloaded."""
        for name in self._records:
            notify(FDSTOREREMOVE=1, FDNAME=name)
        self._records.clear()

    def _drop(self, name: str, problem: str) -> None:
        self._names_to_drop.append(name)
        self._problems[problem] = None


def memfd(name: str, num_bytes: int) -> int:
    """Create anonymous shared memory; it takes pages when touched and leaves no file."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    os.ftruncate(fd, num_bytes)
    return fd


def _read(fds: list[int]) -> tuple[int, PublishedBlocks]:
    """Return a pool's memory, and its record.

    Raises:
        Damaged: it cannot be adopted; its descriptors are closed.
    """
    is_record = [FD_NAME in os.readlink(f"/proc/self/fd/{fd}") for fd in fds]
    try:
        if sorted(is_record) != [False, True]:
            raise Damaged("its descriptors are incomplete")
        record = PublishedBlocks(fds[is_record.index(True)])
        memory_fd = fds[is_record.index(False)]
        if os.fstat(memory_fd).st_size != record.shape.num_blocks * record.shape.block_bytes:
            raise Damaged("its memory has another size than its record")
        if _is_mapped(memory_fd):
            raise Damaged("a worker of that daemon still runs")
    except Damaged:
        for fd in fds:
            os.close(fd)
        raise
    os.close(fds[is_record.index(True)])
    return memory_fd, record


def _is_mapped(fd: int) -> bool:
    """Say whether a worker has locked the memory, as each does for as long as it lives."""
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    fcntl.lockf(fd, fcntl.LOCK_UN)
    return False
