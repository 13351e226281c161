"""Bodies that are no JSON object are refused in words that say why."""

import gc

import pytest

from appliance.json.fields import decode_object
from engine.errors import RequestError


def refused(body: bytes) -> RequestError:
    with pytest.raises(RequestError) as error:
        decode_object(body)
    return error.value


@pytest.mark.parametrize(
    "body",
    [
        rb'{"a": "x\ud800y"}',
        rb'{"a":"\ud800"}',
        rb'{"a": "\udc00 and more"}',
        rb'{"a": "\ud83d\n"}',
    ],
)
def test_half_of_a_surrogate_pair_is_named(body):
    error = refused(body)
    assert (error.code, error.status) == ("invalid_json", 400)
    assert "half a surrogate pair" in error.what


def test_pairs_and_texts_about_them_are_as_they_are():
    assert decode_object(rb'{"a": "\ud83d\ude00"}')["a"] == "\U0001f600"
    assert decode_object(rb'{"a": "\\ud83d"}')["a"] == r"\ud83d"


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_byte_order_marks_and_other_unicode_encodings_are_read(encoding):
    assert decode_object('{"a": "\u00e9\U0001f600"}'.encode(encoding)) == {"a": "\u00e9\U0001f600"}


@pytest.mark.parametrize("body", [b"", b"{", b'{"a": "b', b"\xff", rb'{"a": "\ud83d\ude00'])
def test_what_is_cut_off_is_no_json(body):
    assert "not JSON" in refused(body).what


@pytest.mark.parametrize(
    ("body", "place"),
    [
        (b'{"a": "xy\xff"}', 9),
        (b'{"\xc3\xa4": "' + b"y" * 100 + b'\xc3("}', 108),
        (b'{"a\\n\xed\xa0\x80": 1}', 5),
        (b'["a", "b\x80"]', 8),
    ],
)
def test_a_byte_that_is_no_utf_8_is_told_by_its_place_in_the_body(body, place):
    error = refused(body)
    assert error.code == "invalid_json"
    assert f"byte {place} " in error.what


def test_decoding_a_large_body_looks_for_no_garbage():
    """All of it is new, and each look would go through it again."""
    looks = []

    def look(*about):
        looks.append(about)

    body = b'{"a": [' + b"[]," * 100_000 + b"[]]}"
    gc.callbacks.append(look)
    try:
        decode_object(body)
    finally:
        gc.callbacks.remove(look)
    assert len(looks) < 10
    assert gc.isenabled()
