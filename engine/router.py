"""Who runs where: admission, handoff, recovery. Events in, commands out.

Owns: every sequence from submit to its last released block, and the ledger.
Called by: the daemon, on its loop; calls back `send` (a command for a worker) and `emit` (tokens
for an open reply).
Invariants: in scan order no sequence that holds blocks waits behind one that holds none; a
sequence's blocks are reserved in all pools together, or in none; each sequence ends once.
Never: waits, reads a clock (now_ns is given), knows text, HTTP or SQL.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from engine import suspicion
from engine.ahead import Ahead
from engine.blocks import Ledger
from engine.messages import Admit, Command, CoresUsed, Loaded, Release, SequenceStep, Stepped
from engine.queue import FairQueue
from engine.reservation import can_ever_fit, check_fits, fits_now, wants
from engine.ring import Ring
from engine.roles import Roles
from engine.sequence import FinishReason, Phase, Route, Sequence, TokenLogprob
from engine.topology import Topology

MAX_RUNNING_SEQUENCES = 256
STARVATION_NS = 10_000_000_000
"""A sequence that has waited this long is not passed any more by what comes after it in order."""


@dataclass(slots=True)
class Counters:
    """Since the daemon started; read by telemetry."""

    handoffs: int = 0
    handoff_bytes: int = 0
    stale_messages: int = 0
    recovered_sequences: int = 0


Send = Callable[[str, Command], None]
Emit = Callable[[Sequence, list[int], list[TokenLogprob], bool], None]


class Router:
    """The one owner of all sequences."""

    def __init__(
        self,
        topology: Topology,
        ledger: Ledger,
        ring: Ring | None,
        queue: FairQueue,
        *,
        send: Send,
        emit: Emit,
        max_step_tokens: int,
        roles: str = "static",
        cores: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        self.topology = topology
        no_cores: dict[str, tuple[int, ...]] = dict.fromkeys(topology.workers, ())
        self.roles = Roles(
            topology, cores or no_cores, roles, max_step_tokens=max_step_tokens, send=send
        )
        self.ledger = ledger
        self.ring = ring
        self.counters = Counters()
        self.queue = queue
        """Waiting and holding no blocks."""
        self.resuming: list[Sequence] = []
        """Waiting and holding blocks: moved or recovered; always placed before the queue."""
        self.running: dict[int, Sequence] = {}
        """Admitted to a worker or on the way between two; by seq_id."""
        self._send = send
        self._emit = emit
        self._max_step_tokens = max_step_tokens

    # What clients cause

    def submit(self, sequences: list[Sequence], now_ns: int) -> None:
        """Queue all of a request's sequences, or none.

        Raises:
            QueueFull: there is no room in the queue now.
            RequestError: they could never fit the pools, or the queue.
        """
        for sequence in sequences:
            check_fits(sequence, self.topology, self.ledger.pools)
        self.queue.push(sequences, now_ns)
        self.dispatch(now_ns)

    def finish(self, sequence: Sequence, reason: FinishReason, now_ns: int) -> None:
        """End a sequence now: its blocks drain, its worker is told, its reply is closed."""
        if sequence.is_finished:
            return
        sequence.finish_reason = reason
        sequence.stamps.finished_ns = now_ns
        sequence.phase = Phase.FINISHED
        self.queue.forget(sequence)
        if sequence in self.resuming:
            self.resuming.remove(sequence)
        self.running.pop(sequence.seq_id, None)
        key = ("admit", sequence.seq_id, sequence.generation)
        if sequence.worker is not None and self.ledger.is_open(key):
            self._send(sequence.worker, Release(sequence.seq_id, sequence.generation))
        if self.ring is not None:
            self.ring.forget(sequence)
        self.ledger.release_all(sequence.seq_id)

    def stop(self, sequence: Sequence, num_kept_tokens: int, now_ns: int) -> None:
        """End a sequence at a stop string, after so many output tokens; its reply knows."""
        del sequence.output_token_ids[num_kept_tokens:]
        self.finish(sequence, FinishReason.STOP, now_ns)
        sequence.finish_reason = FinishReason.STOP  # also where it had reached its length meanwhile
        self.dispatch(now_ns)

    def abort(self, sequence: Sequence, reason: FinishReason, now_ns: int) -> None:
        """End a sequence and tell its reply."""
        if sequence.is_finished:
            return
        self.finish(sequence, reason, now_ns)
        self._emit(sequence, [], [], True)
        self.dispatch(now_ns)

    # What workers report

    def worker_ready(self, worker: str, now_ns: int) -> None:
        """The worker takes commands from now on."""
        self.roles.worker_ready(worker)
        self.dispatch(now_ns)

    def cores_used(self, worker: str, report: CoresUsed) -> None:
        """The worker has changed its cores."""
        self.roles.answered(worker, report)

    def switch_roles(self, roles: str, now_ns: int) -> None:
        """Place what comes by other roles; what runs ends as it began."""
        self.roles.switch(roles)
        self.dispatch(now_ns)

    def worker_died(self, worker: str, now_ns: int) -> None:
        """The worker is dead and everything that it sent has been handled.

        Its sequences keep blocks, outputs, and what is acknowledged of KV in pools that outlive it.
        """
        self.roles.worker_died(worker)
        self.ledger.reap(worker)
        if self.ring is not None:
            self.ring.worker_died(worker)
        is_followed = self._lose_pools(worker)
        victims = [s for s in self.running.values() if s.worker == worker]
        if not is_followed:
            suspicion.blame(victims)
        for sequence in victims:
            if suspicion.is_proven(sequence):
                sequence.error = f"worker {worker} died {sequence.num_suspicions} times under it"
                self.abort(sequence, FinishReason.ERROR, now_ns)
                continue
            sequence.num_recoveries += 1
            self.counters.recovered_sequences += 1
            del self.running[sequence.seq_id]
            sequence.worker, sequence.phase = None, Phase.QUEUED
            self.resuming.append(sequence)
        self.dispatch(now_ns)

    def _lose_pools(self, worker: str) -> bool:
        """Note whose KV is gone with pools that are in nobody's memory now.

        True if the worker has only followed another, in whose memory its pool was.
        """
        topology, ready = self.topology, self.roles.ready_workers
        lost = {pool for pool, home in topology.homes.items() if home not in ready}
        for sequence in (*self.running.values(), *self.resuming):
            sequence.lost_pools |= {p for p in lost if self.ledger.table(sequence.seq_id, p)}
        pool = topology.pool_of(worker)
        return pool in lost and topology.homes[pool] != worker

    def stepped(self, worker: str, step: Stepped, now_ns: int) -> None:
        """Take in one step: progress, tokens, stores and releases."""
        self.roles.stepped(worker, step)
        needs_dispatch = bool(self.resuming or (self.queue and step.num_prefill_tokens))
        for entry in step.entries:
            sequence = self.running.get(entry.seq_id)
            if entry.is_released and not self.ledger.close_command(
                ("admit", entry.seq_id, entry.generation)
            ):
                self.counters.stale_messages += 1
            if sequence is not None and (
                sequence.generation != entry.generation or sequence.worker != worker
            ):
                self.counters.stale_messages += 1
                sequence = None
            if self.ring is not None and entry.stored:
                self.ring.stored(worker, sequence, entry.stored)
            if sequence is not None:
                self._advance(sequence, step, entry, now_ns)
            needs_dispatch |= entry.is_released or bool(entry.stored)
        if needs_dispatch:
            self.dispatch(now_ns)

    def loaded(self, report: Loaded, now_ns: int) -> None:
        """A Load is complete: its slots are free, and its sequence may be ready to move."""
        if self.ring is None or not self.ring.loaded(report):
            self.counters.stale_messages += 1
            return
        self.counters.handoff_bytes += report.num_bytes
        self.dispatch(now_ns)

    # Placement

    def dispatch(self, now_ns: int) -> None:
        """Place whatever can be placed: first those that hold blocks, then the queue."""
        for sequence in list(self.resuming):
            self._resume(sequence, now_ns)
        if self.ring is not None:
            self.ring.pump(self.roles.ready_workers, self._send)
            for sequence in self.ring.take_arrived():
                if not sequence.is_finished:
                    self._admit(sequence, self.topology.decode_worker, now_ns)
        if self.queue and self.roles.ready_workers:
            self._dispatch_queue(now_ns)
        self.roles.settle(self.running.values())

    def _dispatch_queue(self, now_ns: int) -> None:
        ahead = Ahead(self.running.values(), now_ns)
        topology, pools = self.topology, self.ledger.pools
        both = (pools[topology.prefill_pool], pools[topology.decode_pool])
        for sequence in self.queue.in_order(now_ns):
            is_full = not any(pool.num_free for pool in both)
            if len(self.running) >= MAX_RUNNING_SEQUENCES or is_full:
                break
            if not self._place(sequence, ahead, now_ns):
                if now_ns - sequence.stamps.arrived_ns > STARVATION_NS:
                    break
                continue
            ahead.add(sequence)

    def _place(self, sequence: Sequence, ahead: Ahead, now_ns: int) -> bool:
        """Route a queued sequence, reserve its blocks and admit it, if all of that can be now.

        A worker sees two steps' worth of prompts; the rest waits in the queue, where it can be
        overtaken by a shorter one and cancelled without a message.
        """
        topology, pools, limit = self.topology, self.ledger.pools, 2 * self._max_step_tokens
        open_workers = {
            name for name in self.roles.ready_workers if ahead.num_tokens(sequence, name) < limit
        }
        stays = wants(sequence, Route.PREFILL, topology, pools)
        if not open_workers or not any(
            fits_now(wants(sequence, route, topology, pools), pools) for route in Route
        ):
            return False
        can_stay = can_ever_fit(stays, pools)
        running = self.running.values()
        choice = self.roles.route(sequence, running, now_ns, fits_prefill_pool=can_stay)
        worker = topology.decode_worker if choice.route is Route.DECODE else topology.prefill_worker
        if worker not in open_workers or not self.ledger.reserve(
            sequence.seq_id, wants(sequence, choice.route, topology, pools)
        ):
            return False
        self.roles.placed(choice)
        sequence.route, sequence.max_chunk_tokens = choice.route, choice.max_chunk_tokens
        sequence.route_reason = ": ".join(filter(None, (choice.reason, choice.about)))
        self.queue.take(sequence, now_ns)
        self._admit(sequence, worker, now_ns)
        return True

    def _resume(self, sequence: Sequence, now_ns: int) -> None:
        """Place a sequence that holds blocks, if the worker it needs is there."""
        topology = self.topology
        self._give_up_storing(sequence)
        needs_prefill = sequence.route is Route.MOVE and (
            not sequence.num_output_tokens
            or (
                self.ring is not None
                and self._moves(sequence)
                and not self.ring.is_stored(sequence)
            )
        )
        is_on_prefill = needs_prefill or sequence.route is Route.PREFILL
        worker = topology.prefill_worker if is_on_prefill else topology.decode_worker
        is_second_suspect = sequence.is_on_probation and any(
            s.is_on_probation and s.worker == worker for s in self.running.values()
        )
        if worker not in self.roles.ready_workers or is_second_suspect:
            return
        self.resuming.remove(sequence)
        is_moving = self._moves(sequence) and not needs_prefill
        if is_moving and self.ring is not None and not self.ring.has_arrived(sequence):
            sequence.worker, sequence.phase = worker, Phase.HANDING_OFF
            self.running[sequence.seq_id] = sequence
            return
        self._admit(sequence, worker, now_ns)

    def _give_up_storing(self, sequence: Sequence) -> None:
        """Where blocks are gone before they were stored, and the first token is out, start anew."""
        ring, pool = self.ring, self.topology.prefill_pool
        is_gone = pool in sequence.lost_pools and sequence.num_output_tokens > 0
        if ring is None or not is_gone or not self._moves(sequence) or ring.is_stored(sequence):
            return
        ring.give_up(sequence)
        self.ledger.release(sequence.seq_id, pool)
        sequence.forget_pool(pool)
        sequence.route = Route.DECODE  # the prefill worker would have nothing to compute it for

    def _moves(self, sequence: Sequence) -> bool:
        return sequence.route is Route.MOVE and sequence.sampling.max_tokens > 1

    def _admit(self, sequence: Sequence, worker: str, now_ns: int) -> None:
        pool = self.topology.pool_of(worker)
        moves_on = worker == self.topology.prefill_worker and self._moves(sequence)
        if pool in sequence.lost_pools:
            sequence.forget_pool(pool)
        sequence.generation += 1
        sequence.worker = worker
        self.running[sequence.seq_id] = sequence
        if sequence.num_computed_tokens < sequence.num_prompt_tokens:
            sequence.phase = Phase.PREFILLING
        else:
            sequence.phase = Phase.HANDING_OFF if moves_on else Phase.DECODING
        table = list(self.ledger.table(sequence.seq_id, pool))
        key = ("admit", sequence.seq_id, sequence.generation)
        self.ledger.open_command(key, worker, {pool: table})
        self._send(
            worker,
            Admit(
                seq_id=sequence.seq_id,
                generation=sequence.generation,
                token_ids=sequence.token_ids,
                num_prompt_tokens=sequence.num_prompt_tokens,
                num_computed_tokens=sequence.num_computed_tokens,
                block_table=table,
                sampling=sequence.sampling,
                until_output=1 if moves_on else sequence.sampling.max_tokens,
                num_stored_blocks=(
                    self.ring.num_stored(sequence) if moves_on and self.ring is not None else None
                ),
                max_chunk_tokens=sequence.max_chunk_tokens,
            ),
        )

    # Progress

    def _advance(self, sequence: Sequence, step: Stepped, entry: SequenceStep, now_ns: int) -> None:
        stamps = sequence.stamps
        sequence.num_computed_tokens = entry.num_computed_tokens
        sequence.prompt_logprobs += entry.prompt_logprobs
        if entry.num_scheduled_tokens:
            sequence.is_on_probation = False
            if stamps.started_ns is None:
                stamps.started_ns = step.started_ns
            if entry.num_computed_tokens > sequence.num_prompt_tokens:
                has_moved = sequence.transport is not None
                stamps.decoding(step.started_ns, entry.admitted_ns if has_moved else None)
        if entry.token_id is not None:
            sequence.output_token_ids.append(entry.token_id)
            if stamps.first_token_ns is None:
                moves_on = sequence.worker != self.topology.decode_worker and self._moves(sequence)
                sequence.phase = Phase.HANDING_OFF if moves_on else Phase.DECODING
            stamps.token(now_ns)
        if entry.finish_reason is not None:
            sequence.error = entry.error
            self.finish(sequence, FinishReason(entry.finish_reason), now_ns)
        if entry.token_id is not None:
            logprobs = [] if entry.logprob is None else [entry.logprob]
            self._emit(sequence, [entry.token_id], logprobs, sequence.is_finished)
        elif sequence.is_finished:
            self._emit(sequence, [], [], True)
        # emit may have ended it too (a stop string), so ask again
        if entry.is_released and not sequence.is_finished:
            self._hand_off(sequence, now_ns)

    def _hand_off(self, sequence: Sequence, now_ns: int) -> None:
        """The prefill worker has dropped the sequence: move it to the decode worker."""
        topology = self.topology
        sequence.transport = topology.transport
        sequence.handoff_blocks = self.ledger.pools[topology.decode_pool].num_blocks_for(
            sequence.num_computed_tokens
        )
        self.counters.handoffs += 1
        sequence.phase = Phase.HANDING_OFF
        if self.ring is not None:
            self.ledger.release(sequence.seq_id, topology.prefill_pool)
            sequence.worker = topology.decode_worker
            return
        sequence.worker = None
        self.resuming.append(self.running.pop(sequence.seq_id))

    def check_invariants(self) -> None:
        """Raise InvariantViolated unless ledger, queue, ring and cores agree with themselves."""
        self.queue.check_invariants()
        self.roles.cores.check_invariants()
        self.ledger.check_invariants()
        if self.ring is not None:
            self.ring.check_invariants()
