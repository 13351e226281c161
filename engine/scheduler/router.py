"""Take in what clients, workers and operators do to sequences: events in, commands out.

Invariant: each sequence ends once.
Never: waits, reads a clock (now_ns is given), knows text, HTTP or SQL.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import chain, count
from typing import NamedTuple

from engine.profile.facts import LINK_BYTES_PER_S, FactKey, Profile
from engine.scheduler import recovery
from engine.scheduler.block_allocator import BlockAllocator
from engine.scheduler.cache.ledger import Ledger
from engine.scheduler.cache.prefix_misses import PrefixMisses
from engine.scheduler.cache.topology import Topology
from engine.scheduler.dispatcher import Dispatcher
from engine.scheduler.offload.tier import Tier
from engine.scheduler.prefixes.cache_contents import CacheContents
from engine.scheduler.prefixes.prefix_cache import PrefixCache
from engine.scheduler.prefixes.prefix_copies import PrefixCopies
from engine.scheduler.prompt_waits import PromptWaits
from engine.scheduler.queue.queue import FairQueue
from engine.scheduler.recovery import Recovery
from engine.scheduler.routing.copies import Copies, TierCopies
from engine.scheduler.routing.elastic import Slo
from engine.scheduler.routing.roles_in_force import Roles
from engine.scheduler.routing.step_times import StepLoad
from engine.scheduler.routing.worker_routes import Routes
from engine.scheduler.sequences.sequence import (
    Counters,
    Ended,
    On,
    Paused,
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
        placed_by = topology, ledger, self.routes, self.copies, self.roles, self.prefix_copies
        held_in = self.prefixes, self.recovery, queue, self.at, self.allocator, self.counters
        self._dispatcher = Dispatcher(*placed_by, *held_in, send, max_num_batched_tokens)
        self._send = send
        self._emit = emit
        self.max_num_batched_tokens = max_num_batched_tokens

    def dispatch(self, now_ns: int) -> None:
        """Place all that can be placed."""
        self._dispatcher.dispatch(now_ns)

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
        self.queue.remove(sequence)
        self.allocator.forget(sequence)
        self.prefixes.forget(sequence)
        self.roles.outcomes.stop_judging(sequence.seq_id)
        key = ("admit", sequence.seq_id, sequence.generation)
        if isinstance(was, On) and self.ledger.is_open(key):
            self._send(was.stage.worker, Release(*key[1:]))
        self.copies.drop(sequence.seq_id)
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
            self.roles.outcomes.stop_judging(sequence.seq_id)
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
            self._dispatcher.grow(now_ns)

    def copied(self, worker: str, report: Copied, now_ns: int) -> None:
        arrival = self.copies.copied(worker, report)
        if arrival is None:
            self.counters.stale_messages += bool(report.num_pairs)
        elif arrival[0] is not None:
            arrival[0].handoff_bytes += arrival[1]
            self.counters.handoff_bytes += arrival[1]
        self.dispatch(now_ns)

    # What becomes of a sequence

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
            self._dispatcher.pause(sequence, now_ns)
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

    # What operators, settings and deadlines change

    def switch_roles(self, roles: str, now_ns: int) -> None:
        """Place what comes by other roles; what runs ends as it began."""
        self.roles.switch(roles)
        self.dispatch(now_ns)

    def set_text_workers(self, workers: frozenset[str]) -> None:
        """Leave their cores to workers that compute whole texts."""
        self.roles.text_workers = workers
        self.roles.move_cores(self.at.held())

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
