"""A tokenizer that does not fit the weights is told, and one that does is not."""

from engine.text.tokenizer import Tokenizer
from engine.text.tokenizer_fit import misfits
from tests.tiny_tokenizers import byte_level

TOKENIZER = Tokenizer(byte_level())
SIZE = TOKENIZER.vocab_size


def test_what_fits_is_not_told():
    assert misfits(TOKENIZER, SIZE + 30, {"config.json": (-1,)}) == []


def test_tokens_beyond_the_embedding_are_told_with_their_ids():
    (told,) = misfits(TOKENIZER, SIZE - 2)
    assert told.startswith("2 ")
    assert f"is {SIZE - 1}" in told


def test_a_tokenizer_that_is_much_too_small_is_told():
    (told,) = misfits(TOKENIZER, 1000)
    assert "1000" in told


def test_an_end_token_beyond_the_embedding_is_told_with_its_file():
    ends = {"generation_config.json": (300, -1), "config.json": (-1,)}
    (told,) = misfits(TOKENIZER, 300, ends)
    assert told.startswith("generation_config.json: end token 300 ")
