"""Steps that nobody asked for, timed, so that elastic roles know what a step takes here.

Owns: nothing.
Invariant: only the named blocks are read and written; a step is not begun if, by what the last of
its kind took, it would not end within the budget.
Never: reports what a first step took where others could be made: the first of a kind also writes
down what later ones repeat.
"""

from __future__ import annotations

import time

from engine.wire.messages import RehearsalStep, Rehearse, Rehearsed, RehearsedStep
from engine.workers.runner import Runner
from engine.workers.running import Running

_LONG_MS = 20.0
"""A chunk of a prompt that takes longer is made once: what a first one adds is little of it. Other
steps that do are made once more, not twice."""


def rehearse(runner: Runner, command: Rehearse) -> Rehearsed:
    """Make the steps in their order, as far as the time lasts."""
    ends_s = time.monotonic() + command.budget_ms / 1e3
    runner.clear(command.block_ids)  # so that no step is the first to touch their memory
    last: dict[bool, tuple[int, float]] = {}
    done: list[RehearsedStep] = []
    for step in command.steps:
        is_decode, size = step.num_tokens == 1, step.num_sequences * step.num_tokens
        num_before, before_ms = last.get(is_decode, (size, 0.0))
        expected_ms = before_ms * max(1.0, size / num_before)
        if _left_ms(ends_s) <= expected_ms:
            continue
        times_ms = [_timed(runner, step, command.block_ids)]
        is_long = times_ms[0] > _LONG_MS
        if (is_decode or not is_long) and _left_ms(ends_s) > times_ms[0]:
            count = 1 if is_long else 2
            times_ms = [_timed(runner, step, command.block_ids) for _ in range(count)]
        elapsed_ms = min(times_ms)  # whatever else the machine does can only make a step longer
        last[is_decode] = size, elapsed_ms
        done.append(RehearsedStep(step.num_sequences, step.num_tokens, step.num_before, elapsed_ms))
    return Rehearsed(command.rehearsal_id, done)


def _left_ms(ends_s: float) -> float:
    return max(0.0, (ends_s - time.monotonic()) * 1e3)


def _timed(runner: Runner, step: RehearsalStep, block_ids: list[int]) -> float:
    """Make a step as the loop does; milliseconds."""
    length = step.num_before + step.num_tokens
    num_blocks = -(-length // runner.block_size)
    table = (block_ids * -(-num_blocks // len(block_ids)))[:num_blocks]
    planned = [
        (Running.stand_in(length, table, step.num_before, temperature=1.0), step.num_tokens)
        for _ in range(step.num_sequences)
    ]
    started_s = time.monotonic()
    runner.collect(runner.launch(planned))
    return (time.monotonic() - started_s) * 1e3
