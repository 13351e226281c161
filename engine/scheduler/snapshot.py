"""Describe the router at one moment, for readers that change nothing.

Invariant: a snapshot never changes, and its parts are of one moment.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from engine.scheduler.block_allocator import BlockAllocator
from engine.scheduler.cache.ledger import CommandKey, Ledger
from engine.scheduler.prompt_waits import PromptWait
from engine.scheduler.queue.queue import FairQueue
from engine.scheduler.routing.elastic import PredictionKind, Slo
from engine.scheduler.routing.links import LinkState
from engine.scheduler.routing.outcomes import PredictionRecord
from engine.scheduler.routing.roles_in_force import Roles
from engine.scheduler.routing.worker_routes import Routes
from engine.scheduler.sequences.sequence import Counters, Phase, Sequence


class WorkerSnapshot(NamedTuple):
    """What one worker has to do."""

    cpus_used: tuple[int, ...]
    """The cores that its steps run on, in order."""
    is_parked: bool
    """Another worker still computes on its cores."""
    has_no_cores: bool
    """Cores can be lent, and it has none now."""
    owes: bool
    """It has commands that need no more blocks, or cores to change."""
    num_sequences: int
    num_prefilling: int
    num_prompt_tokens_left: int
    """Prompt tokens that its prefilling sequences have not computed."""
    oldest_arrived_ns: int | None
    """When its oldest sequence arrived; None: it has none."""


class PoolSnapshot(NamedTuple):
    """What one KV pool holds."""

    name: str
    capacity: int
    block_size: int
    counts: Mapping[str, int]
    """Blocks by state."""
    holders: list[tuple[str, int]]
    """Cached blocks by user, most first."""
    num_evicted: int
    tables: Mapping[int, int]
    """Blocks by sequence id."""
    record_blocks: int
    """Blocks of one record of recurrent states; 0: the model keeps none."""
    num_records: int
    """Of sequences."""
    num_snapshots: int
    """Records that others can go on from, in use or not."""
    num_window_blocks: int
    """Window blocks beside each block; 0: the model has no layers with windows kept apart."""


class QueueSnapshot(NamedTuple):
    """How full the queue is."""

    num_waiting: int
    num_fitting: int
    """Sequences that have room in the pools now."""
    max_sequences: int
    num_tokens: int
    max_tokens: int
    num_owners: int
    oldest_arrived_ns: int | None


class RolesSnapshot(NamedTuple):
    """Roles, targets, and what elastic roles have predicted."""

    roles: str
    slo: Slo
    is_colocated: bool
    """There is one worker, which can have no other role."""
    acts_static: bool
    """Elastic roles have nothing to choose."""
    counts: Mapping[str, int]
    """Sequences placed, by route and reason."""
    num_cores: int
    """Of all workers together."""
    predictions: list[tuple[PredictionKind, PredictionRecord]]
    closed: frozenset[PredictionKind]
    """Kinds that are not predicted any more."""


class Snapshot(NamedTuple):
    """Everything that the router knows and others show."""

    phases: Mapping[Phase, int]
    """Unfinished sequences."""
    queue: QueueSnapshot
    waits: Mapping[int, PromptWait]
    """Waits of prompts that no step has taken up, by sequence id."""
    workers: Mapping[str, WorkerSnapshot]
    has_ready_worker: bool
    pools: list[PoolSnapshot]
    links: list[LinkState]
    transport: str | None
    counters: Counters
    roles: RolesSnapshot
    step_tokens: int
    """Prompt tokens in a worker's step."""

    def num_blocks(self, seq_id: int) -> int:
        """Count a sequence's blocks in all pools."""
        return sum(pool.tables.get(seq_id, 0) for pool in self.pools)


def worker_snapshot(
    name: str, running: Iterable[Sequence], roles: Roles, owed: Collection[CommandKey]
) -> WorkerSnapshot:
    """Describe a worker by what is admitted to it, and the commands that it can go on with."""
    own = [sequence for sequence in running if sequence.worker == name]
    prefilling = [sequence for sequence in own if sequence.phase is Phase.PREFILLING]
    used = tuple(sorted(roles.cores.used(name)))
    return WorkerSnapshot(
        cpus_used=used,
        is_parked=roles.cores.is_parked(name),
        has_no_cores=roles.cores.can_lend and not used,
        owes=roles.cores.awaits(name) or bool(owed),
        num_sequences=len(own),
        num_prefilling=len(prefilling),
        num_prompt_tokens_left=sum(one.num_prefill_tokens_left for one in prefilling),
        oldest_arrived_ns=min((one.stamps.arrived_ns for one in own), default=None),
    )


def pool_snapshots(ledger: Ledger) -> list[PoolSnapshot]:
    """Describe what each pool holds."""
    tables = ledger.table_sizes()
    return [
        PoolSnapshot(
            name=name,
            capacity=pool.capacity,
            block_size=pool.block_size,
            counts={str(state): count for state, count in pool.counts.items()},
            holders=pool.index.held.most_common(),
            num_evicted=pool.index.num_evicted,
            tables=tables[name],
            record_blocks=pool.record_blocks,
            num_records=ledger.num_records(name),
            num_snapshots=len(pool.index.snapshots),
            num_window_blocks=pool.windows.num_each,
        )
        for name, pool in ledger.pools.items()
    ]


def queue_snapshot(queue: FairQueue, allocator: BlockAllocator, routes: Routes) -> QueueSnapshot:
    """Count what waits, and how much of it has room."""
    num_free = allocator.num_free()
    return QueueSnapshot(
        num_waiting=len(queue),
        num_fitting=sum(routes.fits(sequence, num_free) for sequence in queue),
        max_sequences=queue.max_sequences,
        num_tokens=queue.num_tokens,
        max_tokens=queue.max_tokens,
        num_owners=queue.num_owners,
        oldest_arrived_ns=min((one.stamps.arrived_ns for one in queue), default=None),
    )


def roles_snapshot(roles: Roles) -> RolesSnapshot:
    """Describe the roles in force, and how their predictions came out."""
    closed = roles.outcomes.closed()
    return RolesSnapshot(
        roles=roles.roles,
        slo=roles.slo,
        is_colocated=roles.topology.is_colocated,
        acts_static=roles.acts_static,
        counts=dict(roles.counts),
        num_cores=len(roles.cores.all),
        predictions=[
            (kind, copy.copy(record)) for kind, record in sorted(roles.outcomes.records.items())
        ],
        closed=closed,
    )
