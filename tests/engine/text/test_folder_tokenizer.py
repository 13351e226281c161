"""Folders without tokenizer.json: ids are those of the libraries that made their files."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
from pathlib import Path

import pytest
from tokenizers import pre_tokenizers, trainers
from transformers import BertTokenizer, GPT2Tokenizer, Qwen2Tokenizer, RobertaTokenizer
from transformers.integrations.mistral.tokenizer import MistralConverter

from engine.errors import CheckpointError
from engine.text import tokenizer_parts
from engine.text.read_models import read_tokenizer
from engine.text.tokenizer import Tokenizer, TokenizerFiles
from tests.random_texts import PARTS, random_texts

RECORDED = Path(__file__).parents[2] / "fixtures" / "sentencepiece"
"""Small models and what SentencePiece's library gave; each .json says how they were made."""
KINDS = [path.stem for path in sorted(RECORDED.glob("*.model"))]
COUNT = 3000
WORDS = ["the", "of", "hello", "world", "don't", "naïve", "straße", "中文", "русский", "2026", "42"]
CORPUS = [" ".join(WORDS), *random_texts(1, 300)] * 3


def write(folder: Path, name: str, **values: object) -> None:
    (folder / name).write_text(json.dumps(values), encoding="utf-8")


def ids_sum(ids: list[list[int]]) -> str:
    return hashlib.sha256(json.dumps(ids).encode()).hexdigest()


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_are_those_of_the_library(tmp_path, kind):
    shutil.copy(RECORDED / f"{kind}.model", tmp_path / "tokenizer.model")
    recorded = json.loads((RECORDED / f"{kind}.json").read_text())
    tokenizer = read_tokenizer(tmp_path)
    assert tokenizer.vocab_size == recorded["size"]
    for text, ids in recorded["ids"].items():
        assert (text, tokenizer.encode(text, False)) == (text, ids)
    parts = tuple(part for part in PARTS if part not in recorded["left_out"])
    texts = random_texts(recorded["seed"], COUNT, parts)
    assert ids_sum([tokenizer.encode(text, False) for text in texts]) == recorded["sum"]


def test_a_text_of_pieces_begins_with_its_mark_and_ends_as_files_say(tmp_path):
    shutil.copy(RECORDED / "bpe.model", tmp_path / "tokenizer.model")
    tokenizer = Tokenizer.from_folder(tmp_path)
    plain = tokenizer.encode("hello", False)
    assert tokenizer.encode("hello") == [1, *plain]
    assert tokenizer.decode([1, *plain, 2]) == "hello"
    assert tokenizer.special_ids(["<s>", "</s>", "<tag>"]) == {"<s>": 1, "</s>": 2}
    write(tmp_path, "tokenizer_config.json", add_bos_token=False, add_eos_token=True)
    assert Tokenizer.from_folder(tmp_path).encode("hello") == [*plain, 2]


def test_one_prefix_alone_is_added_where_the_class_is_not_the_old_one(tmp_path):
    shutil.copy(RECORDED / "bpe.model", tmp_path / "tokenizer.model")
    old = Tokenizer.from_folder(tmp_path).encode("the</s>the", False)
    write(tmp_path, "tokenizer_config.json", legacy=False)
    new = Tokenizer.from_folder(tmp_path).encode("the</s>the", False)
    assert old[0] == new[0]
    assert old[: old.index(2)] == old[old.index(2) + 1 :]
    assert new[: new.index(2)] != new[new.index(2) + 1 :]


def byte_pairs(cut: str, size: int = 600) -> dict:
    """Train byte-level BPE, and return its vocabulary and merges."""
    tokenizer = tokenizer_parts.byte_level(
        tokenizer_parts.models.BPE(), tokenizer_parts.CUTS[cut], is_normalised=cut == "qwen2"
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        initial_alphabet=alphabet,
        special_tokens=["<|endoftext|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return json.loads(tokenizer.to_str())["model"]


def write_pairs(folder: Path, cut: str) -> None:
    model = byte_pairs(cut)
    write(folder, "vocab.json", **model["vocab"])
    merges = [" ".join(pair) for pair in model["merges"]]
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n", "utf-8")


@pytest.mark.parametrize(
    ("cut", "kind", "theirs"),
    [("gpt-2", "GPT2Tokenizer", GPT2Tokenizer), ("qwen2", "Qwen2Tokenizer", Qwen2Tokenizer)],
)
def test_pairs_of_bytes_are_those_of_the_class(tmp_path, cut, kind, theirs):
    write_pairs(tmp_path, cut)
    write(tmp_path, "tokenizer_config.json", tokenizer_class=kind, eos_token="<|endoftext|>")
    reference, tokenizer = theirs.from_pretrained(tmp_path), read_tokenizer(tmp_path)
    for text in random_texts(3, COUNT):
        assert (text, tokenizer.encode(text)) == (text, reference.encode(text))


def test_robertas_pairs_are_those_of_the_class(tmp_path):
    write_pairs(tmp_path, "gpt-2")
    vocabulary = json.loads((tmp_path / "vocab.json").read_text("utf-8"))
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    for token in special.values():
        vocabulary[token] = len(vocabulary)
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary), "utf-8")
    write(tmp_path, "tokenizer_config.json", tokenizer_class="RobertaTokenizer", **special)
    reference, tokenizer = RobertaTokenizer.from_pretrained(tmp_path), read_tokenizer(tmp_path)
    for pair in zip(random_texts(4, 20), WORDS * 2, strict=False):
        assert next(tokenizer.encode_each([pair])) == reference.encode(*pair)


