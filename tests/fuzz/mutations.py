"""Change valid examples, each time alike for the same seed."""

from __future__ import annotations

import contextlib
import json
from random import Random
from typing import Any

from tests.benchmarks.hostile import VALUES

MAX_BYTES = 1 << 19
_NUMBERS = (0, 1, 0x7F, 0x80, 0xFF, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1)


def mutated(rng: Random, examples: list[bytes], fragments: list[bytes], *, is_json: bool) -> bytes:
    """Change one of the examples in a few places."""
    data = rng.choice(examples)
    if is_json and rng.random() < 0.7:
        data = _changed_json(rng, data)
        if rng.random() < 0.7:
            return data
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 4, 12])):
        _change(rng, changed, examples, fragments)
    return bytes(changed[:MAX_BYTES])


def _change(rng: Random, data: bytearray, examples: list[bytes], fragments: list[bytes]) -> None:
    """Make one change in place."""
    # the beginning says most: heads, lengths, versions
    length = len(data) if rng.random() < 0.6 else min(len(data), 64)
    at = rng.randrange(length + 1)
    end = min(len(data), at + rng.choice([1, 1, 2, 4, 8, 30, 300]))
    match rng.randrange(8):
        case 0 if at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        case 1:
            data[at:end] = rng.randbytes(end - at)
        case 2:
            del data[at:end]
        case 3:
            data[at:at] = data[at:end] * rng.choice([1, 1, 2, 50])
        case 4:
            size = rng.choice([1, 2, 4, 8])
            number = rng.choice(_NUMBERS) + rng.randint(-1, 1)
            data[at : at + size] = (number % 2 ** (8 * size)).to_bytes(size, "little")
        case 5:
            other = rng.choice(examples)
            begin = rng.randrange(len(other) + 1)
            data[at:end] = other[begin : begin + rng.choice([1, 8, 60, 1000])]
        case 6:
            del data[at:]
        case _:
            data[at:at] = rng.choice(fragments) if fragments else rng.randbytes(rng.randint(1, 9))


def _changed_json(rng: Random, data: bytes) -> bytes:
    """Change values and keys of a JSON document, as long as it does not become too long."""
    is_ascii = rng.random() < 0.5
    # it may be no JSON, or nested deeper than the encoder goes
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(data)
        for _ in range(rng.choice([1, 1, 2, 4])):
            value = _changed(rng, value)
            changed = json.dumps(value, ensure_ascii=is_ascii).encode("utf-8", "surrogatepass")
            if len(changed) > MAX_BYTES:
                break
            data = changed
    return data


def _changed(rng: Random, value: Any) -> Any:
    """Return a value with one change somewhere within it."""
    inner = isinstance(value, dict | list) and value and rng.random() < 0.85
    if not inner:
        return _other(rng, value)
    if isinstance(value, list):
        value, at = [*value], rng.randrange(len(value))
        match rng.randrange(12):
            case 0:
                del value[at]
            case 1:
                value[at:at] = [value[at]] * rng.choice([1, 2, 100])
            case _:
                value[at] = _changed(rng, value[at])
        return value
    value, key = dict(value), rng.choice(list(value))
    match rng.randrange(12):
        case 0:
            del value[key]
        case 1:
            value[rng.choice(["", "x", key + "s", "\ud800", "type"])] = value.pop(key)
        case _:
            value[key] = _changed(rng, value[key])
    return value


def _other(rng: Random, value: Any) -> Any:
    """Return something else in a value's place."""
    match rng.randrange(6):
        case 0 if isinstance(value, int | float):
            return rng.choice(
                [-value, value + 1, value * 1e9, 2**53, 10**30, -1, 0, 1e400, float("nan")]
            )
        case 1 if isinstance(value, str):
            return rng.choice([value * 2, value[: len(value) // 2], value.swapcase(), value + "\0"])
        case 2:
            deep: Any = value
            for _ in range(rng.choice([1, 5, 200, 900])):
                deep = rng.choice([[deep], {"a": deep}])
            return deep
        case _:
            return rng.choice(VALUES)
