"""Read a SentencePiece model: its pieces, and what it does with a text before it looks for them.

The file is one message of protocol buffers, a list of numbered fields. Only the fields that change
ids are kept.
Invariant: no length of the file is believed before it is compared with what is left.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.checkpoint.model_file import read_model_bytes
from engine.errors import CheckpointError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
"""Kinds of pieces; GGUF numbers tokens alike."""
_UNIGRAM, _BPE = 1, 2
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_PIECE, _SCORE, _KIND = 1, 2, 3
_MODEL_TYPE, _HAS_SUFFIXES, _HAS_BYTES, _UNKNOWN_ID, _BEGIN_ID, _END_ID, _PAD_ID = (
    3, 24, 35, 40, 41, 42, 43,
)  # fmt: skip
_CHARSMAP, _HAS_PREFIX, _JOINS_SPACES, _ESCAPES = 2, 3, 4, 5
_VARINT, _EIGHT, _BYTES, _FOUR = 0, 1, 2, 5
_MAX_VARINT_BYTES = 10
_SIGN = 1 << 63
_HINT = "make tokenizer.json of it (transformers: AutoTokenizer, save_pretrained)"


@dataclass(frozen=True, slots=True)
class SentencePieceModel:
    """Pieces by id, and the rules of a model."""

    tokens: list[str]
    scores: array[float]
    kinds: array[int]
    is_unigram: bool
    has_bytes: bool
    specials: dict[str, int]
    """Ids of `unk_token`, `bos_token`, `eos_token` and `pad_token`; missing ones are left out."""
    charsmap: bytes
    has_prefix: bool
    joins_spaces: bool

    def texts_of(self, *kinds: int) -> dict[str, int]:
        """List the pieces of some kinds by text, with ids."""
        return {
            token: token_id
            for token_id, (token, kind) in enumerate(zip(self.tokens, self.kinds, strict=True))
            if kind in kinds and token
        }


def read_sentencepiece(path: Path) -> SentencePieceModel:
    """Read a file.

    Raises:
        CheckpointError: it is no such model, is damaged, or has what is not served.
    """
    data = read_model_bytes(path)
    if data[:1] != b"\x0a":  # the first field of each such file is a piece
        raise CheckpointError("not a SentencePiece model", where=str(path), hint=_HINT)
    try:
        return _parsed(memoryview(data))
    except _Damaged as error:
        hint = "download the file again"
        raise CheckpointError(f"damaged: {error}", where=str(path), hint=hint) from error
    except NotImplementedError as error:
        raise CheckpointError(str(error), where=str(path), hint=_HINT) from error


class _Damaged(Exception):
    """A field contradicts the file."""


def _parsed(data: memoryview) -> SentencePieceModel:
    tokens: list[str] = []
    scores, kinds = array("f"), array("i")
    trainer: dict[int, int | memoryview] = {}
    normalizer: dict[int, int | memoryview] = {}
    for number, value in _fields(data):
        if number == _PIECES:
            piece = dict(_fields(_message(value)))
            tokens.append(_text(piece.get(_PIECE, memoryview(b""))))
            scores.append(_float(piece.get(_SCORE, 0)))
            kinds.append(_number(piece.get(_KIND, 1)))
        elif number == _TRAINER:
            trainer |= _fields(_message(value))
        elif number == _NORMALIZER:
            normalizer |= _fields(_message(value))
    kind = _number(trainer.get(_MODEL_TYPE, _UNIGRAM))
    if kind not in (_UNIGRAM, _BPE):
        raise NotImplementedError(f"model_type {kind}; unigram (1) and BPE (2) are served")
    if _number(trainer.get(_HAS_SUFFIXES, 0)) or not _number(normalizer.get(_ESCAPES, 1)):
        raise NotImplementedError("white space is not kept as a prefix of pieces")
    return SentencePieceModel(
        tokens,
        scores,
        kinds,
        is_unigram=kind == _UNIGRAM,
        has_bytes=bool(_number(trainer.get(_HAS_BYTES, 0))),
        specials=_specials(trainer, len(tokens)),
        charsmap=bytes(_message(normalizer.get(_CHARSMAP, memoryview(b"")))),
        has_prefix=bool(_number(normalizer.get(_HAS_PREFIX, 1))),
        joins_spaces=bool(_number(normalizer.get(_JOINS_SPACES, 1))),
    )


def _specials(trainer: dict[int, int | memoryview], num_tokens: int) -> dict[str, int]:
    fields = {"unk_token": (_UNKNOWN_ID, 0), "bos_token": (_BEGIN_ID, 1)} | {
        "eos_token": (_END_ID, 2), "pad_token": (_PAD_ID, -1),
    }  # fmt: skip
    ids = {name: _number(trainer.get(field, usual)) for name, (field, usual) in fields.items()}
    if not 0 <= ids["unk_token"] < num_tokens:
        raise _Damaged(f"unk_id is {ids['unk_token']} of {num_tokens} pieces")
    return {name: token_id for name, token_id in ids.items() if 0 <= token_id < num_tokens}


def _fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Yield a message's fields by number; numbers as they are, everything else as bytes."""
    at, size = 0, len(data)
    while at < size:
        key, at = _varint(data, at)
        kind = key & 7
        if kind == _VARINT:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if kind == _BYTES:
            length, at = _varint(data, at)
        elif kind in (_EIGHT, _FOUR):
            length = 8 if kind == _EIGHT else 4
        else:
            raise _Damaged(f"field {key >> 3} has type {kind}")
        if length > size - at:
            raise _Damaged(f"field {key >> 3} has {length} bytes, and {size - at} are left")
        yield key >> 3, data[at : at + length]
        at += length


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """Read a number of seven bits a byte, the lowest first; return the place behind it, too."""
    value = 0
    for place, byte in enumerate(data[at : at + _MAX_VARINT_BYTES]):
        value |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return value, at + place + 1
    raise _Damaged("a number has no end")


def _message(value: int | memoryview) -> memoryview:
    if isinstance(value, int):
        raise _Damaged("a number stands for a message")
    return value


def _number(value: int | memoryview) -> int:
    """Read a whole number, which may be negative, in 32 bits."""
    if not isinstance(value, int):
        raise _Damaged("a message stands for a number")
    number = value - (_SIGN << 1) if value >= _SIGN else value
    if not -(1 << 31) <= number < 1 << 31:
        raise _Damaged(f"{number} does not fit into 32 bits")
    return number


def _float(value: int | memoryview) -> float:
    if isinstance(value, int):
        return float(value)
    if len(value) != 4:
        raise _Damaged("a score does not have 4 bytes")
    score: float = struct.unpack("<f", value)[0]
    if score != score:
        raise _Damaged("a score is no number")
    return score


def _text(value: int | memoryview) -> str:
    try:
        return str(_message(value), "utf-8")
    except UnicodeDecodeError as error:
        raise _Damaged(f"a piece is not UTF-8: {error}") from error
