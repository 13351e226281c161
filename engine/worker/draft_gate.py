"""Decide how many guessed tokens a decode step computes.

A guessed token costs time, whether it is right or not. The gate compares the tokens that a step is
expected to yield with the time that such steps have taken on this worker, and takes guesses only
where they make tokens come sooner.

Invariant: a step has at most MAX_ROWS rows with guesses: within these a row's bits do not depend on
its neighbours on any CPU.
Never: looks at tokens; its choice changes when tokens come, never which.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.profile.facts import Fact
from engine.wire.messages import SHALLOW

MAX_ROWS = 16
MAX_GATED_SEQUENCES = 4
"""Most sequences of a step with guesses.

8 at once gained nothing with 135M, and cost the starter 40 %."""
WIDTHS = 1, 3, 7
"""Numbers of guessed tokens: with the last known token, as many as decode graphs are kept for."""
MIN_GAIN = 1.05
"""Tokens a second with guesses to those without, from which on guesses are computed."""
MIN_STEPS = 3
"""Steps of a kind before their time counts: the first ones record graphs."""
PLAIN_EVERY = 64
"""Steps with guesses between two without, which keep the comparison up to date."""
RETRY_AFTER = 512
"""Steps with refused guesses after which the times of steps with guesses are measured anew."""
_FIRST_ROW_COST = 0.15
"""Time of a guessed token in plain steps, until MIN_STEPS were timed."""
_MIN_MS = 1e-3
_FORGETTING = 0.95
_NUM_FIRST_TRIES = 3.0
_MATCH_CLASSES = (3, 5, 9, 17)
_FIRST_CHANCES = (0.3, 0.4, 0.6, 0.75, 0.85)
"""Chance of a guessed token by class of match, before any was checked."""


class StepKind(NamedTuple):
    """What decode steps have in common whose times with and without guesses are compared."""

    num_cores: int
    num_sequences: int
    """Each has one row besides its guess."""
    context_class: int
    """Grows by one where the sequences' mean context doubles; 0: hardly any."""

    @classmethod
    def of(cls, contexts: Sequence[int], num_cores: int) -> StepKind:
        """Describe a step of sequences with these positions before its tokens."""
        mean = sum(contexts) // len(contexts)
        return cls(num_cores, len(contexts), (mean // SHALLOW).bit_length())


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


def _no_facts() -> list[Fact]:
    return [Fact() for _ in range(MAX_ROWS.bit_length())]


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
        self._times: defaultdict[StepKind, list[Fact]] = defaultdict(_no_facts)
        """Milliseconds of the newest steps, by the bits of the number of guessed tokens."""
        self._num_since_plain = 0
        self._num_refused = 0

    def widths(
        self, candidates: Sequence[Candidate], kind: StepKind, num_unknown: int = 0
    ) -> list[int]:
        """Choose for each candidate how many of its tokens a step computes.

        Args:
            candidates: the guesses, at most one per sequence.
            kind: of the step, which has no prompts.
            num_unknown: guessed tokens before these that must be right for them to be computed.
        """
        widths, room = [0] * len(candidates), MAX_ROWS - kind.num_sequences
        if self._most is not None:
            return _fixed(candidates, self._most, room)
        times = self._times[kind]
        is_timed = len(times[0].samples) >= MIN_STEPS and self._num_since_plain < PLAIN_EVERY
        if room < 1 or not is_timed:
            return widths
        plain_ms = times[0].typical
        chances = [self._chance(each) for each in candidates]
        num_tokens, num_used = float(kind.num_sequences), 0
        best_rate = num_tokens * MIN_GAIN
        for index in sorted(range(len(candidates)), key=lambda i: -chances[i]):
            most = min(candidates[index].num_tokens, room - num_used)
            best_tokens = num_tokens
            for width in WIDTHS:
                if width > most:
                    break
                accepted = expected_accepted(chances[index], width)
                expected = num_tokens + chances[index] ** num_unknown * accepted
                rate = expected / _cost(times, num_used + width, plain_ms)
                if rate > best_rate:
                    best_rate, best_tokens, widths[index] = rate, expected, width
            num_tokens = best_tokens
            num_used += widths[index]
        self._num_refused += not num_used
        if self._num_refused >= RETRY_AFTER:
            self._num_refused, times[1:] = 0, _no_facts()[1:]
        return widths

    def observe_step(self, kind: StepKind, num_drafted: int, elapsed_ms: float) -> None:
        """Learn from the time of a decode step without prompts."""
        self._num_since_plain = self._num_since_plain + 1 if num_drafted else 0
        self._times[kind][num_drafted.bit_length()].observe(max(elapsed_ms, _MIN_MS))

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


def _cost(times: list[Fact], num_drafted: int, plain_ms: float) -> float:
    """Return the time of a step with guessed tokens, in plain steps."""
    fact = times[num_drafted.bit_length()]
    if len(fact.samples) < MIN_STEPS:
        return 1 + _FIRST_ROW_COST * num_drafted
    return max(fact.typical / plain_ms, 1.0)


def expected_accepted(chance: float, num_drafted: int) -> float:
    """Return how many of the tokens are right, if each has this chance after a right one."""
    if chance == 1:
        return float(num_drafted)
    return chance * (1 - chance**num_drafted) / (1 - chance)


def _class_of(num_matched: int) -> int:
    return bisect_right(_MATCH_CLASSES, num_matched)


def _fixed(candidates: Sequence[Candidate], most: int, room: int) -> list[int]:
    """Take up to `most` tokens of each guess while there is room."""
    widths = []
    for candidate in candidates:
        limit = min(candidate.num_tokens, most, room)
        widths.append(max((width for width in WIDTHS if width <= limit), default=0))
        room -= widths[-1]
    return widths
