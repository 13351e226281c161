"""Records and folders of slabs, read back, checked, deleted."""

import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.scheduler.cache.hashes import HASH_BYTES
from engine.scheduler.cache.snapshot_worths import Saved
from engine.scheduler.offload.records import (
    DIGEST_BYTES,
    HEADER_BYTES,
    PAGE,
    RecordHead,
    SlabHead,
    payload_crc,
    read_record,
    read_slab,
    record_bytes,
    seal_record,
    seal_slab,
)

NUMBERS = st.integers(0, (1 << 64) - 1)
DIGESTS = st.binary(min_size=DIGEST_BYTES, max_size=DIGEST_BYTES)
RECORDS = st.builds(
    RecordHead,
    number=NUMBERS,
    stored_at_s=NUMBERS,
    num_bytes=NUMBERS,
    block_hash=st.binary(max_size=DIGEST_BYTES),
    fingerprint=DIGESTS,
    payload_crc=st.integers(0, (1 << 32) - 1),
    saved=st.builds(
        Saved,
        st.integers(0, (1 << 32) - 1),
        st.none() | st.binary(min_size=HASH_BYTES, max_size=HASH_BYTES).filter(any),
    ),
)
SLABS = st.builds(
    SlabHead,
    number=NUMBERS,
    record_bytes=st.integers(1, 1 << 40).map(lambda n: n * PAGE),
    num_records=st.integers(1, 1 << 40),
    fingerprint=DIGESTS,
)


@given(RECORDS, NUMBERS, NUMBERS)
def test_a_record_says_what_was_sealed_where_it_lies_and_nowhere_else(head, slab, index):
    sealed = seal_record(head, slab, index)
    assert len(sealed) == HEADER_BYTES
    assert read_record(sealed, slab, index) == head
    assert read_record(sealed, slab, index ^ 1) is None
    assert read_record(sealed, slab ^ 1, index) is None


@given(RECORDS, st.integers(0, 124), st.integers(1, 255))
def test_a_header_with_one_byte_changed_is_not_believed(head, at, mask):
    sealed = bytearray(seal_record(head, 3, 5))
    sealed[at] ^= mask
    assert read_record(bytes(sealed), 3, 5) is None


def test_a_record_of_the_form_before_is_read_and_says_nothing_of_what_it_saves():
    form = struct.Struct("<8sQQQQ32s32sI")
    packed = form.pack(b"PnstKVr\x01", 7, 8, 9, 20, b"h" * 20, b"f" * 32, 10)
    sealed = packed + struct.pack("<I", zlib.crc32(struct.pack("<QQ", 3, 5), zlib.crc32(packed)))
    head = read_record(sealed.ljust(HEADER_BYTES, b"\0"), 3, 5)
    assert head == RecordHead(7, 8, 9, b"h" * 20, b"f" * 32, 10, Saved())


@given(SLABS)
def test_a_slab_says_how_it_is_divided(head):
    page = seal_slab(head)
    assert len(page) == PAGE
    assert read_slab(page) == head
    assert head.offset(head.num_records) == head.num_bytes


@given(SLABS, st.integers(0, 67), st.integers(1, 255))
def test_a_first_page_with_one_byte_changed_is_not_believed(head, at, mask):
    page = bytearray(seal_slab(head))
    page[at] ^= mask
    assert read_slab(bytes(page)) is None


@pytest.mark.parametrize("data", [b"", bytes(HEADER_BYTES), b"\xff" * PAGE, bytes(PAGE)])
def test_what_was_never_sealed_is_nothing(data):
    assert read_record(data, 0, 0) is None
    assert read_slab(data) is None


def test_a_slab_whose_records_are_of_no_length_is_nothing():
    fingerprint = bytes(DIGEST_BYTES)
    assert read_slab(seal_slab(SlabHead(1, 0, 7, fingerprint))) is None
    assert read_slab(seal_slab(SlabHead(1, PAGE + 1, 7, fingerprint))) is None


@given(st.integers(0, 1 << 24))
def test_records_fill_whole_pages_with_less_than_one_to_spare(block_bytes):
    size = record_bytes(block_bytes)
    assert size % PAGE == 0
    assert 0 <= size - HEADER_BYTES - block_bytes < PAGE


@given(st.binary(min_size=1, max_size=300), st.data())
def test_a_block_with_one_byte_changed_has_another_checksum(block, data):
    changed = bytearray(block)
    changed[data.draw(st.integers(0, len(block) - 1))] ^= data.draw(st.integers(1, 255))
    assert payload_crc(block) != payload_crc(bytes(changed))
