"""A GGUF file's likeliest pieces make the ids of XLM-RoBERTa's tokenizer.json."""

import json

import pytest

from engine.errors import CheckpointError
from engine.text.tokenizer import Tokenizer
from tests.byte_tokenizer import write_tokenizer
from tests.gguf_files import write_gguf
from tests.text_checkpoints import make_text_checkpoint
from tests.tiny_tokenizers import save, xlm_roberta_like

TEXTS = [
    "",
    "hello world",
    "  hello \t\n world  ",
    "A ABBA, hello.",
    "a <mask> hello</s> <unk>",
    "xyz qxyz \u4e2d\u6587 hello\u00a0world \U0001f600",
    "[PAD27] " * 3,
]
PRE, TOKENS = "tokenizer__ggml__", ("tokens", "scores", "token_type")
FILLER = ("[PAD27]", -10_000.0, 5)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("it") / "it"
    make_text_checkpoint(folder, "xlm-roberta", num_hidden_layers=1)
    save(xlm_roberta_like(), folder)
    return folder


def equal(own, original):
    for text in TEXTS:
        assert own.encode(text) == original.encode(text)
        pairs = [("hello", text), (text, "hello")]
        assert list(own.encode_each(pairs)) == list(original.encode_each(pairs))


def test_ids_are_the_originals(encoder, tmp_path):
    original = Tokenizer.from_folder(encoder)
    own = Tokenizer.from_folder(write_gguf(encoder, tmp_path / "it.gguf"))
    equal(own, original)
    assert own.ids() == original.ids()
    assert own.encode("A") == own.encode("a")


def test_what_fills_a_vocabulary_up_changes_no_id(encoder, tmp_path):
    original = Tokenizer.from_folder(encoder)
    pieces = json.loads(xlm_roberta_like().to_str())["model"]["vocab"]
    kinds = [3 if token.startswith("<") else 1 for token, _ in pieces]
    filled = [*((*piece, kind) for piece, kind in zip(pieces, kinds, strict=True)), FILLER]
    columns = zip(TOKENS, map(list, zip(*filled, strict=True)), strict=True)
    own = write_gguf(encoder, tmp_path / "it.gguf", **{f"{PRE}{key}": v for key, v in columns})
    equal(Tokenizer.from_folder(own), original)


@pytest.mark.parametrize(
    "change",
    [
        {"scores": [0.0]},
        {"scores": None},
        {"token_type": [3] * 27},
        {"unknown_token_id": 99},
        {"remove_extra_whitespaces": False},
        {"precompiled_charsmap": "no list"},
        {"precompiled_charsmap": [255] * 9},
        {"precompiled_charsmap": b"\xff" * 9},
    ],
)
def test_what_makes_other_ids_is_refused(change, encoder, tmp_path):
    changes = {f"{PRE}{key}": value for key, value in change.items()}
    with pytest.raises(CheckpointError):
        Tokenizer.from_folder(write_gguf(encoder, tmp_path / "it.gguf", **changes))


def test_robertas_pairs_have_two_tokens_between_them(tmp_path):
    folder = make_text_checkpoint(tmp_path / "it", "roberta", num_hidden_layers=1)
    write_tokenizer(folder)
    changed = {f"{PRE}pre": "roberta-bpe"}
    own = Tokenizer.from_folder(write_gguf(folder, tmp_path / "it.gguf", **changed))
    first, second = (own.encode(text, False) for text in ("hello", "world"))
    begin, end = own.encode("")
    assert list(own.encode_each([("hello", "world")])) == [[begin, *first, end, end, *second, end]]
