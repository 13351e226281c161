"""Read tekken.json, Mistral's own list of byte-level tokens.

Invariant: ranks are places, and counts are compared with what is listed.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from engine.checkpoint.model_file import read_model_bytes
from engine.errors import CheckpointError

_FILLER = "<SPECIAL_{}>"
_USUAL = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]",
    "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]",
    "[TOOL_CONTENT]",
)  # fmt: skip
"""Special tokens of files that list none, as mistral-common has them."""
_MAX_SPECIALS = 1 << 16


class _Token(msgspec.Struct):
    rank: int
    token_bytes: bytes  # base64, which the decoder knows


class _Special(msgspec.Struct):
    rank: int
    token_str: str
    is_control: bool = True


class _Config(msgspec.Struct):
    pattern: str
    default_vocab_size: int | None = None
    default_num_special_tokens: int | None = None


class _Specials(msgspec.Struct):
    config: _Config
    special_tokens: list[_Special] | None = None


class Tekken(_Specials):
    """A file's tokens; the ids of ordinary ones follow the special ones."""

    vocab: list[_Token] = []

    @property
    def tokens(self) -> list[bytes]:
        """Ordinary tokens in order, without those beyond the stated size."""
        size = self.config.default_vocab_size
        num_used = None if size is None else size - len(special_texts(self))
        return [each.token_bytes for each in self.vocab[:num_used]]


def read_tekken(path: Path) -> Tekken:
    """Read all of a file.

    Raises:
        CheckpointError: it is no such file, or contradicts itself.
    """
    found = _decoded(path, Tekken)
    if [each.rank for each in found.vocab] != list(range(len(found.vocab))):
        raise CheckpointError("its tokens are not in the order of their ranks", where=str(path))
    size = found.config.default_vocab_size
    if size is not None and not 0 < size - len(special_texts(found)) <= len(found.vocab):
        what = f"{len(found.vocab)} tokens are listed for default_vocab_size {size}"
        raise CheckpointError(what, where=str(path))
    return found


def read_tekken_specials(path: Path) -> dict[str, bool]:
    """List the special tokens in the order of their ids, and say which of them are control tokens.

    Raises:
        CheckpointError: as read_tekken().
    """
    return special_texts(_decoded(path, _Specials))


def special_texts(found: _Specials) -> dict[str, bool]:
    """List special tokens, as read_tekken_specials()."""
    listed = found.special_tokens
    if listed is None:
        texts = dict.fromkeys(_USUAL, True)
    else:
        ranked = sorted(listed, key=lambda each: each.rank)
        texts = {each.token_str: each.is_control for each in ranked}
    count = found.config.default_num_special_tokens
    more = range(len(texts), len(texts) if count is None else count)
    return texts | {_FILLER.format(number): True for number in more}


_File = TypeVar("_File", bound=_Specials)


def _decoded(path: Path, kind: type[_File]) -> _File:
    try:
        found = msgspec.json.decode(read_model_bytes(path), type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise CheckpointError(f"cannot read it: {error}", where=str(path)) from error
    ranks = sorted(each.rank for each in found.special_tokens or ())
    if ranks != list(range(len(ranks))):
        raise CheckpointError("ranks of special tokens leave a gap", where=str(path))
    count = found.config.default_num_special_tokens
    if count is not None and not len(ranks) <= count <= _MAX_SPECIALS:
        what = f"default_num_special_tokens is {count}, and {len(ranks)} are listed"
        raise CheckpointError(what, where=str(path))
    if len(special_texts(found)) < (len(ranks) if count is None else count):
        raise CheckpointError("two special tokens are alike", where=str(path))
    return found
