"""Assemble tokenizers of the kinds that models have, whatever file the vocabulary is from."""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from engine.checkpoint.model_file import tell_of_merges

BEGIN_MARKS = frozenset(
    {"<|im_start|>", "<|start_header_id|>", "<|end_header_id|>", "<|begin_of_text|>"}
    | {"<start_of_turn>", "<|start_of_role|>", "<|end_of_role|>", "<|START_OF_TURN_TOKEN|>"}
)
Assembled = tokenizers.Tokenizer
_SPACE = "▁"

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _words(digits: str) -> str:
    """Return patterns of contractions, words with a leading sign, numbers, signs, white space."""
    return (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
    )


def _cased(digits: str, ending: str) -> str:
    """Return the pattern of words that also end where capitals follow small letters."""
    upper, lower = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
    before = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{before}[{upper}]*[{lower}]+{ending}|{before}[{upper}]+[{lower}]*{ending}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3, _QWEN2 = _words(r"\p{N}{1,3}"), _words(r"\p{N}")
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
CUTS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "exaone4", "mellum", "gigachat"), (_GPT2,)),
    "roberta-bpe": (_GPT2,),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
        (r"\p{N}", _GPT2),
    ),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral"), (_LLAMA3,)),
    **dict.fromkeys(("lfm2", "dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez"), (_QWEN2,)),
    "qwen35": (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
        rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
    ),
    "deepseek-v3": (r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK3),
    "seed-coder": (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}"
        rf"| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",
    ),
    **dict.fromkeys(("gpt-4o", "llama4"), (_cased(r"\p{N}{1,3}", f"{_CONTRACTIONS}?"),)),
    "tekken": (_cased(r"\p{N}", ""),),
}
"""Patterns that split text in order, by GGUF's names for them."""
NORMALISED = frozenset({"qwen2", "qwen35", "deepseek-r1-qwen"})
"""Those before which characters are composed."""


def byte_level(
    model: models.BPE, cuts: Iterable[str], *, is_normalised: bool = False
) -> tokenizers.Tokenizer:
    """Assemble byte-level BPE.

    Args:
        model: with a character for each byte.
        cuts: patterns that split text, in order.
        is_normalised: characters are composed first (NFC).
    """
    tokenizer = tokenizers.Tokenizer(model)
    if is_normalised:
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(cut), "isolated") for cut in cuts]
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


CONTINUES = "##"
"""What a piece of WordPiece begins with that continues a word."""


def word_piece(
    vocabulary: dict[str, int],
    unknown: str,
    ends: tuple[tuple[str, int], tuple[str, int]],
    *,
    lowers_case: bool,
) -> Assembled:
    """Assemble BERT's tokenizer.

    Args:
        unknown: the token of words that have no pieces.
        ends: tokens, as text and id, before a text and behind each of a pair.
        lowers_case: capitals and accents count for nothing.
    """
    model = models.WordPiece(
        vocabulary,
        unk_token=unknown,
        continuing_subword_prefix=CONTINUES,
        max_input_chars_per_word=100,
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowers_case)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix=CONTINUES)
    (begin, _), (end, _) = ends
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[begin, "$A", end],
        pair=[begin, "$A", end, "$B:1", f"{end}:1"],
        special_tokens=list(ends),
    )
    return tokenizer


@dataclass(frozen=True, slots=True)
class Spelling:
    """What SentencePiece does with a text before it looks for pieces."""

    has_prefix: bool
    """A space goes before a text."""
    has_one_prefix: bool = False
    """None goes before what follows a special token."""
    charsmap: bytes = b""
    """Compiled replacements of characters; empty: none."""
    joins_spaces: bool = False
    """Spaces at both ends are left out, and several in a row are one."""
    is_literal: bool = False
    """A byte token's name in a text, as <0x0A>, would become that token."""
    whole: tuple[str, ...] = ()
    """Pieces that are cut out first, and never joined with their neighbours."""


