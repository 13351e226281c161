"""Build a tokenizer from a folder without tokenizer.json, out of the files that came before it.

Invariant: ids equal transformers' with the class in tokenizer_config.json; with tokenizer.model,
SentencePiece's.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from engine.checkpoint.end_tokens import end_marks
from engine.checkpoint.folder_files import FolderFiles, read_object, read_text
from engine.checkpoint.sentencepiece_model import (
    CONTROL,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    SentencePieceModel,
    read_sentencepiece,
)
from engine.checkpoint.tekken_file import read_tekken, special_texts
from engine.checkpoint.token_files import TokenFiles, is_token_id, read_words
from engine.checkpoint.tokenizer_source import (
    MERGES,
    SENTENCE_PIECE,
    TEKKEN,
    VOCABULARY,
    WORDS,
)
from engine.errors import CheckpointError
from engine.text import tokenizer_parts as parts

_CONFIG = "tokenizer_config.json"
_HINT = "make tokenizer.json of it (transformers: AutoTokenizer, save_pretrained)"
_DIGITS_TOGETHER = re.compile(r"\d{2}|Ġ\d")
_RENUMBERED = frozenset(
    {"XLMRoberta", "Camembert", "MBart", "MBart50", "Nllb", "Barthez", "Pegasus", "XLNet"}
)
"""Classes that give a model's pieces other ids than its file."""


@dataclass(frozen=True, slots=True)
class _Folder:
    """A folder's files, and what they say of the class that reads them."""

    path: Path
    source: str
    """The file with the vocabulary."""
    tokens: TokenFiles
    config: Mapping[str, Any]
    """tokenizer_config.json."""
    model_type: str

    @property
    def kind(self) -> str:
        """The name of the class, without its ending; empty: no file names it."""
        return re.sub(r"Tokenizer(Fast)?$", "", str(self.config.get("tokenizer_class") or ""))

    def flag(self, key: str, *, usual: bool) -> bool:
        value = self.config.get(key)
        return value if isinstance(value, bool) else usual

    def mark(self, name: str, token_id: Callable[[str], int | None]) -> tuple[str, int] | None:
        """Find a special token by the name that files give it, with its id."""
        text = self.tokens.variables.get(name)
        found = None if text is None else token_id(text)
        return None if text is None or found is None else (text, found)

    def refuse(self, what: str) -> CheckpointError:
        where = str(self.path / self.source)
        return CheckpointError(what, where=where, hint=_HINT)


def build_tokenizer(folder: FolderFiles, tokens: TokenFiles) -> tokenizers.Tokenizer:
    """Build the tokenizer of a folder out of its source.

    Args:
        tokens: the source, and which tokens the folder's files name.

    Raises:
        CheckpointError: a file is damaged, or of a kind that is not served.
    """
    config, model = folder.object(_CONFIG), folder.object("config.json")
    assert tokens.source is not None, "checked by the caller"
    name = tokens.source.name
    files = _Folder(folder.path, name, tokens, config, str(model.get("model_type") or ""))
    return _BUILDERS[name](files)


def _sentence_piece(files: _Folder) -> tokenizers.Tokenizer:
    if files.kind in _RENUMBERED:
        raise files.refuse(f"{files.kind}Tokenizer numbers pieces in its own way")
    model = read_sentencepiece(files.path / SENTENCE_PIECE)
    has_prefix = files.flag("add_prefix_space", usual=model.has_prefix)
    whole = model.texts_of(USER_DEFINED)
    # found in the text as it was written where that makes no difference: some have thousands
    is_as_written = not (has_prefix or model.charsmap or model.joins_spaces)
    cut = () if is_as_written else tuple(whole)
    spelling = parts.Spelling(
        has_prefix,
        has_one_prefix=not files.flag("legacy", usual=True),
        charsmap=model.charsmap,
        joins_spaces=model.joins_spaces,
        is_literal=model.is_unigram or bool(cut),
        whole=cut,
    )
    backend = _unigram(model) if model.is_unigram else _scored_pairs(model, bool(cut))
    tokenizer = parts.sentence_piece(backend, spelling, has_bytes=model.has_bytes)
    special = model.texts_of(UNKNOWN, CONTROL).keys() | _chat_marks(whole)
    found = [text for text in whole if is_as_written and text not in special]
    spaces = [text for text in found if "▁" in text]  # in the text they are written as spaces
    parts.add_marks(tokenizer, [(text, True) for text in sorted(special)])
    parts.add_marks(tokenizer, [(text, False) for text in found if "▁" not in text])
    parts.add_marks(tokenizer, [(text, False) for text in spaces], is_normalised=True)
    _add_ends(tokenizer, files, begins=True)
    return tokenizer


def _unigram(model: SentencePieceModel) -> models.Unigram:
    pieces = list(zip(model.tokens, model.scores, strict=True))
    return models.Unigram(pieces, model.specials["unk_token"], model.has_bytes)


