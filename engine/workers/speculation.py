"""Give the sequences of a decode step guesses of their next tokens, and learn from the outcome.

Owns: the guesses of the step under way.
Invariant: a guess lies within its sequence's blocks and limits, so that checking it writes no block
but its own, and ends where its sequence's record is kept; only decode steps without prompts have
guesses.
Never: draws: the runner draws each token as if there were no guess.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.workers.draft_gate import Candidate, DraftGate, StepKind
from engine.workers.drafts import MAX_DRAFT, Drafts, Guess
from engine.workers.worker_request import WorkerRequest

Planned = Sequence[tuple[WorkerRequest, int]]


class Speculation:
    """Speculate for the sequences of one worker.

    Args:
        vocab_size: of the model's logits.
        block_size: of the pool.
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

    def draft(self, planned: Planned, num_cores: int) -> None:
        """Set the drafts of a step about to be launched."""
        self._candidates, self._step, self._num_drafted = {}, None, 0
        is_decode = all(running.is_decoding for running, _ in planned)
        if not planned or not is_decode or len(planned) > self._gate.max_sequences:
            return
        self._step = StepKind.of([r.num_computed_tokens for r, _ in planned], num_cores)
        guesses = [(r, guess) for r, _ in planned if (guess := self._guess(r)) is not None]
        if not guesses:
            return
        candidates = [
            Candidate(running.seq_id, len(guess.token_ids), guess.num_matched)
            for running, guess in guesses
        ]
        widths = self._gate.widths(candidates, self._step)
        for (running, guess), candidate, width in zip(guesses, candidates, widths, strict=True):
            if width:
                running.draft, running.drafter = guess.token_ids[:width], guess.drafter
                self._candidates[running.seq_id] = candidate
        self._num_drafted = sum(widths)

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

    def _guess(self, running: WorkerRequest) -> Guess | None:
        most = min(
            MAX_DRAFT,
            running.room(self._block_size) - 1,
            running.until_output - running.num_output_tokens - 1,
        )
        every = 0 if running.records is None else running.records.keeps_every
        most = running.until_border(most + 1, every) - 1
        return self._drafts.guess(running, most) if most > 0 else None
