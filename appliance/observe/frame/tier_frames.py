"""Describe one KV tier as a part of a frame.

Invariant: counts are since the daemon started; None is not reported.
"""

from __future__ import annotations

from typing import Any

import msgspec


def fields(frame: msgspec.Struct) -> dict[str, Any]:
    """Return a frame's values by field name; nested parts stay frames."""
    return msgspec.structs.asdict(frame)


class TierFrame(msgspec.Struct):
    """One cache below the KV pools, with its figures."""

    state: str
    """`on`, `opening`, `off`, `failed` if it is configured but unavailable, or `down` while it
    fails."""
    reason: str
    """Why it is not on; empty if it is."""
    folder: str
    """The folder of the disk cache; empty for the DRAM cache."""
    blocks: int = 0
    num_bytes: int = 0
    """Bytes of cached blocks."""
    max_bytes: int = 0
    """Maximum bytes of cached blocks."""
    waiting: int = 0
    """Prompts waiting for blocks from it now."""
    stored_blocks: int = 0
    loaded_blocks: int = 0
    loaded_tokens: int = 0
    loads: int = 0
    """Prompts that waited for blocks, successfully or not."""
    declined_loads: int = 0
    """Prompts with cached blocks that were predicted to compute faster."""
    load_ms: float = 0.0
    """Total time that prompts waited for loads."""
    compute_ms: float = 0.0
    """Total predicted time of computing the loaded tokens."""
    regret_ms: float = 0.0
    """Excess load time over the predicted computing."""
    missed_deadlines: int = 0
    evicted_blocks: int = 0
    expired_blocks: int = 0
    damaged_blocks: int = 0
    """Blocks with a wrong checksum, dropped and computed again."""
    failed_stores: int = 0
    read_bytes_per_s: float | None = None
    """Read rate measured by a probe; None: it is not on."""
    limit: str = ""
    """Why it holds less than `max_bytes`: its disk is full or rejects writes. Empty: it does not.
    """
    other_models: dict[str, int] = {}
    """Bytes of blocks kept for models that are not served now, by model."""
