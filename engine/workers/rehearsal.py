"""Steps that nobody asked for, timed, so that elastic roles know what a step takes here.

Owns: nothing. Called by: the loop, for a Rehearse.
Invariant: only the named blocks are read and written; a step is not begun if, by what others of its
kind took, it would not end within the budget.
Never: reports what a first step took where others could be made: the first of a kind also writes
down what later ones repeat.
"""

from __future__ import annotations

import time

from engine.messages import RehearsalStep, Rehearse, Rehearsed, RehearsedStep
from engine.workers.runner import Runner
from engine.workers.running import Running

_LONG_SHARE = 0.04
"""Of the budget: what takes longer is made less often, so that there is time for larger steps, also
where the machine is busy; what a first one adds is little of it."""
_NUM_TIMED = 2
_MIN_GROWTH = 0.25
"""A step takes at least this share of what it would if its time grew as its size."""


def rehearse(runner: Runner, command: Rehearse) -> Rehearsed:
    """Make the steps in their order, as far as the time lasts."""
    ends_s = time.monotonic() + command.budget_ms / 1e3
    runner.clear(command.block_ids)  # so that no step is the first to touch their memory
    known: dict[bool, list[tuple[int, float]]] = {False: [], True: []}
    done: list[RehearsedStep] = []
    for step in command.steps:
        is_decode, size = step.num_tokens == 1, step.num_sequences * step.num_tokens
        if _left_ms(ends_s) <= _expected_ms(known[is_decode], size):
            continue
        times_ms = [_timed(runner, step, command.block_ids)]
        is_long = times_ms[0] > _LONG_SHARE * command.budget_ms
        num_more = _NUM_TIMED if not is_long else int(is_decode)
        if num_more and _left_ms(ends_s) > num_more * times_ms[0]:
            times_ms = [_timed(runner, step, command.block_ids) for _ in range(num_more)]
        elapsed_ms = min(times_ms)  # whatever else the machine does can only make a step longer
        known[is_decode].append((size, elapsed_ms))
        done.append(RehearsedStep(step.num_sequences, step.num_tokens, step.num_before, elapsed_ms))
    return Rehearsed(command.rehearsal_id, done)


def _expected_ms(known: list[tuple[int, float]], size: int) -> float:
    """What a step may take: on the line through the two largest of its kind, or in proportion.

    A small step's time is mostly that of reading the weights, which a larger one reads once, too.

    Args:
        known: sizes and milliseconds; nothing is expected if there are none.
        size: tokens of the step.
    """
    if not known:
        return 0.0
    (large, large_ms), *others = sorted(known, reverse=True)
    if size <= large:
        return min(elapsed_ms for other, elapsed_ms in known if other >= size)
    in_proportion_ms = large_ms * size / large
    small = next((other for other in others if other[0] < large), None)
    if small is None:
        return in_proportion_ms
    growth_ms = (large_ms - small[1]) / (large - small[0])
    on_line_ms = large_ms + (size - large) * growth_ms
    return min(max(on_line_ms, _MIN_GROWTH * in_proportion_ms), in_proportion_ms)


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
