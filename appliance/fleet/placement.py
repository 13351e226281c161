"""Divide cores and memory between workers, within control group limits.

Invariant: each worker has cores of its own (with one core both share it), one thread per physical
core; the pools together never exceed the KV memory.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from appliance.configuration.setting_kinds import MIN_BYTES, size_setting
from appliance.configuration.wanted_workers import WantedWorkers
from appliance.devices.gpu_list import Gpu
from appliance.devices.inventory import Node
from appliance.fleet.cgroup_limits import cpu_quota, free_memory_bytes
from appliance.fleet.own_cpus import OWN_CPUS
from appliance.observe.frame.figures import things
from engine.checkpoint.checkpoint import Checkpoint
from engine.errors import ConfigError
from engine.scheduler.cache.block_pool import MIN_RECORDS, BlockPool
from engine.scheduler.cache.topology import (
    COLOCATED,
    DECODE,
    PREFILL,
    SHARED,
    STAGING,
    Topology,
    make_topology,
)
from engine.scheduler.cache.window_blocks import NO_WINDOWS, Windows
from engine.units import size_text

CPUS = Path("/sys/devices/system/cpu")
BLOCK_SIZE = 64
MIN_BLOCKS = 2
"""Minimum blocks per pool, besides a sequence's records: one for padding, and one to use."""
CPU_STEP_TOKENS = 512
"""Tokens per step; a CPU's matrix products come within 10 % of their best rate."""
MAX_DEFAULT_KV_BYTES = 4 << 30
MAX_STAGING_BYTES = 64 << 20
MAX_STAGING_SLOTS = 64
MIN_STAGING_SLOTS = 4
MIN_COPIED_BLOCKS = 12
"""Minimum blocks of two pools and the staging buffer between them."""
DEFAULT_FULL_LENGTH_SEQUENCES = 64
"""Maximum full-length sequences per pool without --kv-memory."""


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """A worker's name, cores, pool, and GPU if it has one."""

    name: str
    cpus: tuple[int, ...]
    pool: str
    gpu: Gpu | None = None
    shares: str | None = None
    """How it shares GPU memory, as in GpuSpec."""
    node: int | None = None
    """The NUMA node of its pool and weights; None: any."""
    mps_percent: int | None = None
    """Maximum percent of the GPU's processors; None: all, or not shared."""
    ranks: tuple[tuple[int, ...], ...] = ()
    """The cores of each process of a group, as many for each; empty: the worker is one process."""

    @property
    def num_others(self) -> int:
        """Processes besides the first."""
        return max(len(self.ranks) - 1, 0)

    @property
    def device(self) -> str:
        """The device's name for people: `cpu 0-1`, of a group `cpu 0+1`, or `gpu0`."""
        return self.cores if self.gpu is None else self.gpu.name

    @property
    def cores(self) -> str:
        """Its cores in words, separated by process if it is a group."""
        each = [cpu_names(cpus).removeprefix("cpu ") for cpus in self.ranks or (self.cpus,)]
        return f"cpu {'+'.join(each)}"


@dataclass(frozen=True, slots=True)
class Placement:
    """The workers with their devices and pools; place() makes it."""

    topology: Topology
    workers: tuple[WorkerPlan, ...]
    block_bytes: int
    max_model_len: int
    max_num_batched_tokens: int = CPU_STEP_TOKENS
    block_size: int = BLOCK_SIZE
    record_blocks: int = 0
    """Blocks of one sequence's record of recurrent states; 0: the model keeps none."""
    windows: Windows = NO_WINDOWS
    """Window blocks beside each block, for layers with sliding windows."""
    reasons: tuple[str, ...] = ()
    """The reasons for the choices, in words."""
    is_trial: bool = False
    """Two workers share a device to be timed; the result decides whether both stay."""

    def pools(self) -> list[BlockPool]:
        return self.topology.new_block_pools(self.block_size, self.record_blocks, self.windows)

    @property
    def whole_block_bytes(self) -> int:
        """Bytes of a block with its window blocks, which is what the caches below pools store."""
        return self.block_bytes * (1 + self.windows.num_each)


