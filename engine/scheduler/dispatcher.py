"""Place sequences with blocks first, then waiting sequences by owners' turns.

Invariant: no sequence that holds blocks waits behind one that holds none, and none of an owner's
passes one of its own that was preempted; what is taken is taken in all pools of a sequence's
stages together, or in none.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from itertools import chain

from engine.scheduler import recovery
from engine.scheduler.block_allocator import BlockAllocator
from engine.scheduler.cache.ledger import Ledger
from engine.scheduler.cache.topology import DECODE, PREFILL, Topology
from engine.scheduler.prefixes.prefix_cache import PrefixCache
from engine.scheduler.prefixes.prefix_copies import PrefixCopies
from engine.scheduler.queue.queue import FairQueue, PromptsAhead
from engine.scheduler.recovery import Recovery
from engine.scheduler.routing.copies import Copies
from engine.scheduler.routing.roles_in_force import Roles
from engine.scheduler.routing.worker_routes import Pair, Routes, admit, route_stages
from engine.scheduler.sequences.sequence import (
    Counters,
    Moving,
    On,
    Paused,
    RouteStage,
    Sequence,
    Waiting,
)
from engine.scheduler.sequences.sequence_table import SequenceTable
from engine.wire.messages import Command

MAX_RUNNING_SEQUENCES = 256  # for each worker that decodes
STARVATION_NS = 10_000_000_000
"""Maximum time for which later sequences may pass a waiting one."""


@dataclass(slots=True)
class Dispatcher:
    """Gives sequences workers and blocks, out of what the router keeps."""

    _topology: Topology
    _ledger: Ledger
    _routes: Routes
    _copies: Copies
    _roles: Roles
    _prefix_copies: PrefixCopies
    _prefixes: PrefixCache
    _recovery: Recovery
    _queue: FairQueue
    _sequences: SequenceTable
    _allocator: BlockAllocator
    _counters: Counters
    _send: Callable[[str, Command], None]
    _step_tokens: int

    def dispatch(self, now_ns: int) -> None:
        """Place all that can be placed: sequences with blocks, then the others by owners' turns."""
        self._prefix_copies.end_arrived(self._roles.open_workers)
        for sequence in list(self._sequences.moving.values()):
            self._arrive(sequence, now_ns)
        for sequence in list(self._sequences.resuming.values()):
            self._resume(sequence, now_ns)
        self.grow(now_ns)  # running sequences get blocks before waiting ones
        self._queue.served(bool(self._roles.ready_workers), now_ns)
        most = MAX_RUNNING_SEQUENCES * len(self._topology.playing(DECODE))
        over = self._allocator.begin_turns(most)
        if (self._sequences.paused or self._queue) and self._roles.ready_workers:
            self._dispatch_queue(over, most, now_ns)
        self.grow(now_ns)  # new ones, too, and no block is promised any more
        self._copies.pump(self._roles.ready_workers, self._send)
        self._roles.move_cores(self._sequences.held())

    def grow(self, now_ns: int) -> None:
        """Give short sequences blocks; preempt others if too few are free."""
        while victims := self._allocator.grow():
            for sequence in victims:
                self.pause(sequence, now_ns)

    def _dispatch_queue(self, over: Collection[str], most: int, now_ns: int) -> None:
        """Place what holds no blocks, by owners' turns.

        Args:
            over: owners that hold more than their shares, and come last.
            most: sequences at workers.
            now_ns: CLOCK_MONOTONIC.
        """
        ahead = PromptsAhead(self._sequences.running.values(), self._step_tokens, now_ns)
        num_free, there = self._allocator.num_free(), self._roles.open_workers
        held_up: set[str] = set()
        waits_within = False
        for sequence in self._queue.in_order(now_ns, over):
            if len(self._sequences.running) + len(self._sequences.moving) >= most:
                self._allocator.make_place(sequence, most)
                break
            if sequence.owner in over and waits_within:
                break
            is_paused = isinstance(sequence.where, Paused)
            if sequence.owner in held_up:
                continue
            is_coming = not is_paused and self._prefixes.is_coming(sequence, ahead, there)
            if not is_coming and self._place(sequence, ahead, num_free, now_ns):
                ahead.add(sequence)
                num_free = self._allocator.num_free()
                continue
            waits_within |= sequence.owner not in over
            if is_coming:
                continue
            is_full = not any(num_free[worker.pool] > 0 for worker in self._topology.workers)
            if is_paused or is_full:
                held_up.add(sequence.owner)
            if now_ns - sequence.waits_since_ns > STARVATION_NS:
                break

    def _place(
        self, sequence: Sequence, ahead: PromptsAhead, num_free: Mapping[str, int], now_ns: int
    ) -> bool:
        """Route a sequence, reserve what it needs and admit it, if all of that can be now.

        A worker sees two steps' worth of prompts; the rest waits in the queue, where it can be
        overtaken by a shorter one and cancelled without a message.
        """
        held, there = self._sequences.held(), self._roles.open_workers
        open_workers = ahead.with_fewer_than(2 * self._step_tokens, sequence, there)
        prefixes, hits = self._prefixes, self._prefixes.hits(sequence)
        num_available = prefixes.num_available(sequence, hits, num_free)
        if not open_workers:
            return False
        if not self._routes.fits(sequence, num_available):
            usual = self._routes.usual_needs(sequence)
            self._allocator.make_room(sequence, usual, num_available)
            return False
        if self._prefix_copies.is_awaited(sequence) or prefixes.waits_for_restore(sequence, there):
            return False
        until = prefixes.tokens_until(sequence, hits, ahead)
        ready = self._roles.ready_workers
        candidates = self._routes.candidates(
            sequence, there, ready, held, until, hits, num_available
        )
        choice = self._roles.route(sequence, candidates, held, now_ns, hits)
        stages = route_stages(sequence, choice.pair)
        if not self._routes.has_capacity(
            sequence, stages
        ):  # with its output it is too long to move
            stages = route_stages(sequence, Pair(choice.pair.decode, choice.pair.decode))
        needed = self._routes.needs(sequence, stages)
        if stages[0].worker not in open_workers:
            return False
        if not self._routes.fits_in(needed, num_available):
            self._allocator.make_room(sequence, needed, num_available)
            return False
        if prefixes.fetch(sequence, stages[0].worker, hits, there):
            return False
        if not prefixes.reserve(sequence, stages, needed):
            return False
        self._roles.placed(sequence, choice, now_ns)
        sequence.stages = stages
        sequence.route_reason = choice.words + self._copies.links.named(stages)
        sequence.max_chunk_tokens = choice.max_chunk_tokens
        sequence.spares_streams_at = choice.pair.prefill if choice.spares_streams else None
        if len(stages) > 1:
            self._copies.begin(
                sequence, self._copies.links.between(stages[0].worker, stages[1].worker)
            )
        if isinstance(sequence.where, Waiting):
            self._queue.remove_placed(sequence, now_ns)
        else:
            self._queue.take_again(sequence)
            sequence.come_back()
        self._admit(sequence, stages[0], now_ns)
        return True

    def _resume(self, sequence: Sequence, now_ns: int) -> None:
        """Place a sequence that has lost its worker: there if it is back, else where it can."""
        assert isinstance(sequence.where, Waiting)
        assert sequence.where.stage is not None
        stage = sequence.where.stage
        if self._is_misplaced(sequence, stage.worker):
            if (other := self._other(sequence)) is None:  # the workers of prompts are full
                self.pause(sequence, now_ns)
                return
            stage = other
        stage = self._fallback(sequence, stage)
        sequence.where = Waiting(stage)
        if self._may_run(sequence, stage.worker):
            self._admit(sequence, stage, now_ns)

    def _is_misplaced(self, sequence: Sequence, worker: str) -> bool:
        """Say whether a worker of streams is up for it that should leave it to prefill workers."""
        ready = self._roles.ready_workers
        return (
            self._roles.roles != "colocated"
            and worker in ready
            and not ready.isdisjoint(self._topology.playing(PREFILL))
            and self._routes.is_stray(sequence, worker)
        )

    def _fallback(self, sequence: Sequence, stage: RouteStage) -> RouteStage:
        return (
            stage if stage.worker in self._roles.ready_workers else self._other(sequence) or stage
        )

    def _other(self, sequence: Sequence) -> RouteStage | None:
        """Give a sequence another route, and return its first stage; None: no route is free."""
        there, ready = self._roles.open_workers, self._roles.ready_workers
        return self._recovery.fallback(sequence, there, ready, self._sequences.held())

    def _may_run(self, sequence: Sequence, worker: str) -> bool:
        """Say whether the worker is ready, and runs no second suspect."""
        at_worker = [s for s in self._sequences.running.values() if s.worker == worker]
        return worker in self._roles.ready_workers and not recovery.must_wait(sequence, at_worker)

    def _arrive(self, sequence: Sequence, now_ns: int) -> None:
        """Go on with a sequence between two workers, as far as its blocks have come."""
        assert isinstance(sequence.where, Moving)
        target, ready = sequence.where.target, self._roles.ready_workers
        stage = self._fallback(sequence, target)
        if stage is not target:
            self._sequences.put(sequence, Waiting(stage))
            return
        if not self._recovery.has_come(sequence, ready):
            return
        if self._recovery.lacks_blocks(sequence):
            if (other := self._other(sequence)) is not None:
                self._sequences.put(sequence, Waiting(other))
            else:  # the workers of prompts are full: it waits for its owner's turn
                self.pause(sequence, now_ns)
        elif self._may_run(sequence, target.worker):
            self._recovery.arrive(sequence)
            self._admit(sequence, target, now_ns)

    def _admit(self, sequence: Sequence, stage: RouteStage, now_ns: int) -> None:
        worker, pool = stage.worker, self._topology.pool_of(stage.worker)
        if not self._prefixes.begin_at(sequence, pool):  # it waits for blocks as others do
            self.pause(sequence, now_ns)
            return
        sequence.generation += 1
        sequence.has_begun = False
        self._sequences.put(sequence, On(stage))
        table = list(self._ledger.table(sequence.seq_id, pool))
        records = self._prefixes.records.of(sequence, pool)
        named = chain(table, *(() if records is None else records.blocks))
        key = ("admit", sequence.seq_id, sequence.generation)
        self._ledger.open_command(key, worker, {pool: list(named)})
        windows = self._ledger.window_tables(sequence.seq_id, pool)
        beside = self._roles.chunk_beside(sequence, worker, self._sequences.held)
        self._send(worker, admit(sequence, stage, table, records, windows, beside))
        self._prefixes.publish(sequence)
        self._allocator.note(sequence)

    def pause(self, sequence: Sequence, now_ns: int) -> None:
        """Others need its blocks; what it has computed is computed again when it is admitted."""
        self._roles.outcomes.stop_judging(sequence.seq_id)
        self._copies.drop(sequence.seq_id)
        self._prefixes.release_preempted(sequence)
        sequence.lose_blocks(now_ns)
        self._counters.preemptions += 1
        self._queue.wait_again(sequence)
        self._sequences.put(sequence, Paused())
