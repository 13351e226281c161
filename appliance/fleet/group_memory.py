"""Count what workers of several processes hold, and refuse workers without room in memory.

Invariant: what is refused is refused before anything is made, with what would fit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from appliance.configuration.setting_kinds import MIN_BYTES
from appliance.configuration.settings import ServeConfig
from appliance.fleet.placement import Placement
from appliance.fleet.weights_offload import (
    WORKER_BYTES,
    MemoryShares,
    least_pool_bytes,
    pool_bytes,
    share_memory,
)
from appliance.fleet.weights_plan import WeightsPlan
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.shard_bytes import group_bytes
from engine.checkpoint.weights_layout import AT_START, panels_layout
from engine.errors import ConfigError
from engine.units import size_text

_NO_GROUP = "leave + out of --place"


class _Wanted(NamedTuple):
    """What is to be placed, and the memory for it."""

    config: ServeConfig
    checkpoint: Checkpoint
    dtype: str
    placement: Placement
    weights: WeightsPlan
    memory_bytes: int

    @property
    def least_kv(self) -> int:
        return least_pool_bytes(self.config, self.placement)

    @property
    def widths(self) -> list[int]:
        """Processes of each worker."""
        return [len(plan.ranks) for plan in self.placement.workers]

    def left_by(self, widths: list[int]) -> int:
        """Return the memory that workers of these widths leave for KV."""
        is_packed, left = self.weights.variants is not None, self.memory_bytes
        for width in widths:
            each = group_bytes(self.checkpoint, self.dtype, width, is_packed=is_packed)
            left -= sum(each.own) + each.sums + width * WORKER_BYTES
        return left - each.mapped

    def ways(self) -> Iterator[str]:
        """Yield what would fit, the nearest to what was asked for first."""
        widths, left = self.widths, self.left_by(self.widths)
        if self.config.kv_memory_bytes is not None and left >= MIN_BYTES:
            yield f"at most --kv-memory {size_text(left)}"
        fewer = [min(width, 2) for width in widths]
        if fewer != widths and self.left_by(fewer) >= self.least_kv:
            yield "2 processes a worker"
        if len(widths) > 1 and self.left_by([max(widths)]) >= self.least_kv:
            yield "--roles colocated, which is one worker"
        for bits in AT_START if self.checkpoint.is_plain else ():
            layout = panels_layout(self.checkpoint, self.dtype, bits)
            taken = len(widths) * WORKER_BYTES + self.least_kv
            if layout is not None and layout.num_bytes + taken <= self.memory_bytes:
                yield f"{_NO_GROUP}, and add --weights {bits}"
                break
        try:
            alone = share_memory(*self)
        except ConfigError:
            return
        about = "one copy fits" if alone.offload is None else alone.offload.words
        yield f"{_NO_GROUP}: {about}"


def share_group_memory(
    config: ServeConfig,
    checkpoint: Checkpoint,
    dtype: str,
    placement: Placement,
    weights: WeightsPlan,
    memory_bytes: int,
) -> MemoryShares:
    """Leave the pools what all processes leave, as share_memory() does.

    Raises:
        ConfigError: the processes do not fit.
    """
    wanted = _Wanted(config, checkpoint, dtype, placement, weights, memory_bytes)
    left, kv = wanted.left_by(wanted.widths), pool_bytes(placement)
    if left >= wanted.least_kv:
        return MemoryShares(None, None if left >= kv else left)
    needed = memory_bytes - left + wanted.least_kv
    what = f"{sum(wanted.widths)} processes need {size_text(needed)} of memory"
    hint = "; or ".join(wanted.ways()) or "serve a smaller model, or one of fewer bits"
    raise ConfigError(f"{what}, and {size_text(memory_bytes)} are free", where="place", hint=hint)
