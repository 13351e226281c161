"""Build a tokenizer of SentencePiece's likeliest pieces from a GGUF file's metadata.

Invariant: XLM-RoBERTa's tokenizer.json makes equal ids.
"""

from __future__ import annotations

from array import array

from engine.checkpoint.gguf import GgufModel
from engine.checkpoint.sentencepiece_model import NORMAL, UNKNOWN
from engine.text import tokenizer_parts as parts
from engine.text.tokenizer_parts import Assembled

_KEY = "tokenizer.ggml."


def unigram(model: GgufModel, tokens: list[str]) -> Assembled:
    """Build the tokenizer of a file's tokens, without the marks that are never split.

    Raises:
        CheckpointError: a key is missing, or says what those models do not do.
    """
    scores, kinds = (_numbers(model, key, len(tokens)) for key in ("scores", "token_type"))
    for key in ("add_space_prefix", "remove_extra_whitespaces"):
        if model.flag(f"{_KEY}{key}") is False:
            raise model.bad(f"{_KEY}{key}", "true is served")
    normal = [score for score, kind in zip(scores, kinds, strict=True) if kind == NORMAL]
    if not normal:
        raise model.bad(f"{_KEY}token_type", "some tokens of a text are needed")
    # what fills up a vocabulary must not change what a character without a piece costs
    least = min(normal)
    pieces = [(token, max(score, least)) for token, score in zip(tokens, scores, strict=True)]
    charsmap = model.metadata.get(f"{_KEY}precompiled_charsmap")
    if charsmap is not None and not (isinstance(charsmap, array) and charsmap.itemsize == 1):
        raise model.bad(f"{_KEY}precompiled_charsmap", "a list of bytes is needed")
    data = b"" if charsmap is None else bytes(charsmap)
    return parts.spaced_pieces(pieces, _unknown(model, kinds), data)


def _numbers(model: GgufModel, key: str, count: int) -> array[float]:
    values = model.metadata.get(f"{_KEY}{key}")
    if not isinstance(values, array) or len(values) != count:
        raise model.bad(f"{_KEY}{key}", "one for each token is needed")
    return values


def _unknown(model: GgufModel, kinds: array[float]) -> int:
    """Find the token of characters that have no piece: by its key, else by its kind."""
    token_id = model.integer(f"{_KEY}unknown_token_id")
    if token_id is None:
        token_id = next((i for i, kind in enumerate(kinds) if kind == UNKNOWN), len(kinds))
    if not 0 <= token_id < len(kinds):
        raise model.bad(f"{_KEY}unknown_token_id", "a token's id is needed")
    return token_id
