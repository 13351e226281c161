"""Spread workers over GPUs, MIG instances and cores, with links between them.

Invariant: pools of one daemon have one layout and KV dtype; each choice has its reason in words; an
impossible setting is refused with the possible ones.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from appliance.devices.gpu_list import Gpu
from appliance.devices.inventory import Inventory
from appliance.fleet.placement import (
    CPU_STEP_TOKENS,
    MAX_STAGING_BYTES,
    MAX_STAGING_SLOTS,
    MIN_BLOCKS,
    MIN_STAGING_SLOTS,
    Placement,
    WorkerPlan,
    cpu_names,
    default_kv_bytes,
)
from appliance.hub.fits import GPU_OVERHEAD_BYTES
from engine.checkpoint.model_config import ModelConfig
from engine.errors import ConfigError
from engine.scheduler.cache.block_pool import MIN_RECORDS
from engine.scheduler.cache.topology import STAGING, Topology, make_topology
from engine.units import size_text

GPU_STEP_TOKENS = 4096
"""Prompt tokens per step at which a GPU's products come near their best rate."""
MAX_SEQUENCES = 256
"""Maximum full-length sequences per pool; more cannot run at once."""


@dataclass(frozen=True, slots=True)
class WorkerDevice:
    """The GPU or the cores that one worker computes on."""

    name: str
    """The worker's name."""
    gpu: Gpu | None
    cpus: tuple[int, ...] = ()
    """The worker's own cores; for a worker on a GPU they are chosen later."""

    @property
    def device(self) -> str:
        """The name of its GPU or cores, for people."""
        return cpu_names(self.cpus) if self.gpu is None else self.gpu.name


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The model's sizes that placement depends on, in the chosen dtype and block size."""

    weights_bytes: int
    block_bytes: int
    block_size: int
    max_model_len: int
    """The longest sequence to serve."""
    record_blocks: int = 0
    """Blocks of one sequence's record of recurrent states; 0: the model keeps none."""

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        weights_bytes: int,
        dtype: str,
        block_size: int,
        wanted: int | None,
    ) -> ModelShape:
        """Compute the shape of a model served in this dtype."""
        longest = config.max_position_embeddings
        block_bytes = config.kv_block_bytes(block_size, dtype)
        max_model_len = min(wanted or longest, longest)
        record_blocks = config.record_blocks(block_size, dtype)
        return cls(weights_bytes, block_bytes, block_size, max_model_len, record_blocks)

    @property
    def full_length_bytes(self) -> int:
        """Bytes of one request of maximum length, with its records."""
        num_blocks = -(-self.max_model_len // self.block_size)
        return (num_blocks + MIN_RECORDS * self.record_blocks) * self.block_bytes

    @property
    def min_blocks(self) -> int:
        """Fewest blocks of a pool that serves anything."""
        return MIN_BLOCKS + MIN_RECORDS * self.record_blocks

    def room_bytes(self, gpu: Gpu) -> int:
        """Estimate the bytes that a GPU has left for KV; the worker measures them later."""
        return gpu.memory_bytes - self.weights_bytes - GPU_OVERHEAD_BYTES


def too_small(gpu: Gpu, shape: ModelShape) -> str | None:
    """Explain why a GPU cannot hold even the weights; None: it can."""
    short_bytes = shape.min_blocks * shape.block_bytes - shape.room_bytes(gpu)
    if short_bytes <= 0:
        return None
    return (
        f"{gpu.name} has {size_text(gpu.memory_bytes)}; the weights "
        f"({size_text(shape.weights_bytes)}) and a worker's buffers need "
        f"{size_text(gpu.memory_bytes + short_bytes)}"
    )


def check_weights(gpus: Sequence[Gpu], shape: ModelShape, where: str) -> None:
    """Refuse a GPU that cannot hold even the weights.

    Raises:
        ConfigError: naming it, the shortage and the alternatives.
    """
    for gpu in gpus:
        reason = too_small(gpu, shape)
        if reason is not None:
            what = "a larger MIG instance" if gpu.is_instance else "a larger GPU"
            hint = (
                f"{what}, a smaller or quantised model, or --devices cpu; see penstock models show"
            )
            raise ConfigError(reason, where=where, hint=hint)


def spread(
    prefill: Sequence[WorkerDevice],
    decode: Sequence[WorkerDevice],
    inventory: Inventory,
    shape: ModelShape,
    *,
    transport: str,
    kv_memory_bytes: int | None,
    reasons: Sequence[str] = (),
) -> Placement:
    """Choose devices, cores and pools for workers of which at least one is on a GPU.

    Args:
        prefill: devices that prefill, no GPU twice.
        decode: devices that decode, no GPU twice and none of `prefill`.
        inventory: for links, cores and memory.
        transport: `auto`, `peer` or `shm`.
        kv_memory_bytes: of all pools together; None: as much as is useful.

    Raises:
        ConfigError: a transport or a pool is impossible.
    """
    spots = [*prefill, *decode]
    gpus = [spot.gpu for spot in spots if spot.gpu is not None]
    check_weights(gpus, shape, "place")
    links = {
        (one.name, other.name): _transport(one, other, inventory, transport)
        for one, other in itertools.product(prefill, decode)
    }
    topology = make_topology(
        [spot.name for spot in prefill],
        [spot.name for spot in decode],
        {pair: kind for pair, (kind, _) in links.items()},
        in_workers={spot.name for spot in spots if spot.gpu is not None},
        buses={spot.name: "host" if spot.gpu is None else spot.gpu.board for spot in spots},
    )
    rooms = _rooms(spots, inventory, shape, kv_memory_bytes)
    topology = topology.with_pools(_counts(topology, rooms, shape))
    cores = _cores(spots, inventory)
    held = min(pool.num_blocks for pool in topology.pools if pool.tier == "device") - 1
    held -= MIN_RECORDS * shape.record_blocks
    return Placement(
        topology=topology,
        workers=tuple(
            WorkerPlan(spot.name, cores[spot.name], topology.pool_of(spot.name), spot.gpu)
            for spot in spots
        ),
        block_bytes=shape.block_bytes,
        max_model_len=min(shape.max_model_len, held * shape.block_size),
        max_num_batched_tokens=GPU_STEP_TOKENS if gpus else CPU_STEP_TOKENS,
        block_size=shape.block_size,
        record_blocks=shape.record_blocks,
        reasons=(*reasons, *_link_reasons(links), *_core_reasons(spots, cores, inventory)),
    )


def _transport(
    one: WorkerDevice, other: WorkerDevice, inventory: Inventory, asked: str
) -> tuple[str, str]:
    """Choose how blocks go from one device to the other, and say why."""
    best, why = _best_transport(one, other, inventory)
    if asked in ("auto", best):
        return best, why
    if asked == "shm":
        return "shm", "asked for"
    raise ConfigError(
        f"blocks cannot go from {one.device} to {other.device} by {asked}: "
        + ("they do not share memory" if asked == "alias" else why),
        where="transport",
        hint=f"leave out --transport; these two are linked by {best}",
    )


def _best_transport(
    one: WorkerDevice, other: WorkerDevice, inventory: Inventory
) -> tuple[str, str]:
    if other.gpu is None:
        return "peer", "written into the host's memory" if one.gpu else "within the host's memory"
    if one.gpu is None:
        return "shm", "the host's memory is copied by the GPU"
    link = inventory.link(one.gpu, other.gpu)
    if link.can_reach:
        return "peer", link.words if link.num_nvlinks else f"P2P over {link.words}"
    if one.gpu.is_instance or other.gpu.is_instance:
        return "shm", "a MIG instance reaches no other's memory"
    if link.can_reach is None:
        return "shm", f"{link.words}; the driver does not say that they reach each other's memory"
    return "shm", f"{link.words}, by which they do not reach each other's memory (no P2P)"


def _rooms(
    spots: Sequence[WorkerDevice], inventory: Inventory, shape: ModelShape, asked: int | None
) -> dict[str, int]:
    """Return the maximum pool bytes of each worker."""
    on_host = [spot for spot in spots if spot.gpu is None]
    useful = shape.full_length_bytes * MAX_SEQUENCES + shape.block_bytes
    host_bytes = default_kv_bytes(shape.full_length_bytes, inventory.memory_bytes)
    rooms = {
        spot.name: host_bytes // len(on_host)
        if spot.gpu is None
        else min(shape.room_bytes(spot.gpu), useful)
        for spot in spots
    }
    if asked is None:
        return rooms
    each = asked // len(spots)
    for spot in spots:
        most = rooms[spot.name] if spot.gpu else inventory.memory_bytes // len(on_host)
        if each > most:
            raise ConfigError(
                f"{each} bytes of KV memory for {spot.name}, but {spot.device} has {most}",
                where="kv_memory",
                hint=f"it is divided among {len(spots)} workers: at most "
                f"{most * len(spots)} bytes, or leave it out",
            )
    return dict.fromkeys(rooms, each)


def _counts(topology: Topology, rooms: Mapping[str, int], shape: ModelShape) -> dict[str, int]:
    counts = {
        topology.pool_of(name): num_bytes // shape.block_bytes for name, num_bytes in rooms.items()
    }
    for name, count in counts.items():
        if count < shape.min_blocks:
            raise ConfigError(
                f"the pool of {name} would have {max(count, 0)} KV blocks of "
                f"{shape.block_bytes} bytes; at least {shape.min_blocks} are needed",
                where="kv_memory",
                hint=f"give at least {shape.min_blocks * shape.block_bytes * len(rooms)} bytes",
            )
    if STAGING in topology.pool_by_name:
        slots = min(MAX_STAGING_BYTES // shape.block_bytes, MAX_STAGING_SLOTS)
        counts[STAGING] = max(slots, MIN_STAGING_SLOTS) + 1
    return counts


def _cores(spots: Sequence[WorkerDevice], inventory: Inventory) -> dict[str, tuple[int, ...]]:
    """Choose each worker's cores; workers on GPUs divide the free cores near their GPU."""
    found = {spot.name: spot.cpus for spot in spots if spot.gpu is None}
    taken = {cpu for cpus in found.values() for cpu in cpus}
    by_cores: defaultdict[tuple[int, ...], list[str]] = defaultdict(list)
    for spot in spots:
        if spot.gpu is not None:
            near = inventory.cores_near(spot.gpu)
            free = [cpu for cpu in near if cpu not in taken]
            free = free or [cpu for cpu in inventory.cores if cpu not in taken]
            by_cores[tuple(free or near)].append(spot.name)
    for cores, names in by_cores.items():
        for place, name in enumerate(names):
            own = cores[len(cores) * place // len(names) : len(cores) * (place + 1) // len(names)]
            found[name] = own or (cores[place % len(cores)],)
    return found


def _link_reasons(links: Mapping[tuple[str, str], tuple[str, str]]) -> list[str]:
    """Describe the links, equal pairs in one sentence."""
    pairs = Counter(links.values())
    reasons = []
    for (kind, why), count in pairs.items():
        if count == len(links):
            (source, target), *others = links
            which = "every pair" if others else f"{source} to {target}"
        else:
            which = ", ".join(
                f"{a} to {b}" for (a, b), link in links.items() if link == (kind, why)
            )
        reasons.append(f"{which} by {kind}: {why}")
    return reasons


def _core_reasons(
    spots: Sequence[WorkerDevice], cores: Mapping[str, tuple[int, ...]], inventory: Inventory
) -> list[str]:
    """Say which cores are near which GPU, on machines with several NUMA nodes."""
    if len(inventory.nodes) == 1:
        return []
    near: defaultdict[int, list[str]] = defaultdict(list)
    reasons = []
    for spot in spots:
        if spot.gpu is None:
            continue
        if spot.gpu.node is None:
            reasons.append(
                f"{spot.gpu.name}'s NUMA node is not known: {spot.name}'s cores may be far"
            )
        elif not set(cores[spot.name]) <= set(inventory.cores_near(spot.gpu)):
            reasons.append(f"NUMA node {spot.gpu.node} has no core free: {spot.name}'s are far")
        else:
            near[spot.gpu.node].append(spot.name)
    return [
        *(
            f"{', '.join(names)}: cores of NUMA node {node}, where their GPUs are"
            for node, names in sorted(near.items())
        ),
        *reasons,
    ]
