"""How a block lies on disk: a header, its bytes, and checksums over both and over the place.

A slab file begins with a page that says how it is divided; then come records of one length, each
on a 4 KiB border, so that they can be read and written past the page cache. A record's header has
the block's hash, a fingerprint of all that its bytes depend on, a sequence number, the time, and
two checksums: one of the bytes, and one of the header itself together with where it lies, so that
a header is believed without reading what follows, and a record that strayed to another place is
not. CRC-32 finds every error within 32 bits of each other, so every damaged byte.
Owns: the format. Pure.
Invariant: what was not sealed for this place, fingerprint and content is read as None or as wrong.
Never: reads or writes a file.
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

PAGE = 4096
"""Offsets and lengths of every read and write are multiples of it."""
HEADER_BYTES = 128
"""Of a record, before its bytes."""
DIGEST_BYTES = 32
"""Of a fingerprint; a hash has at most as many."""

_SLAB = struct.Struct("<8sQQQ32s")
_RECORD = struct.Struct("<8sQQQQ32s32sI")
_CRC = struct.Struct("<I")
_PLACE = struct.Struct("<QQ")
_SLAB_MAGIC = b"PnstKVs\x01"
_RECORD_MAGIC = b"PnstKVr\x01"


class SlabHead(NamedTuple):
    """What a slab's first page says."""

    number: int
    """Of the slab, which is in the file's name, too."""
    record_bytes: int
    num_records: int
    fingerprint: bytes
    """Of model, dtype and layout: [DIGEST_BYTES]. All records of a slab have the same."""

    @property
    def num_bytes(self) -> int:
        """Of the whole file."""
        return PAGE + self.num_records * self.record_bytes

    def offset(self, index: int) -> int:
        """Where a record begins."""
        return PAGE + index * self.record_bytes


class RecordHead(NamedTuple):
    """What a record's header says."""

    number: int
    """Grows with every store; of two records of one block the newer counts."""
    stored_at_s: int
    """Unix time."""
    num_bytes: int
    """Of the block."""
    block_hash: bytes
    fingerprint: bytes
    payload_crc: int


def record_bytes(block_bytes: int) -> int:
    """Length of a record: header and block, up to the next border."""
    return -(-(HEADER_BYTES + block_bytes) // PAGE) * PAGE


def payload_crc(payload: bytes | memoryview) -> int:
    """The checksum of a block's bytes; Python's lock is free meanwhile."""
    return zlib.crc32(payload)


def seal_slab(head: SlabHead) -> bytes:
    """The first page of a slab."""
    packed = _SLAB.pack(
        _SLAB_MAGIC, head.number, head.record_bytes, head.num_records, head.fingerprint
    )
    return (packed + _CRC.pack(zlib.crc32(packed))).ljust(PAGE, b"\0")


def read_slab(page: bytes) -> SlabHead | None:
    """What a first page says; None if it is none."""
    packed = page[: _SLAB.size]
    crc = page[_SLAB.size : _SLAB.size + _CRC.size]
    if len(crc) < _CRC.size or _CRC.pack(zlib.crc32(packed)) != crc:
        return None
    magic, *values = _SLAB.unpack(packed)
    head = SlabHead(*values)
    is_sound = head.record_bytes > 0 and head.record_bytes % PAGE == 0 and head.num_records > 0
    return head if magic == _SLAB_MAGIC and is_sound else None


def seal_record(head: RecordHead, slab: int, index: int) -> bytes:
    """The header of a record that is to lie there, HEADER_BYTES long."""
    packed = _RECORD.pack(
        _RECORD_MAGIC,
        head.number,
        head.stored_at_s,
        head.num_bytes,
        len(head.block_hash),
        head.block_hash,
        head.fingerprint,
        head.payload_crc,
    )
    return (packed + _CRC.pack(_header_crc(packed, slab, index))).ljust(HEADER_BYTES, b"\0")


def read_record(header: bytes, slab: int, index: int) -> RecordHead | None:
    """What a record's header says; None if it was not sealed for this place, or is damaged."""
    packed = header[: _RECORD.size]
    crc = header[_RECORD.size : _RECORD.size + _CRC.size]
    if len(crc) < _CRC.size or _CRC.pack(_header_crc(packed, slab, index)) != crc:
        return None
    magic, number, stored_at_s, num_bytes, hash_bytes, padded, *rest = _RECORD.unpack(packed)
    if magic != _RECORD_MAGIC or hash_bytes > len(padded):
        return None
    return RecordHead(number, stored_at_s, num_bytes, padded[:hash_bytes], *rest)


def _header_crc(packed: bytes, slab: int, index: int) -> int:
    return zlib.crc32(_PLACE.pack(slab, index), zlib.crc32(packed))
