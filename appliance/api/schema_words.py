"""Define the words that our JSON schemas are written in.

Invariant: objects may have other fields than those named.
"""

from __future__ import annotations

from typing import Any

from appliance.json.fields import INT64_MAX

Json = dict[str, Any]

STRING: Json = {"type": "string"}
INTEGER: Json = {"type": "integer"}
NUMBER: Json = {"type": "number"}
BOOLEAN: Json = {"type": "boolean"}
OBJECT: Json = {"type": "object"}
COUNT: Json = {"type": "integer", "minimum": 0}


def ref(name: str) -> Json:
    """Refer to a component by its name."""
    return {"$ref": f"#/components/schemas/{name}"}


def one_of(*words: str) -> Json:
    """Describe a string that is one of these words."""
    return {"type": "string", "enum": list(words)}


def whole(low: int, high: int = INT64_MAX) -> Json:
    """Describe an integer in [low, high]."""
    return {"type": "integer", "minimum": low, "maximum": high}


def items(schema: Json, **limits: int) -> Json:
    """Describe a list of such things."""
    return {"type": "array", "items": schema, **limits}


def nullable(schema: Json) -> Json:
    """Describe what may also be null."""
    return {"anyOf": [schema, {"type": "null"}]}


def shape(required: Json, optional: Json | None = None) -> Json:
    """Describe an object by its required and its optional fields; it may have others."""
    absent = {name: nullable(schema) for name, schema in (optional or {}).items()}
    return {"type": "object", "required": list(required), "properties": {**required, **absent}}


def listing(schema: Json) -> Json:
    """Describe a list as every endpoint sends it."""
    return shape({"object": {"const": "list"}, "data": items(schema)})
