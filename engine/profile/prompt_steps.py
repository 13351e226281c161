"""Choose how many prompt tokens a step computes, and whether steps borrow more cores.

Invariant: the same facts give the same choice; a default stays until it is beaten by more than
MIN_GAIN and beyond the spread of both.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.profile.facts import PROMPT_MS, Fact, FactKey, Profile

STEP_TOKENS = (256, 128, 512)
"""Sizes of steps, the default first: sequences that decode beside a prompt, and the next prompt,
wait for its end."""
MIXTURE_STEP_TOKENS = (512, 256, 1024, 2048)
"""An expert gets but a few of them."""
MIN_GAIN = 1.05
"""Minimum gain in tokens a second over the default."""
MIN_SAMPLES = 9
"""Samples of a size before it can replace the default. All on one side of it are then no chance."""
CORE_GAIN = 1.15
"""Minimum gain of borrowed cores; less does not pay when their owner wants them back."""


@dataclass(frozen=True, slots=True)
class PromptChoice:
    """How prompts are computed, and why."""

    step_tokens: int
    why: str
    """For people."""


def choose_prompt_steps(profile: Profile, sizes: tuple[int, ...], place: str) -> PromptChoice:
    """Choose by what steps took here.

    Args:
        profile: of the model.
        sizes: that may be chosen, the default first.
        place: of facts about a worker on all cores.
    """
    facts = {size: profile.facts.get(FactKey(PROMPT_MS, size, 0, place)) for size in sizes}
    known = {size: fact for size, fact in facts.items() if fact is not None}
    default = chosen = sizes[0]
    if default not in known:
        said = "default; not measured before this start"
        return PromptChoice(default, f"prefill step: {default:,} tokens ({said})")
    usual, rates = known[default], {size: size / fact.value for size, fact in known.items()}
    for size, fact in known.items():
        has_enough = min(len(fact.samples), len(usual.samples)) >= MIN_SAMPLES
        is_clear = has_enough and fact.high / size < usual.low / default
        if is_clear and rates[size] > MIN_GAIN * rates[chosen]:
            chosen = size
    said = f"{rates[chosen] / rates[default]:.2f}x as fast as {default}"
    if chosen == default:
        said = "default; no size is clearly faster"
    return PromptChoice(chosen, f"prefill step: {chosen:,} tokens ({said})")


def may_gain(own: Fact | None, lent: Fact | None) -> bool:
    """Say whether steps may be faster on borrowed cores; they are tried until known not to be.

    Args:
        own: the steps' times on a worker's own cores; None: not known.
        lent: the same with borrowed cores.
    """
    return own is None or lent is None or own.high / lent.low >= CORE_GAIN
