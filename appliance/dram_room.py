"""How large a DRAM cache below the KV pools is.

Owns: its size when nobody says.
Invariant: pure; where pools are in the host's memory themselves, there is none unless it is asked
for: it would copy DRAM to DRAM.
Never: takes memory.
"""

from __future__ import annotations

from appliance.placement import Placement
from appliance.setting_kinds import size_text
from engine.errors import ConfigError

FREE_SHARE = 8
"""Below GPUs, without a size, this part of the host's free memory..."""
MAX_DEFAULT_BYTES = 8 << 30
"""...and at most this: the workers pin it."""


def num_arena_blocks(asked: int | str, placement: Placement, free_bytes: int) -> int:
    """Blocks that it holds; 0: there is none.

    Args:
        asked: a size in bytes, `auto` or `off`.
        placement: where pools are, and how large a block is.
        free_bytes: of the host's memory.

    Raises:
        ConfigError: there is less than was asked for.
    """
    if isinstance(asked, int):
        if asked > free_bytes:
            what = f"{size_text(asked)} of DRAM cache, and {size_text(free_bytes)} of memory free"
            raise ConfigError(what, where="dram_cache", hint="ask for less, or for off")
        return asked // placement.block_bytes
    is_on_gpu = any(worker.gpu is not None for worker in placement.workers)
    if asked == "off" or not is_on_gpu:
        return 0
    return min(free_bytes // FREE_SHARE, MAX_DEFAULT_BYTES) // placement.block_bytes
