"""Record a pool's published blocks in memory that outlives the daemon, one entry for each block.

Invariant: an entry's flag is set after the rest of it, and cleared before its block may be written.
Wherever a daemon dies, each entry that counts is whole, and its block has the content of its hash.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from typing import NamedTuple

from engine.errors import PenstockError
from engine.scheduler.cache.hashes import Hash

FD_NAME = "penstock-published"
_MAGIC, _VERSION = b"penstock", 1
_HEAD = struct.Struct("<8sIQQQ32s")
"""Magic, version, PoolShape, and the fingerprint of everything that blocks depend on."""
_ENTRY = struct.Struct("<Q21p21p65p")
"""Number of the publication, hash, parent, user."""
_SUM = struct.Struct("<I")
_HEAD_BYTES = 80
_ENTRY_BYTES = 1 + _SUM.size + _ENTRY.size
_USER_BYTES = 64
"""Longer names are cut; they only divide the cache between users."""


class Damaged(PenstockError):
    """Memory or a record that the next daemon cannot use."""


class PoolShape(NamedTuple):
    """What a pool's memory was divided into."""

    num_blocks: int
    block_bytes: int
    free_bytes: int
    """Free memory of the machine when the pool was sized."""


class Published(NamedTuple):
    """An entry."""

    block_id: int
    number: int
    """Grows with each publication."""
    hash: Hash
    parent: Hash
    user: str


class PublishedBlocks:
    """The record of one pool.

    Args:
        fd: of the record, which make_record() has made; it may be closed afterwards.

    Raises:
        Damaged: it is no such record.
    """

    def __init__(self, fd: int) -> None:
        num_bytes = os.fstat(fd).st_size
        if num_bytes < _HEAD_BYTES:
            raise Damaged("the record is too short")
        self._memory = mmap.mmap(fd, num_bytes)
        magic, version, *shape, self.fingerprint = _HEAD.unpack_from(self._memory)
        if (magic, version) != (_MAGIC, _VERSION):
            raise Damaged("the record is of another version")
        self.shape = PoolShape(*shape)
        if num_bytes != _record_bytes(self.shape.num_blocks):
            raise Damaged("the record has another size than its pool")
        self._num_published = 0

    def begin(self, fingerprint: bytes) -> None:
        """Forget all entries; blocks of this fingerprint follow."""
        self._memory[_HEAD_BYTES::_ENTRY_BYTES] = bytes(self.shape.num_blocks)
        _HEAD.pack_into(self._memory, 0, _MAGIC, _VERSION, *self.shape, fingerprint)
        self.fingerprint = fingerprint

    def read(self) -> list[Published]:
        """Return the entries in the order of their publication.

        Raises:
            Damaged: an entry was not written by add().
        """
        flags = self._memory[_HEAD_BYTES::_ENTRY_BYTES]
        found = [self._entry(block_id) for block_id, flag in enumerate(flags) if flag]
        found.sort(key=lambda each: each.number)
        self._num_published = found[-1].number + 1 if found else 0
        return found

    def add(self, block_id: int, block_hash: Hash, parent: Hash, user: str) -> None:
        """Record a block; it counts from the last byte on."""
        start, name = self._start(block_id), user.encode(errors="replace")[:_USER_BYTES]
        entry = _ENTRY.pack(self._num_published, block_hash, parent, name)
        self._num_published += 1
        self._memory[start + 1 : start + _ENTRY_BYTES] = _SUM.pack(zlib.crc32(entry)) + entry
        self._memory[start] = 1

    def remove(self, block_id: int) -> None:
        """Forget a block, which may be written from now on."""
        self._memory[self._start(block_id)] = 0

    def _entry(self, block_id: int) -> Published:
        start = self._start(block_id)
        content = self._memory[start + 1 : start + _ENTRY_BYTES]
        (checksum,), entry = _SUM.unpack_from(content), content[_SUM.size :]
        if not block_id or self._memory[start] != 1 or zlib.crc32(entry) != checksum:
            raise Damaged(f"the entry of block {block_id} is damaged")
        number, block_hash, parent, user = _ENTRY.unpack(entry)
        return Published(block_id, number, block_hash, parent, user.decode(errors="replace"))

    @staticmethod
    def _start(block_id: int) -> int:
        return _HEAD_BYTES + block_id * _ENTRY_BYTES


def make_record(shape: PoolShape) -> int:
    """Make an empty record in memory, and return its descriptor."""
    fd = os.memfd_create(FD_NAME, os.MFD_CLOEXEC)
    os.ftruncate(fd, _record_bytes(shape.num_blocks))
    os.pwrite(fd, _HEAD.pack(_MAGIC, _VERSION, *shape, b""), 0)
    return fd


def _record_bytes(num_blocks: int) -> int:
    return _HEAD_BYTES + num_blocks * _ENTRY_BYTES
