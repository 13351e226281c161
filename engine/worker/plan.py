"""Choose the sequences of the next step, and how many tokens of each.

Invariant: every decoding sequence gets its token in every step, and prompts share the budget, so
neither phase can starve the other. A prompt longer than a step goes alone, a chunk at a time. A
prompt that one step completes waits for one such chunk at most; a long prompt that has waited
longest gets at least every second step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar

from engine.wire.prompt_order import prefill_key


class Plannable(Protocol):
    """What planning needs to know of a running sequence."""

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens known."""

    @property
    def num_computed_tokens(self) -> int:
        """Positions whose KV is written."""

    @property
    def is_decoding(self) -> bool:
        """True if it is computed up to its last token."""

    @property
    def max_chunk_beside(self) -> int | None:
        """Maximum prompt tokens of a step in which others decode; None: no limit."""

    @property
    def admitted_ns(self) -> int:
        """When the worker took it, CLOCK_MONOTONIC nanoseconds."""


S = TypeVar("S", bound=Plannable)


def is_chunk(planned: Iterable[tuple[Plannable, int]]) -> bool:
    """Tell whether a step leaves a prompt unfinished; call it before the step is made."""
    return any(s.num_computed_tokens + n < s.num_tokens for s, n in planned)


def _spared(running: list[S], max_num_batched_tokens: int) -> int:
    """Limit a step's prompt tokens for the sequences that decode in it."""
    limits = [
        sequence.max_chunk_beside
        for sequence in running
        if not sequence.is_decoding and sequence.max_chunk_beside is not None
    ]
    if limits and any(sequence.is_decoding for sequence in running):
        return min(max_num_batched_tokens, *limits)
    return max_num_batched_tokens


def plan(
    running: Iterable[S], max_num_batched_tokens: int, now_ns: int, *, is_after_chunk: bool = False
) -> list[tuple[S, int]]:
    """Choose the sequences of the next step, and how many tokens of each.

    Args:
        running: sequences that hold their blocks and have something left to compute.
        max_num_batched_tokens: prompt tokens in the step, at most; fewer where one of its prompts
            must spare the sequences that decode.
        now_ns: CLOCK_MONOTONIC, for ageing.
        is_after_chunk: the step before was a chunk of a long prompt, so short ones are next.

    Returns:
        (sequence, number of new tokens), single-token sequences first. Empty if nothing runs.
    """
    running = list(running)
    max_num_batched_tokens = _spared(running, max_num_batched_tokens)
    chosen: list[tuple[S, int]] = []
    prompts: list[tuple[bool, float, int, S]] = []
    for order, sequence in enumerate(running):
        remaining = sequence.num_tokens - sequence.num_computed_tokens
        if sequence.is_decoding:
            chosen.append((sequence, 1))
        elif remaining > 1:
            key = prefill_key(remaining, now_ns - sequence.admitted_ns)
            prompts.append(
                (is_after_chunk and remaining > max_num_batched_tokens, key, order, sequence)
            )
    budget = max_num_batched_tokens
    is_first = True
    for *_, sequence in sorted(prompts, key=lambda item: item[:3]):
        remaining = sequence.num_tokens - sequence.num_computed_tokens
        if remaining <= budget:
            chosen.append((sequence, remaining))
            budget -= remaining
        else:
            if is_first:
                chosen.append((sequence, budget))
            break
        is_first = False
    return chosen
