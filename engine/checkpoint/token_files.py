"""Read what a model folder says of special and added tokens.

Repositories of different years keep them in different files. The order is docs/models.md's.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.checkpoint.folder_files import FolderFiles, read_text
from engine.checkpoint.json_keys import MAX_INTEGER
from engine.checkpoint.sentencepiece_model import (
    CONTROL,
    UNKNOWN,
    USER_DEFINED,
    read_sentencepiece,
)
from engine.checkpoint.tokenizer_source import (
    SENTENCE_PIECE,
    TEKKEN,
    VOCABULARY,
    WHOLE,
    WORDS,
    TokenizerSource,
    tokenizer_source,
)
from engine.errors import CheckpointError

_CONFIG, ADDED_FILE = "tokenizer_config.json", "added_tokens.json"
SPECIAL_FILES = (_CONFIG, "special_tokens_map.json")
_ADDED = '"added_tokens"'
_FLAGS = ("lstrip", "rstrip", "single_word", "normalized")


def token_text(value: object) -> str | None:
    """Return the text of a special token, which may be an object with its content."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) and content else None


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token beside the ordinary vocabulary, as a file lists it."""

    text: str
    token_id: int
    is_special: bool
    """Replies omit it."""
    flags: Mapping[str, bool]
    """`lstrip` and the like, by the names of `tokenizers`."""


@dataclass(frozen=True, slots=True)
class TokenFiles:
    """What a folder's files say of tokens beside the ordinary vocabulary."""

    source: TokenizerSource | None
    """What the tokenizer is made from; None: no file has one."""
    own: Mapping[str, int]
    """The ids of its own tokens beside the ordinary ones, by text."""
    listed: Mapping[str, tuple[AddedToken, ...]]
    """Added tokens of the files beside it, by file."""
    named: Mapping[str, Mapping[str, str]]
    """Texts of `eos_token` and the like by name, by file; of two, the first file's is used."""
    variables: Mapping[str, str]
    """Those that templates use."""
    marks: frozenset[str]
    """Texts of all special tokens that a file names."""
    vocabulary: str
    """The text of its JSON, whose vocabulary may have named tokens as ordinary ones."""

    @property
    def ids(self) -> dict[str, int]:
        """Ids by text; of two, the tokenizer's is the one that is used."""
        beside = {each.text: each.token_id for listed in self.listed.values() for each in listed}
        return {**beside, **self.own}

    def token_id(self, text: str) -> int | None:
        """Find a named token's id, also in the ordinary vocabulary."""
        known = self.ids.get(text)
        if known is not None:
            return known
        for written in {json.dumps(text), json.dumps(text, ensure_ascii=False)}:
            if found := re.search(rf"{re.escape(written)}\s*:\s*(\d{{1,9}})\b", self.vocabulary):
                return int(found[1])
        return None

    def differing(self) -> list[str]:
        """Say what files say otherwise than the one that is used."""
        used = self.ids
        lines = [
            f"{file}: {each.text!r} is {each.token_id}, not {used[each.text]}"
            for file, listed in self.listed.items()
            for each in listed
            if each.token_id != used[each.text]
        ]
        first: dict[str, tuple[str, str]] = {}
        for file, texts in self.named.items():
            for name, text in texts.items():
                used_file, used_text = first.setdefault(name, (file, text))
                if text != used_text:
                    lines.append(f"{file}: {name} is {text!r}, not {used_text!r} of {used_file}")
        return lines


def read_token_files(folder: FolderFiles, wanted: str = "") -> TokenFiles:
    """Read every file of a folder that lists special or added tokens.

    Args:
        wanted: the file that the tokenizer is made from; empty: the preferred one.

    Raises:
        CheckpointError: one cannot be read.
    """
    files, path = {name: folder.object(name) for name in SPECIAL_FILES}, folder.path
    source = tokenizer_source(os.listdir(path) if path.is_dir() else (), wanted)
    found = _Own({}) if source is None else _READERS[source.name](path / source.name)
    decoder = files[_CONFIG].get("added_tokens_decoder")
    is_newer = isinstance(decoder, Mapping)  # transformers then does not read the older map
    order = SPECIAL_FILES if is_newer else SPECIAL_FILES[::-1]
    named = {name: special_tokens_of(files[name]) for name in order}
    first, second = (named[name] for name in order)
    usual = {name: text for name, text in found.named.items() if name not in files[_CONFIG]}
    if source is not None and usual:
        named[source.name] = usual
    marks = {text for texts in named.values() for text in texts.values()}
    marks |= set(_more_specials(files.values()))
    legacy = [
        AddedToken(text, token_id, text in marks, {"normalized": False})
        for text, token_id in folder.object(ADDED_FILE).items()
        if text and is_token_id(token_id)
    ]
    listed = {ADDED_FILE: tuple(legacy), _CONFIG: tuple(_decoder_entries(decoder))}
    listed = {file: each for file, each in listed.items() if each}
    variables = usual | (first if is_newer else second | first)
    return TokenFiles(
        source, found.ids, listed, named, variables, frozenset(marks), found.vocabulary
    )


