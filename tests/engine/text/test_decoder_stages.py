"""How long a token's text may become, by the stages of its decoder."""

from __future__ import annotations

import pytest
from tokenizers import Regex, Tokenizer, decoders, models

from engine.text.decoder_stages import (
    MAX_GROWTH,
    MAX_TOKEN_CHARS,
    check_token_texts,
    decoder_stages,
)
from tests.tiny_tokenizers import byte_level, sentencepiece_like


def stages_of(*parts):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.decoder = decoders.Sequence(list(parts))
    return decoder_stages(tokenizer)


@pytest.mark.parametrize(
    "parts",
    [
        [decoders.ByteLevel()],
        [decoders.WordPiece()],
        [decoders.Metaspace()],
        [decoders.BPEDecoder()],
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()],
        [decoders.Replace("a", "b" * MAX_GROWTH)],
        [decoders.Sequence([decoders.Fuse()] * 100)],
    ],
)
def test_stages_that_write_little_are_taken(parts):
    check_token_texts(MAX_TOKEN_CHARS, stages_of(*parts))


@pytest.mark.parametrize(
    "parts",
    [
        [decoders.Replace("a", "b" * (MAX_GROWTH + 1))],
        [decoders.Replace("a", "aa")] * 7,
        [decoders.Sequence([decoders.Replace("a", "aa")] * 4)] * 2,
        [decoders.Replace("ä", "ää" * MAX_GROWTH)],
        [decoders.BPEDecoder("")] * 7,
        [decoders.WordPiece("")] * 7,
        [decoders.ByteLevel()] * 4,
        [decoders.Replace("", "a")],
        [decoders.Replace(Regex("a+"), "")],
    ],
)
def test_stages_that_write_much_or_look_for_expressions_are_refused(parts):
    with pytest.raises(ValueError, match=r".+"):
        check_token_texts(1, stages_of(*parts))


def test_a_token_that_is_too_long_is_refused():
    with pytest.raises(ValueError, match=r".+"):
        check_token_texts(MAX_TOKEN_CHARS + 1, [])


def test_stages_are_listed_in_order_and_may_be_none():
    assert [each["type"] for each in decoder_stages(sentencepiece_like())] == [
        "Replace",
        "ByteFallback",
        "Fuse",
        "Strip",
    ]
    assert [each["type"] for each in decoder_stages(byte_level())] == ["ByteLevel"]
    assert decoder_stages(Tokenizer(models.BPE())) == []
