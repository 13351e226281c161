"""Describe one KV tier as a part of a frame.

Owns: the tier's fields.
Invariant: counts are since the daemon started; None is not reported.
Never: knows the store.
"""

from __future__ import annotations

from typing import Any

import msgspec


def fields(frame: msgspec.Struct) -> dict[str, Any]:
    """A frame's values by the names of its fields, parts of it as they are."""
    return msgspec.structs.asdict(frame)


class TierFrame(msgspec.Struct):
    """One cache below the KV pools, and what it has earned."""

    state: str
    """`on`, `opening`, `off`, `failed` where it was asked for and cannot be had, or `down` while
    it cannot be relied on."""
    reason: str
    """Why it is not on; empty if it is."""
    folder: str
    """Of the cache on disk; empty for the other."""
    blocks: int = 0
    num_bytes: int = 0
    """Of these blocks."""
    max_bytes: int = 0
    """Of all blocks that its cap has room for."""
    waiting: int = 0
    """Prompts that wait for blocks from it now."""
    stored_blocks: int = 0
    loaded_blocks: int = 0
    loaded_tokens: int = 0
    loads: int = 0
    """Prompts that have waited for blocks, in vain or not."""
    declined_loads: int = 0
    """Where computing was predicted to take less."""
    load_ms: float = 0.0
    """What those prompts have waited, all together."""
    compute_ms: float = 0.0
    """What computing the same was predicted to take."""
    regret_ms: float = 0.0
    """What loads took beyond that."""
    missed_deadlines: int = 0
    evicted_blocks: int = 0
    expired_blocks: int = 0
    damaged_blocks: int = 0
    """Found out by their checksums, dropped, and computed again."""
    failed_stores: int = 0
    would_find: dict[str, float] = {}
    reuse_distances: dict[str, int] = {}
    """These two are old: only recordings have them."""
    read_bytes_per_s: float | None = None
    """What a probe found that loads get from it; None: it is not on."""
    limit: str = ""
    """Why it takes less than `max_bytes`: its disk is full, or refuses. Empty: it does not."""
    other_models: dict[str, int] = {}
    """Bytes of blocks that it keeps of models that are not served now, by the model's name."""
