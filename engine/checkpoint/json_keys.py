"""Read typed values from a model folder's JSON files.

Invariant: what is returned has the type asked for; anything else is a CheckpointError that names
the file and the key.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.checkpoint.model_file import read_model_text
from engine.errors import WHAT_IS_SERVED, CheckpointError

REQUIRED = object()
MAX_INTEGER = 2**31 - 1
_MIN_NUMBER, _MAX_NUMBER = 1e-38, 3e38
"""What float32 holds, in which models compute."""
_ABOVE_0 = f"a number above 0, from {_MIN_NUMBER:g} to {_MAX_NUMBER:g}"
ADAPTER_FILE = "adapter_config.json"
ADAPTER_HINT = "it is an adapter: merge it into its model (peft: merge_and_unload)"


class JsonKeys:
    """Typed reading of one JSON object; a wrong value is a CheckpointError naming file and key."""

    def __init__(self, values: dict[str, Any], path: Path, prefix: str = "") -> None:
        self.values = values
        self.path = path
        self._prefix = prefix

    @classmethod
    def from_file(cls, path: Path) -> JsonKeys:
        """Read a JSON file that must hold an object."""
        try:
            values = json.loads(read_model_text(path))
        except FileNotFoundError:
            is_adapter = (path.parent / ADAPTER_FILE).exists()
            hint = ADAPTER_HINT if is_adapter else "a folder in Hugging Face format has this file"
            raise CheckpointError("the file is missing", where=str(path), hint=hint) from None
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"not valid JSON: {error}", where=str(path)) from None
        if not isinstance(values, dict):
            raise CheckpointError("not a JSON object", where=str(path))
        return cls(values, path)

    def bad(self, key: str, needed: str) -> CheckpointError:
        """Make the error for a key: its value, and what is needed."""
        shown = repr(self.values.get(key))[:80]
        what = f"{self._prefix}{key} is {shown}, not {needed}"
        return CheckpointError(what, where=str(self.path), hint=WHAT_IS_SERVED)

    def get(self, key: str, default: Any) -> Any:
        """Return the raw value; an explicit null is None, not the default."""
        value = self.values.get(key, default)
        if value is REQUIRED:
            what = f"{self._prefix}{key} is missing"
            raise CheckpointError(what, where=str(self.path), hint=WHAT_IS_SERVED)
        return value

    def integer(self, key: str, default: Any = REQUIRED, maximum: int = MAX_INTEGER) -> int:
        """Read a positive integer of at most `maximum`; raise CheckpointError otherwise."""
        value = self.get(key, default)
        if type(value) is not int or not 1 <= value <= maximum:
            raise self.bad(key, f"an integer from 1 to {maximum}")
        return value

    def number(self, key: str, default: Any = REQUIRED) -> float:
        """Read a number above zero that float32 holds."""
        value = self.get(key, default)
        if not _is_above_0(value):
            raise self.bad(key, _ABOVE_0)
        return float(value)

    def number_or_none(self, key: str) -> float | None:
        """Read what number() does; absent or null is None."""
        return None if self.get(key, None) is None else self.number(key)

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """Read a list of `count` numbers as number() does."""
        values = self.get(key, REQUIRED)
        if (
            not isinstance(values, list)
            or len(values) != count
            or not all(map(_is_above_0, values))
        ):
            raise self.bad(key, f"a list, of length {count}, each {_ABOVE_0}")
        return tuple(map(float, values))

    def flag(self, key: str, default: bool = False) -> bool:
        """Read true or false; raise CheckpointError otherwise."""
        value = self.get(key, default)
        if type(value) is not bool:
            raise self.bad(key, "true or false")
        return value

    def token_ids(self, key: str, default: Any) -> tuple[int, ...]:
        """Read one token id, a list of them, or null for none; a file may also say -1 for none."""
        value = self.get(key, default)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if any(type(each) is not int or abs(each) > MAX_INTEGER for each in ids):
            raise self.bad(key, "a token id or a list of them")
        return tuple(dict.fromkeys(ids))

    def section(self, key: str) -> JsonKeys:
        """Read a nested object; absent or null is empty."""
        value = self.get(key, None)
        if value is not None and not isinstance(value, dict):
            raise self.bad(key, "an object")
        return JsonKeys(value or {}, self.path, prefix=f"{self._prefix}{key}.")


def _is_above_0(value: Any) -> bool:
    return type(value) in (int, float) and _MIN_NUMBER <= value <= _MAX_NUMBER
