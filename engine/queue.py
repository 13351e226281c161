"""Who is next: the sequences that wait and hold no blocks, by turns between their owners.

Owns: the order of the queue, and what each owner has been charged.
Called by: the router, which decides whether what is next can be placed; telemetry counts.
Invariants: of two owners that keep waiting, neither gets ahead by more than one sequence; one owner
alone sees the order of prefill_key; no owner fills the queue.
Never: knows blocks or workers, or reads a clock (now_ns is given).

Turns are start-time fair queueing with equal weights. Placing a sequence charges its owner for all
the tokens that may be computed for it, those of its prompt that are cached left out; its end gives
back those that were not. The owner charged least is next. Whoever begins to wait starts level with
the least charged of those who wait, so that nobody saves up a share; when nobody waits all is
forgotten: what no one else wanted was free.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from engine.errors import InvariantViolated
from engine.plan import prefill_key
from engine.room import Room
from engine.sequence import Sequence


class FairQueue:
    """Sequences by owner, from submit until they are placed or end."""

    def __init__(self, max_sequences: int, max_tokens: int) -> None:
        self._sequences = Room("sequences", max_sequences)
        self._tokens = Room("prompt tokens", max_tokens)
        self._waiting: dict[str, dict[int, Sequence]] = {}
        self._charged: dict[str, int] = {}
        """Tokens by owner since somebody began to wait; also of owners that do not wait now."""
        self._placed: dict[int, int] = {}
        """What was charged for these, which may be more than they use."""
        self._pushed_ns = -1
        self.max_wait_ms = 0.0
        """Who would wait longer, as predicted, is refused; 0: nobody is."""

    def __len__(self) -> int:
        return self._sequences.total

    def __iter__(self) -> Iterator[Sequence]:
        for waiting in self._waiting.values():
            yield from waiting.values()

    @property
    def max_sequences(self) -> int:
        """Sequences that may wait."""
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
        """Prompt tokens that wait."""
        return self._tokens.total

    @property
    def max_tokens(self) -> int:
        """Prompt tokens that may wait; a longer prompt is taken when nothing waits."""
        return self._tokens.limit

    @property
    def num_owners(self) -> int:
        """Owners that wait."""
        return self._sequences.num_owners

    def set_limits(self, max_sequences: int, max_tokens: int) -> None:
        """Change the limits; what waits already stays, also beyond them."""
        self._sequences.limit = max_sequences
        self._tokens.limit = max_tokens

    def push(self, sequences: list[Sequence], now_ns: int) -> None:
        """Queue all of a request's sequences, which have one owner, or none.

        Raises:
            QueueFull: there is no room now, for anybody or for this owner.
            RequestError: there never will be.
        """
        owner, is_single = sequences[0].owner, len(sequences) == 1
        num_tokens = sum(sequence.num_prompt_tokens for sequence in sequences)
        self._advance(now_ns)
        self._sequences.check(owner, len(sequences), is_single=is_single)
        self._tokens.check(owner, num_tokens, is_single=is_single)
        if self.max_wait_ms:
            self._sequences.check_wait(owner, len(sequences), self.max_wait_ms)
            self._tokens.check_wait(owner, num_tokens, self.max_wait_ms)
        self._enter(sequences, num_tokens)
        self._pushed_ns = now_ns

    def put_back(self, sequence: Sequence) -> None:
        """It was placed and has lost its blocks; it waits again, whatever room there is."""
        self.forget(sequence)
        self._enter([sequence], sequence.num_prompt_tokens)

    def _enter(self, sequences: list[Sequence], num_tokens: int) -> None:
        owner = sequences[0].owner
        if owner not in self._waiting:
            level = min((self._charged[other] for other in self._waiting), default=0)
            self._charged[owner] = max(self._charged.get(owner, 0), level)
            self._waiting[owner] = {}
        for sequence in sequences:
            self._waiting[owner][sequence.seq_id] = sequence
        self._sequences.enter(owner, len(sequences))
        self._tokens.enter(owner, num_tokens)

    def in_order(self, now_ns: int) -> Iterator[Sequence]:
        """What waits, the next one first; taking one moves its owner's next turn back."""
        return self._by_turns(self._charged, now_ns)

    def forecast(self, now_ns: int) -> Iterator[Sequence]:
        """What waits, in the order in which it will be taken if nothing else comes."""
        charged = dict(self._charged)
        for sequence in self._by_turns(charged, now_ns):
            charged[sequence.owner] += _charge(sequence)
            yield sequence

    def _by_turns(self, charged: dict[str, int], now_ns: int) -> Iterator[Sequence]:
        def key(sequence: Sequence) -> float:
            return prefill_key(sequence.num_uncached_tokens, now_ns - sequence.stamps.arrived_ns)

        # Of owners charged alike the one with less waiting is first: it is the newcomer.
        turns = [
            (charged[owner], len(waiting), owner, sorted(waiting.values(), key=key)[::-1])
            for owner, waiting in self._waiting.items()
        ]
        heapq.heapify(turns)
        while turns:
            _, num_waiting, owner, rest = heapq.heappop(turns)
            yield rest.pop()
            if rest:
                heapq.heappush(turns, (charged[owner], num_waiting, owner, rest))

    def take(self, sequence: Sequence, now_ns: int) -> None:
        """It is being placed: its owner is charged."""
        self._advance(now_ns)
        if now_ns > self._pushed_ns:  # what goes in the instant of its arrival did not wait
            self._sequences.pace.count(1)
            self._tokens.pace.count(sequence.num_prompt_tokens)
        charge = self._placed[sequence.seq_id] = _charge(sequence)
        self._charged[sequence.owner] += charge
        self._remove(sequence)

    def forget(self, sequence: Sequence) -> None:
        """It has ended, waiting or placed: its owner gets back what it did not use."""
        if sequence.seq_id in self._waiting.get(sequence.owner, ()):
            self._remove(sequence)
        elif sequence.seq_id in self._placed:
            used = max(sequence.num_computed_tokens - sequence.num_cached_tokens, 0)
            self._charged[sequence.owner] -= self._placed.pop(sequence.seq_id) - used

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
            room.pace.advance(now_ns, is_waited=bool(self))

    def _remove(self, sequence: Sequence) -> None:
        waiting = self._waiting[sequence.owner]
        del waiting[sequence.seq_id]
        self._sequences.leave(sequence.owner, 1)
        self._tokens.leave(sequence.owner, sequence.num_prompt_tokens)
        if not waiting:
            del self._waiting[sequence.owner]
        if not self._waiting:
            self._charged.clear()
            self._placed.clear()


def _charge(sequence: Sequence) -> int:
    """All the tokens that may have to be computed for it."""
    return sequence.num_uncached_tokens + sequence.sampling.max_tokens
