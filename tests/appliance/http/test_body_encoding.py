"""Compressed bodies in parts: whole, cut, damaged, and too large."""

from __future__ import annotations

import asyncio
import gzip
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.http.body_encoding import BodyDecoder, body_decoder
from engine.errors import RequestError

MAX_BYTES = 1 << 20


def raw_deflate(data):
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(data) + packer.flush()


FORMS = [(b"gzip", gzip.compress), (b"deflate", zlib.compress), (b"deflate", raw_deflate)]


async def decoded(encoding, data, size, max_bytes=MAX_BYTES):
    decoder, out = BodyDecoder(encoding, max_bytes, asyncio.Lock()), b""
    for start in range(0, max(len(data), 1), size):
        is_last = start + size >= len(data)
        out += await decoder.decode(data[start : start + size], is_last=is_last)
    return out


@given(st.binary(max_size=9000), st.sampled_from(FORMS), st.integers(1, 5000))
async def test_parts_of_any_size_give_the_body(data, form, size):
    encoding, compress = form
    assert await decoded(encoding, compress(data), size) == data


@pytest.mark.parametrize(("encoding", "compress"), FORMS)
@pytest.mark.parametrize("spoil", [lambda d: d[:-3], lambda d: b"x" + d, lambda d: d + b"x"])
async def test_a_body_that_is_no_whole_stream_is_refused(encoding, compress, spoil):
    with pytest.raises(RequestError) as raised:
        await decoded(encoding, spoil(compress(b"{}" * 99)), 7)
    assert (raised.value.status, raised.value.code) == (400, "invalid_encoding")


async def test_at_most_one_byte_above_the_limit_is_made():
    data = gzip.compress(bytes(64 << 20))
    assert len(await decoded(b"gzip", data, 4096, max_bytes=1000)) == 1001


@pytest.mark.parametrize("headers", [[], [(b"content-encoding", b"Identity")]])
async def test_a_body_that_is_not_compressed_has_no_decoder(headers):
    assert body_decoder({"headers": headers}, 1, asyncio.Lock()) is None