def decode_cpus(
    placement: Placement, usable: Collection[int], topology_root: Path = CPUS
) -> frozenset[int]:
    """Find the usable logical CPUs of the physical cores on which workers do nothing but decode.

    Args:
        usable: by this process.
    """
    decode = set(placement.topology.playing(DECODE)) - set(placement.topology.playing(PREFILL))
    only, shared = set[str](), set[str]()
    for worker in placement.workers:
        cores = only if worker.name in decode and worker.gpu is None else shared
        cores |= {_core_of(cpu, topology_root) for cpu in worker.cpus}
    return frozenset(cpu for cpu in usable if _core_of(cpu, topology_root) in only - shared)


def available_cores(
    allowed: set[int] | None = None,
    topology_root: Path = CPUS,
    quota_cpus: float | None = None,
) -> list[int]:
    """List one logical CPU of each usable physical core, within affinity and CPU quota."""
    cores: dict[str, int] = {}
    for cpu in sorted(OWN_CPUS.usable() if allowed is None else allowed):
        cores.setdefault(_core_of(cpu, topology_root), cpu)
    chosen = list(cores.values())
    quota = cpu_quota() if quota_cpus is None else quota_cpus
    return chosen if quota is None else chosen[: max(1, int(quota))]


def _core_of(cpu: int, topology_root: Path) -> str:
    """Name the physical core of a logical CPU."""
    try:
        return (topology_root / f"cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def num_machine_cores() -> int:
    return psutil.cpu_count(logical=False) or os.cpu_count() or 1


def cpu_names(cpus: tuple[int, ...]) -> str:
    """Name cores in words, such as `cpu 0-2,5`."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return "cpu " + ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def split_cores(cores: list[int]) -> tuple[list[int], list[int]]:
    """Split cores between prefill and decode; prefill, being compute-bound, gets the odd one."""
    if len(cores) == 1:
        return cores, cores
    num_decode = len(cores) // 2
    return cores[:-num_decode], cores[-num_decode:]


def available_memory_bytes() -> int:
    """Return the memory usable without swapping, within control groups."""
    free: int = psutil.virtual_memory().available
    allowed = free_memory_bytes()
    return free if allowed is None else min(free, allowed)


def place(
    checkpoint: Checkpoint,
    *,
    kv_dtype: str,
    roles: str,
    transport: str,
    wanted: WantedWorkers,
    kv_memory_bytes: int | None,
    max_model_len: int | None,
    nodes: tuple[Node, ...],
    memory_bytes: int,
) -> Placement:
    """Choose workers, cores, pools and the model length.

    Workers on several NUMA nodes have a pool and weights each, and blocks are copied between
    them (`peer`), unless another transport is asked for. kv_dtype is that of the pools.

    Raises:
        ConfigError: the KV memory does not hold a single useful sequence.
    """
    config = checkpoint.config.in_groups()
    block_bytes = config.kv_block_bytes(BLOCK_SIZE, kv_dtype)
    windows = Windows.of(config.kv_groups.num_groups, config.kv_groups.window)
    record_blocks = config.record_blocks(BLOCK_SIZE, kv_dtype)
    own_len = config.max_position_embeddings
    wanted_len = min(max_model_len or own_len, own_len)
    num_own_blocks = MIN_RECORDS * record_blocks
    useful_bytes = (_num_blocks(wanted_len, windows) + num_own_blocks) * block_bytes
    kv_memory_bytes = _kv_memory_bytes(kv_memory_bytes, useful_bytes, memory_bytes)
    cores = sorted(core for node in nodes for core in node.cores)
    node_of: dict[str, int] = {}
    if roles == "colocated":
        topology = make_topology([COLOCATED], [COLOCATED], "alias")
        cores_of = {COLOCATED: wanted.colocated_cores(cores)}
    else:
        wanted, cores_of = _cores_by_node(wanted, nodes, transport) or (wanted, wanted.cores(cores))
        node_of = _nodes_of(cores_of, nodes) if transport != "alias" else {}
        if transport == "auto":
            transport = "peer" if node_of else "alias"
        buses = {name: f"node{node}" for name, node in node_of.items()} or None
        topology = make_topology(*wanted.names, transport, buses=buses)
    num_blocks = kv_memory_bytes // block_bytes
    counts = pool_counts(topology, num_blocks, block_bytes, 1 + windows.num_each)
    topology = topology.with_pools(counts)
    fewest = max(min(counts[worker.pool] for worker in topology.workers), 1)
    held_by_pools = BlockPool("", fewest, BLOCK_SIZE, record_blocks, windows).kv_capacity
    if held_by_pools < 1:
        raise _too_little(topology, kv_memory_bytes, block_bytes, num_own_blocks, windows)
    return Placement(
        topology=topology,
        workers=tuple(_plans(topology, cores_of, node_of, wanted)),
        block_bytes=block_bytes,
        max_model_len=min(wanted_len, held_by_pools * BLOCK_SIZE),
        record_blocks=record_blocks,
        windows=windows,
        reasons=(*_reasons(topology, nodes, node_of), *_group_reasons(wanted)),
    )


def _num_blocks(num_tokens: int, windows: Windows) -> int:
    """Count the blocks of a text, with its window blocks."""
    return BlockPool("", 1, BLOCK_SIZE, 0, windows).max_cost(-(-num_tokens // BLOCK_SIZE))


def _too_little(
    topology: Topology,
    kv_memory_bytes: int,
    block_bytes: int,
    num_own_blocks: int,
    windows: Windows,
) -> ConfigError:
    """Make the error for KV memory that holds no useful sequence in every pool.

    Args:
        num_own_blocks: that a sequence's records take.
        windows: the window blocks of a block.
    """
    num_pools = len({worker.pool for worker in topology.workers})
    min_blocks = MIN_BLOCKS if num_pools == 1 else MIN_COPIED_BLOCKS * len(topology.workers) // 2
    min_blocks *= 1 + windows.num_each
    # of two pools a prefill worker's has a third
    min_blocks += num_own_blocks * (1 if num_pools == 1 else 2 * num_pools)
    records = f", {num_own_blocks} for recurrent states" if num_own_blocks else ""
    num_blocks = max(kv_memory_bytes // block_bytes, 0)
    blocks = "1 KV block" if num_blocks == 1 else f"{num_blocks} KV blocks"
    return ConfigError(
        f"{size_text(kv_memory_bytes)} of KV memory gives {blocks} of {size_text(block_bytes)}; "
        f"at least {min_blocks} are needed{records}",
        where="kv_memory",
        hint=f"give at least {size_setting(max(min_blocks * block_bytes, MIN_BYTES))}",
    )


def _cores_by_node(
    wanted: WantedWorkers, nodes: tuple[Node, ...], transport: str
) -> tuple[WantedWorkers, dict[str, tuple[int, ...]]] | None:
    """Give each of several NUMA nodes a worker; None: one node, or placed by the operator."""
    if len(nodes) == 1 or not wanted.is_auto or transport == "alias":
        return None
    num_decode = len(nodes) // 2
    each = wanted.of_each(len(nodes) - num_decode, num_decode)
    names = [name for role in each.names for name in role]
    return each, {name: node.cores for name, node in zip(names, nodes, strict=True)}


def _nodes_of(cores_of: dict[str, tuple[int, ...]], nodes: tuple[Node, ...]) -> dict[str, int]:
    """Return each worker's node if every worker is within one and they differ; else empty."""
    found = {
        name: node.number
        for name, cpus in cores_of.items()
        for node in nodes
        if set(cpus) <= set(node.cores)
    }
    is_of_use = len(found) == len(cores_of) and len(set(found.values())) > 1
    return found if is_of_use else {}


def _reasons(topology: Topology, nodes: tuple[Node, ...], node_of: dict[str, int]) -> Iterator[str]:
    if node_of:
        each = ", ".join(f"{name} on node {node}" for name, node in node_of.items())
        yield f"{len(set(node_of.values()))} NUMA nodes: weights and pool are on each ({each})"
    elif len(nodes) > 1:
        yield f"{len(nodes)} NUMA nodes, fewer workers: memory lies where first touched"
    if topology.transport == "alias" and not topology.is_colocated:
        yield "workers share one KV pool (zero-copy)"
    elif topology.transport is not None:
        yield f"every pair by {topology.transport}, within the host's memory"


def _plans(
    topology: Topology,
    cores_of: dict[str, tuple[int, ...]],
    node_of: dict[str, int],
    wanted: WantedWorkers,
) -> Iterator[WorkerPlan]:
    for w in topology.workers:
        node, ranks = node_of.get(w.name), wanted.ranks(w.name)
        yield WorkerPlan(w.name, cores_of[w.name], w.pool, node=node, ranks=ranks)


def _group_reasons(wanted: WantedWorkers) -> Iterator[str]:
    if wanted.width > 1:
        widths = " and ".join(map(str, dict.fromkeys(wanted.widths)))
        yield f"a worker is {widths} processes, each with its part of the weights"


def default_kv_bytes(full_length_bytes: int, memory_bytes: int) -> int:
    """Return the default KV memory in the host."""
    useful = full_length_bytes * DEFAULT_FULL_LENGTH_SEQUENCES
    return min(MAX_DEFAULT_KV_BYTES, memory_bytes // 4, useful)


def _kv_memory_bytes(asked: int | None, full_length_bytes: int, memory_bytes: int) -> int:
    if asked is None:
        return default_kv_bytes(full_length_bytes, memory_bytes)
    if asked > memory_bytes:
        raise ConfigError(
            f"{size_text(asked)} of KV memory, but only {size_text(memory_bytes)} are available",
            where="kv_memory",
            hint="leave memory for the weights as well",
        )
    return asked


def pool_counts(
    topology: Topology, num_blocks: int, block_bytes: int, num_groups: int = 1
) -> dict[str, int]:
    """Divide blocks between pools: a third to prefill workers and the rest to the others.

    A staging buffer comes first, with at most an eighth.

    Args:
        num_groups: blocks for the same tokens.
    """
    names = {worker.pool for worker in topology.workers}
    if names == {SHARED}:
        return {SHARED: num_blocks}
    counts, rest = {}, num_blocks
    if STAGING in topology.pool_by_name:
        most = min(MAX_STAGING_BYTES // block_bytes, MAX_STAGING_SLOTS * num_groups)
        counts[STAGING] = max(min(most, num_blocks // 8), MIN_STAGING_SLOTS * num_groups) + 1
        rest -= counts[STAGING]
    prefill, decode = topology.playing(PREFILL), topology.playing(DECODE)
    for name in prefill:
        counts[topology.pool_of(name)] = rest // 3 // len(prefill)
    for name in decode:
        counts[topology.pool_of(name)] = (rest - rest // 3) // len(decode)
    return counts


MIN_CACHED_BLOCKS = 16
"""Minimum blocks of a useful cache below the pools; a smaller one is reported."""


def capacity_text(placement: Placement, num_blocks: int, files_bytes: int | None = None) -> str:
    """Describe a cache's capacity: `1.5 GiB (1,024 blocks, 65,536 tokens)`.

    Args:
        files_bytes: on disk, where blocks have headers and files are whole; None: in memory.
    """
    said = size_text(num_blocks * placement.whole_block_bytes)
    said += "" if files_bytes is None else f" of KV in {size_text(files_bytes)} of files"
    said += f" ({things(num_blocks, 'block')}, {num_blocks * placement.block_size:,} tokens)"
    return f"{said}, which is too small to help" if num_blocks < MIN_CACHED_BLOCKS else said


def placement_lines(placement: Placement) -> list[str]:
    """Describe each worker's device, pool and the reasons, in lines for people."""
    rows = [list(_cells(placement, plan)) for plan in placement.workers]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  "
        + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return lines + [f"  because {text}" for text in placement.reasons]


def _cells(placement: Placement, plan: WorkerPlan) -> Iterator[str]:
    pool = placement.topology.pool_by_name[plan.pool]
    yield plan.name
    yield plan.cores if plan.gpu is None else f"{plan.gpu.name}, {plan.gpu.model}"
    yield "" if plan.gpu is None else cpu_names(plan.cpus)
    num_bytes = pool.num_blocks * placement.block_bytes
    books = BlockPool("", pool.num_blocks, placement.block_size, 0, placement.windows)
    num_tokens = books.kv_capacity * placement.block_size
    first, *others = [each.name for each in placement.workers if each.pool == plan.pool]
    if plan.name != first:
        yield f"the pool of {first}"
        return
    what = "one pool" if others else "a pool"
    yield f"{what} of up to {num_tokens:,} tokens, {size_text(num_bytes)}"
