"""Time steps that no request asked for, in slices that end as soon as a command arrives.

Owns: which part of a long step is computed: enough layers to extrapolate.
Invariant: only the named blocks are read and written; after a command has arrived at most one half
of a layer is computed, on a GPU the rest of one step.
Never: decides what to time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from engine.wire.messages import MeasuredStep, MeasureSteps, StepShape, StepsMeasured
from engine.workers.runner import Runner
from engine.workers.worker_request import WorkerRequest

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
        runner: makes them.
        is_interrupted: asked between layers; true once a command has arrived.
    """

    def __init__(self, runner: Runner, is_interrupted: Callable[[], bool]) -> None:
        self._runner = runner
        self._is_interrupted = is_interrupted
        self._has_long_decodes: bool | None = None
        """None: no decode step has been timed yet."""
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
        in_layers = partial(_timed, self._runner, shape, block_ids, self._is_interrupted)
        if self._runner.is_on_device:
            return in_layers(has_layers=False)
        if not is_decode:
            elapsed_ms = in_layers(has_layers=True)
            num_halves = 2 * self._runner.num_layers
            if elapsed_ms is not None:
                self._half_ms[shape.num_before] = elapsed_ms / num_halves / shape.num_tokens
            return elapsed_ms
        if self._has_long_decodes is None:
            elapsed_ms = in_layers(has_layers=True)
            if elapsed_ms is None:
                return None
            self._has_long_decodes = elapsed_ms > WHOLE_MS / 2
        # a whole one is replayed from a decode graph, which cannot be left in the middle
        return in_layers(has_layers=self._has_long_decodes)


class _Stopwatch:
    """Decide between layers whether the rest of a step is skipped, and when that was."""

    def __init__(self, is_interrupted: Callable[[], bool]) -> None:
        self._is_interrupted = is_interrupted
        self.was_interrupted = False
        self.started_s = time.monotonic()
        self.left_out_ms = 0.0
        """The estimated time of the skipped layers."""

    def stops(self, num_done: int, num_halves: int) -> bool:
        """Say whether the layers after this one are skipped."""
        if self._is_interrupted():
            self.was_interrupted = True
            return True
        so_far_ms = (time.monotonic() - self.started_s) * 1e3
        if so_far_ms < WHOLE_MS or num_done < MIN_HALVES or num_done % 2:
            return False
        self.left_out_ms = so_far_ms * (num_halves - num_done) / num_done
        return True


def _timed(
    runner: Runner,
    shape: StepShape,
    block_ids: list[int],
    is_interrupted: Callable[[], bool],
    *,
    has_layers: bool,
) -> float | None:
    """Run a step as the loop does; return milliseconds, or None: it was interrupted."""
    length = shape.num_before + shape.num_tokens
    num_blocks = -(-length // runner.block_size)
    table = (block_ids * -(-num_blocks // len(block_ids)))[:num_blocks]
    planned = [
        (
            WorkerRequest.dummy(
                length, table, shape.num_before, 1.0, TOP_K, num_groups=runner.num_groups
            ),
            shape.num_tokens,
        )
        for _ in range(shape.num_sequences)
    ]
    watch = _Stopwatch(is_interrupted)
    runner.collect(runner.launch(planned, watch.stops if has_layers else None))
    if watch.was_interrupted:
        return None
    return (time.monotonic() - watch.started_s) * 1e3 + watch.left_out_ms
