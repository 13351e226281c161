"""Build BERT's WordPiece tokenizer from a GGUF file's metadata.

Invariant: ids equal the file's.
"""

from __future__ import annotations

import re
from array import array

from engine.checkpoint.gguf import GgufModel
from engine.checkpoint.sentencepiece_model import CONTROL, NORMAL
from engine.text import tokenizer_parts as parts
from engine.text.tokenizer_parts import CONTINUES, Assembled

_BEGINS = "\u2581"
"""What a token begins with that begins a word; others continue one."""
_IN_BRACKETS = re.compile(r"\[\S+\]")
"""Earlier converters left such tokens as they were."""
_CAPITAL = re.compile("[A-Z]")
_FEW = 100
"""A vocabulary of lower case has fewer capitals than one token in this number."""


def word_piece(model: GgufModel, tokens: list[str]) -> Assembled:
    """Build the tokenizer of a file's tokens."""
    kinds = model.metadata.get("tokenizer.ggml.token_type")
    if kinds is None:
        kinds = array("i", [NORMAL] * len(tokens))
    if not isinstance(kinds, array) or len(kinds) != len(tokens):
        raise model.bad("tokenizer.ggml.token_type", "one for each token is needed")
    spelled = [_spelled(token, kind) for token, kind in zip(tokens, kinds, strict=True)]
    unknown, begin, end = (
        _special(model, spelled, names, usual)
        for names, usual in (
            (("unknown",), 100),
            (("cls", "bos"), 101),
            (("seperator", "separator", "eos"), 102),  # the format's own spelling first
        )
    )
    num_capital = sum(bool(_CAPITAL.search(s)) for s in spelled if not _IN_BRACKETS.fullmatch(s))
    has_case = num_capital * _FEW > len(spelled)
    tokenizer = parts.word_piece(
        parts.numbered(spelled), unknown[0], (begin, end), lowers_case=not has_case
    )
    marks = [(s, True) for s, kind in zip(spelled, kinds, strict=True) if kind == CONTROL]
    parts.add_marks(tokenizer, marks)
    return tokenizer


def _spelled(token: str, kind: int) -> str:
    """Spell a token as vocabularies of WordPiece do."""
    if kind == CONTROL or _IN_BRACKETS.fullmatch(token):
        return token
    return token[1:] if token.startswith(_BEGINS) else f"{CONTINUES}{token}"


def _special(
    model: GgufModel, tokens: list[str], names: tuple[str, ...], usual: int
) -> tuple[str, int]:
    """Find a special token by its keys, else where BERT has it: its text and id."""
    found = (model.integer(f"tokenizer.ggml.{name}_token_id") for name in names)
    token_id = next((each for each in found if each is not None), usual)
    if not 0 <= token_id < len(tokens):
        raise model.bad(f"tokenizer.ggml.{names[0]}_token_id", "a token's id is needed")
    return tokens[token_id], token_id
