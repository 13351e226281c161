"""Build a tokenizer from a GGUF file's metadata.

Invariant: ids equal the file's.
Never: reads a file.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Iterator

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from engine.checkpoint.chat_files import template_in_metadata
from engine.checkpoint.end_tokens import end_marks
from engine.checkpoint.gguf import GgufModel
from engine.errors import CheckpointError

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_MARK = re.compile(r"<\|(?!tool|think)\w+\|>|<｜(?!tool)[^<>\s]+｜>|<(start|end)_of_turn>")
"""Marks by their form; of tools and thoughts the file decides, for replies show such tokens."""
_BEGIN_MARKS = frozenset(
    {"<|im_start|>", "<|start_header_id|>", "<|end_header_id|>", "<|begin_of_text|>"}
    | {"<start_of_turn>", "<|start_of_role|>", "<|end_of_role|>", "<|START_OF_TURN_TOKEN|>"}
)
_SPECIALS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}

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
_CUTS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "exaone4", "mellum", "gigachat"), (_GPT2,)),
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
"""Patterns that split text in order, by the file's name for them."""
_WHOLE_WORDS = frozenset({"llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "lfm2"}) | {
    "glm4", "tekken",
}  # fmt: skip
"""Pre-tokenizers whose whole words may be tokens without merging."""
_BEGINS = frozenset({"llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "lfm2"})
"""Pre-tokenizers that add a beginning token, unless the file says otherwise."""
_NORMALISED = frozenset({"qwen2", "qwen35", "deepseek-r1-qwen"})


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
        else:
            needed = "gpt2 (byte-level BPE), llama and gemma4 (SentencePiece) are served"
            raise model.bad("tokenizer.ggml.model", needed)
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
    if not isinstance(tokens, list) or not tokens:
        raise model.bad("tokenizer.ggml.tokens", "a list of tokens is needed")
    return tokens


def _byte_level(model: GgufModel, tokens: list[str]) -> tokenizers.Tokenizer:
    name = model.text("tokenizer.ggml.pre")
    cuts = _CUTS.get(name or "")
    if cuts is None:
        known = ", ".join(sorted(_CUTS))
        raise model.bad("tokenizer.ggml.pre", f"known ways to cut text are {known}")
    merges = _listed_merges(model)
    tokenizer = tokenizers.Tokenizer(
        models.BPE(_vocabulary(tokens), merges, ignore_merges=name in _WHOLE_WORDS)
    )
    if name in _NORMALISED:
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(cut), "isolated") for cut in cuts]
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _listed_merges(model: GgufModel) -> list[tuple[str, str]]:
    listed = model.metadata.get("tokenizer.ggml.merges")
    if not isinstance(listed, list):
        raise model.bad("tokenizer.ggml.merges", "a list of merges is needed")
    return [(left, right) for left, _, right in (merge.partition(" ") for merge in listed)]


def _scored_merges(model: GgufModel, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    scores = model.metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, array) or len(scores) != len(_tokens(model)):
        raise model.bad("tokenizer.ggml.scores", "one for each token is needed")
    return list(_merges(vocabulary, scores))


def _sentence_piece(
    model: GgufModel, tokens: list[str], *, has_merges: bool
) -> tokenizers.Tokenizer:
    unknown = tokens[min(model.integer("tokenizer.ggml.unknown_token_id") or 0, len(tokens) - 1)]
    vocabulary = _vocabulary(tokens)
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            vocabulary,
            _listed_merges(model) if has_merges else _scored_merges(model, vocabulary),
            unk_token=unknown,
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    has_prefix = model.flag("tokenizer.ggml.add_space_prefix") is not False
    begin = [normalizers.Prepend("▁")] if has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*begin, normalizers.Replace(" ", "▁")])
    end = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *end]
    )
    return tokenizer


def _merges(vocabulary: dict[str, int], scores: array[float]) -> Iterator[tuple[str, str]]:
    """Yield all pairs of tokens that form another one, the likeliest tokens first."""
    found = []
    for token, token_id in vocabulary.items():
        if len(token) > 1 and not (token.startswith("<0x") and len(token) == 6):
            splits = ((token[:i], token[i:]) for i in range(1, len(token)))
            known = [each for each in splits if each[0] in vocabulary and each[1] in vocabulary]
            known.sort(key=lambda each: (vocabulary[each[0]], vocabulary[each[1]]))
            found += [(scores[token_id], each) for each in known]
    found.sort(key=lambda each: -each[0])
    return (each for _, each in found)


def _vocabulary(tokens: Iterable[str]) -> dict[str, int]:
    vocabulary: dict[str, int] = {}
    for token_id, token in enumerate(tokens):
        vocabulary.setdefault(token, token_id)
    return vocabulary


def _add_tokens(tokenizer: tokenizers.Tokenizer, model: GgufModel, tokens: list[str]) -> None:
    """Add control tokens, which replies omit, and other tokens that are never split."""
    kinds = model.metadata.get("tokenizer.ggml.token_type")
    if kinds is None:
        kinds = array("i", [1] * len(tokens))
    if not isinstance(kinds, array) or len(kinds) != len(tokens):
        raise model.bad("tokenizer.ggml.token_type", "one for each token is needed")
    marks = _marks(model, tokens, kinds)
    added = [
        AddedToken(token, special=token in marks or kind != _USER_DEFINED, normalized=False)
        for token, kind in zip(tokens, kinds, strict=True)
        if token and (token in marks or kind in (_UNKNOWN, _CONTROL, _USER_DEFINED))
    ]
    tokenizer.add_tokens(added)


def _marks(model: GgufModel, tokens: list[str], kinds: Iterable[int]) -> frozenset[str]:
    """Find the marks of chats, which are control tokens whatever type the file gives them."""
    found = template_in_metadata(model.metadata, model.path)
    template = "" if found is None else found.text
    named = {
        token
        for token, kind in zip(tokens, kinds, strict=True)
        if kind == _NORMAL and _MARK.fullmatch(token) and token in template
    }
    begin = model.integer("tokenizer.ggml.bos_token_id")
    if begin is not None and begin < len(tokens) and _MARK.fullmatch(tokens[begin]):
        named.add(tokens[begin])  # templates write it by its variable
    return end_marks(tokens) | named | _BEGIN_MARKS.intersection(tokens)


def _add_ends(
    tokenizer: tokenizers.Tokenizer, model: GgufModel, tokens: list[str], kind: str
) -> None:
    """Add the tokens before and after a plain text."""
    begins = kind in ("llama", "gemma4") or model.text("tokenizer.ggml.pre") in _BEGINS
    said = {"bos": model.flag("tokenizer.ggml.add_bos_token")}
    said["eos"] = model.flag("tokenizer.ggml.add_eos_token")
    wanted = {"bos": begins if said["bos"] is None else said["bos"], "eos": said["eos"] is True}
    ids = {
        name: model.integer(f"tokenizer.ggml.{name}_token_id")
        for name, is_wanted in wanted.items()
        if is_wanted
    }
    marks = {
        name: (tokens[token_id], token_id)
        for name, token_id in ids.items()
        if token_id is not None and token_id < len(tokens)
    }
    if marks:
        before, after = (f"{marks[name][0]}" if name in marks else "" for name in ("bos", "eos"))
        parts = [each for each in (before, "$A", after) if each]
        pair = [each for each in (before, "$A", "$B", after) if each]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=parts, pair=pair, special_tokens=list(marks.values())
        )
