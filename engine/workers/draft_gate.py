"""Decide how many guessed tokens a decode step computes.

A guessed token costs time, whether it is right or not. The gate compares the tokens that a step is
expected to yield with the time that such steps have taken on this worker, and takes guesses only
where they make tokens come sooner.

Owns: how often guesses were right, by the length of the match behind them; how long decode steps
with guesses took, in steps of the same sequences without.
Invariant: a step has at most MAX_ROWS rows with guesses: within these a row's bits do not depend on
its neighbours on any CPU.
Never: looks at tokens; its choice changes when tokens come, never which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

MAX_ROWS = 16
MAX_GATED_SEQUENCES = 4
"""Most sequences of a step with guesses.

8 at once gained nothing with 135M, and cost the starter 40 %."""
WIDTHS = 1, 3, 7
"""Numbers of guessed tokens: with the last known token, as many as decode graphs are kept for."""
MIN_GAIN = 1.05
"""Tokens a second with guesses to those without, from which on guesses are computed."""
PLAIN_EVERY = 64
"""Steps with guesses between two without, which the others are compared with."""
_FIRST_ROW_COST = 0.15
"""Time of a guessed token in plain steps, until some were timed."""
_NEWEST_SHARE = 0.2
_MAX_OUTLIER = 3.0
_SECOND_CHANCE = 0.01
"""Share by which a refused width's cost returns to its first value, step by step."""
_FORGETTING = 0.95
_NUM_FIRST_TRIES = 3.0
_MATCH_CLASSES = (3, 5, 9, 17)
_FIRST_CHANCES = (0.3, 0.4, 0.6, 0.75, 0.85)
"""Chance of a guessed token by class of match, before any was checked."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A guess for a sequence of the step."""

    seq_id: int
    num_tokens: int
    num_matched: int
    """Tokens before the guess that are the sequence's last ones."""


@dataclass(slots=True)
class _Chances:
    """How often guessed tokens were right, by the class of the match behind the guess."""

    num_tried: list[float] = field(default_factory=lambda: [0.0] * len(_FIRST_CHANCES))
    num_right: list[float] = field(default_factory=lambda: [0.0] * len(_FIRST_CHANCES))

    def observe(self, of_class: int, num_drafted: int, num_accepted: int) -> None:
        """Count the tokens of a guess up to the first wrong one."""
        num_tried = num_accepted + (num_accepted < num_drafted)
        self.num_tried[of_class] = self.num_tried[of_class] * _FORGETTING + num_tried
        self.num_right[of_class] = self.num_right[of_class] * _FORGETTING + num_accepted

    def of(self, of_class: int, first: float) -> float:
        """Return the share that was right, beginning with a first value."""
        num_tried = self.num_tried[of_class] + _NUM_FIRST_TRIES
        return (self.num_right[of_class] + _NUM_FIRST_TRIES * first) / num_tried


