"""Order waiting prompts, in the queue and in a step alike: the shortest first, with ageing."""

AGEING_TOKENS_PER_S = 512.0
"""A waiting prompt counts as this much shorter for every second it waits."""


def prefill_key(num_remaining_tokens: int, waited_ns: int) -> float:
    """Sort key of a prompt: shortest remaining first, with ageing; smaller goes first."""
    return num_remaining_tokens - AGEING_TOKENS_PER_S * waited_ns / 1e9
