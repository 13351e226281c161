"""A SentencePiece model is read whole, or refused by what is wrong with it."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.checkpoint.sentencepiece_model import CONTROL, read_sentencepiece
from engine.errors import CheckpointError
from tests.protobuf_fields import field

MODEL = (Path(__file__).parents[2] / "fixtures" / "sentencepiece" / "bpe.model").read_bytes()


def piece(text: str, kind: int = 1) -> bytes:
    return field(1, field(1, text.encode()) + field(3, kind))


PIECES = piece("<unk>", 2) + piece("<s>", CONTROL) + piece("a")


def read(path: Path, data: bytes):
    path.write_bytes(data)
    return read_sentencepiece(path)


def test_fields_are_read_and_what_is_left_out_has_the_formats_value(tmp_path):
    model = read(tmp_path / "m", PIECES)
    assert model.tokens == ["<unk>", "<s>", "a"]
    assert (model.is_unigram, model.has_bytes, model.has_prefix) == (True, False, True)
    assert model.specials == {"unk_token": 0, "bos_token": 1, "eos_token": 2}
    trainer = field(2, field(3, 2) + field(35, 1) + field(41, -1) + field(42, 1) + field(43, 0))
    model = read(tmp_path / "m", PIECES + trainer + field(3, field(3, 0) + field(2, b"map")))
    assert (model.is_unigram, model.has_bytes, model.has_prefix) == (False, True, False)
    assert model.specials == {"unk_token": 0, "eos_token": 1, "pad_token": 0}
    assert model.charsmap == b"map"
    assert model.texts_of(CONTROL) == {"<s>": 1}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"IQ== 0\nIg== 1\n",
        PIECES[:-1],
        PIECES + b"\x0a\xff\xff\xff\xff\x7f",
        PIECES + b"\x0a" + b"\xff" * 12,
        PIECES + b"\x0b",
        PIECES + field(1, 5),
        PIECES + field(1, field(1, b"\xff")),
        PIECES + field(1, field(1, b"b") + b"\x15\x00\x00\xc0\x7f"),
        PIECES + field(2, field(3, 3)),
        PIECES + field(2, field(24, 1)),
        PIECES + field(2, field(40, 9)),
        PIECES + field(2, field(40, 1 << 40)),
        PIECES + field(3, field(5, 0)),
    ],
)
def test_what_is_damaged_or_not_served_is_refused(tmp_path, data):
    with pytest.raises(CheckpointError) as refused:
        read(tmp_path / "m", data)
    assert refused.value.where == str(tmp_path / "m")


@settings(max_examples=100, deadline=None)
@given(place=st.integers(0, len(MODEL) - 1), change=st.binary(max_size=8), is_cut=st.booleans())
def test_changed_bytes_are_read_or_refused(tmp_path_factory, place, change, is_cut):
    rest = b"" if is_cut else MODEL[place + len(change) :]
    path = tmp_path_factory.getbasetemp() / "changed.model"
    with contextlib.suppress(CheckpointError):
        read(path, MODEL[:place] + change + rest)
