"""Give the sequences of a decode step guesses of their next tokens, and learn from the outcome.

Invariant: a guess lies within its sequence's blocks and limits, so that checking it writes no block
but its own, and ends where its sequence's record is kept; only decode steps without prompts have
guesses.
Never: draws: the runner draws each token as if there were no guess.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.worker.draft_gate import Candidate, DraftGate, StepKind
from engine.worker.drafts import MAX_DRAFT, Drafts, Guess
from engine.worker.worker_request import WorkerRequest

Planned = Sequence[tuple[WorkerRequest, int]]
_Choice = tuple[WorkerRequest, Guess, Candidate, int]
"""A sequence, its guess, the gate's view of it, and the tokens taken."""


class Speculation:
    """Speculate for the sequences of one worker.

    Args:
        most: guessed tokens per sequence and step; None: as many as pay.
    """

    def __init__(self, vocab_size: int, block_size: int, most: int | None = None) -> None:
        self._drafts = Drafts(vocab_size)
        self._gate = DraftGate(most)
        self._block_size = block_size
        self._candidates: dict[int, Candidate] = {}
        """The guesses that the step under way computes, by sequence."""
        self._step: StepKind | None = None
        """The kind of that step; None: its time says nothing about guesses."""
        self._num_drafted = 0
        self._awaited: dict[int, tuple[Candidate, int]] = {}
        """Guesses by sequence, each with the token that the awaited step must yield."""

    def draft(self, planned: Planned, num_cores: int) -> None:
        """Set the drafts of a step about to be launched."""
        self._candidates, self._step, self._num_drafted = {}, None, 0
        self._learn_awaited(planned)
        self._step = self._kind_of(planned, num_cores)
        for running, guess, candidate, width in self._choose(planned, self._step):
            if width:
                running.draft, running.drafter = guess.token_ids[:width], guess.drafter
                self._candidates[running.seq_id] = candidate
            self._num_drafted += width

    def waits(self, planned: Planned, num_cores: int) -> bool:
        """Say whether the step after a launched one without guesses is to wait for its tokens.

        It is to, if guesses of it would pay although the launched step's token is a guess itself.
        """
        step = self._kind_of(planned, num_cores)
        chosen = [each for each in self._choose(planned, step, num_unknown=1) if each[-1]]
        self._awaited = {
            running.seq_id: (candidate, guess.token_ids[0])
            for running, guess, candidate, _ in chosen
        }
        return bool(chosen)

    def checked(self, running: WorkerRequest, num_drafted: int, num_taken: int) -> None:
        """Learn how many tokens a sequence with a draft has got."""
        candidate = self._candidates.get(running.seq_id)
        if candidate is not None and num_taken:
            self._gate.observe_guess(candidate, num_drafted, num_taken - 1)

    def timed(self, elapsed_ms: float) -> None:
        """Learn how long the step took."""
        if self._step is not None:
            self._gate.observe_step(self._step, self._num_drafted, elapsed_ms)

    def end(self, running: WorkerRequest) -> None:
        """Keep the text of a sequence that the worker drops."""
        self._drafts.end(running)
        self._gate.forget(running.seq_id)

    def _learn_awaited(self, planned: Planned) -> None:
        awaited, self._awaited = self._awaited, {}
        for running, _ in planned:
            if running.seq_id in awaited:
                candidate, token_id = awaited[running.seq_id]
                self._gate.observe_guess(candidate, 1, int(running.token_ids[-1] == token_id))

    def _kind_of(self, planned: Planned, num_cores: int) -> StepKind | None:
        """Describe a step to the gate; None: a step that may have no guesses."""
        is_decode = all(running.is_decoding for running, _ in planned)
        if not planned or not is_decode or len(planned) > self._gate.max_sequences:
            return None
        return StepKind.of([r.num_computed_tokens for r, _ in planned], num_cores)

    def _choose(
        self, planned: Planned, step: StepKind | None, num_unknown: int = 0
    ) -> list[_Choice]:
        """Guess the sequences' next tokens, and let the gate choose how many of them pay.

        Args:
            step: the kind of the step that would compute the guesses.
            num_unknown: tokens at a guess's begin that are known before that step.
        """
        if step is None:
            return []
        guesses = [
            (running, guess, Candidate(running.seq_id, length, guess.num_matched))
            for running, _ in planned
            if (guess := self._guess(running, num_unknown)) is not None
            and (length := len(guess.token_ids) - num_unknown) > 0
        ]
        if not guesses:
            return []
        widths = self._gate.widths([each[-1] for each in guesses], step, num_unknown)
        return [(*each, width) for each, width in zip(guesses, widths, strict=True)]

    def _guess(self, running: WorkerRequest, num_unknown: int) -> Guess | None:
        most = min(
            MAX_DRAFT + num_unknown,
            running.room(self._block_size) - 1,
            running.until_output - running.num_output_tokens - 1,
        )
        every = 0 if running.records is None else running.records.keeps_every
        most = running.until_border(most + 1, every) - 1
        return self._drafts.guess(running, most) if most > 0 else None
