"""A GGUF file's WordPiece makes the ids of the tokenizer that it is made of."""

import pytest

from engine.errors import CheckpointError
from engine.text.tokenizer import Tokenizer
from tests.gguf_files import write_gguf
from tests.text_checkpoints import make_text_checkpoint
from tests.wordpiece_tokenizer import write_wordpiece

LOWER = ["hello", "world", "##ing", "##ly", "un", "like", "mueller", "caf", "[unused1]"]
CASED = ["Hello", "World", "##ING", "Paris", "un", "like", "New", "York", *map(chr, range(65, 91))]
TEXTS = [
    "",
    "hello world",
    "Hello WORLD, unlikely Café; Müller!",
    "a [SEP] b [MASK][CLS] [unused1]",
    "\u4e2d\u6587 text\u00a0with\u2003spaces\tand\nlines\x00",
    "x" * 120 + " 3.14 'quoted' -- \U0001f600 \u0301",
]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return make_text_checkpoint(tmp_path_factory.mktemp("it") / "it", "bert", num_hidden_layers=1)


@pytest.mark.parametrize("is_cased", [False, True])
def test_ids_are_the_originals(is_cased, encoder, tmp_path):
    write_wordpiece(encoder, CASED if is_cased else LOWER, is_cased=is_cased)
    original = Tokenizer.from_folder(encoder)
    own = Tokenizer.from_folder(write_gguf(encoder, tmp_path / "it.gguf"))
    for text in TEXTS:
        ids = own.encode(text)
        assert ids == original.encode(text)
        assert own.decode(ids) == original.decode(ids)
        pairs = [("hello", text)]
        assert list(own.encode_each(pairs)) == list(original.encode_each(pairs))
    assert own.ids() == original.ids()


def test_tokens_in_brackets_that_are_not_marked_stay_so(encoder, tmp_path):
    write_wordpiece(encoder, LOWER)
    original, path = Tokenizer.from_folder(encoder), tmp_path / "it.gguf"
    tokens = ["[unused1]" if token == "\u2581[unused1]" else token for token in _marked(original)]
    own = Tokenizer.from_folder(write_gguf(encoder, path, tokenizer__ggml__tokens=tokens))
    assert own.ids() == original.ids()


def test_special_tokens_beyond_the_vocabulary_are_refused(encoder, tmp_path):
    write_wordpiece(encoder, LOWER)
    path = write_gguf(encoder, tmp_path / "it.gguf", tokenizer__ggml__cls_token_id=100_000)
    with pytest.raises(CheckpointError):
        Tokenizer.from_folder(path)


def _marked(original: Tokenizer) -> list[str]:
    """The tokens as a file has them."""
    ids = original.ids()
    tokens = sorted(ids, key=ids.__getitem__)
    return [
        token if number < 5 else token[2:] if token.startswith("##") else f"\u2581{token}"
        for number, token in enumerate(tokens)
    ]
