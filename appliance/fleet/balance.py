"""How many of several devices prefill, and which: by what a usual request costs each phase.

Before a model was served that is an estimate by data sheets; from then on, by what its steps took.
Owns: the estimate. Pure.
Invariant: each role has a device; of all ways to divide them the one is taken whose slower role is
quickest, and whose links between the roles are the best.
Never: measures anything; once it serves, elastic roles go by measured step times.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from appliance.devices.gpu_listing import Gpu
from appliance.devices.inventory import Inventory
from engine.wire.messages import RehearsedStep

USUAL_PROMPT_TOKENS = 2048
USUAL_OUTPUT_TOKENS = 256
_USUAL_DEPTH = USUAL_PROMPT_TOKENS / 2
MAX_BATCH = 32
"""Sequences that decode together; fewer where the KV of more has no room."""
_PRODUCT_SHARE, _BANDWIDTH_SHARE = 0.55, 0.65
"""Of what data sheets promise, that prefill and decode come to."""
_FLOPS_PER_BYTE: Mapping[tuple[int, int], float] = {
    (7, 5): 200,
    (8, 0): 155,
    (8, 6): 80,
    (8, 9): 165,
    (9, 0): 295,
    (10, 0): 280,
}
"""Products in halves to bytes of memory, a second of each, by data sheets of the usual GPUs."""
_USUAL_FLOPS_PER_BYTE = 200


def phase_costs(
    weights_bytes: int, kv_token_bytes: int, pool_bytes: int, capability: tuple[int, int] | None
) -> tuple[float, float]:
    """What a usual request takes of prefill and of decode; only their proportion means something.

    Args:
        weights_bytes: in memory, two for each parameter.
        kv_token_bytes: of one position.
        pool_bytes: of one device, for KV.
        capability: of the devices.
    """
    length = USUAL_PROMPT_TOKENS + USUAL_OUTPUT_TOKENS
    batch = max(min(MAX_BATCH, pool_bytes // (length * kv_token_bytes)), 1)
    per_byte = _USUAL_FLOPS_PER_BYTE
    if capability is not None:
        per_byte = int(_FLOPS_PER_BYTE.get(capability, per_byte))
    # a product and a sum for each parameter and token, and two bytes a parameter
    prefill = weights_bytes * USUAL_PROMPT_TOKENS / (_PRODUCT_SHARE * per_byte)
    read_bytes = weights_bytes / batch + length * kv_token_bytes
    return prefill, USUAL_OUTPUT_TOKENS * read_bytes / _BANDWIDTH_SHARE


def measured_costs(steps: Sequence[RehearsedStep]) -> tuple[float, float] | None:
    """The same from steps that were timed, in ms; None: too few of a kind to tell."""
    prompts = [step for step in steps if step.num_tokens > 1]
    decodes = [s for s in steps if s.num_tokens == 1 and s.num_sequences <= MAX_BATCH]
    if not prompts or not decodes:
        return None
    # the largest, which are what a busy device makes, and of those the one most like a usual one
    prompt = max(
        prompts, key=lambda s: (s.num_sequences * s.num_tokens, -abs(_depth(s) - _USUAL_DEPTH))
    )
    decode = max(decodes, key=lambda s: (s.num_sequences, -abs(_depth(s) - USUAL_PROMPT_TOKENS)))
    return (
        USUAL_PROMPT_TOKENS * prompt.elapsed_ms / (prompt.num_sequences * prompt.num_tokens),
        USUAL_OUTPUT_TOKENS * decode.elapsed_ms / decode.num_sequences,
    )


def _depth(step: RehearsedStep) -> float:
    """Positions before a token of it, on average."""
    return step.num_before + step.num_tokens / 2


def num_prefilling(
    num_devices: int, costs: tuple[float, float], *, are_measured: bool = False
) -> tuple[int, str]:
    """How many of at least two prefill, and why."""
    prefill, decode = costs
    shares = f"{100 * prefill / (prefill + decode):.0f} to {100 * decode / (prefill + decode):.0f}"
    count = min(
        range(1, num_devices), key=lambda n: (max(prefill / n, decode / (num_devices - n)), n)
    )
    how = "was measured to need" if are_measured else "is estimated to need"
    about = (
        f"{count} of {num_devices} prefill: a request of {USUAL_PROMPT_TOKENS:,} prompt and "
        f"{USUAL_OUTPUT_TOKENS} output tokens {how} prefill and decode as {shares}"
    )
    return count, about


def divide(
    gpus: Sequence[Gpu], num_prefill: int, num_decode: int, inventory: Inventory
) -> tuple[list[Gpu], list[Gpu]]:
    """Which of the GPUs prefill and which decode: those with the best links between them."""

    def quality(pairs: Sequence[tuple[Gpu, Gpu]]) -> tuple[float, ...]:
        """More is better: pairs that reach each other, by NVLink, by a short path."""
        links = [inventory.link(*pair) for pair in pairs]
        return (
            sum(bool(each.can_reach) for each in links),
            sum(each.nvlink_bytes_per_s or each.num_nvlinks for each in links),
            -sum((99 if e.level is None else e.level) for e in links if not e.num_nvlinks),
        )

    count = num_prefill + num_decode
    chosen = max(
        itertools.combinations(gpus, count),
        key=lambda some: quality(list(itertools.combinations(some, 2))),
    )

    def between(prefill: tuple[Gpu, ...]) -> tuple[float, ...]:
        others = [gpu for gpu in chosen if gpu not in prefill]
        return quality([(one, other) for one in prefill for other in others])

    prefill = max(itertools.combinations(chosen, num_prefill), key=between)
    return list(prefill), [gpu for gpu in chosen if gpu not in prefill]
