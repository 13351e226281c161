"""Describe the topology: workers, KV pools, and the links between pools.

Two workers or five, one pool or one each, are values of these records, not code. `alias`: prefill
and decode share a pool, and a handoff names the same blocks. `peer`: the source's worker writes
into the target's pool. `shm`: it writes into a staging buffer in host memory, and the
target's worker reads from there.
Invariant: from each worker that prefills to each that decodes there is one link, and one back; each
has a transport of its own; every hop is made by the worker of one of its pools, and by none that
reads memory of which it would not know that its owner has died.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from engine.scheduler.cache.block_pool import BlockPool
from engine.scheduler.cache.window_blocks import NO_WINDOWS, Windows

PREFILL, DECODE, COLOCATED = "prefill", "decode", "colocated"
STAGING = "ring"
SHARED = "kv"
SSD, DRAM = "ssd", "dram"
"""Names of tiers below the pools, used as pool names in copies."""


@dataclass(frozen=True, slots=True)
class Worker:
    """A process that runs steps."""

    name: str
    pool: str
    """The pool of its sequences."""
    bus: str
    """The memory bus that its weights are read over; two decoding on one bus read them twice."""
    roles: tuple[str, ...]
    """The roles that static routing gives it: PREFILL, DECODE or both."""


@dataclass(frozen=True, slots=True)
class Pool:
    """Memory for KV blocks, which one or several workers map."""

    name: str
    tier: str
    """`device`: steps read and write it; `dram`: blocks only pass through it."""
    home: str | None
    """The worker whose memory it is in, lost with the worker; None: the daemon's."""
    num_blocks: int
    """Including padding block 0."""


@dataclass(frozen=True, slots=True)
class Hop:
    """One copy of a link, made by a worker."""

    worker: str
    from_pool: str
    to_pool: str


@dataclass(frozen=True, slots=True)
class Link:
    """The path of blocks from one pool to another."""

    from_pool: str
    to_pool: str
    transport: str
    """`alias`, `peer` or `shm`."""
    hops: tuple[Hop, ...]
    """Empty for `alias`, which is one pool."""
    fallback: Link | None = None
    """The link used while this one is down; None: no fallback."""


@dataclass(frozen=True)
class Topology:
    """Every worker of the machine, their pools of KV blocks and the links between these."""

    workers: tuple[Worker, ...]
    pools: tuple[Pool, ...]
    links: tuple[Link, ...] = ()
    backs: tuple[Link, ...] = ()
    """Links from decode pools back to prefill pools, for blocks found only there."""

    @cached_property
    def by_name(self) -> dict[str, Worker]:
        return {worker.name: worker for worker in self.workers}

    @cached_property
    def pool_by_name(self) -> dict[str, Pool]:
        return {pool.name: pool for pool in self.pools}

    @cached_property
    def _link_by_pools(self) -> dict[tuple[str, str], Link]:
        return {(link.from_pool, link.to_pool): link for link in self.links}

    @property
    def names(self) -> list[str]:
        return [worker.name for worker in self.workers]

    def playing(self, role: str) -> list[str]:
        return [worker.name for worker in self.workers if role in worker.roles]

    @property
    def is_colocated(self) -> bool:
        """True if one worker plays both roles."""
        return len(self.workers) == 1

    @property
    def parked_when_colocated(self) -> list[str]:
        """List the workers that are idle when decode workers do everything."""
        return [name for name in self.playing(PREFILL) if name not in self.playing(DECODE)]

    @property
    def shares_memory_bus(self) -> bool:
        return len({worker.bus for worker in self.workers}) == 1

    @property
    def transport(self) -> str | None:
        """The transports of all links, joined with a plus; None: no handoffs."""
        return "+".join(sorted({link.transport for link in self.links})) or None

    def pool_of(self, worker: str) -> str:
        """Return the pool of a worker's sequences."""
        return self.by_name[worker].pool

    def home_of(self, pool: str) -> str | None:
        """Return the worker whose memory a pool is in; None: the daemon's."""
        return self.pool_by_name[pool].home

    def mappers_of(self, worker: str) -> set[str]:
        """List other workers with their sequences' blocks in this one's memory."""
        names = {each.name for each in self.workers if self.home_of(each.pool) == worker}
        return names - {worker}

    def has_followed(self, worker: str, ready: Collection[str]) -> bool:
        """Say whether a dead worker's pool was in another dead worker's memory."""
        home = self.home_of(self.pool_of(worker))
        return home not in (None, worker) and home not in ready

    def link(self, source: str, target: str) -> Link:
        """Return the link from one worker's pool to another's."""
        return self._link_by_pools[self.pool_of(source), self.pool_of(target)]

    def links_to(self, pool: str) -> list[Link]:
        """List the links that bring blocks into a pool."""
        steady = [link for link in self.links if link.fallback is None]
        return [link for link in (*self.backs, *steady) if link.to_pool == pool and link.hops]

    def copied_by(self, worker: str) -> list[str]:
        """List other pools that a worker copies blocks to or from."""
        ways = [
            *self.links,
            *self.backs,
            *(link.fallback for link in self.links if link.fallback is not None),
        ]
        hops = [hop for link in ways for hop in link.hops if hop.worker == worker]
        names = dict.fromkeys(name for hop in hops for name in (hop.from_pool, hop.to_pool))
        return [name for name in names if name != self.pool_of(worker)]

    def passing_pools(self) -> set[str]:
        """List the pools that blocks only pass through."""
        return {pool.name for pool in self.pools if pool.tier == "dram"}

    def new_block_pools(
        self, block_size: int, record_blocks: int = 0, windows: Windows = NO_WINDOWS
    ) -> list[BlockPool]:
        shape = block_size, record_blocks, windows
        return [BlockPool(pool.name, pool.num_blocks, *shape) for pool in self.pools]

    def with_pools(self, num_blocks: dict[str, int]) -> Topology:
        """Copy the topology with pools of these sizes."""
        pools = [replace(pool, num_blocks=num_blocks[pool.name]) for pool in self.pools]
        return replace(self, pools=tuple(pools))


