"""Who is next, by turns between owners; how much may wait, and when the refused should come back.

Turns are start-time fair queueing. Placing a sequence charges its owner for those tokens of its
prompt that are not cached, and every output token is charged when it comes, for nobody knows before
how many there will be; both are divided by the owner's weight. What of a prompt was not computed is
given back at its end. The owner charged least is next: one of weight two gets twice as much while
all wait. Whoever begins to wait starts level with the least charged of those who wait, so that
nobody saves up a share; when nobody waits all is forgotten: what no one else wanted was free.

Owns: the limit on one thing that waits (sequences, or their prompt tokens), the counts by owner,
and the pace at which it has been leaving; the order of the queue, and what each owner has been
charged.
Invariants: of two owners that keep waiting, neither gets ahead of its share by more than one prompt
and the outputs that are under way; one owner alone sees the order of prefill_key; no owner fills
the queue.
Never: knows blocks or workers, or reads a clock (now_ns is given).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Mapping

from engine.errors import InvariantViolated, QueueFull, RequestError
from engine.schedule.plan import prefill_key
from engine.schedule.sequence import Phase, Sequence

# How much may wait, everybody's and each owner's; and when a refused client should come back.
# This is the dynamic threshold by which switches share their buffers: alone, an owner gets three
# quarters of the room; the more owners, the less for each; and always some is left for a newcomer.
# Invariant: an owner has at most OWNER_SHARE times as much waiting as there is room left, but for a
# single sequence of one that had none.
# Never: knows sequences or their order, or reads a clock (now_ns is given).


OWNER_SHARE = 3
PACE_WINDOW_S = 30.0
"""How far back the pace looks, in time that somebody waited."""
FIRST_WINDOWS_S = (2.0, 10.0)
"""The same of first tokens: how fast they come changes as soon as more is decoded beside them."""
KEPT_SHARE = 0.3
"""Of the target for the first token: what was admitted slows down what comes after it."""
UNKNOWN_RETRY_MS = 5_000
"""When to come back while nothing has left yet."""
MIN_RETRY_MS = 1_000
MAX_RETRY_MS = 120_000
"""A longer time OpenAI's client does not keep to."""


