"""Describe weights that stay on disk as a part of a frame."""

from __future__ import annotations

import msgspec


class OffloadFrame(msgspec.Struct):
    """Weights that steps read from disk, as CPUs serve a model larger than memory."""

    disk_bytes: int
    """Bytes of weights that each step reads."""
    weights_bytes: int
    """Bytes of all weights."""
    resident_bytes: int | None
    """Their bytes in memory now, from a sample of pages; None: the kernel hides it."""
