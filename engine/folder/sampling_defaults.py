"""What generation_config.json asks for where a request does not say how to sample.

Owns: those keys and their limits.
Invariant: what is returned a request may ask for, too.
Never: reads a file.
"""

from __future__ import annotations

from collections.abc import Mapping

from engine.folder.json_keys import JsonKeys

_SAMPLING_LIMITS = {
    "temperature": (0, 2),
    "top_p": (1e-6, 1),
    "top_k": (-1, 1 << 31),
    "min_p": (0, 1),
    "repetition_penalty": (1e-6, 2),
}
"""As the API's for requests; -1 and 0 mean no top_k."""


def sampling_defaults(generation: JsonKeys) -> Mapping[str, float]:
    """Defaults as transformers would take them: who says not to sample gets greedy output."""
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