def special_tokens_of(config: Mapping[str, Any]) -> dict[str, str]:
    """Return `bos_token` and similar tokens, which templates use as variables."""
    extra = config.get("extra_special_tokens")
    values = {**config, **(extra if isinstance(extra, dict) else {})}
    found = {name: token_text(value) for name, value in values.items() if name.endswith("_token")}
    return {name: text for name, text in found.items() if text is not None}


def _more_specials(files: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    for config in files:
        for key in ("additional_special_tokens", "extra_special_tokens"):
            values = config.get(key)
            values = values.values() if isinstance(values, dict) else values
            for value in values if isinstance(values, Iterable) else ():
                if text := token_text(value):
                    yield text


def _decoder_entries(decoder: object) -> Iterator[AddedToken]:
    """List the tokens of `added_tokens_decoder`, in the order of their ids."""
    entries = decoder.items() if isinstance(decoder, Mapping) else ()
    numbered = [(int(key), value) for key, value in entries if key.isdecimal() and len(key) < 10]
    for token_id, value in sorted(numbered, key=lambda each: each[0]):
        if text := token_text(value):
            flags = {name: value[name] for name in _FLAGS if type(value.get(name)) is bool}
            yield AddedToken(text, token_id, value.get("special") is True, flags)


@dataclass(frozen=True, slots=True)
class _Own:
    """What the file with the vocabulary says of tokens beside it."""

    ids: dict[str, int]
    named: dict[str, str] = field(default_factory=dict)
    vocabulary: str = ""


def _of_tokenizer_json(path: Path) -> _Own:
    text = read_text(path)
    ids = {
        content: token["id"]
        for token in _own_tokens(path, text)
        if isinstance(token, dict)
        and (content := token_text(token))
        and is_token_id(token.get("id"))
    }
    return _Own(ids, vocabulary=text)


def is_token_id(value: object) -> bool:
    """Say whether a value of a file can be a token id."""
    return type(value) is int and 0 <= value <= MAX_INTEGER


def _own_tokens(path: Path, text: str) -> list[Any]:
    """Read the added tokens of tokenizer.json."""
    at = text.find(_ADDED)
    start = text.find("[", at)
    if at < 0 or start < 0:
        return []
    try:  # the rest of the file, a vocabulary, takes a quarter of a second
        tokens, _ = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read it: {error}", where=str(path)) from error
    return list(tokens)


def _of_sentencepiece(path: Path) -> _Own:
    model = read_sentencepiece(path)
    named = {name: model.tokens[token_id] for name, token_id in model.specials.items()}
    return _Own(model.texts_of(UNKNOWN, CONTROL, USER_DEFINED), named)


def _of_tekken(path: Path) -> _Own:
    # commands import this file, and few need msgspec
    from engine.checkpoint.tekken_file import read_tekken_specials

    ids = {text: token_id for token_id, text in enumerate(read_tekken_specials(path))}
    return _Own(ids, {name: text for name, text in _TEKKEN.items() if text in ids})


def _of_words(path: Path) -> _Own:
    ids = {word: place for place, word in enumerate(read_words(path)) if _MARK.fullmatch(word)}
    return _Own(ids, {name: text for name, text in _WORDS.items() if text in ids})


def read_words(path: Path) -> list[str]:
    """Read vocab.txt, a token a line.

    Raises:
        CheckpointError: it cannot be read.
    """
    lines = read_text(path).replace("\r\n", "\n").split("\n")
    return lines if lines[-1] else lines[:-1]


_TEKKEN = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
_WORDS = {"cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"} | {
    "pad_token": "[PAD]", "mask_token": "[MASK]",
}  # fmt: skip
_MARK = re.compile(r"\[.+\]|<.+>")
_READERS: dict[str, Callable[[Path], _Own]] = {
    WHOLE: _of_tokenizer_json,
    SENTENCE_PIECE: _of_sentencepiece,
    TEKKEN: _of_tekken,
    VOCABULARY: lambda path: _Own({}, vocabulary=read_text(path)),
    WORDS: _of_words,
}
