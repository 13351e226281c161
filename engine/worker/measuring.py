"""Time steps that no request asked for, in slices that end as soon as a command arrives.

Invariant: only the named blocks are read and written; after a command has arrived at most one half
of a layer is computed, on a GPU the rest of one step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import cycle, islice

from engine.wire.messages import MeasuredStep, MeasureSteps, StepShape, StepsMeasured
from engine.worker.runner import Runner
from engine.worker.worker_request import WorkerRequest

WHOLE_MS = 100.0
"""A longer step is extrapolated from the layers computed by then..."""
MIN_HALVES = 4
"""...at least two; each layer has two halves, attention and feed-forward."""
MAX_HALF_MS = 40.0
"""Maximum time of half a layer, since a new request waits for it; longer prompts are not timed."""
TOP_K = 64
"""A dummy prompt's logits are flat: without a limit each draw would sort the whole vocabulary."""


class StepMeasuring:
    """Measure steps of one worker.

    Args:
        is_interrupted: asked between layers; true once a command has arrived.
    """

    def __init__(self, runner: Runner, is_interrupted: Callable[[], bool]) -> None:
        self._runner = runner
        self._is_interrupted = is_interrupted
        self._has_long_decodes = True
        """Until one was short."""
        self._half_ms: dict[int, float] = {}
        """Half a layer for one token of the last prompt, by the positions before that."""

    def measure(self, command: MeasureSteps) -> StepsMeasured:
        """Run the steps in their order, until the time is over or a command arrives."""
        ends_s = time.monotonic() + command.budget_ms / 1e3
        done: list[MeasuredStep] = []
        too_long: list[StepShape] = []
        if command.budget_ms and not self._is_interrupted():
            self._runner.clear(command.block_ids)  # so that no step is the first to touch them
        for shape in command.steps:
            if time.monotonic() >= ends_s or self._is_interrupted():
                break
            if self._longest_half_ms(shape) > MAX_HALF_MS:
                too_long += [shape] if shape not in too_long else []
                continue
            elapsed_ms = self._time(shape, command.block_ids)
            if elapsed_ms is None:
                break
            size = shape.num_sequences, shape.num_tokens, shape.num_before
            done.append(MeasuredStep(*size, elapsed_ms))
        return StepsMeasured(command.measurement_id, done, too_long)

    def _longest_half_ms(self, shape: StepShape) -> float:
        """Estimate half a layer by prompts with as many positions before them, or fewer."""
        known = (ms for before, ms in self._half_ms.items() if before <= shape.num_before)
        return shape.num_tokens * max(known, default=0.0)

    def _time(self, shape: StepShape, block_ids: list[int]) -> float | None:
        """Return the milliseconds of one step; None: it was interrupted."""
        is_decode = shape.num_tokens == 1
        # a whole decode step is replayed from a graph, which cannot be left in the middle
        is_whole = self._runner.is_on_device or (is_decode and not self._has_long_decodes)
        elapsed_ms = self._run(shape, block_ids, is_whole=is_whole)
        if elapsed_ms is None or is_whole:
            return elapsed_ms
        if not is_decode:
            half_ms = elapsed_ms / (2 * self._runner.num_layers)
            self._half_ms[shape.num_before] = half_ms / shape.num_tokens
        elif elapsed_ms <= WHOLE_MS / 2:
            self._has_long_decodes = False
            return self._run(shape, block_ids, is_whole=True)
        return elapsed_ms

    def _run(self, shape: StepShape, block_ids: list[int], *, is_whole: bool) -> float | None:
        """Run a step as the loop does; return its milliseconds, or None: it was interrupted."""
        length = shape.num_before + shape.num_tokens
        num_blocks = -(-length // self._runner.block_size)
        table = list(islice(cycle(block_ids), num_blocks))
        planned = [
            (
                WorkerRequest.dummy(
                    length, table, shape.num_before, 1.0, TOP_K, num_groups=self._runner.num_groups
                ),
                shape.num_tokens,
            )
            for _ in range(shape.num_sequences)
        ]
        was_interrupted, left_out_ms, started_s = False, 0.0, time.monotonic()

        def stops(num_done: int, num_halves: int) -> bool:
            """Say between layers whether the others are skipped."""
            nonlocal was_interrupted, left_out_ms
            if self._is_interrupted():
                was_interrupted = True
                return True
            so_far_ms = (time.monotonic() - started_s) * 1e3
            if so_far_ms < WHOLE_MS or num_done < MIN_HALVES or num_done % 2:
                return False
            left_out_ms = so_far_ms * (num_halves - num_done) / num_done
            return True

        self._runner.collect(self._runner.launch(planned, None if is_whole else stops))
        if was_interrupted:
            return None
        return (time.monotonic() - started_s) * 1e3 + left_out_ms
