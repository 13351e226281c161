"""A WordPiece tokenizer as BERT's, of the words that are given and the letters of ASCII."""

from __future__ import annotations

import json
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.byte_tokenizer import head

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
PAD, UNK, CLS, SEP, MASK = range(5)
_LETTERS = string.ascii_lowercase + string.digits + string.punctuation


def vocabulary(words: Sequence[str]) -> list[str]:
    """Special tokens, then letters that begin a word, letters within one, and the words."""
    return [*SPECIAL_TOKENS, *_LETTERS, *(f"##{letter}" for letter in _LETTERS), *words]


def write_wordpiece(folder: Path, words: Sequence[str], *, is_cased: bool = False) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    tokens = vocabulary(words)
    assert len(set(tokens)) == len(tokens)
    settings = {
        "tokenizer_class": "BertTokenizer",
        "do_lower_case": not is_cased,
        **{f"{token[1:-1].lower()}_token": token for token in SPECIAL_TOKENS},
    }
    files = {"tokenizer.json": _tokenizer(tokens, is_cased), "tokenizer_config.json": settings}
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def _tokenizer(tokens: list[str], is_cased: bool) -> dict[str, Any]:
    return {
        **head({token: i for i, token in enumerate(SPECIAL_TOKENS)}),
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": None,
            "lowercase": not is_cased,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": _between_special_tokens(),
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": {token: i for i, token in enumerate(tokens)},
        },
    }


def _between_special_tokens() -> dict[str, Any]:
    """[CLS] A [SEP], and [CLS] A [SEP] B [SEP] for a pair."""

    def special(token: str, kind: int) -> dict[str, Any]:
        return {"SpecialToken": {"id": token, "type_id": kind}}

    def text(name: str, kind: int) -> dict[str, Any]:
        return {"Sequence": {"id": name, "type_id": kind}}

    single = [special("[CLS]", 0), text("A", 0), special("[SEP]", 0)]
    ids = {"[CLS]": CLS, "[SEP]": SEP}
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, text("B", 1), special("[SEP]", 1)],
        "special_tokens": {
            token: {"id": token, "ids": [number], "tokens": [token]}
            for token, number in ids.items()
        },
    }
