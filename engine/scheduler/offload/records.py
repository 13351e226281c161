"""Define how a KV block lies on disk: header, bytes, checksums.

Invariant: data not sealed for this place, fingerprint and content is read as None or as damaged.
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

from engine.scheduler.cache.snapshot_worths import NOTHING, Saved

PAGE = 4096
"""Offsets and lengths of every read and write are multiples of it."""
HEADER_BYTES = 128
"""Bytes of a record's header."""
DIGEST_BYTES = 32
"""Bytes of a fingerprint, and maximum bytes of a hash."""

_SLAB = struct.Struct("<8sQQQ32s")
_RECORD = struct.Struct("<8sQQQB32s32sII16s")
_RECORD_BEFORE = struct.Struct("<8sQQQQ32s32sI")
"""Records that did not say what a snapshot saves."""
_CRC = struct.Struct("<I")
_MODEL = struct.Struct("<256s")
_MODEL_AT = 256
"""Offset of the model's name in a slab's first page; it has a checksum of its own."""
_PLACE = struct.Struct("<QQ")
_SLAB_MAGIC = b"PnstKVs\x01"
_RECORD_MAGIC, _MAGIC_BEFORE = b"PnstKVr\x02", b"PnstKVr\x01"
_FORMS = {_RECORD_MAGIC: _RECORD, _MAGIC_BEFORE: _RECORD_BEFORE}
_NO_BORDER = bytes(16)


class SlabHead(NamedTuple):
    """The contents of a slab's first page."""

    number: int
    """The slab's number, as in the file's name."""
    record_bytes: int
    num_records: int
    fingerprint: bytes
    """A digest of model, dtype and layout, [DIGEST_BYTES], common to all records of a slab."""
    model: str = ""
    """Its model's name, for people; empty: unknown."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole slab file."""
        return PAGE + self.num_records * self.record_bytes

    def offset(self, index: int) -> int:
        """Return a record's offset in its slab file, in bytes."""
        return PAGE + index * self.record_bytes


class RecordHead(NamedTuple):
    """The contents of a record's header."""

    number: int
    """Grows with every store; the newer of two records of one block counts."""
    stored_at_s: int
    """The Unix time of storing."""
    num_bytes: int
    """Bytes of the block."""
    block_hash: bytes
    fingerprint: bytes
    payload_crc: int
    saved: Saved = NOTHING
    """What the block's snapshot saved when it was stored; NOTHING for keys and values."""


def record_bytes(block_bytes: int) -> int:
    """Return the length of a record: header and block, rounded up to a page."""
    return -(-(HEADER_BYTES + block_bytes) // PAGE) * PAGE


def payload_crc(payload: bytes | memoryview) -> int:
    """Compute the checksum of a block's bytes; Python's lock is free meanwhile."""
    return zlib.crc32(payload)


def seal_slab(head: SlabHead) -> bytes:
    """Make the first page of a slab."""
    packed = _SLAB.pack(
        _SLAB_MAGIC, head.number, head.record_bytes, head.num_records, head.fingerprint
    )
    model = _MODEL.pack(head.model.encode())
    sealed = (packed + _CRC.pack(zlib.crc32(packed))).ljust(_MODEL_AT, b"\0")
    return (sealed + model + _CRC.pack(zlib.crc32(model))).ljust(PAGE, b"\0")


def read_slab(page: bytes) -> SlabHead | None:
    packed = page[: _SLAB.size]
    crc = page[_SLAB.size : _SLAB.size + _CRC.size]
    if len(crc) < _CRC.size or _CRC.pack(zlib.crc32(packed)) != crc:
        return None
    magic, *values = _SLAB.unpack(packed)
    head = SlabHead(*values)._replace(model=_read_model(page))
    is_sound = head.record_bytes > 0 and head.record_bytes % PAGE == 0 and head.num_records > 0
    return head if magic == _SLAB_MAGIC and is_sound else None


def _read_model(page: bytes) -> str:
    """Read a slab's model name; empty: missing or damaged."""
    end = _MODEL_AT + _MODEL.size
    model = page[_MODEL_AT:end]
    if page[end : end + _CRC.size] != _CRC.pack(zlib.crc32(model)):
        return ""
    return model.rstrip(b"\0").decode(errors="replace")


def seal_record(head: RecordHead, slab: int, index: int) -> bytes:
    """Make the header of a record for this place, HEADER_BYTES long."""
    packed = _RECORD.pack(
        _RECORD_MAGIC,
        head.number,
        head.stored_at_s,
        head.num_bytes,
        len(head.block_hash),
        head.block_hash,
        head.fingerprint,
        head.payload_crc,
        head.saved.num_blocks,
        head.saved.before or _NO_BORDER,
    )
    return (packed + _CRC.pack(_header_crc(packed, slab, index))).ljust(HEADER_BYTES, b"\0")


def read_record(header: bytes, slab: int, index: int) -> RecordHead | None:
    """Read a record's header; None: not sealed for this place, or damaged."""
    form = _FORMS.get(header[: len(_RECORD_MAGIC)])
    if form is None:
        return None
    packed = header[: form.size]
    crc = header[form.size : form.size + _CRC.size]
    if len(crc) < _CRC.size or _CRC.pack(_header_crc(packed, slab, index)) != crc:
        return None
    _, number, stored_at_s, num_bytes, hash_bytes, padded, *rest = form.unpack(packed)
    if hash_bytes > len(padded):
        return None
    fingerprint, crc_of_payload, *saved = rest
    head = RecordHead(
        number, stored_at_s, num_bytes, padded[:hash_bytes], fingerprint, crc_of_payload
    )
    if not saved:
        return head
    num_blocks, before = saved
    return head._replace(saved=Saved(num_blocks, None if before == _NO_BORDER else before))


def _header_crc(packed: bytes, slab: int, index: int) -> int:
    return zlib.crc32(_PLACE.pack(slab, index), zlib.crc32(packed))
