"""Define which prompts may share cached blocks.

Never: holds a secret itself, only a hash with it. Imports nothing: the command starts quickly.
"""

from __future__ import annotations

from typing import NamedTuple


class CacheScope(NamedTuple):
    """Mark the chains of hashes of prompts that share cached blocks."""

    root: bytes
    """Every chain of the scope begins with it, and no other chain does."""
    is_secret: bool = False
    """A client's salt is in it: its blocks never reach a disk, and are never listed."""
    model: bytes = b""
    """Equal for all scopes of one model with one cache key, and for no others."""
