"""One worker or two on one device: by what steps take there alone, and beside the other's.

In one worker a token waits for the chunk of a prompt that its step has; in two, for whatever the
device lets both processes compute at once. What that is worth is measured, not assumed.
Owns: what is measured for it, and the comparison. Pure.
Invariant: two are chosen only where a token waits less and prompts are hardly slower.
Never: starts a process.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from appliance.fleet.step_memory import PairTimes
from engine.wire.messages import RehearsalStep, RehearsedStep

MAX_GAP_RATIO = 0.75
"""Of a token's wait in one worker: less has to be left of it in two."""
MIN_RATE_RATIO = 0.9
"""Of the prompt tokens a second of one worker: so many have to be left."""
BATCH, CONTEXT = 8, 512
_NUM_REPEATED = 400
"""More than there is time for: both go on until theirs is over."""

Turn = Mapping[str, Sequence[RehearsalStep]]


def programme(prefill: str, decode: str, chunk_tokens: int, max_model_len: int) -> list[Turn]:
    """What to rehearse by worker: each kind by itself, in one of them, then both at once."""
    size = min(chunk_tokens, max_model_len)
    prompt = RehearsalStep(1, size, 0)
    token = RehearsalStep(BATCH, 1, min(CONTEXT, max_model_len - 1))
    alone = [prompt, token] * _NUM_REPEATED
    return [{decode: alone}, {prefill: [prompt] * _NUM_REPEATED, decode: [token] * _NUM_REPEATED}]


def pair_times(turns: Sequence[Mapping[str, Sequence[RehearsedStep]]]) -> PairTimes | None:
    """From what was made, turn by turn; None: a kind is missing, for lack of time or a worker."""
    if len(turns) != 2:
        return None
    (prompts, tokens), (prompts_beside, tokens_beside) = map(_of_kinds, turns)
    if not (prompts and tokens and prompts_beside and tokens_beside):
        return None
    return PairTimes(
        chunk_tokens=prompts[0].num_tokens,
        batch=tokens[0].num_sequences,
        prompt_alone_ms=_median(prompts),
        decode_alone_ms=_median(tokens),
        prompt_beside_ms=_median(prompts_beside),
        decode_beside_ms=_median(tokens_beside),
    )


def is_two_better(times: PairTimes) -> tuple[bool, str]:
    """Whether two workers are better than one, and why."""
    one_ms = times.prompt_alone_ms + times.decode_alone_ms
    gap = times.decode_beside_ms / one_ms
    rate = one_ms / times.prompt_beside_ms
    is_better = gap <= MAX_GAP_RATIO and rate >= MIN_RATE_RATIO
    return is_better, (
        f"beside a chunk of {times.chunk_tokens:,} prompt tokens a token takes {one_ms:.3g} ms in "
        f"one worker and {times.decode_beside_ms:.3g} ms in a second, which computes prompts at "
        f"{rate:.0%} of the rate"
    )


def _of_kinds(
    turn: Mapping[str, Sequence[RehearsedStep]],
) -> tuple[list[RehearsedStep], list[RehearsedStep]]:
    """Steps of prompts, and of decoding."""
    steps = [step for made in turn.values() for step in made]
    return [s for s in steps if s.num_tokens > 1], [s for s in steps if s.num_tokens == 1]


def _median(steps: Sequence[RehearsedStep]) -> float:
    return statistics.median(step.elapsed_ms for step in steps)
