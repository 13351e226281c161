"""Order waiting prompts fairly between owners.

Turns are start-time fair queueing. Placing a sequence charges its owner for the uncached tokens of
its prompt; an output token is charged when it is generated, because the number is not known before.
Both are divided by the owner's weight. Prompt tokens that were not computed are refunded at the
end. The least charged owner is next: weight two gets twice as much while all wait. An owner that
begins to wait starts level with the least charged waiting owner, so no owner saves up a share. When
nothing waits all charges are forgotten: tokens that no other owner wanted were free. Preempted
sequences have their owner's turns, before its new ones.

Invariants: of two owners that keep waiting, neither gets ahead of its share by more than one prompt
and the outputs under way; one owner alone sees the order of prefill_key; no owner fills the queue.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterable, Iterator, Mapping

from engine.errors import InvariantViolated, QueueFull
from engine.scheduler.queue.waiting_limit import MAX_RETRY_MS, WaitingLimit
from engine.scheduler.sequences.sequence import Phase, Sequence
from engine.scheduler.sequences.sequence_table import age
from engine.wire.prompt_order import prefill_key


class FairQueue:
    """Sequences by owner, from submit until they are placed or end."""

    def __init__(self, max_sequences: int, max_tokens: int) -> None:
        self._sequences = WaitingLimit("sequences", max_sequences, least=1)
        self._tokens = WaitingLimit("prompt tokens", max_tokens)
        self._waiting: dict[str, dict[int, Sequence]] = {}
        self._charged: dict[str, float] = {}
        """Tokens over the weight, by owner, since the queue was last empty; also of owners that do
        not wait now."""
        self._placed: dict[int, tuple[int, float]] = {}
        """Prompt tokens charged at placement, perhaps more than are computed, and the weight then.
        """
        self.weights: Mapping[str, float] = {}
        """Weights by owner; the default is 1. A change holds for later placements."""
        self.paused: Mapping[int, Sequence] = {}
        """Preempted sequences by id: their owners wait, too."""
        self._pending: dict[int, int] = {}
        """Prompt tokens of placed sequences without a first token."""
        self._promised: dict[str, float] = {}
        """Until when owners' refused clients have been told times to come back."""
        self._pushed_ns = -1
        self._is_served = True
        self.max_wait_ms = 0.0
        """Maximum predicted wait for a turn, above which requests are refused; 0: no limit."""
        self.max_first_ms = 0.0
        """Maximum predicted TTFT, above which requests are refused; 0: no limit."""
        self.step_tokens = 0
        """Prompt tokens in a worker's step."""

    def __len__(self) -> int:
        return self._sequences.total

    def __iter__(self) -> Iterator[Sequence]:
        for waiting in self._waiting.values():
            yield from waiting.values()

    @property
    def max_sequences(self) -> int:
        return self._sequences.limit

    @property
    def max_per_request(self) -> int:
        """Sequences that one request may bring; a single one always may."""
        return max(self._sequences.max_per_request, 1)

    @property
    def max_tokens_per_request(self) -> int:
        """The most prompt tokens that one request of several sequences may bring."""
        return self._tokens.max_per_request

    @property
    def num_tokens(self) -> int:
        """Prompt tokens of all waiting sequences."""
        return self._tokens.total

    @property
    def max_tokens(self) -> int:
        """Prompt tokens that may wait; a longer prompt is taken when nothing waits."""
        return self._tokens.limit

    @property
    def num_owners(self) -> int:
        """Users and keys of which something waits."""
        return self._sequences.num_owners

    def assume(self, ms_per_token: float) -> None:
        """Set the time of a prompt token until it is measured; 0: unknown."""
        self._tokens.assumed_ms = ms_per_token

    def set_limits(self, max_sequences: int, max_tokens: int) -> None:
        """Change the limits; what waits already stays, also beyond them."""
        self._sequences.limit = max_sequences
        self._tokens.limit = max_tokens

    def push(self, sequences: list[Sequence], now_ns: int) -> None:
        """Queue all of a request's sequences, which have one owner, or none.

        Raises:
            QueueFull: the queue is full, for all or for this owner.
            RequestError: the request is larger than the queue.
        """
        num_tokens = sum(sequence.num_prompt_tokens for sequence in sequences)
        self.check(sequences[0].owner, len(sequences), num_tokens, now_ns)
        self._enter(sequences, num_tokens)
        self._pushed_ns = now_ns

    def check(self, owner: str, num_sequences: int, num_tokens: int, now_ns: int) -> None:
        """Refuse a request of this size as push() would."""
        self._advance(now_ns)
        share = self._share(owner)
        try:
            for room, amount in ((self._sequences, num_sequences), (self._tokens, num_tokens)):
                room.check(owner, amount, is_single=num_sequences == 1)
            if self.max_wait_ms:
                limit_ms, behind = self.max_wait_ms, self._behind(owner, num_tokens, now_ns)
                self._sequences.check_wait(owner, num_sequences, limit_ms, share, len(behind))
                self._tokens.check_wait(owner, num_tokens, limit_ms, share, sum(behind))
            if self.max_first_ms and (self or self._pending):
                # shorter prompts pass longer ones at a worker, but for the step under way
                longest = max(num_tokens, self.step_tokens)
                ahead = sum(min(each, longest) for each in self._pending.values())
                self._tokens.check_first(owner, num_tokens, self.max_first_ms, share, ahead)
        except QueueFull as full:
            turn_ms = self._sequences.pace.wait_ms(num_sequences / share)
            if turn_ms is None:  # no sequence had to wait for a turn
                turn_ms = self._tokens.first_ms(num_tokens / share)
            full.retry_after_ms = self._promise(owner, full.retry_after_ms, turn_ms, now_ns)
            raise

    def _behind(self, owner: str, num_tokens: int, now_ns: int) -> list[int]:
        """List the lengths of an owner's waiting prompts that a new one of this size passes."""
        key = prefill_key(num_tokens, 0)
        return [
            each.num_prompt_tokens
            for each in self._waiting.get(owner, {}).values()
            if prefill_key(each.num_uncached_tokens, now_ns - each.stamps.arrived_ns) > key
        ]

    def _enter(self, sequences: list[Sequence], num_tokens: int) -> None:
        owner = sequences[0].owner
        self._begin(owner)
        self._waiting.setdefault(owner, {})
        for sequence in sequences:
            self._waiting[owner][sequence.seq_id] = sequence
        self._sequences.enter(owner, len(sequences))
        self._tokens.enter(owner, num_tokens)

    def _begin(self, owner: str) -> None:
        """Let an owner wait, level with the least charged one that does."""
        others = self.owners()
        if not others:
            self._promised.clear()
            self._charged.clear()
            self._placed.clear()
        if owner not in others:
            level = min((self._charged[other] for other in others), default=0)
            self._charged[owner] = max(self._charged.get(owner, 0), level)

    def _promise(self, owner: str, retry_ms: int | None, turn_ms: float, now_ns: int) -> int:
        """Choose when a refused client should retry: once there is room, one at a time.

        If all clients of a flood retried together, all but the first would be refused again.
        """
        soonest_ns = now_ns + (retry_ms or 0) * 1e6
        slot_ns = max(soonest_ns, self._promised.get(owner, 0) + turn_ms * 1e6)
        self._promised[owner] = min(slot_ns, now_ns + MAX_RETRY_MS * 1e6)
        return math.ceil((self._promised[owner] - now_ns) / 1e6)

    def owners(self) -> set[str]:
        """Return the owners of which something waits."""
        return {*self._waiting, *(sequence.owner for sequence in self.paused.values())}

    def in_order(self, now_ns: int, last: Collection[str] = ()) -> Iterator[Sequence]:
        """Yield waiting sequences, the next one first; taking one moves its owner back.

        An owner's preempted sequences go before its new ones.

        Args:
            now_ns: CLOCK_MONOTONIC, for ageing.
            last: owners that come after all others.
        """
        paused: dict[str, list[Sequence]] = {}
        for sequence in sorted(self.paused.values(), key=age, reverse=True):
            paused.setdefault(sequence.owner, []).append(sequence)
        return self._by_turns(self._charged, now_ns, paused, last)

    def forecast(self, now_ns: int) -> Iterator[Sequence]:
        """Yield waiting sequences in the order of the queue if no others come."""
        charged = dict(self._charged)
        for sequence in self._by_turns(charged, now_ns, {}, ()):
            charged[sequence.owner] += sequence.num_uncached_tokens / self._weight(sequence.owner)
            yield sequence

    def _weight(self, owner: str) -> float:
        return self.weights.get(owner, 1.0)

    def _share(self, owner: str) -> float:
        return self._weight(owner) / sum(map(self._weight, {owner, *self.owners()}))

    def _by_turns(
        self,
        charged: dict[str, float],
        now_ns: int,
        paused: Mapping[str, list[Sequence]],
        last: Collection[str],
    ) -> Iterator[Sequence]:
        def key(sequence: Sequence) -> float:
            return prefill_key(sequence.num_uncached_tokens, now_ns - sequence.stamps.arrived_ns)

        # Of owners charged alike the one with less waiting is first: it is the newcomer.
        turns = []
        for owner in {*self._waiting, *paused}:
            new = sorted(self._waiting.get(owner, {}).values(), key=key)
            rest = new[::-1] + paused.get(owner, [])
            turns.append((owner in last, charged[owner], len(rest), owner, rest))
        heapq.heapify(turns)
        while turns:
            is_last, _, num_waiting, owner, rest = heapq.heappop(turns)
            yield rest.pop()
            if rest:
                heapq.heappush(turns, (is_last, charged[owner], num_waiting, owner, rest))

    def served(self, is_served: bool, now_ns: int) -> None:
        """Note whether any worker takes sequences from the queue.

        The time until a dead worker is back does not count for the pace.
        """
        self._advance(now_ns)
        self._is_served = is_served

    def remove_placed(self, sequence: Sequence, now_ns: int) -> None:
        """Take out a sequence that is being placed; charge its owner for the prompt."""
        self._advance(now_ns)
        if now_ns > self._pushed_ns:  # what goes in the instant of its arrival did not wait
            self._sequences.pace.count(1)
            self._tokens.pace.count(sequence.num_prompt_tokens)
        charge, weight = sequence.num_uncached_tokens, self._weight(sequence.owner)
        self._placed[sequence.seq_id] = charge, weight
        self._charged[sequence.owner] += charge / weight
        self._pending[sequence.seq_id] = sequence.num_prompt_tokens
        self._remove(sequence)

    def wait_again(self, sequence: Sequence) -> None:
        """Let the owner of a sequence wait that has lost its blocks, or its daemon."""
        self._begin(sequence.owner)

    def take_again(self, sequence: Sequence) -> None:
        """Go on charging for a sequence that is placed again; what is computed again is free."""
        self._placed.setdefault(sequence.seq_id, (0, self._weight(sequence.owner)))

    def generated(self, sequence: Sequence, num_tokens: int) -> None:
        """Charge the owner for new output tokens."""
        if sequence.seq_id in self._placed:
            _, weight = self._placed[sequence.seq_id]
            self._charged[sequence.owner] += num_tokens / weight

    def answered(self, sequence: Sequence, now_ns: int) -> None:
        """Take in that the first token of a sequence has been answered."""
        self._advance(now_ns)
        num_tokens = self._pending.pop(sequence.seq_id, None)
        if num_tokens is not None:
            for pace in self._tokens.first_tokens:
                pace.count(num_tokens)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that has ended, and refund its owner's unused tokens."""
        self._pending.pop(sequence.seq_id, None)
        if sequence.seq_id in self._waiting.get(sequence.owner, ()):
            self._remove(sequence)
        elif sequence.seq_id in self._placed:
            charge, weight = self._placed.pop(sequence.seq_id)
            if not sequence.output_token_ids:  # else its prompt was computed
                used = max(sequence.num_computed_tokens - sequence.num_cached_tokens, 0)
                self._charged[sequence.owner] -= max(charge - used, 0) / weight

    def check_invariants(self) -> None:
        """Raise InvariantViolated unless rooms and owners agree."""
        for room, counted in (
            (self._sequences, sum(1 for _ in self)),
            (self._tokens, sum(sequence.num_prompt_tokens for sequence in self)),
        ):
            room.check_invariants()
            if room.total != counted:
                raise InvariantViolated(
                    f"{counted} {room.unit} wait, {room.total} are counted", where="queue"
                )
        if not all(self._waiting.values()) or not self._waiting.keys() <= self._charged.keys():
            raise InvariantViolated("an owner has nothing waiting, or no account", where="queue")

    def _advance(self, now_ns: int) -> None:
        for room in (self._sequences, self._tokens):
            room.pace.advance(now_ns, is_waited=bool(self) and self._is_served)
        for pace in self._tokens.first_tokens:
            pace.advance(now_ns, is_waited=bool(self._pending or self) and self._is_served)

    def _remove(self, sequence: Sequence) -> None:
        waiting = self._waiting[sequence.owner]
        del waiting[sequence.seq_id]
        self._sequences.leave(sequence.owner, 1)
        self._tokens.leave(sequence.owner, sequence.num_prompt_tokens)
        if not waiting:
            del self._waiting[sequence.owner]


