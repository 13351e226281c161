"""Bound how long a token's text may become: tokens of a reply are decoded beside the loop's work.

Stages of a decoder follow each other, and each may multiply the text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

MAX_TOKEN_CHARS = 1 << 14
"""Published vocabularies have tokens of a few hundred characters."""
MAX_GROWTH = 64
"""Published decoders write at most three bytes for one."""
_GROWTH = {"ByteLevel": 3, "WordPiece": 2, "BPEDecoder": 2}
"""Maximum bytes for one of a stage; others write none that was not there."""


def decoder_stages(backend: Any) -> list[dict[str, Any]]:
    """List the stages of a tokenizer's decoder in order, as tokenizer.json has them."""
    if backend.decoder is None:
        return []
    # Its pickled state is its JSON; to_str() would write out the whole vocabulary.
    return list(_flat(json.loads(backend.decoder.__getstate__())))


def _flat(spec: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if "decoders" not in spec:
        yield spec
    for part in spec.get("decoders", ()):
        yield from _flat(part)


def check_token_texts(max_token_chars: int, stages: Iterable[Mapping[str, Any]]) -> None:
    """Refuse tokens whose text is too long, or that stages may make too long.

    Raises:
        ValueError: with the reason.
    """
    if max_token_chars > MAX_TOKEN_CHARS:
        raise ValueError(f"a token of {max_token_chars} characters, at most {MAX_TOKEN_CHARS}")
    growth = 1
    for stage in stages:
        growth *= _growth(stage)
        if growth > MAX_GROWTH:
            raise ValueError(f"a decoder that makes a text over {MAX_GROWTH} times as long")


def _growth(stage: Mapping[str, Any]) -> int:
    if stage["type"] != "Replace":
        return _GROWTH.get(stage["type"], 1)
    pattern = stage["pattern"].get("String")
    if not pattern:  # nothing bounds how often, or how long, an expression is looked for
        raise ValueError("a decoder that replaces by a regular expression or an empty text")
    return max(-(-len(stage["content"].encode()) // len(pattern.encode())), 1)