def test_a_vocabulary_without_joined_digits_cuts_digits_apart(tmp_path):
    write_pairs(tmp_path, "starcoder")
    write(tmp_path, "tokenizer_config.json", tokenizer_class="GPT2Tokenizer")
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert [tokenizer.token(one) for one in tokenizer.encode("a  12")][-3:] == ["ĠĠ", "1", "2"]


def test_a_class_whose_way_to_cut_text_no_file_says_is_refused_by_name(tmp_path):
    write_pairs(tmp_path, "gpt-2")
    write(tmp_path, "tokenizer_config.json", tokenizer_class="CLIPTokenizer")
    with pytest.raises(CheckpointError, match="CLIP"):
        Tokenizer.from_folder(tmp_path)


TEKKEN = {"pattern": tokenizer_parts.CUTS["tekken"][0], "default_num_special_tokens": 20}


def write_tekken(folder: Path, **config: object) -> Path:
    model = byte_pairs("tekken")
    known = {ord(text): byte for byte, text in enumerate(tokenizer_parts.BYTE_CHARACTERS)}
    listed = [bytes((byte,)) for byte in range(256)]
    texts = [text for text in model["vocab"] if len(text) > 1 and text != "<|endoftext|>"]
    listed += [bytes(text.translate(known), "latin-1") for text in texts]
    tokens = [
        {"rank": rank, "token_bytes": base64.b64encode(each).decode(), "token_str": None}
        for rank, each in enumerate(listed)
    ]
    names = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    special = [
        {"rank": rank, "token_str": name, "is_control": True} for rank, name in enumerate(names)
    ]
    values = TEKKEN | {"default_vocab_size": len(tokens) + 10} | config
    write(folder, "tekken.json", config=values, vocab=tokens, special_tokens=special)
    return folder


def test_tokens_of_tekken_are_those_of_the_library(tmp_path):
    write_tekken(tmp_path)
    reference = MistralConverter(str(tmp_path / "tekken.json")).converted()
    tokenizer = read_tokenizer(tmp_path)
    for text in random_texts(4, COUNT):
        ids = reference.encode(text, add_special_tokens=False).ids
        assert (text, tokenizer.encode(text, False)) == (text, ids)
    assert tokenizer.encode("")[:1] == [1]
    assert tokenizer.special_ids(["[INST]", "<SPECIAL_19>"]) == {"[INST]": 3, "<SPECIAL_19>": 19}
    files = TokenizerFiles.read(tmp_path)
    assert files.special_tokens["eos_token"] == "</s>"


@pytest.mark.parametrize(
    "config", [{"default_vocab_size": 5}, {"default_num_special_tokens": 1}, {"pattern": 5}]
)
def test_a_tekken_file_that_contradicts_itself_is_refused(tmp_path, config):
    with pytest.raises(CheckpointError) as refused:
        Tokenizer.from_folder(write_tekken(tmp_path, **config))
    assert refused.value.where == str(tmp_path / "tekken.json")


@pytest.mark.parametrize("is_lower", [True, False])
def test_word_pieces_are_those_of_bert(tmp_path, is_lower):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyzHWI", "中"]
    words += [f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyzTPS文"]
    words += ["the", "hello", "world", "##ing", "##ed", "é", "'", "-", ".", "!", "42", "20", "##26"]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    write(
        tmp_path, "tokenizer_config.json", do_lower_case=is_lower, tokenizer_class="BertTokenizer"
    )
    reference, tokenizer = BertTokenizer.from_pretrained(tmp_path), read_tokenizer(tmp_path)
    for text in random_texts(5, COUNT):
        assert (text, tokenizer.encode(text)) == (text, reference.encode(text))


def test_the_preferred_file_wins_and_another_can_be_read(tmp_path):
    write_pairs(tmp_path, "gpt-2")
    shutil.copy(RECORDED / "bpe.model", tmp_path / "tokenizer.model")
    assert TokenizerFiles.read(tmp_path).where.name == "tokenizer.model"
    assert TokenizerFiles.read(tmp_path, source="vocab.json").where.name == "vocab.json"
    write_tekken(tmp_path)
    assert TokenizerFiles.read(tmp_path).where.name == "tekken.json"
