"""Values of arguments as models write them, to JSON.

Owns: how a text becomes a value where a notation has no quotes.
Invariant: whatever a model writes gives JSON; what is no value of any kind is a string.
Never: reads calls.
"""

from __future__ import annotations

import ast
import json


def types_of(schema: object) -> set[str]:
    """The types that a parameter may have; empty where its schema does not say."""
    if not isinstance(schema, dict):
        return set()
    types, options = schema.get("type"), schema.get("anyOf")
    found = {types} if isinstance(types, str) else set()
    if isinstance(types, list):
        found |= {one for one in types if isinstance(one, str)}
    return found.union(*map(types_of, options)) if isinstance(options, list) else found


def as_json(text: str, types: set[str]) -> str:
    """A value that is written as JSON or as Python, if it may be that; else it is a text."""
    stripped = text.strip()
    if "string" in types:
        return "null" if stripped == "null" and "null" in types else quoted(text)
    try:
        return json.dumps(json.loads(stripped), ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return python_as_json(stripped if types else text)


def python_as_json(text: str) -> str:
    """A value that is written as Python; else it is a text."""
    names = {"true": "True", "false": "False", "null": "None"}
    try:
        value = ast.literal_eval(names.get(text.strip(), text.strip()))
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return quoted(text)


def quoted(text: str) -> str:
    """A text as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def inner(text: str) -> str:
    """Text as it stands between the quotes of a JSON string."""
    return quoted(text)[1:-1]
