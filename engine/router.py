"""Who runs where: admission, handoff, recovery. Events in, commands out.

Owns: every sequence from submit to its last released block, and the ledger.
Called by: the daemon, on its loop; calls back `send` (a command for a worker) and `emit` (tokens
for an open reply).
Invariants: in scan order no sequence that holds blocks waits behind one that holds none; a
sequence's blocks are reserved in all pools together, or in none; each sequence ends once.
Never: waits, reads a clock (now_ns is given), knows text, HTTP or SQL.

A sequence's life: submit → (blocks reserved) → admit to the prefill worker until it has one output
token → its release is the handoff → admit to the decode worker until it ends. A worker's death
puts its sequences back in front of the queue, with their blocks and outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.blocks import Ledger
from engine.errors import RequestError
from engine.messages import Admit, Command, Loaded, Release, SequenceStep, Stepped
from engine.plan import prefill_key
from engine.queue import FairQueue
from engine.ring import Ring
from engine.sequence import FinishReason, Phase, Sequence, TokenLogprob
from engine.topology import Topology

MAX_RUNNING_SEQUENCES = 256
PROBATION_SUSPICIONS = 2
MAX_SUSPICIONS = 3
"""A sequence that keeps killing workers is found out: after its second death each that was there
makes its next step with no other suspect beside it, and a death then is blamed on it alone."""
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
    ) -> None:
        self.topology = topology
        self.ledger = ledger
        self.ring = ring
        self.counters = Counters()
        self.queue = queue
        """Waiting and holding no blocks."""
        self.resuming: list[Sequence] = []
        """Waiting and holding blocks: moved or recovered; always placed before the queue."""
        self.running: dict[int, Sequence] = {}
        """Admitted to a worker or on the way between two; by seq_id."""
        self.ready_workers: set[str] = set()
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
            self._check_fits(sequence)
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

    def abort(self, sequence: Sequence, reason: FinishReason, now_ns: int) -> None:
        """End a sequence and tell its reply."""
        if not sequence.is_finished:
            self.finish(sequence, reason, now_ns)
            self._emit(sequence, [], [], True)
            self.dispatch(now_ns)

    # What workers report

    def worker_ready(self, worker: str, now_ns: int) -> None:
        """The worker takes commands from now on."""
        self.ready_workers.add(worker)
        self.dispatch(now_ns)

    def worker_died(self, worker: str, now_ns: int) -> None:
        """The worker is dead and everything that it sent has been handled.

        The pools outlive it, so its sequences keep their blocks, outputs and acknowledged KV.
        """
        self.ready_workers.discard(worker)
        self.ledger.reap(worker)
        if self.ring is not None:
            self.ring.worker_died(worker)
        victims = [s for s in self.running.values() if s.worker == worker]
        for sequence in [s for s in victims if s.is_on_probation] or victims:
            sequence.num_suspicions += 1
            sequence.is_on_probation = sequence.num_suspicions >= PROBATION_SUSPICIONS
        for sequence in victims:
            if sequence.num_suspicions > MAX_SUSPICIONS:
                sequence.error = f"worker {worker} died {sequence.num_suspicions} times under it"
                self.abort(sequence, FinishReason.ERROR, now_ns)
                continue
            sequence.num_recoveries += 1
            self.counters.recovered_sequences += 1
            del self.running[sequence.seq_id]
            sequence.worker = None
            sequence.phase = Phase.QUEUED
            self.resuming.append(sequence)
        self.dispatch(now_ns)

    def stepped(self, worker: str, step: Stepped, now_ns: int) -> None:
        """Take in one step: progress, tokens, stores and releases."""
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
            self.ring.pump(self.ready_workers, self._send)
            for sequence in self.ring.take_arrived():
                if not sequence.is_finished:
                    self._admit(sequence, self.topology.decode_worker, now_ns)
        if self.queue and self.topology.prefill_worker in self.ready_workers:
            self._dispatch_queue(now_ns)

    def _dispatch_queue(self, now_ns: int) -> None:
        def key(sequence: Sequence) -> float:
            return prefill_key(sequence.num_prompt_tokens, now_ns - sequence.stamps.arrived_ns)

        ahead = [
            (s.owner, s.num_prompt_tokens - s.num_computed_tokens, key(s))
            for s in self.running.values()
            if s.phase is Phase.PREFILLING
        ]

        def num_ahead(sequence: Sequence) -> int:
            """Prompt tokens that the worker has to compute first.

            Its owner's older prompts keep their place. Of others' the longer ones are passed, as
            they will be in the worker's plan: how long they waited was their owners' affair.
            """
            owner, num_tokens, own_key = sequence.owner, sequence.num_prompt_tokens, key(sequence)
            return sum(
                n
                for other, n, other_key in ahead
                if (other_key <= own_key if other == owner else n <= num_tokens)
            )

        pool = self.ledger.pools[self.topology.prefill_pool]
        for sequence in self.queue.in_order(now_ns):
            if len(self.running) >= MAX_RUNNING_SEQUENCES or not pool.num_free:
                break
            # The worker sees two steps' worth of prompts; the rest waits here, where it can be
            # overtaken by a shorter one and cancelled without a message.
            if num_ahead(sequence) >= 2 * self._max_step_tokens or not self.ledger.reserve(
                sequence.seq_id, self._wants(sequence)
            ):
                if now_ns - sequence.stamps.arrived_ns > STARVATION_NS:
                    break
                continue
            self.queue.take(sequence, now_ns)
            ahead.append((sequence.owner, sequence.num_prompt_tokens, key(sequence)))
            self._admit(sequence, self.topology.prefill_worker, now_ns)

    def _wants(self, sequence: Sequence) -> dict[str, int]:
        """Blocks to reserve, by pool: all that the sequence can ever use, so decode never runs out.

        With two pools, a sequence that ends with its first token takes nothing on the decode side.
        """
        topology, pools = self.topology, self.ledger.pools
        num_tokens = sequence.num_prompt_tokens + sequence.sampling.max_tokens
        if topology.prefill_pool == topology.decode_pool:
            pool = pools[topology.decode_pool]
            return {pool.name: pool.num_blocks_for(num_tokens)}
        prefill, decode = pools[topology.prefill_pool], pools[topology.decode_pool]
        wants = {prefill.name: prefill.num_blocks_for(sequence.num_prompt_tokens)}
        if sequence.sampling.max_tokens > 1:
            wants[decode.name] = decode.num_blocks_for(num_tokens)
        return wants

    def _check_fits(self, sequence: Sequence) -> None:
        for name, count in self._wants(sequence).items():
            if count > self.ledger.pools[name].capacity:
                raise RequestError(
                    f"prompt ({sequence.num_prompt_tokens} tokens) and max_tokens "
                    f"({sequence.sampling.max_tokens}) need {count} KV blocks, "
                    f"the {name} pool has {self.ledger.pools[name].capacity}",
                    code="context_length_exceeded",
                    param="max_tokens",
                )

    def _resume(self, sequence: Sequence, now_ns: int) -> None:
        """Place a sequence that holds blocks, if the worker it needs is there."""
        topology = self.topology
        needs_prefill = not sequence.num_output_tokens or (
            self.ring is not None and self._moves(sequence) and not self.ring.is_stored(sequence)
        )
        worker = topology.prefill_worker if needs_prefill else topology.decode_worker
        is_second_suspect = sequence.is_on_probation and any(
            s.is_on_probation and s.worker == worker for s in self.running.values()
        )
        if worker not in self.ready_workers or is_second_suspect:
            return
        self.resuming.remove(sequence)
        if not needs_prefill and self.ring is not None and not self.ring.has_arrived(sequence):
            sequence.worker = worker
            self.running[sequence.seq_id] = sequence
            sequence.phase = Phase.HANDING_OFF
            return
        self._admit(sequence, worker, now_ns)

    def _moves(self, sequence: Sequence) -> bool:
        """True if it is prefilled by one worker and decoded by another."""
        return not self.topology.is_colocated and sequence.sampling.max_tokens > 1

    def _admit(self, sequence: Sequence, worker: str, now_ns: int) -> None:
        topology = self.topology
        is_prefill = worker == topology.prefill_worker
        pool = topology.prefill_pool if is_prefill else topology.decode_pool
        moves_on = is_prefill and self._moves(sequence)
        sequence.generation += 1
        sequence.worker = worker
        self.running[sequence.seq_id] = sequence
        if sequence.num_computed_tokens < sequence.num_prompt_tokens:
            sequence.phase = Phase.PREFILLING
        else:
            sequence.phase = Phase.HANDING_OFF if moves_on else Phase.DECODING
        self.ledger.activate(sequence.seq_id, pool)
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
            is_past_prompt = entry.num_computed_tokens > sequence.num_prompt_tokens
            if is_past_prompt and stamps.decode_started_ns is None:
                if sequence.transport is not None:
                    stamps.attached_ns = max(entry.admitted_ns, stamps.first_token_ns or 0)
                stamps.decode_started_ns = max(step.started_ns, stamps.attached_ns or 0)
        if entry.token_id is not None:
            sequence.output_token_ids.append(entry.token_id)
            stamps.last_token_ns = now_ns
            if stamps.first_token_ns is None:
                stamps.first_token_ns = now_ns
                moves_on = sequence.worker != self.topology.decode_worker and self._moves(sequence)
                sequence.phase = Phase.HANDING_OFF if moves_on else Phase.DECODING
            elif stamps.second_token_ns is None:
                stamps.second_token_ns = now_ns
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
        else:
            del self.running[sequence.seq_id]
            sequence.worker = None
            self.resuming.append(sequence)

    def check_invariants(self) -> None:
        """Raise InvariantViolated unless ledger, queue and ring agree with themselves."""
        self.queue.check_invariants()
        self.ledger.check_invariants()
        if self.ring is not None:
            self.ring.check_invariants()