class WaitingLimit:
    """How much of one kind (sequences, tokens, bytes) may wait: in all, and of each owner."""

    def __init__(self, unit: str, limit: int) -> None:
        self.unit = unit
        """Plural, as messages name it."""
        self.limit = limit
        self.total = 0
        self.pace = QueueRate()
        self.first_tokens = tuple(map(QueueRate, FIRST_WINDOWS_S))
        """How fast prompts get theirs, in time that one was waited for."""
        self.assumed_ms = 0.0
        """For one of it, where no pace is known yet; 0: nothing is."""
        self._held: dict[str, int] = {}

    @property
    def num_owners(self) -> int:
        """Owners that have something here."""
        return len(self._held)

    @property
    def max_per_request(self) -> int:
        """The most that one request of several sequences may bring: an owner's alone."""
        return OWNER_SHARE * self.limit // (1 + OWNER_SHARE)

    def held(self, owner: str) -> int:
        """How much of it is this owner's."""
        return self._held.get(owner, 0)

    def enter(self, owner: str, amount: int) -> None:
        """Count what an owner has put into the queue."""
        self.total += amount
        self._held[owner] = self.held(owner) + amount

    def leave(self, owner: str, amount: int) -> None:
        """Count what an owner no longer has in the queue."""
        self.total -= amount
        self._held[owner] -= amount
        if not self._held[owner]:
            del self._held[owner]

    def check(self, owner: str, wanted: int, *, is_single: bool) -> None:
        """Refuse what there is no room for.

        Args:
            owner: whose it is.
            wanted: how much a request brings.
            is_single: it is one sequence. An owner's first may take all that is left, and where
                nothing waits it may be of any size: whatever can be served can also wait.

        Raises:
            QueueFull: there is no room now, for anybody or for this owner.
            RequestError: there never will be.
        """
        free, held = self.limit - self.total, self.held(owner)
        if is_single and not held and (wanted <= free or not self.total):
            return
        most = self.max_per_request
        if wanted > most and not is_single:
            raise RequestError(
                f"the prompts of one request may be {most} {self.unit}, these are {wanted}",
                code="invalid_value",
                param="prompt",
                hint="send them in several requests",
            )
        if wanted > free:
            raise QueueFull(
                f"{self.total} {self.unit} are waiting, at most {self.limit} may; "
                f"this request has {wanted}",
                retry_after_ms=self.pace.retry_ms(min(wanted - free, self.total)),
            )
        # What the owner may add so that it has at most OWNER_SHARE times what is left after that.
        share = max((OWNER_SHARE * free - held) // (1 + OWNER_SHARE), 0)
        if wanted > share:
            raise QueueFull(
                f"{held} of your {self.unit} are waiting and {share} more may, "
                f"so that others find room; this request has {wanted}",
                code="user_quota",
                # Owners take turns: its own leave at its share of the pace.
                retry_after_ms=self.pace.retry_ms((wanted - share) * max(self.num_owners, 1)),
            )

    def ahead_of(self, owner: str, wanted: int, share: float) -> float:
        """What leaves before the last of so much more of an owner's, if nothing else comes.

        Owners take turns, so others' queues count only as far as its own is long, by its share.
        """
        own = self.held(owner) + wanted
        return min(own / share, self.total + wanted) - wanted

    def check_wait(self, owner: str, wanted: int, max_wait_ms: float, share: float) -> None:
        """Refuse what would wait too long at the pace at which the queue has been going down.

        Args:
            owner: whose it is.
            wanted: how much a request brings.
            max_wait_ms: for a turn.
            share: the owner's, of the turns.

        Raises:
            QueueFull: with the time after which it would wait no longer than that.
        """
        leaving = self.ahead_of(owner, wanted, share) + wanted  # it has its turn when it leaves
        wait_ms = self.pace.wait_ms(leaving)
        if wait_ms is None:
            wait_ms = leaving * self.assumed_ms
        if wait_ms <= max_wait_ms or not self.total:
            return
        excess = math.ceil(leaving * (1 - max_wait_ms / wait_ms))
        raise QueueFull(
            f"it would wait about {wait_ms / 1e3:.0f} s for its turn, longer than the "
            f"{max_wait_ms / 1e3:g} s that a request may; {self.total} {self.unit} are waiting",
            retry_after_ms=self.pace.retry_ms(excess),
        )

    def check_first(
        self, owner: str, wanted: int, target_ms: float, share: float, ahead: int
    ) -> None:
        """Refuse whose first token would come too late at the pace of first tokens.

        That pace falls while those who have theirs are served, which is why it is looked at over a
        short time and a longer one, the slower of which counts, and why a part of the target is
        kept back. Who needs most of the target alone is let in while little is ahead.

        Args:
            owner: whose it is.
            wanted: how much a request brings.
            target_ms: for the first token.
            share: the owner's, of the turns.
            ahead: how much has had its turn, and no token yet.

        Raises:
            QueueFull: with the time after which it would come in time.
        """
        ahead_ms = self.first_ms(self.ahead_of(owner, wanted, share) + ahead)
        own_ms = self.first_ms(wanted)
        left_ms = target_ms * (1 - KEPT_SHARE) - min(own_ms, target_ms / 2)
        if ahead_ms <= left_ms:
            return
        raise QueueFull(
            f"its first token would come after about {(ahead_ms + own_ms) / 1e3:.1f} s, which is "
            f"not safely within the {target_ms / 1e3:g} s of the target; {self.total + ahead} "
            f"{self.unit} are before it",
            retry_after_ms=retry_after_ms(ahead_ms - left_ms),
        )

    def first_ms(self, amount: float) -> float:
        """Until so much has had its first token."""
        known = [pace.wait_ms(amount) for pace in self.first_tokens]
        return max((n for n in known if n is not None), default=amount * self.assumed_ms)

    def check_invariants(self) -> None:
        """Raise InvariantViolated unless the owners' parts add up."""
        if self.total != sum(self._held.values()) or any(n <= 0 for n in self._held.values()):
            raise InvariantViolated(
                f"{self.total} {self.unit} wait, by owner {self._held}", where="queue"
            )


class QueueRate:
    """How fast a queue goes down: what left it, over the time that somebody waited, lately.

    Args:
        window_s: how far back it looks.
    """

    def __init__(self, window_s: float = PACE_WINDOW_S) -> None:
        self._window_s = window_s
        self._amount = 0.0
        self._waited_s = 0.0
        self._at_ns = 0

    def advance(self, now_ns: int, *, is_waited: bool) -> None:
        """Time has passed since the last call, and there was a queue or there was none."""
        if is_waited:
            kept = math.exp(-(now_ns - self._at_ns) / 1e9 / self._window_s)
            self._amount *= kept
            self._waited_s = self._waited_s * kept + self._window_s * (1 - kept)
        self._at_ns = now_ns

    def count(self, amount: int) -> None:
        """So much has left after it has waited."""
        self._amount += amount

    def wait_ms(self, amount: float) -> float | None:
        """How long it takes until so much has left; None while nothing has left yet."""
        if not self._amount or not self._waited_s:
            return None
        return 1e3 * amount * self._waited_s / self._amount

    def retry_ms(self, amount: int) -> int:
        """When to come back, within what clients keep to."""
        estimate_ms = self.wait_ms(amount)
        if estimate_ms is None:
            return UNKNOWN_RETRY_MS
        return retry_after_ms(estimate_ms)


def retry_after_ms(wait_ms: float) -> int:
    """A time to come back that clients keep to."""
    return math.ceil(min(max(wait_ms, MIN_RETRY_MS), MAX_RETRY_MS))


# --------------------------------------------------------------------------------------------------


class FairQueue:
    """Sequences by owner, from submit until they are placed or end."""

    def __init__(self, max_sequences: int, max_tokens: int) -> None:
        self._sequences = WaitingLimit("sequences", max_sequences)
        self._tokens = WaitingLimit("prompt tokens", max_tokens)
        self._waiting: dict[str, dict[int, Sequence]] = {}
        self._charged: dict[str, float] = {}
        """Tokens over the owner's weight, by owner, since somebody began to wait; also of owners
        that do not wait now."""
        self._placed: dict[int, tuple[int, float]] = {}
        """Prompt tokens charged for these, which may be more than are computed, and the weight
        then."""
        self.weights: Mapping[str, float] = {}
        """By owner; others have 1. A change holds for what is placed from then on."""
        self._pending: dict[int, int] = {}
        """Prompt tokens of those that were placed and have no token yet."""
        self._promised: dict[str, float] = {}
        """Until when owners' refused clients have been told times to come back."""
        self._pushed_ns = -1
        self._is_served = True
        self.max_wait_ms = 0.0
        """Who would wait longer for a turn, as predicted, is refused; 0: nobody is."""
        self.max_first_ms = 0.0
        """Whose first token would come later, as predicted, is refused; 0: nobody is."""
        self.step_tokens = 0
        """Of prompts, in a worker's step."""

    def __len__(self) -> int:
        return self._sequences.total

    def __iter__(self) -> Iterator[Sequence]:
        for waiting in self._waiting.values():
            yield from waiting.values()

    @property
    def max_sequences(self) -> int:
        """How many sequences may wait."""
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
        """What a prompt token takes, until it has been seen; 0: nothing is known of it."""
        self._tokens.assumed_ms = ms_per_token

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
        num_tokens = sum(sequence.num_prompt_tokens for sequence in sequences)
        self.check(sequences[0].owner, len(sequences), num_tokens, now_ns)
        self._enter(sequences, num_tokens)
        self._pushed_ns = now_ns

    def check(self, owner: str, num_sequences: int, num_tokens: int, now_ns: int) -> None:
        """Refuse as push() would refuse a request of so many sequences and prompt tokens."""
        self._advance(now_ns)
        share = self._share(owner)
        try:
            for room, amount in ((self._sequences, num_sequences), (self._tokens, num_tokens)):
                room.check(owner, amount, is_single=num_sequences == 1)
                if self.max_wait_ms:
                    room.check_wait(owner, amount, self.max_wait_ms, share)
            if self.max_first_ms and (self or self._pending):
                # shorter prompts pass longer ones at a worker, but for the step under way
                longest = max(num_tokens, self.step_tokens)
                ahead = sum(min(each, longest) for each in self._pending.values())
                self._tokens.check_first(owner, num_tokens, self.max_first_ms, share, ahead)
        except QueueFull as full:
            turn_ms = self._sequences.pace.wait_ms(num_sequences / share)
            if turn_ms is None:  # nobody had to wait for a turn
                turn_ms = self._tokens.first_ms(num_tokens / share)
            full.retry_after_ms = self._promise(owner, full.retry_after_ms, turn_ms, now_ns)
            raise

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

    def _promise(self, owner: str, retry_ms: int | None, turn_ms: float, now_ns: int) -> int:
        """When a refused client should come back: as soon as there is room, but one at a time.

        Were all of a flood told the same time, all but the first would come in vain.
        """
        soonest_ns = now_ns + (retry_ms or 0) * 1e6
        slot_ns = max(soonest_ns, self._promised.get(owner, 0) + turn_ms * 1e6)
        self._promised[owner] = min(slot_ns, now_ns + MAX_RETRY_MS * 1e6)
        return math.ceil((self._promised[owner] - now_ns) / 1e6)

    def in_order(self, now_ns: int) -> Iterator[Sequence]:
        """What waits, the next one first; taking one moves its owner's next turn back."""
        return self._by_turns(self._charged, now_ns)

    def forecast(self, now_ns: int) -> Iterator[Sequence]:
        """What waits, in the order in which it will be taken if nothing else comes."""
        charged = dict(self._charged)
        for sequence in self._by_turns(charged, now_ns):
            charged[sequence.owner] += sequence.num_uncached_tokens / self._weight(sequence.owner)
            yield sequence

    def _weight(self, owner: str) -> float:
        return self.weights.get(owner, 1.0)

    def _share(self, owner: str) -> float:
        """Of the turns, an owner's if it waits."""
        return self._weight(owner) / sum(map(self._weight, {owner, *self._waiting}))

    def _by_turns(self, charged: dict[str, float], now_ns: int) -> Iterator[Sequence]:
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

    def served(self, is_served: bool, now_ns: int) -> None:
        """From now on there is a worker that takes from it, or there is none.

        The time until a dead worker is back says nothing of the pace at which it serves.
        """
        self._advance(now_ns)
        self._is_served = is_served

    def take(self, sequence: Sequence, now_ns: int) -> None:
        """It is being placed: its owner is charged for its prompt."""
        self._advance(now_ns)
        if now_ns > self._pushed_ns:  # what goes in the instant of its arrival did not wait
            self._sequences.pace.count(1)
            self._tokens.pace.count(sequence.num_prompt_tokens)
        charge, weight = sequence.num_uncached_tokens, self._weight(sequence.owner)
        self._placed[sequence.seq_id] = charge, weight
        self._charged[sequence.owner] += charge / weight
        self._pending[sequence.seq_id] = sequence.num_prompt_tokens
        self._remove(sequence)

    def generated(self, sequence: Sequence, num_tokens: int) -> None:
        """So many output tokens have come: its owner is charged for them."""
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

    def forget(self, sequence: Sequence) -> None:
        """It has ended, waiting or placed: its owner gets back what of it was not computed."""
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
        if not self._waiting:
            self._promised.clear()
            self._charged.clear()
            self._placed.clear()


# How many prompt tokens each worker would compute before a prompt that still waits.
#
# Owns: a reading of the prompts under way, kept up while the queue is being placed.
# Invariant: prompts are counted in the order in which the workers' plans will take them.
# Never: places anything.


class PromptsAhead:
    """What a queued prompt would find before it at each worker.

    Args:
        running: all that is admitted.
        max_step_tokens: of prompts, in a worker's step.
        now_ns: CLOCK_MONOTONIC, for ageing.
    """

    def __init__(self, running: Iterable[Sequence], max_step_tokens: int, now_ns: int) -> None:
        self._max_step_tokens = max_step_tokens
        self._now_ns = now_ns
        self._prompts: list[tuple[str | None, str, int, float]] = []
        self.sequences: list[Sequence] = []
        """Those whose prompts are counted."""
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

        A prompt of one step passes those of several, as it will in the worker's plan. Otherwise its
        owner's older prompts keep their place; other owners' longer prompts are passed.
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
        """Those of the workers that have less to compute first."""
        return {name for name in workers if self.num_tokens(sequence, name) < most_tokens}

    def _key(self, sequence: Sequence, num_tokens: int) -> float:
        return prefill_key(num_tokens, self._now_ns - sequence.stamps.arrived_ns)
