"""Define the words that our JSON schemas are written in.

Owns: the shorthand of types.
Invariant: objects may have other fields than those named.
Never: knows a route or a field.
"""

from __future__ import annotations

from typing import Any

from appliance.json_fields import INT64_MAX

Json = dict[str, Any]

STRING: Json = {"type": "string"}
INTEGER: Json = {"type": "integer"}
NUMBER: Json = {"type": "number"}
BOOLEAN: Json = {"type": "boolean"}
OBJECT: Json = {"type": "object"}
COUNT: Json = {"type": "integer", "minimum": 0}


def ref(name: str) -> Json:
    """A component by its name."""
    return {"$ref": f"#/components/schemas/{name}"}


def one_of(*words: str) -> Json:
    """The schema of a string that is one of these words."""
    return {"type": "string", "enum": list(words)}


def within(low: float, high: float) -> Json:
    """A number in [low, high]."""
    return {"type": "number", "minimum": low, "maximum": high}


def whole(low: int, high: int = INT64_MAX) -> Json:
    """An integer in [low, high]."""
    return {"type": "integer", "minimum": low, "maximum": high}


def items(schema: Json, **limits: int) -> Json:
    """The schema of a list of such things."""
    return {"type": "array", "items": schema, **limits}


def nullable(schema: Json) -> Json:
    """A schema that also takes null."""
    return {"anyOf": [schema, {"type": "null"}]}


def one_form(forms: Json) -> Json:
    """An object with one of these fields, or none; `null` and false count as absent."""
    absent: Json = {"enum": [None, False]}
    return {
        "anyOf": [
            {
                "type": "object",
                "properties": dict.fromkeys(forms, absent) | {name: {"anyOf": [schema, absent]}},
                "additionalProperties": {"type": "null"},
            }
            for name, schema in forms.items()
        ]
    }


def shape(required: Json, optional: Json | None = None) -> Json:
    """An object with fields that are there, and fields that may be absent or null; and others."""
    absent = {name: nullable(schema) for name, schema in (optional or {}).items()}
    return {"type": "object", "required": list(required), "properties": {**required, **absent}}


def listing(schema: Json) -> Json:
    """Things as every list here is sent."""
    return shape({"object": {"const": "list"}, "data": items(schema)})
