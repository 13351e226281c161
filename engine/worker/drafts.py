"""Guess a sequence's next tokens from texts in which its last few tokens occur.

Texts are its own prompt and output, what its request predicts, and the newest texts of the same
owner and cache scope that this worker has run. Each has an index as LZ77 compressors have it: the
last place of every two tokens, and from each place the one before it. The longest match wins.

Invariant: a step's share of the work and the memory are bounded; a text is read only for its own
owner and scope. A guess never changes what is drawn, only how many tokens a step yields.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

from engine.worker.worker_request import WorkerRequest

OWN_TEXT, PREDICTION, RECENT_TEXT = DRAFTERS = "own_text", "prediction", "recent_text"
MAX_DRAFT = 7
"""Most tokens of a guess: with the last known token they are as many as a decode graph takes."""
MIN_MATCH = 2
_MAX_MATCH = 32
_MAX_PLACES = 32
"""Places with the same two tokens that are compared."""
_TOKENS_PER_STEP = 512
"""Most tokens of a text that are indexed in one step."""
MAX_TOKENS = 1 << 18
"""Most tokens in all indices of a worker, at some 150 bytes each."""
_MAX_RECENT_TEXTS = 4
"""Maximum per owner and scope."""


class Guess(NamedTuple):
    """The tokens that followed where a sequence's last tokens occurred before."""

    token_ids: list[int]
    num_matched: int
    """How many tokens before them are the sequence's last ones."""
    drafter: str
    """One of DRAFTERS."""


class TextIndex:
    """Find in one text, which may grow, what followed some tokens."""

    def __init__(self, token_ids: list[int]) -> None:
        self._text = token_ids
        self._newest: dict[tuple[int, int], int] = {}
        self._before: list[int] = [-1] * MIN_MATCH
        """The place before, by place: ends of the same two tokens; -1: none."""

    def __len__(self) -> int:
        return len(self._before) - MIN_MATCH

    @property
    def num_left(self) -> int:
        """Tokens of the text that are not indexed."""
        return len(self._text) + 1 - len(self._before)

    def grow(self, most: int) -> int:
        """Index more of the text; return the number of its tokens that were added."""
        text, before, newest = self._text, self._before, self._newest
        start = len(before)
        for end in range(start, min(len(text) + 1, start + most)):
            key = text[end - 2], text[end - 1]
            before.append(newest.get(key, -1))
            newest[key] = end
        return len(before) - start

    def find(self, last: list[int], most: int) -> tuple[list[int], int]:
        """Return what followed the last tokens where most of them occurred, and how many did."""
        if len(last) < MIN_MATCH:
            return [], 0
        text, best, best_length = self._text, -1, 0
        place = self._newest.get((last[-2], last[-1]), -1)
        for _ in range(_MAX_PLACES):
            if place >= len(text):  # the last tokens themselves
                place = self._before[place]
            if place < 0:
                break
            length = _num_equal(text, place, last)
            if length > best_length:
                best, best_length = place, length
            place = self._before[place]
        if best < 0:
            return [], 0
        following = text[best : best + most]
        while len(following) < most and following:  # a repetition at the text's end
            following += following[: most - len(following)]
        return following, best_length


def _num_equal(text: list[int], end: int, last: list[int]) -> int:
    """Count the tokens before `end` that equal the last ones; the nearest two are known to."""
    most, length = min(end, len(last), _MAX_MATCH), MIN_MATCH
    while length < most and text[end - length - 1] == last[-length - 1]:
        length += 1
    return length


class _Texts(NamedTuple):
    """The texts that one sequence is guessed from."""

    own: TextIndex
    prediction: TextIndex | None


class Drafts:
    """Hold the texts of one worker."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._live: dict[int, _Texts] = {}
        self._recent: OrderedDict[tuple[str, bytes], list[TextIndex]] = OrderedDict()
        self._num_tokens = 0

    def guess(self, running: WorkerRequest, most: int) -> Guess | None:
        """Guess up to `most` tokens; None: nothing like its last tokens has been there."""
        texts = self._live.get(running.seq_id)
        if texts is None:
            texts = self._live[running.seq_id] = _texts_of(running)
        self._grow(texts)
        last = running.token_ids[-_MAX_MATCH:]
        found = [
            Guess(token_ids, length, drafter)
            for drafter, index in self._sources(running, texts)
            for token_ids, length in [index.find(last, most)]
            if token_ids
        ]
        start = running.num_output_tokens
        predicted = running.prediction[start : start + most]
        if predicted and start < _MAX_MATCH and running.prediction[:start] == running.output_ids:
            found.insert(0, Guess(predicted, MIN_MATCH + start, PREDICTION))
        if not found:
            return None
        best = max(found, key=lambda guess: guess.num_matched)
        if found[0].drafter == PREDICTION and found[0].token_ids == best.token_ids:
            best = best._replace(drafter=PREDICTION)
        usable = _before_any_end(best.token_ids, running.stop_token_ids, self._vocab_size)
        return best._replace(token_ids=usable) if usable else None

    def end(self, running: WorkerRequest) -> None:
        """Keep the text of a sequence that this worker drops, for its owner's next ones."""
        texts = self._live.pop(running.seq_id, None)
        if texts is None:
            return
        if texts.prediction is not None:
            self._num_tokens -= len(texts.prediction)
        key = _key_of(running)
        if key is None or not len(texts.own) or texts.own.num_left > _TOKENS_PER_STEP:
            self._num_tokens -= len(texts.own)
            return
        kept = self._recent.setdefault(key, [])
        self._recent.move_to_end(key)
        kept.insert(0, texts.own)
        for old in kept[_MAX_RECENT_TEXTS:]:
            self._num_tokens -= len(old)
        del kept[_MAX_RECENT_TEXTS:]

    def _sources(self, running: WorkerRequest, texts: _Texts) -> Iterator[tuple[str, TextIndex]]:
        if texts.prediction is not None:
            yield PREDICTION, texts.prediction
        yield OWN_TEXT, texts.own
        key = _key_of(running)
        for index in self._recent.get(key, ()) if key is not None else ():
            yield RECENT_TEXT, index

    def _grow(self, texts: _Texts) -> None:
        """Index more of the texts; in place of the oldest recent ones, where there is no room."""
        budget = _TOKENS_PER_STEP
        for index in (each for each in texts if each is not None):
            while self._num_tokens + budget > MAX_TOKENS and self._recent:
                _, dropped = self._recent.popitem(last=False)
                self._num_tokens -= sum(map(len, dropped))
            budget = min(budget, MAX_TOKENS - self._num_tokens)
            num_new = index.grow(budget)
            budget -= num_new
            self._num_tokens += num_new


def _texts_of(running: WorkerRequest) -> _Texts:
    predicted = running.prediction
    return _Texts(TextIndex(running.token_ids), TextIndex(predicted) if predicted else None)


def _key_of(running: WorkerRequest) -> tuple[str, bytes] | None:
    """Say whose later sequences may read its text; None: no others."""
    return None if running.scope is None else (running.owner, running.scope.root)


def _before_any_end(token_ids: list[int], ends: frozenset[int], vocab_size: int) -> list[int]:
    for count, token_id in enumerate(token_ids):
        if token_id in ends or token_id >= vocab_size:
            return token_ids[:count]
    return token_ids