def sentence_piece(
    model: models.BPE | models.Unigram, spelling: Spelling, *, has_bytes: bool
) -> tokenizers.Tokenizer:
    """Assemble a tokenizer of SentencePiece's pieces.

    Args:
        has_bytes: characters without a piece are tokens of single bytes.
    """
    tokenizer = tokenizers.Tokenizer(model)
    steps: list[normalizers.Normalizer] = []
    if spelling.charsmap:
        steps.append(normalizers.Precompiled(spelling.charsmap))
    if spelling.joins_spaces:
        steps.append(normalizers.Replace(Regex(rf"\A +|[ {_SPACE}]+\z"), ""))
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    cuts: list[pre_tokenizers.PreTokenizer] = []
    if spelling.has_prefix and spelling.has_one_prefix:
        cuts.append(pre_tokenizers.Metaspace(_SPACE, prepend_scheme="first", split=False))
    elif spelling.has_prefix:
        steps.append(normalizers.Prepend(_SPACE))
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    if has_bytes and spelling.is_literal:
        cuts.append(pre_tokenizers.Split(Regex("<(?=0x[0-9A-F]{2}>)"), "isolated"))
    if spelling.whole:
        longest_first = sorted(spelling.whole, key=len, reverse=True)
        either = "|".join(re.escape(piece) for piece in longest_first)
        cuts.append(pre_tokenizers.Split(Regex(either), "isolated"))
    if cuts:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    bytes_ = [decoders.ByteFallback()] if has_bytes else []
    end = [decoders.Strip(" ", 1, 0)] if spelling.has_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), *bytes_, decoders.Fuse(), *end]
    )
    return tokenizer


def spaced_pieces(pieces: Sequence[tuple[str, float]], unknown: int, charsmap: bytes) -> Assembled:
    """Assemble XLM-RoBERTa's tokenizer: words between white space, a space before each.

    Args:
        pieces: tokens with their scores.
        unknown: the id of characters that have no piece.
        charsmap: compiled replacements of characters; empty: none.
    """
    tokenizer = tokenizers.Tokenizer(models.Unigram(list(pieces), unknown, False))
    if charsmap:
        tokenizer.normalizer = normalizers.Precompiled(charsmap)
    space = pre_tokenizers.Metaspace(_SPACE, prepend_scheme="always")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), space])
    tokenizer.decoder = decoders.Metaspace(_SPACE, prepend_scheme="always")
    return tokenizer


def scored_merges(vocabulary: Mapping[str, int], scores: array[float]) -> Iterator[tuple[str, str]]:
    """Yield all pairs of tokens that form another one, the likeliest tokens first."""
    tell_of_merges(len(vocabulary))
    found = []
    texts = {token: token for token in vocabulary}  # parts are then no strings of their own
    for token, token_id in vocabulary.items():
        if len(token) > 1 and not (token.startswith("<0x") and len(token) == 6):
            splits = ((token[:i], token[i:]) for i in range(1, len(token)))
            known = [each for each in splits if each[0] in texts and each[1] in texts]
            known.sort(key=lambda each: (vocabulary[each[0]], vocabulary[each[1]]))
            score = scores[token_id]
            found += [(score, texts[left], texts[right]) for left, right in known]
    found.sort(key=lambda each: -each[0])
    return ((left, right) for _, left, right in found)


def numbered(tokens: Iterable[str]) -> dict[str, int]:
    """Number tokens by their places; of equal ones, the first counts."""
    vocabulary: dict[str, int] = {}
    for token_id, token in enumerate(tokens):
        vocabulary.setdefault(token, token_id)
    return vocabulary


def add_marks(
    tokenizer: tokenizers.Tokenizer,
    marks: Iterable[tuple[str, bool]],
    *,
    is_normalised: bool = False,
) -> None:
    """Add tokens that are found in a text before all others.

    Args:
        marks: texts, and whether replies omit them.
        is_normalised: found in the text as the tokenizer spells it, not as it was written.
    """
    tokenizer.add_tokens(
        [
            AddedToken(text, special=is_special, normalized=is_normalised)
            for text, is_special in marks
        ]
    )


def add_ends(
    tokenizer: tokenizers.Tokenizer,
    begin: tuple[str, int] | None,
    end: tuple[str, int] | None,
    *,
    is_between: bool = False,
) -> None:
    """Put tokens, as text and id, before and after a plain text; None: nothing.

    Args:
        is_between: the last one stands twice between the texts of a pair, as RoBERTa has it.
    """
    if begin is None and end is None:
        return
    before, after = ([] if mark is None else [mark[0]] for mark in (begin, end))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *(2 * after if is_between else []), "$B", *after],
        special_tokens=list(dict.fromkeys(mark for mark in (begin, end) if mark is not None)),
    )


_HIDDEN = (*range(0x21), *range(0x7F, 0xA1), 0xAD)
BYTE_CHARACTERS = tuple(
    chr(0x100 + _HIDDEN.index(byte) if byte in _HIDDEN else byte) for byte in range(0x100)
)
"""The characters that stand for bytes: printable Latin-1, and from U+0100 on the others."""
