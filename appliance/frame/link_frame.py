"""One link between two pools as a part of a frame.

Owns: the record. Never: reads anything.
"""

from __future__ import annotations

import msgspec


class LinkFrame(msgspec.Struct):
    """How blocks get from one pool to another."""

    from_pool: str
    to_pool: str
    transport: str
    """`peer` or `shm`: as it is now."""
    probe_bytes_per_s: float | None
    """Of blocks there and back, found unchanged at start; None: not tried yet."""
    copy_bytes_per_s: float | None
    """While it copies, lately; None: it has not copied yet."""
    bytes_per_s: float
    """That have arrived, since the last frame."""
    down: str | None = None
    """Why `transport` is not what was placed; None: it is."""
    has_detour: bool = False
    """It goes from one device's memory into another's."""
    num_bytes: int = 0
    """That have ever arrived."""
    num_strikes: int = 0
    """Copies in a row that failed or came to less than half of what the try at start did."""
