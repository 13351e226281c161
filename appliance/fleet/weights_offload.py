"""Decide how many bytes of the weights stay on disk, and what that leaves for the KV pools.

Invariant: weights that fit into memory stay there; what is refused is refused before anything is
made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from appliance.configuration.setting_kinds import MIN_BYTES, size_setting
from appliance.configuration.settings import ServeConfig
from appliance.fleet.placement import Placement
from appliance.fleet.weights_file import check_room, folder_of, identity_of
from appliance.fleet.weights_plan import WeightsPlan
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.layer_units import names_by_unit, units_on_disk, weight_bytes
from engine.errors import ConfigError, unreadable
from engine.units import size_text

WORKER_BYTES = 320 << 20
"""Memory of a worker's process besides weights and pools."""
UNITS_AHEAD = 2
"""Units on disk that a worker has in memory: one is computed, and one is read."""
LEAST_KV_SHARE = 4
"""Weights may leave KV this part of its usual memory."""


@dataclass(frozen=True, slots=True)
class Offload:
    """Weights that steps read from disk."""

    disk_bytes: int
    """What a step reads."""
    weights_bytes: int
    held_bytes: int
    """Their memory, with what is being read."""
    identity: bytes | None
    """The identity of their file; None: they are mapped from the model's files."""

    @property
    def words(self) -> str:
        """Describe it for people."""
        disk, whole = size_text(self.disk_bytes), size_text(self.weights_bytes)
        return f"each step reads {disk} of {whole} from disk"


class MemoryShares(NamedTuple):
    """How weights and KV divide the memory."""

    offload: Offload | None
    kv_bytes: int | None
    """KV memory that is left; None: as placed."""
    notes: tuple[str, ...] = ()
    """State, cause and action, for the operator."""


class _Sizes(NamedTuple):
    total: int
    units: Sequence[int]
    kv: int
    """KV memory as placed, and the least."""
    least_kv: int
    room: int
    """Memory for weights and KV."""
    num_workers: int

    @property
    def ahead(self) -> int:
        """Bytes of layers that all workers together read ahead."""
        return UNITS_AHEAD * max(self.units) * self.num_workers

    def held_with(self, num_bytes: int) -> tuple[int, int]:
        """Return what stays on disk if `num_bytes` should, and what memory then holds."""
        on_disk = sum(self.units[unit] for unit in units_on_disk(self.units, num_bytes))
        return on_disk, min(self.total - on_disk + self.ahead, self.total)


def share_memory(
    config: ServeConfig,
    checkpoint: Checkpoint,
    dtype: str,
    placement: Placement,
    weights: WeightsPlan,
    memory_bytes: int,
) -> MemoryShares:
    """Divide the memory between weights and KV.

    Raises:
        ConfigError: the setting cannot be followed, or nothing fits.
    """
    asked = config.offload_weights
    if any(plan.gpu is not None for plan in placement.workers):
        if isinstance(asked, int):
            what = "weights cannot stay on disk on GPUs yet"
            hint = "leave it out, or serve with --devices cpu"
            raise ConfigError(what, where="offload_weights", hint=hint)
        return MemoryShares(None, None)
    sizes = _sizes(config, checkpoint, dtype, placement, weights, memory_bytes)
    if isinstance(asked, int):
        if asked > sum(sizes.units):
            what = f"{size_text(asked)} on disk, and the layers have {size_text(sum(sizes.units))}"
            hint = f"at most {size_setting(sum(sizes.units))}, or auto"
            raise ConfigError(what, where="offload_weights", hint=hint)
        return _shares(config, checkpoint, dtype, weights, sizes, asked)
    missing = sizes.total + sizes.least_kv - sizes.room
    if missing <= 0:
        return MemoryShares(None, _kv_left(sizes, sizes.total))
    wanted = min(sizes.total + sizes.kv - sizes.room + sizes.ahead, sum(sizes.units))
    try:
        return _shares(config, checkpoint, dtype, weights, sizes, wanted)
    except ConfigError:
        if sizes.total > memory_bytes:
            raise
        return MemoryShares(None, None)  # a tight fit, as ever


def pool_bytes(placement: Placement) -> int:
    """Return the KV memory as placed."""
    return sum(pool.num_blocks for pool in placement.topology.pools) * placement.block_bytes


def least_pool_bytes(config: ServeConfig, placement: Placement) -> int:
    """Return the KV memory that weights must leave: a part of what is placed, or all as asked."""
    kv = pool_bytes(placement)
    return kv if config.kv_memory_bytes is not None else kv // LEAST_KV_SHARE


def _sizes(
    config: ServeConfig,
    checkpoint: Checkpoint,
    dtype: str,
    placement: Placement,
    weights: WeightsPlan,
    memory_bytes: int,
) -> _Sizes:
    found = weight_bytes(checkpoint, dtype, weights.layout)
    units = [
        sum(found[name] for name in names) for names in names_by_unit(found, checkpoint.config)
    ]
    kv, least = pool_bytes(placement), least_pool_bytes(config, placement)
    num_workers = len(placement.workers)
    room = memory_bytes - num_workers * WORKER_BYTES
    return _Sizes(sum(found.values()), units, kv, least, room, num_workers)


def _shares(
    config: ServeConfig,
    checkpoint: Checkpoint,
    dtype: str,
    weights: WeightsPlan,
    sizes: _Sizes,
    num_bytes: int,
) -> MemoryShares:
    """Leave a number of bytes on disk."""
    on_disk, held = sizes.held_with(num_bytes)
    needed = held + sizes.least_kv
    if needed > sizes.room:
        short = size_setting(max(needed - sizes.room, MIN_BYTES))
        what = f"{size_text(max(sizes.room, 0))} of memory for weights and KV, {short} too little"
        hint = "set a smaller kv_memory, or serve with --roles colocated"
        raise ConfigError(what, where="offload_weights", hint=hint)
    identity = None
    if weights.layout is not None:
        try:
            identity = identity_of(checkpoint, dtype, weights.layout, weights.weights)
        except OSError as error:
            raise unreadable(checkpoint.folder, error) from error
        check_room(folder_of(config), identity, weights.layout.num_bytes)
    offload = Offload(on_disk, sizes.total, held, identity)
    why = f"Weights exceed memory ({size_text(sizes.room)} left)"
    if config.offload_weights != "auto":
        why = "Weights on disk, as configured"
    return MemoryShares(offload, _kv_left(sizes, held), (f"{why}: {offload.words}.",))


def _kv_left(sizes: _Sizes, held_bytes: int) -> int | None:
    """Return the KV memory beside the weights; None: all that was placed."""
    left = sizes.room - held_bytes
    return None if left >= sizes.kv else max(left, sizes.least_kv)
