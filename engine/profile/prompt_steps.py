"""Choose how many prompt tokens a step computes, and whether prompts borrow a second core.

Owns: that choice, from the facts about prompts' steps.
Invariant: the same facts give the same choice; a default stays until it is beaten by more than
MIN_GAIN and beyond the spread of both.
Never: measures.
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
"""Minimum gain of a second core; less does not pay when its owner wants it back."""


@dataclass(frozen=True, slots=True)
class PromptChoice:
    """How prompts are computed, and why."""

    step_tokens: int
    lends: bool
    """A second core makes a prompt faster, as far as is known."""
    why: str
    """For people."""


def choose_prompt_steps(
    profile: Profile, sizes: tuple[int, ...], own: str, lent: str
) -> PromptChoice:
    """Choose by what steps took here.

    Args:
        profile: of the model.
        sizes: that may be chosen, the default first.
        own: the place of facts about a worker on its own cores.
        lent: the place of facts about a worker on all cores.
    """
    default, *others = sizes
    usual = _fact(profile, default, lent)
    chosen, fastest = default, usual
    for size in others:
        fact = _fact(profile, size, lent)
        if usual is None or fact is None or fastest is None:
            continue
        has_enough = min(len(fact.samples), len(usual.samples)) >= MIN_SAMPLES
        is_clear = has_enough and fact.high / size < usual.low / default
        if is_clear and fact.value / size * MIN_GAIN < fastest.value / chosen:
            chosen, fastest = size, fact
    if usual is None:
        said = "default; not measured before this start"
    elif chosen == default:
        said = "default; no size is clearly faster"
    else:
        gain = (usual.value / default) / (fastest.value / chosen if fastest else 1)
        said = f"{gain:.2f}x as fast as {default}"
    alone, together = (_fact(profile, default, place) for place in (own, lent))
    lends = True
    if own != lent and alone is not None and together is not None:
        lends = alone.high / together.low >= CORE_GAIN
    about = "" if lends else "; no core lending, prompts gain nothing from it"
    return PromptChoice(chosen, lends, f"prefill step: {chosen:,} tokens ({said}){about}")


def _fact(profile: Profile, size: int, place: str) -> Fact | None:
    return profile.facts.get(FactKey(PROMPT_MS, size, 0, place))
