"""Build a tokenizer from a GGUF file's metadata.

Invariant: ids equal the file's.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable

import tokenizers
from tokenizers import models

from engine.checkpoint.chat_files import template_in_metadata
from engine.checkpoint.end_tokens import end_marks
from engine.checkpoint.gguf import GgufModel
from engine.checkpoint.sentencepiece_model import CONTROL, NORMAL, UNKNOWN, USER_DEFINED
from engine.errors import CheckpointError
from engine.text import tokenizer_parts as parts
from engine.text.gguf_unigram import unigram
from engine.text.gguf_word_piece import word_piece
from engine.text.tokenizer_parts import CUTS

_MARK = re.compile(r"<\|(?!tool|think)\w+\|>|<｜(?!tool)[^<>\s]+｜>|<(start|end)_of_turn>")
"""Marks by their form; of tools and thoughts the file decides, for replies show such tokens."""
_SPECIALS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_WHOLE_WORDS = frozenset({"llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "lfm2"}) | {
    "glm4", "tekken",
}  # fmt: skip
"""Pre-tokenizers whose whole words may be tokens without merging."""
_BEGINS = frozenset({"llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "lfm2"})
"""Pre-tokenizers that add a beginning token, unless the file says otherwise."""


def read_tokenizer(model: GgufModel) -> tokenizers.Tokenizer:
    """Build the tokenizer of a file.

    Raises:
        CheckpointError: it has none, or one of an unknown kind, which is named.
    """
    kind = model.text("tokenizer.ggml.model")
    tokens = _tokens(model)
    try:
        if kind == "gpt2":
            tokenizer = _byte_level(model, tokens)
        elif kind in ("llama", "gemma4"):
            tokenizer = _sentence_piece(model, tokens, has_merges=kind == "gemma4")
        elif kind == "bert":
            return word_piece(model, tokens)
        elif kind == "t5":
            tokenizer = unigram(model, tokens)
        else:
            needed = "gpt2 (byte-level BPE), llama, gemma4 and t5 (SentencePiece), bert (WordPiece)"
            raise model.bad("tokenizer.ggml.model", f"{needed} are served")
        _add_tokens(tokenizer, model, tokens)
        _add_ends(tokenizer, model, tokens, kind)
    except CheckpointError:
        raise
    # tokenizers raises plain Exception for whatever it refuses
    except Exception as error:
        what = f"its tokenizer cannot be built: {error}"
        raise CheckpointError(what[:300], where=str(model.path)) from error
    return tokenizer


def special_tokens(model: GgufModel) -> dict[str, str]:
    """Return `bos_token` and similar tokens, which templates use as variables."""
    tokens = _tokens(model)
    ids = {name: model.integer(f"tokenizer.ggml.{key}_token_id") for name, key in _SPECIALS.items()}
    return {
        name: tokens[token_id]
        for name, token_id in ids.items()
        if token_id is not None and token_id < len(tokens)
    }


def _tokens(model: GgufModel) -> list[str]:
    tokens = model.metadata.get("tokenizer.ggml.tokens")
    if tokens is not None and not len(tokens):
        what = "tokenizer.ggml.tokens lists no tokens, so no text can be read"
        hint = "download the file again, or convert the model again with its tokenizer"
        raise CheckpointError(what, where=str(model.path), hint=hint)
    if not isinstance(tokens, list):
        raise model.bad("tokenizer.ggml.tokens", "a list of tokens is needed")
    return tokens


def _byte_level(model: GgufModel, tokens: list[str]) -> tokenizers.Tokenizer:
    name = model.text("tokenizer.ggml.pre")
    cuts = CUTS.get(name or "")
    if cuts is None:
        known = ", ".join(sorted(CUTS))
        raise model.bad("tokenizer.ggml.pre", f"known ways to cut text are {known}")
    bpe = models.BPE(
        parts.numbered(tokens), _listed_merges(model), ignore_merges=name in _WHOLE_WORDS
    )
    return parts.byte_level(bpe, cuts, is_normalised=name in parts.NORMALISED)


def _listed_merges(model: GgufModel) -> list[tuple[str, str]]:
    listed = model.metadata.get("tokenizer.ggml.merges")
    if not isinstance(listed, list):
        raise model.bad("tokenizer.ggml.merges", "a list of merges is needed")
    return [(left, right) for left, _, right in (merge.partition(" ") for merge in listed)]


def _scored_merges(model: GgufModel, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    scores = model.metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, array) or len(scores) != len(_tokens(model)):
        raise model.bad("tokenizer.ggml.scores", "one for each token is needed")
    return list(parts.scored_merges(vocabulary, scores))


def _sentence_piece(
    model: GgufModel, tokens: list[str], *, has_merges: bool
) -> tokenizers.Tokenizer:
    unknown = tokens[min(model.integer("tokenizer.ggml.unknown_token_id") or 0, len(tokens) - 1)]
    vocabulary = parts.numbered(tokens)
    bpe = models.BPE(
        vocabulary,
        _listed_merges(model) if has_merges else _scored_merges(model, vocabulary),
        unk_token=unknown,
        byte_fallback=True,
        fuse_unk=True,
    )
    has_prefix = model.flag("tokenizer.ggml.add_space_prefix") is not False
    return parts.sentence_piece(bpe, parts.Spelling(has_prefix), has_bytes=True)


def _add_tokens(tokenizer: tokenizers.Tokenizer, model: GgufModel, tokens: list[str]) -> None:
    """Add control tokens, which replies omit, and other tokens that are never split."""
    kinds = model.metadata.get("tokenizer.ggml.token_type")
    if kinds is None:
        kinds = array("i", [1] * len(tokens))
    if not isinstance(kinds, array) or len(kinds) != len(tokens):
        raise model.bad("tokenizer.ggml.token_type", "one for each token is needed")
    marks = _marks(model, tokens, kinds)
    added = [
        (token, token in marks or kind != USER_DEFINED)
        for token, kind in zip(tokens, kinds, strict=True)
        if token and (token in marks or kind in (UNKNOWN, CONTROL, USER_DEFINED))
    ]
    parts.add_marks(tokenizer, added)


def _marks(model: GgufModel, tokens: list[str], kinds: Iterable[int]) -> frozenset[str]:
    """Find the marks of chats, which are control tokens whatever type the file gives them."""
    found = template_in_metadata(model.metadata, model.path)
    template = "" if found is None else found.text
    named = {
        token
        for token, kind in zip(tokens, kinds, strict=True)
        if kind == NORMAL and _MARK.fullmatch(token) and token in template
    }
    begin = model.integer("tokenizer.ggml.bos_token_id")
    if begin is not None and begin < len(tokens) and _MARK.fullmatch(tokens[begin]):
        named.add(tokens[begin])  # templates write it by its variable
    return end_marks(tokens) | named | parts.BEGIN_MARKS.intersection(tokens)


def _add_ends(
    tokenizer: tokenizers.Tokenizer, model: GgufModel, tokens: list[str], kind: str
) -> None:
    """Add the tokens before and after a plain text."""
    pre = model.text("tokenizer.ggml.pre")
    is_roberta = kind == "t5" or pre == "roberta-bpe"
    begins = is_roberta or kind in ("llama", "gemma4") or pre in _BEGINS
    said = {name: model.flag(f"tokenizer.ggml.add_{name}_token") for name in ("bos", "eos")}
    usual = {"bos": begins, "eos": is_roberta}
    begin, end = (
        _mark(model, tokens, name) if (usual[name] if flag is None else flag) else None
        for name, flag in said.items()
    )
    parts.add_ends(tokenizer, begin, end, is_between=is_roberta)


def _mark(model: GgufModel, tokens: list[str], name: str) -> tuple[str, int] | None:
    token_id = model.integer(f"tokenizer.ggml.{name}_token_id")
    known = token_id is not None and token_id < len(tokens)
    return (tokens[token_id], token_id) if known and token_id is not None else None