def _scored_pairs(model: SentencePieceModel, has_whole: bool) -> models.BPE:
    return models.BPE(
        parts.numbered(model.tokens),
        list(parts.scored_merges(model.texts_of(NORMAL), model.scores)),
        unk_token=model.tokens[model.specials["unk_token"]],
        fuse_unk=True,
        byte_fallback=model.has_bytes,
        ignore_merges=has_whole,  # what was cut out first is one token already
    )


def _chat_marks(texts: Iterable[str]) -> frozenset[str]:
    known = frozenset(texts)
    return (end_marks(known) | parts.BEGIN_MARKS) & known


def _add_ends(tokenizer: tokenizers.Tokenizer, files: _Folder, *, begins: bool) -> None:
    """Add the tokens before and after a plain text, unless tokenizer_config.json says otherwise."""
    wanted = {
        "bos_token": files.flag("add_bos_token", usual=begins),
        "eos_token": files.flag("add_eos_token", usual=False),
    }
    begin, end = (
        files.mark(name, tokenizer.token_to_id) if is_wanted else None
        for name, is_wanted in wanted.items()
    )
    parts.add_ends(tokenizer, begin, end)


def _tekken(files: _Folder) -> tokenizers.Tokenizer:
    found = read_tekken(files.path / TEKKEN)
    specials, tokens = special_texts(found), found.tokens
    texts = [*specials, *("".join(map(parts.BYTE_CHARACTERS.__getitem__, each)) for each in tokens)]
    ordinary = {text: token_id for token_id, text in enumerate(texts) if token_id >= len(specials)}
    scores = array("f", (-token_id for token_id in range(len(texts))))
    bpe = models.BPE(
        parts.numbered(texts), list(parts.scored_merges(ordinary, scores)), ignore_merges=True
    )
    tokenizer = parts.byte_level(bpe, [found.config.pattern])
    parts.add_marks(tokenizer, specials.items())
    _add_ends(tokenizer, files, begins=True)
    return tokenizer


def _merged_pairs(files: _Folder) -> tokenizers.Tokenizer:
    vocabulary = read_object(files.path / VOCABULARY)
    if not all(map(is_token_id, vocabulary.values())):
        raise files.refuse("it is no list of tokens with their ids")
    name = _cut(files, vocabulary)
    lines = read_text(files.path / MERGES).replace("\r\n", "\n").split("\n")
    pairs = [line.partition(" ") for line in lines if line and not line.startswith("#version")]
    bpe = models.BPE(vocabulary, [(left, right) for left, _, right in pairs])
    tokenizer = parts.byte_level(bpe, parts.CUTS[name], is_normalised=name in parts.NORMALISED)
    if files.flag("add_prefix_space", usual=False):
        if name != "gpt-2":
            raise files.refuse("add_prefix_space is known with GPT-2's way to cut text alone")
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    parts.add_marks(tokenizer, [(text, True) for text in sorted(_chat_marks(vocabulary))])
    if files.kind == "Roberta":
        begin, end = (files.mark(one, tokenizer.token_to_id) for one in _ENDS)
        parts.add_ends(tokenizer, begin, end, is_between=True)
    else:
        _add_ends(tokenizer, files, begins=False)
    return tokenizer


def _cut(files: _Folder, vocabulary: Iterable[str]) -> str:
    """Name the way to cut text, which the class knows and no file says.

    A vocabulary in which no digit is joined with anything was made with digits cut apart.
    """
    if files.model_type.startswith("qwen3_5"):
        return "qwen35"
    if files.kind == "Qwen2" or files.model_type.startswith("qwen"):
        return "qwen2"
    if files.kind not in ("", "GPT2", "CodeGen", "Roberta"):
        raise files.refuse(f"how {files.kind}Tokenizer cuts text is not known")
    joined = any(map(_DIGITS_TOGETHER.search, vocabulary))
    return "gpt-2" if joined or files.kind in ("CodeGen", "Roberta") else "starcoder"


_ENDS = ("bos_token", "eos_token")


def _word_pieces(files: _Folder) -> tokenizers.Tokenizer:
    vocabulary = {word: place for place, word in enumerate(read_words(files.path / WORDS))}
    unknown = files.tokens.variables.get("unk_token", "[UNK]")
    tokenizer = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token=unknown))
    accents = files.config.get("strip_accents")
    tokenizer.normalizer = normalizers.BertNormalizer(
        handle_chinese_chars=files.flag("tokenize_chinese_chars", usual=True),
        strip_accents=accents if isinstance(accents, bool) else None,
        lowercase=files.flag("do_lower_case", usual=True),
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    marks = [text for text in files.tokens.marks if text in vocabulary]
    parts.add_marks(tokenizer, [(text, True) for text in sorted(marks)])
    begin, end = (files.mark(one, tokenizer.token_to_id) for one in ("cls_token", "sep_token"))
    if begin is None or end is None:
        raise files.refuse("its tokens before and after a text are not in it")
    tokenizer.post_processor = processors.BertProcessing(end, begin)
    return tokenizer


_BUILDERS: dict[str, Callable[[_Folder], tokenizers.Tokenizer]] = {
    SENTENCE_PIECE: _sentence_piece,
    TEKKEN: _tekken,
    VOCABULARY: _merged_pairs,
    WORDS: _word_pieces,
}