def make_topology(
    prefill: Sequence[str],
    decode: Sequence[str],
    transport: str | Mapping[tuple[str, str], str],
    *,
    home: str | None = None,
    in_workers: Collection[str] = (),
    buses: dict[str, str] | None = None,
) -> Topology:
    """Make workers by role with their pools and links; with_pools() sets the pools' sizes.

    Args:
        prefill: names of the workers that prefill.
        decode: names of the workers that decode; a name in both is colocated.
        transport: `alias`, `peer` or `shm`; or `peer` or `shm` for each pair of workers.
        home: with `alias`, the worker that owns the pool's memory; None: the daemon's.
        in_workers: with `peer` and `shm`, workers with pools in their own memory.
        buses: memory bus by worker; None: all share one.
    """
    names = list(dict.fromkeys([*prefill, *decode]))
    is_shared = transport == "alias" or len(names) == 1
    pool_of = {name: SHARED if is_shared else name for name in names}
    workers = tuple(
        Worker(
            name,
            pool_of[name],
            "memory" if buses is None else buses[name],
            (*([PREFILL] if name in prefill else []), *([DECODE] if name in decode else [])),
        )
        for name in names
    )
    homes = {SHARED: home} if is_shared else {n: n if n in in_workers else None for n in names}
    pools = [Pool(name, "device", at, 0) for name, at in homes.items()]
    pairs = [(p, d) for p in prefill for d in decode if p != d]
    by_pair = dict.fromkeys(pairs, transport) if isinstance(transport, str) else transport
    links = dict.fromkeys(_link(p, d, pool_of[p], pool_of[d], by_pair[p, d]) for p, d in pairs)
    if not is_shared:
        links = dict.fromkeys(_with_fallback(link, in_workers) for link in links)
    if any("shm" in (link.transport, link.fallback and link.fallback.transport) for link in links):
        pools.append(Pool(STAGING, "dram", None, 0))
    backs = dict.fromkeys(_back(p, d, pool_of, by_pair[p, d], in_workers) for p, d in pairs)
    other_way = [link for link in backs if link.hops and link not in links]
    return Topology(workers, tuple(pools), tuple(links), tuple(other_way))


def _link(source: str, target: str, from_pool: str, to_pool: str, transport: str) -> Link:
    hops: tuple[Hop, ...] = ()
    if transport == "peer":
        hops = (Hop(source, from_pool, to_pool),)
    elif transport == "shm":
        hops = (Hop(source, from_pool, STAGING), Hop(target, STAGING, to_pool))
    return Link(from_pool, to_pool, transport, hops)


def _back(
    prefill: str,
    decode: str,
    pool_of: Mapping[str, str],
    transport: str,
    in_workers: Collection[str],
) -> Link:
    """Make the link from a decode pool back to a prefill pool, avoiding unreachable memory."""
    from_pool, to_pool = pool_of[decode], pool_of[prefill]
    if transport == "peer" and prefill in in_workers:
        if decode in in_workers:  # through the host: the fallback's staging buffer is there
            return _link(decode, prefill, from_pool, to_pool, "shm")
        # the prefill worker writes host memory, so it can read there
        return Link(from_pool, to_pool, transport, (Hop(prefill, from_pool, to_pool),))
    return _link(decode, prefill, from_pool, to_pool, transport)


def _with_fallback(link: Link, in_workers: Collection[str]) -> Link:
    """Add the fallback through host memory to a link between two devices' memories."""
    source = link.hops[0].worker
    is_between_devices = source in in_workers and link.to_pool in in_workers
    if link.transport != "peer" or not is_between_devices:
        return link
    fallback = _link(source, link.to_pool, link.from_pool, link.to_pool, "shm")
    return replace(link, fallback=fallback)