class PromptsAhead:
    """What a queued prompt would find before it at each worker.

    Args:
        running: all that is admitted.
        max_num_batched_tokens: of prompts, in a worker's step.
        now_ns: CLOCK_MONOTONIC, for ageing.
    """

    def __init__(
        self, running: Iterable[Sequence], max_num_batched_tokens: int, now_ns: int
    ) -> None:
        self._max_step_tokens = max_num_batched_tokens
        self._now_ns = now_ns
        self._prompts: list[tuple[str | None, str, int, float]] = []
        self.sequences: list[Sequence] = []
        """The sequences whose prompts are counted."""
        for sequence in running:
            if sequence.phase is Phase.PREFILLING:
                self.add(sequence)

    def add(self, sequence: Sequence) -> None:
        """Count the prompt of a sequence that has just been admitted to a worker."""
        self.sequences.append(sequence)
        num_tokens = sequence.num_tokens - sequence.num_computed_tokens
        key = self._key(sequence, num_tokens)
        self._prompts.append((sequence.worker, sequence.owner, num_tokens, key))

    def num_tokens(self, sequence: Sequence, worker: str) -> int:
        """Count the prompt tokens that the worker has to compute first.

        A prompt of one step passes prompts of several, as it will in the worker's plan. Otherwise
        its owner's older prompts stay ahead; other owners' longer prompts are passed.
        """
        owner, own_tokens = sequence.owner, sequence.num_uncached_tokens
        own_key = self._key(sequence, own_tokens)
        is_short = own_tokens <= self._max_step_tokens
        return sum(
            num_tokens
            for at, other, num_tokens, other_key in self._prompts
            if at == worker
            and not (is_short and num_tokens > self._max_step_tokens)
            and (other_key <= own_key if other == owner else num_tokens <= own_tokens)
        )

    def with_fewer_than(
        self, most_tokens: int, sequence: Sequence, workers: Iterable[str]
    ) -> set[str]:
        """Return the workers that have less to compute first."""
        return {name for name in workers if self.num_tokens(sequence, name) < most_tokens}

    def _key(self, sequence: Sequence, num_tokens: int) -> float:
        return prefill_key(num_tokens, self._now_ns - sequence.stamps.arrived_ns)
