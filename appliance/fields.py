"""A client's JSON object, its values taken out by name with type and range.

Owns: the wording of what is wrong with a field. Called by: openai, api.
Invariant: any bytes at all give values of the type asked for or a RequestError naming the field.
Never: knows which fields there are.
"""

from __future__ import annotations

from typing import Any

import msgspec

from engine.errors import RequestError


class Fields:
    """A JSON object whose values are taken out by name, with type and range; null is absent."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    @classmethod
    def of_body(cls, body: bytes) -> Fields:
        """Decode a body; it must be a JSON object."""
        try:
            values = msgspec.json.decode(body)
        except RecursionError as error:
            raise RequestError("the body is nested too deeply", code="invalid_json") from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RequestError(f"the body is not JSON: {error}", code="invalid_json") from error
        if not isinstance(values, dict):
            raise RequestError("the body is not a JSON object", code="invalid_type")
        return cls(values)

    def get(self, name: str) -> Any:
        """The raw value, None if absent."""
        return self._values.get(name)

    def required(self, name: str) -> Any:
        """The raw value; refused if absent."""
        value = self._values.get(name)
        if value is None:
            raise RequestError(
                f"`{name}` is required", code="missing_required_parameter", param=name
            )
        return value

    def integer(self, name: str, low: int, high: int) -> int | None:
        """An integer in [low, high]; 3.0 and true are none."""
        value = self._values.get(name)
        return None if value is None else integer(value, name, low, high)

    def number(self, name: str, low: float, high: float, default: float) -> float:
        """A number in [low, high]."""
        value = self._values.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise invalid_type(name, "a number", value)
        if not low <= value <= high:
            raise invalid_value(name, f"must be between {low:g} and {high:g}")
        return float(value)

    def boolean(self, name: str) -> bool:
        """A boolean, false if absent."""
        value = self._values.get(name)
        if not isinstance(value, bool | None):
            raise invalid_type(name, "a boolean", value)
        return bool(value)


def integer(value: object, param: str, low: int, high: int) -> int:
    """An integer in [low, high], or a RequestError that names the field."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise invalid_type(param, "an integer", value)
    if not low <= value <= high:
        raise invalid_value(param, f"must be between {low} and {high}")
    return value


def invalid_type(param: str, wanted: str, value: object) -> RequestError:
    """A field has the wrong JSON type."""
    return RequestError(
        f"`{param}` must be {wanted}, not {_json_type(value)}", code="invalid_type", param=param
    )


def invalid_value(param: str, why: str) -> RequestError:
    """A field has the right type and a value that cannot be."""
    return RequestError(f"`{param}` {why}", code="invalid_value", param=param)


def _json_type(value: object) -> str:
    names = {bool: "a boolean", int: "an integer", float: "a number", str: "a string"}
    names |= {list: "a list", dict: "an object", type(None): "null"}
    return names.get(type(value), type(value).__name__)
