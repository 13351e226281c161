"""Read how the model's makers sample it, from generation_config.json.

Invariant: a request may ask for whatever is returned.
"""

from __future__ import annotations

from collections.abc import Mapping

from engine.checkpoint.json_keys import JsonKeys

_SAMPLING_LIMITS = {
    "temperature": (0, 2),
    "top_p": (1e-6, 1),
    "top_k": (-1, 1 << 31),
    "min_p": (0, 1),
    "repetition_penalty": (1e-6, 2),
}
"""Limits of the API's requests; -1 and 0 mean no top_k."""


def sampling_defaults(generation: JsonKeys) -> Mapping[str, float]:
    """Read defaults as transformers does: `do_sample: false` is greedy."""
    found: dict[str, float] = {}
    for name, (low, high) in _SAMPLING_LIMITS.items():
        value = generation.get(name, None)
        if value is None:
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not low <= value <= high or (name == "top_k" and value != int(value)):
            raise generation.bad(name, f"a number from {low:g} to {high:g}")
        found[name] = value
    if generation.get("do_sample", None) is False:
        return {"temperature": 0.0, "repetition_penalty": found.get("repetition_penalty", 1.0)}
    return found
