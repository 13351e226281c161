"""Take typed values out of a client's JSON object, with errors that name the field.

Owns: the wording of what is wrong with a field, and which fields nobody asked for.
Invariant: any bytes at all give values of the type asked for or a RequestError naming the field.
Never: knows which fields there are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from engine.errors import RequestError

INT64_MAX = 2**63 - 1
"""The greatest integer that is asked for anywhere; engine and log keep 64 bits."""


MAX_MARKS = 1 << 18
"""Brackets, braces and colons in a body. Each may stand for something that takes time to decode,
a quarter of a second in all, in which nothing else happens; no context holds a text with as many.
"""
_FIRST_HALF = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u)")


class Fields:
    """A JSON object whose values are taken out by name, with type and range; null is absent.

    Args:
        values: the object.
        where: its own place in the body, for the names in errors; empty for the body itself.
    """

    def __init__(self, values: dict[str, Any], where: str = "") -> None:
        self._values = values
        self._where = where
        self._taken: set[str] = set()

    @classmethod
    def of_body(cls, body: bytes) -> Fields:
        """Decode a body; it must be a JSON object."""
        if len(body) > MAX_MARKS and sum(map(body.count, (b"[", b"{", b":"))) > MAX_MARKS:
            raise RequestError(
                f"the body has more than {MAX_MARKS} brackets, braces and colons",
                code="invalid_value",
            )
        try:
            values = msgspec.json.decode(body)
        except RecursionError as error:
            raise RequestError("the body is nested too deeply", code="invalid_json") from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RequestError(_not_json(error, body), code="invalid_json") from error
        if not isinstance(values, dict):
            raise RequestError("the body is not a JSON object", code="invalid_type")
        return cls(values)

    @classmethod
    def of(cls, value: object, where: str) -> Fields:
        """An object somewhere in the body, at `where`."""
        if not isinstance(value, dict):
            raise invalid_type(where, "an object", value)
        return cls(value, where)

    @property
    def ignored(self) -> tuple[str, ...]:
        """Names of the values that nothing has taken so far."""
        return tuple(n for n, v in self._values.items() if v is not None and n not in self._taken)

    def path(self, name: str) -> str:
        """A field's place in the body, as errors name it."""
        return f"{self._where}.{name}" if self._where else name

    def get(self, name: str) -> Any:
        """The raw value, None if absent."""
        self._taken.add(name)
        return self._values.get(name)

    def required(self, name: str) -> Any:
        """The raw value; refused if absent."""
        value = self.get(name)
        if value is None:
            param = self.path(name)
            raise RequestError(
                f"`{param}` is required", code="missing_required_parameter", param=param
            )
        return value

    def nested(self, name: str) -> Fields | None:
        """An object in this one, None if absent."""
        value = self.get(name)
        return None if value is None else Fields.of(value, self.path(name))

    def items(self, name: str, most: int) -> list[Any]:
        """A list of at most so many, empty if absent."""
        value = self.get(name)
        if not isinstance(value, list | None):
            raise invalid_type(self.path(name), "a list", value)
        if value and len(value) > most:
            raise invalid_value(self.path(name), f"has {len(value)} entries, at most {most} may be")
        return value or []

    def text(self, name: str) -> str | None:
        """A string, None if absent."""
        value = self.get(name)
        if not isinstance(value, str | None):
            raise invalid_type(self.path(name), "a string", value)
        return value

    def integer(self, name: str, low: int, high: int = INT64_MAX) -> int | None:
        """An integer in [low, high]; 3.0 is one, true is not."""
        value = self.get(name)
        return None if value is None else integer(value, self.path(name), low, high)

    def number(self, name: str, low: float, high: float, default: float) -> float:
        """A number in [low, high]."""
        value = self.get(name)
        return default if value is None else number(value, self.path(name), low, high)

    def boolean(self, name: str, default: bool = False) -> bool:
        """A field that is true or false; raises a 400 that names it."""
        value = self.get(name)
        if not isinstance(value, bool | None):
            raise invalid_type(self.path(name), "a boolean", value)
        return default if value is None else value


def _not_json(error: Exception, body: bytes) -> str:
    """What is wrong with a body; half of a surrogate pair is JSON, but no character."""
    is_cut = "truncated" in str(error)  # in the middle of the second half, where there is none
    if "surrogate" in str(error) or (is_cut and _FIRST_HALF.search(body[-16:])):
        return f"the body has an escape of half a surrogate pair, which is no character: {error}"
    return f"the body is not JSON: {error}"


def integer(value: object, param: str, low: int, high: int = INT64_MAX) -> int:
    """An integer in [low, high], or a RequestError that names the field."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise invalid_type(param, "an integer", value)
    if not low <= value <= high:
        is_open = high == INT64_MAX and value < low
        wanted = f"{low} or more" if is_open else f"between {low} and {high}"
        raise invalid_value(param, f"must be {wanted}")
    return value


def number(value: object, param: str, low: float, high: float) -> float:
    """A number in [low, high], or a RequestError that names the field."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise invalid_type(param, "a number", value)
    if not low <= value <= high:
        raise invalid_value(param, f"must be between {low:g} and {high:g}")
    return float(value)


def invalid_type(param: str, wanted: str, value: object) -> RequestError:
    """A field has the wrong JSON type."""
    return RequestError(
        f"`{param}` must be {wanted}, not {_json_type(value)}", code="invalid_type", param=param
    )


def invalid_value(param: str, why: str) -> RequestError:
    """A field has the right type and a value that cannot be."""
    return RequestError(f"`{param}` {why}", code="invalid_value", param=param)


def renamed(error: RequestError, names: Mapping[str, str]) -> RequestError:
    """A refusal in the words of another API: a field's name there, by its first name here."""
    param = error.param or ""
    name = names.get(re.split(r"[.[]", param)[0])
    if name is None:
        return error
    return RequestError(
        error.what.replace(f"`{param}`", f"`{name}`"),
        code=error.code,
        param=name,
        status=error.status,
        kind=error.kind,
        hint=error.hint,
    )


def unsupported(param: str, why: str = "is not supported") -> RequestError:
    """A field or value that clients of OpenAI, vLLM or Ollama know, and that is not served here."""
    return RequestError(f"`{param}` {why}", code="unsupported_parameter", param=param)


def _json_type(value: object) -> str:
    names = {bool: "a boolean", int: "an integer", float: "a number", str: "a string"}
    names |= {list: "a list", dict: "an object", type(None): "null"}
    return names.get(type(value), type(value).__name__)
