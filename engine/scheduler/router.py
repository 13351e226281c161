"""Admit, hand off and recover sequences: events in, commands out.

Invariants: in scan order no sequence that holds blocks waits behind one that holds none, and none
of an owner's passes one of its own that was preempted; what admission takes is taken in all pools
of a sequence's stages together, or in none; each sequence ends once.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from itertools import chain, count
from typing import NamedTuple

from engine.profile.facts import LINK_BYTES_PER_S, FactKey, Profile
from engine.scheduler import recovery
from engine.scheduler.block_allocator import BlockAllocator
from engine.scheduler.cache.ledger import Ledger
from engine.scheduler.cache.prefix_misses import PrefixMisses
from engine.scheduler.cache.topology import DECODE, Topology
from engine.scheduler.offload.tier import Tier
from engine.scheduler.prefixes.cache_contents import CacheContents
from engine.scheduler.prefixes.prefix_cache import PrefixCache
from engine.scheduler.prefixes.prefix_copies import PrefixCopies
from engine.scheduler.prompt_waits import PromptWaits
from engine.scheduler.queue.queue import FairQueue, PromptsAhead
from engine.scheduler.recovery import Recovery
from engine.scheduler.routing.copies import Copies, TierCopies
from engine.scheduler.routing.elastic import Slo
from engine.scheduler.routing.roles_in_force import Roles
from engine.scheduler.routing.step_times import StepLoad
from engine.scheduler.routing.worker_routes import Pair, Routes, admit, route_stages
from engine.scheduler.sequences.sequence import (
    Counters,
    Ended,
    Moving,
    On,
    Paused,
    RouteStage,
    Sequence,
    Waiting,
)
from engine.scheduler.sequences.sequence_table import SequenceTable
from engine.scheduler.snapshot import (
    RolesSnapshot,
    Snapshot,
    WorkerSnapshot,
    pool_snapshots,
    queue_snapshot,
    roles_snapshot,
    worker_snapshot,
)
from engine.wire.finish_reason import FinishReason
from engine.wire.messages import Begun, Command, Copied, CoresUsed, Release, SequenceStep, Stepped
from engine.wire.sampling import TokenLogprob

MAX_RUNNING_SEQUENCES = 256  # for each worker that decodes
STARVATION_NS = 10_000_000_000
"""Maximum time for which later sequences may pass a waiting one."""

Send = Callable[[str, Command], None]
Emit = Callable[[Sequence, list[int], list[TokenLogprob], bool], None]


class TierHost(NamedTuple):
    """What a tier below the pools needs of the router that it is attached to."""

    ledger: Ledger
    numbers: count[int]
    """Numbers of copies, shared by all tiers."""
    prompt_ms: Callable[[str, int, int], float | None]
    """Predicts the fastest prefill of tokens after cached ones in a pool; None: unknown."""
    copier_of: Callable[[str], str | None]
    """The worker that copies for a pool; None: no worker is ready."""


class Router:
    """The one owner of all sequences."""

    def __init__(
        self,
        topology: Topology,
        ledger: Ledger,
        queue: FairQueue,
        *,
        send: Send,
        emit: Emit,
        max_num_batched_tokens: int,
        roles: str = "static",
        cores: Mapping[str, tuple[int, ...]] | None = None,
        profile: Profile | None = None,
        misses: PrefixMisses | None = None,
    ) -> None:
        self.topology = topology
        self.ledger = ledger
        self.routes = Routes(topology, ledger)
        self.copies = Copies(ledger, topology)
        cores = cores or dict.fromkeys(topology.names, ())
        self.roles = Roles(
            topology,
            cores,
            roles,
            self.copies,
            max_num_batched_tokens,
            send,
            profile=profile,
        )
        self.counters = Counters()
        self.prefix_copies = PrefixCopies(ledger, self.copies, self.counters, self.roles.prompt_ms)
        self.prefixes = PrefixCache(
            topology, ledger, self.counters, self.prefix_copies, max_num_batched_tokens, misses
        )
        self.recovery = Recovery(
            topology, ledger, self.routes, self.copies, self.prefixes, self.counters
        )
        self.queue = queue
        """New, and holding no blocks."""
        self.at = SequenceTable()
        queue.paused = self.at.paused
        self.allocator = BlockAllocator(topology, ledger, self.at, queue, send)
        self._waits = PromptWaits(
            self.at,
            queue,
            self.allocator,
            self.routes,
            self.prefixes,
            self.prefix_copies,
            max_num_batched_tokens,
        )
        self._send = send
        self._emit = emit
        self.max_num_batched_tokens = max_num_batched_tokens

    # What clients cause

    def submit(self, sequences: list[Sequence], now_ns: int) -> None:
        """Queue all of a request's sequences, or none.

        Raises:
            QueueFull: there is no room in the queue now.
            RequestError: they could never fit the pools, or the queue.
        """
        for sequence in sequences:
            self.routes.check_fits(sequence)
        self.queue.push(sequences, now_ns)
        self.dispatch(now_ns)

    def resume(self, sequences: list[Sequence], now_ns: int) -> None:
        """Continue sequences of a daemon that died, each before its owner's new ones.

        Raises:
            RequestError: they do not fit the pools any more.
        """
        unfinished = [sequence for sequence in sequences if not sequence.is_finished]
        for sequence in unfinished:
            self.routes.check_fits(sequence)
        for sequence in unfinished:
            if (chain := sequence.prefix) is not None:  # its output may be cached, too
                chain.grow(sequence.tokens_between(chain.num_tokens, sequence.num_tokens))
            self.queue.wait_again(sequence)
            self.at.put(sequence, Paused())
        self.counters.recovered_sequences += len(unfinished)
        self.dispatch(now_ns)

    def finish(self, sequence: Sequence, reason: FinishReason, now_ns: int) -> None:
        """End a sequence now: its blocks drain, its worker is told, its reply is closed."""
        if sequence.is_finished:
            return
        was = sequence.where
        self.at.put(sequence, Ended(sequence.worker))
        sequence.finish_reason = reason
        sequence.stamps.finish(now_ns)
        self.queue.forget(sequence)
        self.allocator.forget(sequence)
        self.prefixes.forget(sequence)
        self.roles.outcomes.forget(sequence.seq_id)
        key = ("admit", sequence.seq_id, sequence.generation)
        if isinstance(was, On) and self.ledger.is_open(key):
            self._send(was.stage.worker, Release(*key[1:]))
        self.copies.forget(sequence.seq_id)
        self.ledger.release_all(sequence.seq_id)

    def stop(self, sequence: Sequence, num_kept_tokens: int, now_ns: int) -> None:
        """End a sequence at a stop string, after `num_kept_tokens` output tokens."""
        del sequence.output_token_ids[num_kept_tokens:]
        self.finish(sequence, FinishReason.STOP, now_ns)
        sequence.finish_reason = FinishReason.STOP  # also where it had reached its length meanwhile
        self.dispatch(now_ns)

    def abort(
        self, sequence: Sequence, reason: FinishReason, now_ns: int, error: str | None = None
    ) -> None:
        """End a sequence and tell its reply, with what went wrong if something did."""
        if sequence.is_finished:
            return
        sequence.error = error
        self.finish(sequence, reason, now_ns)
        self._emit(sequence, [], [], True)
        self.dispatch(now_ns)

    # What workers report

    def worker_ready(
        self, worker: str, now_ns: int, probes: Mapping[str, float] | None = None
    ) -> None:
        """Give the worker commands from now on.

        Args:
            now_ns: CLOCK_MONOTONIC.
            probes: bytes a second of its links, by the other pool; 0: a try that failed.
        """
        self.copies.links.probed(worker, probes or {})
        for pool, rate in (probes or {}).items():
            if rate:
                key = FactKey(LINK_BYTES_PER_S, place=f"{worker} and {pool}")
                self.roles.profile.observe(key, rate)
        self.roles.worker_ready(worker)
        if self.roles.roles != "colocated":
            for stray in self.routes.strays(worker, self.at.running.values()):
                self._send(str(stray.worker), Release(stray.seq_id, stray.generation))
        self.dispatch(now_ns)

    def pool_made(self, worker: str, num_blocks: int) -> int:
        """Take the size of a worker's pool; return the longest request that fits."""
        return self.ledger.resize(self.topology.pool_of(worker), num_blocks)

    def cores_used(self, worker: str, report: CoresUsed) -> None:
        """Take a worker's answer that its cores have changed."""
        self.roles.answered(worker, report)

    def worker_died(self, worker: str, now_ns: int) -> None:
        """Recover a dead worker's sequences, after all its messages.

        Its sequences keep blocks, outputs and acknowledged KV in pools that outlive it.
        """
        self.roles.worker_died(worker)
        self.ledger.reap(worker)
        for pool in self.topology.pools:
            if pool.home == worker:
                self.ledger.pools[pool.name].lose()
        self.copies.worker_died(worker)
        victims = [s for s in self.at.running.values() if s.worker == worker]
        if not self.topology.has_followed(worker, self.roles.ready_workers):
            recovery.blame(victims)
        for sequence in victims:
            self.allocator.forget(sequence)
            self.roles.outcomes.forget(sequence.seq_id)
            assert isinstance(sequence.where, On)
            self.at.put(sequence, Waiting(sequence.where.stage))
        for sequence in victims:
            if recovery.is_proven(sequence):
                about = f"worker {worker} died {sequence.num_suspicions} times while running it"
                self.abort(sequence, FinishReason.ERROR, now_ns, about)
            else:
                sequence.num_recoveries += 1
                self.counters.recovered_sequences += 1
        self.dispatch(now_ns)

    def begun(self, report: Begun) -> None:
        """Note that a suspect has reached its worker."""
        sequence = self.at.running.get(report.seq_id)
        if sequence is not None and sequence.generation == report.generation:
            sequence.has_begun = True

    def stepped(self, worker: str, step: Stepped, now_ns: int) -> None:
        """Take in one step: progress, tokens and releases."""
        for outcome in self.roles.stepped(worker, step):
            if (told := self.at.running.get(outcome.seq_id)) is not None:
                told.route_reason = f"{told.route_reason}{outcome.about}"
                if outcome.yields:
                    self._send(worker, Release(told.seq_id, told.generation))
        waits_for_prompts = bool(self.queue) or self.copies.waits_for_slots
        is_waited = bool(self.at.resuming or self.at.paused or self.allocator.is_claimed)
        needs_dispatch = is_waited or (waits_for_prompts and step.num_prefill_tokens > 0)
        for entry in step.entries:
            key = ("admit", entry.seq_id, entry.generation)
            if entry.released and not self.ledger.close_command(key):
                self.counters.stale_messages += 1
            needs_dispatch |= entry.released is not None
            sequence = self.at.running.get(entry.seq_id)
            if sequence is None:
                continue
            if sequence.generation != entry.generation or sequence.worker != worker:
                self.counters.stale_messages += 1
                continue
            self._advance(sequence, step, entry, now_ns)
        if needs_dispatch:
            self.dispatch(now_ns)
        else:
            self._grow(now_ns)

    def copied(self, worker: str, report: Copied, now_ns: int) -> None:
        arrival = self.copies.copied(worker, report)
        if arrival is None:
            self.counters.stale_messages += bool(report.num_pairs)
        elif arrival[0] is not None:
            arrival[0].handoff_bytes += arrival[1]
            self.counters.handoff_bytes += arrival[1]
        self.dispatch(now_ns)

    # Placement

    def dispatch(self, now_ns: int) -> None:
        """Place all that can be placed: sequences with blocks, then the others by owners' turns."""
        self.prefix_copies.settle(self.roles.open_workers)
        for sequence in list(self.at.moving.values()):
            self._arrive(sequence, now_ns)
        for sequence in list(self.at.resuming.values()):
            self._resume(sequence, now_ns)
        self._grow(now_ns)
        self.queue.served(bool(self.roles.ready_workers), now_ns)
        most = MAX_RUNNING_SEQUENCES * len(self.topology.playing(DECODE))
        over = self.allocator.begin_turns(most)
        if (self.at.paused or self.queue) and self.roles.ready_workers:
            self._dispatch_queue(over, most, now_ns)
        self._grow(now_ns)
        self.copies.pump(self.roles.ready_workers, self._send)
        self.roles.settle(self.at.held())

    def _grow(self, now_ns: int) -> None:
        """Give short sequences blocks; preempt others if too few are free."""
        while victims := self.allocator.grow():
            for sequence in victims:
                self._pause(sequence, now_ns)

    def _dispatch_queue(self, over: Collection[str], most: int, now_ns: int) -> None:
        """Place what holds no blocks, by owners' turns.

        Args:
            over: owners that hold more than their shares, and come last.
            most: sequences at workers.
            now_ns: CLOCK_MONOTONIC.
        """
        ahead = PromptsAhead(self.at.running.values(), self.max_num_batched_tokens, now_ns)
        num_free, there = self.allocator.num_free(), self.roles.open_workers
        held_up: set[str] = set()
        waits_within = False
        for sequence in self.queue.in_order(now_ns, over):
            if len(self.at.running) + len(self.at.moving) >= most:
                self.allocator.make_place(sequence, most)
                break
            if sequence.owner in over and waits_within:
                break
            is_paused = isinstance(sequence.where, Paused)
            if sequence.owner in held_up:
                continue
            is_coming = not is_paused and self.prefixes.is_coming(sequence, ahead, there)
            if not is_coming and self._place(sequence, ahead, num_free, now_ns):
                ahead.add(sequence)
                num_free = self.allocator.num_free()
                continue
            waits_within |= sequence.owner not in over
            if is_coming:
                continue
            is_full = not any(num_free[worker.pool] > 0 for worker in self.topology.workers)
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
        held, there = self.at.held(), self.roles.open_workers
        open_workers = ahead.with_fewer_than(2 * self.max_num_batched_tokens, sequence, there)
        prefixes, hits = self.prefixes, self.prefixes.hits(sequence)
        num_available = prefixes.num_available(sequence, hits, num_free)
        if not open_workers:
            return False
        if not self.routes.fits(sequence, num_available):
            usual = self.routes.usual_needs(sequence)
            self.allocator.make_room(sequence, usual, num_available)
            return False
        if self.prefix_copies.is_awaited(sequence) or prefixes.waits_for_restore(sequence, there):
            return False
        until = prefixes.tokens_until(sequence, hits, ahead)
        ready = self.roles.ready_workers
        candidates = self.routes.candidates(
            sequence, there, ready, held, until, hits, num_available
        )
        choice = self.roles.route(sequence, candidates, held, now_ns, hits)
        stages = route_stages(sequence, choice.pair)
        if not self.routes.has_capacity(sequence, stages):  # with its output it is too long to move
            stages = route_stages(sequence, Pair(choice.pair.decode, choice.pair.decode))
        needed = self.routes.needs(sequence, stages)
        if stages[0].worker not in open_workers:
            return False
        if not self.routes.fits_in(needed, num_available):
            self.allocator.make_room(sequence, needed, num_available)
            return False
        if prefixes.fetch(sequence, stages[0].worker, hits, there):
            return False
        if not prefixes.reserve(sequence, stages, needed):
            return False
        self.roles.placed(sequence, choice, now_ns)
        sequence.stages = stages
        sequence.route_reason = choice.words + self.copies.links.named(stages)
        sequence.max_chunk_tokens = choice.max_chunk_tokens
        sequence.spares_streams_at = choice.pair.prefill if choice.spares_streams else None
        if len(stages) > 1:
            self.copies.begin(
                sequence, self.copies.links.between(stages[0].worker, stages[1].worker)
            )
        if isinstance(sequence.where, Waiting):
            self.queue.take(sequence, now_ns)
        else:
            self.queue.take_again(sequence)
            sequence.come_back()
        self._admit(sequence, stages[0], now_ns)
        return True

    def _resume(self, sequence: Sequence, now_ns: int) -> None:
        """Place a sequence that has lost its worker: there if it is back, else where it can."""
        assert isinstance(sequence.where, Waiting)
        assert sequence.where.stage is not None
        stage = self._fallback(sequence, sequence.where.stage)
        sequence.where = Waiting(stage)
        if self._may_run(sequence, stage.worker):
            self._admit(sequence, stage, now_ns)

    def _fallback(self, sequence: Sequence, stage: RouteStage) -> RouteStage:
        return stage if stage.worker in self.roles.ready_workers else self._other(sequence) or stage

    def _other(self, sequence: Sequence) -> RouteStage | None:
        """Give a sequence another route, and return its first stage; None: no route is free."""
        there, ready = self.roles.open_workers, self.roles.ready_workers
        return self.recovery.fallback(sequence, there, ready, self.at.held())

    def _may_run(self, sequence: Sequence, worker: str) -> bool:
        """Say whether the worker is ready, and runs no second suspect."""
        at_worker = [s for s in self.at.running.values() if s.worker == worker]
        return worker in self.roles.ready_workers and not recovery.must_wait(sequence, at_worker)

    def _arrive(self, sequence: Sequence, now_ns: int) -> None:
        """Go on with a sequence between two workers, as far as its blocks have come."""
        assert isinstance(sequence.where, Moving)
        target, ready = sequence.where.target, self.roles.ready_workers
        stage = self._fallback(sequence, target)
        if stage is not target:
            self.at.put(sequence, Waiting(stage))
            return
        if not self.recovery.has_come(sequence, ready):
            return
        if self.recovery.lacks_blocks(sequence):
            if (other := self._other(sequence)) is not None:
                self.at.put(sequence, Waiting(other))
            else:  # the workers of prompts are full: it waits for its owner's turn
                self._pause(sequence, now_ns)
        elif self._may_run(sequence, target.worker):
            self.recovery.arrive(sequence)
            self._admit(sequence, target, now_ns)

    def _admit(self, sequence: Sequence, stage: RouteStage, now_ns: int) -> None:
        worker, pool = stage.worker, self.topology.pool_of(stage.worker)
        if not self.prefixes.settle(sequence, pool):  # it waits for blocks as others do
            self._pause(sequence, now_ns)
            return
        sequence.generation += 1
        sequence.has_begun = False
        self.at.put(sequence, On(stage))
        table = list(self.ledger.table(sequence.seq_id, pool))
        records = self.prefixes.records.of(sequence, pool)
        named = chain(table, *(() if records is None else records.blocks))
        key = ("admit", sequence.seq_id, sequence.generation)
        self.ledger.open_command(key, worker, {pool: list(named)})
        windows = self.ledger.window_tables(sequence.seq_id, pool)
        beside = self.roles.chunk_beside(sequence, worker, self.at.held)
        self._send(worker, admit(sequence, stage, table, records, windows, beside))
        self.prefixes.publish(sequence)
        self.allocator.note(sequence)

    def _advance(self, sequence: Sequence, step: Stepped, entry: SequenceStep, now_ns: int) -> None:
        stamps = sequence.stamps
        sequence.num_computed_tokens = entry.num_computed_tokens
        sequence.valid_record = entry.valid_record
        sequence.output_token_ids += entry.token_ids
        self.queue.generated(sequence, len(entry.token_ids))
        self.prefixes.advanced(sequence, entry.released)
        sequence.prompt_logprobs += entry.prompt_logprobs
        if entry.num_scheduled_tokens:
            sequence.is_on_probation = False
            if entry.is_decoding:
                sequence.drafts.add(entry)
                self.counters.drafts.add(entry)
            if stamps.started_ns is None:
                stamps.started_ns = step.started_ns
            if entry.num_computed_tokens > sequence.num_prompt_tokens:
                has_moved = sequence.transport is not None
                stamps.decoding(step.started_ns, entry.admitted_ns if has_moved else None)
        for _ in entry.token_ids:
            stamps.token(now_ns)
        if entry.finish_reason is not None:
            sequence.error = entry.error
            sequence.is_refused = entry.error is not None and not entry.is_fault
            self.finish(sequence, FinishReason(entry.finish_reason), now_ns)
        if entry.token_ids and len(entry.token_ids) == sequence.num_output_tokens:
            self.queue.answered(sequence, now_ns)
        if entry.token_ids or sequence.is_finished:
            self._emit(sequence, entry.token_ids, entry.logprobs, sequence.is_finished)
        # emit may have ended it too (a stop string), so ask again
        if entry.released is None or sequence.is_finished:
            self.allocator.note(sequence)
            return
        self.allocator.forget(sequence)
        if entry.released == "preempted":
            self._pause(sequence, now_ns)
        elif entry.released == "moved":
            self.at.put(sequence, self.recovery.hand_over(sequence))
        else:
            self._yield(sequence)

    def _yield(self, sequence: Sequence) -> None:
        """Continue a sequence that yielded its worker, elsewhere or in shorter chunks."""
        assert isinstance(sequence.where, On)
        stage = sequence.where.stage
        stages = self.routes.elsewhere(sequence, stage.worker, self.roles.ready_workers)
        if stages:
            stage, sequence.stages = stages[0], stages
        sequence.max_chunk_tokens = sequence.spares_streams_at = None
        self.at.put(sequence, Waiting(stage))

    def _pause(self, sequence: Sequence, now_ns: int) -> None:
        """Others need its blocks; what it has computed is computed again when it is admitted."""
        self.roles.outcomes.forget(sequence.seq_id)
        self.copies.forget(sequence.seq_id)
        self.prefixes.release_preempted(sequence)
        sequence.lose_blocks(now_ns)
        self.counters.preemptions += 1
        self.queue.wait_again(sequence)
        self.at.put(sequence, Paused())

    # What operators, settings and deadlines change

    def switch_roles(self, roles: str, now_ns: int) -> None:
        """Place what comes by other roles; what runs ends as it began."""
        self.roles.switch(roles)
        self.dispatch(now_ns)

    def set_text_workers(self, workers: frozenset[str]) -> None:
        """Leave their cores to workers that compute whole texts."""
        self.roles.text_workers = workers
        self.roles.settle(self.at.held())

    def text_limits(self) -> tuple[Mapping[str, float], int]:
        """Return owners' weights, and the tokens of texts that may wait."""
        return self.queue.weights, self.queue.max_tokens

    def set_targets(self, slo: Slo) -> None:
        """Choose pairs of workers by these targets from now on."""
        self.roles.slo = slo

    def set_stalled(self, workers: frozenset[str], now_ns: int) -> None:
        """Give nothing new to workers that make no progress."""
        if workers != self.roles.stalled:
            self.roles.stalled = workers
            self.dispatch(now_ns)

    def set_queue(self, max_sequences: int, max_tokens: int) -> None:
        """Change what may wait from now on; what waits already stays."""
        self.queue.set_limits(max_sequences, max_tokens)

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Share the queue between owners by these weights; others have 1."""
        self.queue.weights = weights

    def refuse_late(self, max_wait_ms: float) -> None:
        """Refuse what would wait longer, or miss its target, by what steps take now; 0: nothing."""
        self.queue.max_wait_ms = max_wait_ms
        self.queue.max_first_ms = self.roles.slo.ttft_ms or 0.0
        self.queue.step_tokens = self.max_num_batched_tokens
        self.queue.assume(self._prompt_token_ms())

    def learn(self, *, is_disturbed: bool) -> None:
        """Learn from the steps since the last call, unless something else held them up."""
        self.roles.learn(is_disturbed=is_disturbed)

    def continue_from(self, old: Router) -> None:
        """Count on from another model's router, with the targets that an operator has set."""
        self.counters.go_on_from(old.counters)
        self.roles.counts, self.roles.slo = old.roles.counts, old.roles.slo

    # What others attach, and ask

    @property
    def tier_host(self) -> TierHost:
        """What a tier is made with."""
        return TierHost(self.ledger, self.prefixes.tiers.numbers, self._prompt_ms, self._copier_of)

    def attach_tier(self, tier: Tier, *, is_fastest: bool) -> None:
        """Load and store blocks in a tier below the pools, before or after the others."""
        tiers = self.prefixes.tiers.each
        tiers.insert(0 if is_fastest else len(tiers), tier)

    def unloaded(self) -> None:
        """Remember all cached blocks as evicted, since their pools go with the model."""
        self.prefixes.unloaded()

    def detach_tiers(self) -> None:
        """Forget the tiers, which were closed; no command of theirs is open."""
        self.prefixes.tiers.each.clear()

    def attach_copies(self, copies: TierCopies) -> None:
        """Pass reports of copies to and from tiers on."""
        self.copies.of_tiers = copies

    @property
    def cache_contents(self) -> CacheContents:
        """What the prefix cache holds by tokens, as it changes."""
        return self.prefixes.contents

    @property
    def max_per_request(self) -> int:
        return self.queue.max_per_request

    @property
    def max_tokens_per_request(self) -> int:
        """Prompt tokens that one request of several sequences may bring."""
        return self.queue.max_tokens_per_request

    def check_room(self, owner: str, num_tokens: int, now_ns: int) -> None:
        """Raise QueueFull if the queue would not take a prompt of this length."""
        self.queue.check(owner, 1, num_tokens, now_ns)

    def queue_place(self, request_id: str, now_ns: int) -> int | None:
        """Count up to the first sequence of a request in the queue; None: it has none there."""
        order = enumerate(self.queue.forecast(now_ns), 1)
        return next((place for place, one in order if one.request_id == request_id), None)

    def num_cores(self, worker: str) -> int:
        """Count the cores that a worker's steps run on now."""
        return len(self.roles.cores.used(worker))

    @property
    def is_idle(self) -> bool:
        """True if no block is held and no command is open."""
        return self.ledger.is_idle

    def longest_step_ms(self, worker: str, most_tokens: int) -> float | None:
        """Predict the longest step that a worker could be in; None: unknown."""
        return self.roles.longest_step_ms(worker, self.at.running.values(), most_tokens)

    # What others look at

    def workers_now(self) -> dict[str, WorkerSnapshot]:
        """Describe the workers alone."""
        running, waiting = self.at.running.values(), self.allocator.waiting()
        owed = {n: set(self.ledger.unanswered(n)) - waiting for n in self.topology.names}
        return {n: worker_snapshot(n, running, self.roles, owed[n]) for n in owed}

    def roles_now(self) -> RolesSnapshot:
        """Describe the roles alone."""
        return roles_snapshot(self.roles)

    def snapshot(self, now_ns: int) -> Snapshot:
        """Describe everything at this moment; nothing of it changes later."""
        paused, holders = self.at.paused.values(), self.at.holders()
        return Snapshot(
            phases=Counter(one.phase for one in chain(self.queue, paused, holders)),
            queue=queue_snapshot(self.queue, self.allocator, self.routes),
            waits=self._waits.find(self.roles.ready_workers, now_ns),
            workers=self.workers_now(),
            has_ready_worker=bool(self.roles.ready_workers),
            pools=pool_snapshots(self.ledger),
            links=[copy.copy(state) for state in self.copies.links.states.values()],
            transport=self.topology.transport,
            counters=copy.deepcopy(self.counters),
            roles=self.roles_now(),
            step_tokens=self.max_num_batched_tokens,
        )

    def _prompt_token_ms(self) -> float:
        """Predict a prompt token in the largest step whose time is known; 0: unknown."""
        most = self.max_num_batched_tokens
        for size in (max(most >> shift, 1) for shift in range(4)):
            load = StepLoad(size, size * size / 2)
            steps = [self.roles.slowest_ms(name, load) for name in self.roles.ready_workers]
            if known := [each for each in steps if each is not None]:
                return min(known) / size
        return 0.0

    def _prompt_ms(self, pool: str, num_tokens: int, num_before: int) -> float | None:
        names = [worker.name for worker in self.topology.workers if worker.pool == pool]
        known = [self.roles.prompt_ms(name, num_tokens, num_before) for name in names]
        return min((each for each in known if each is not None), default=None)

    def _copier_of(self, pool: str) -> str | None:
        # the last worker of the pool decodes: its steps are short
        names = [worker.name for worker in self.topology.workers if worker.pool == pool]
        return next((n for n in reversed(names) if n in self.roles.ready_workers), None)

    def check_invariants(self) -> None:
        """Raise InvariantViolated unless ledger, queue, copies, cores and sequences agree."""
        self.queue.check_invariants()
        self.roles.cores.check_invariants()
        self.ledger.check_invariants()
        self.copies.check_invariants()
        self.at.check_invariants(self.ledger, self.queue, self.prefix_copies.owners)