class DraftGate:
    """One worker's gate.

    Args:
        most: guessed tokens per sequence and step where there is a guess; None: as many as pay.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        self.max_sequences = MAX_GATED_SEQUENCES if most is None else MAX_ROWS - 1
        """Sequences of the largest step that has guesses."""
        self._chances: dict[int, _Chances] = {}
        self._of_all = _Chances()
        self._plain_of: tuple[int, ...] = ()
        """The sequences, and the number of cores, of the plain steps that were timed last."""
        self._plain_ms = 0.0
        self._num_since_plain = 0
        self._costs: dict[tuple[int, int, int], float] = {}
        """Time of a step in plain steps by cores, sequences and class of guessed tokens."""

    def widths(
        self, candidates: Sequence[Candidate], seq_ids: Sequence[int], num_cores: int
    ) -> list[int]:
        """Choose for each candidate how many of its tokens a step computes.

        Args:
            candidates: the guesses, at most one per sequence.
            seq_ids: the sequences of a decode step, each with one row besides its guess.
            num_cores: that compute it.
        """
        num_sequences, widths = len(seq_ids), [0] * len(candidates)
        room = MAX_ROWS - num_sequences
        if self._most is not None:
            return _fixed(candidates, self._most, room)
        is_timed = self._plain_of == (*seq_ids, num_cores) and self._num_since_plain < PLAIN_EVERY
        if room < 1 or not is_timed:
            return widths
        chances = [self._chance(each) for each in candidates]
        num_tokens, num_used = float(num_sequences), 0
        best_rate = num_tokens * MIN_GAIN
        for index in sorted(range(len(candidates)), key=lambda i: -chances[i]):
            most = min(candidates[index].num_tokens, room - num_used)
            for width in (each for each in WIDTHS if each <= most):
                expected = num_tokens + expected_accepted(chances[index], width)
                rate = expected / self._cost(num_cores, num_sequences, num_used + width)
                if rate > best_rate:
                    best_rate, widths[index] = rate, width
            num_tokens += expected_accepted(chances[index], widths[index])
            num_used += widths[index]
        if not num_used:
            self._forgive(num_cores, num_sequences)
        return widths

    def observe_step(
        self, seq_ids: Sequence[int], num_drafted: int, num_cores: int, elapsed_ms: float
    ) -> None:
        """Learn from the time of a decode step without prompts."""
        of = *seq_ids, num_cores
        if not num_drafted:
            is_first = of != self._plain_of or self._num_since_plain >= PLAIN_EVERY
            self._plain_ms = _moved(elapsed_ms if is_first else self._plain_ms, elapsed_ms)
            self._plain_of, self._num_since_plain = of, 0
        elif of == self._plain_of:
            self._num_since_plain += 1
            key = num_cores, len(seq_ids), num_drafted.bit_length()
            known = self._costs.get(key, _first_cost(num_drafted))
            self._costs[key] = _moved(known, max(elapsed_ms / self._plain_ms, 1.0))

    def observe_guess(self, candidate: Candidate, num_drafted: int, num_accepted: int) -> None:
        """Learn how much of a guess was right."""
        of_class = _class_of(candidate.num_matched)
        for chances in (self._chances.setdefault(candidate.seq_id, _Chances()), self._of_all):
            chances.observe(of_class, num_drafted, num_accepted)

    def forget(self, seq_id: int) -> None:
        """Forget a sequence that has left this worker."""
        self._chances.pop(seq_id, None)

    def _chance(self, candidate: Candidate) -> float:
        """Return the chance that a token is right if those before it are."""
        of_class = _class_of(candidate.num_matched)
        of_all = self._of_all.of(of_class, _FIRST_CHANCES[of_class])
        own = self._chances.get(candidate.seq_id)
        return of_all if own is None else own.of(of_class, of_all)

    def _cost(self, num_cores: int, num_sequences: int, num_drafted: int) -> float:
        key = num_cores, num_sequences, num_drafted.bit_length()
        return self._costs.get(key) or _first_cost(num_drafted)

    def _forgive(self, num_cores: int, num_sequences: int) -> None:
        for width in WIDTHS:
            key = num_cores, num_sequences, width.bit_length()
            excess = self._costs.get(key, 0.0) - _first_cost(width)
            if excess > 0:
                self._costs[key] -= _SECOND_CHANCE * excess


def expected_accepted(chance: float, num_drafted: int) -> float:
    """Return how many of the tokens are right, if each has this chance after a right one."""
    total, product = 0.0, 1.0
    for _ in range(num_drafted):
        product *= chance
        total += product
    return total


def _class_of(num_matched: int) -> int:
    return sum(num_matched >= least for least in _MATCH_CLASSES)


def _first_cost(num_drafted: int) -> float:
    return 1 + _FIRST_ROW_COST * num_drafted


def _moved(known: float, newest: float) -> float:
    return known + _NEWEST_SHARE * (min(newest, _MAX_OUTLIER * known) - known)


def _fixed(candidates: Sequence[Candidate], most: int, room: int) -> list[int]:
    """Take up to `most` tokens of each guess while there is room."""
    widths = []
    for candidate in candidates:
        limit = min(candidate.num_tokens, most, room)
        widths.append(max((width for width in WIDTHS if width <= limit), default=0))
        room -= widths[-1]
    return widths
