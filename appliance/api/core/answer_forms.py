"""Read which form an answer must have: `response_format`, and vLLM's `structured_outputs`.

Invariant: a request has at most one form.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from appliance.api.core import fields as chats
from appliance.json.fields import invalid_value
from engine.errors import Unreadable
from engine.text.reading import READER


@dataclass(frozen=True, slots=True)
class Constraint:
    """What a client wants the answer to match, and the field that asked for it."""

    kind: str
    """As in engine/reader/jobs.py."""
    value: Any
    param: str

    def grammar(self, *, is_whole: bool = True) -> str:
        """Make the grammar; up to a tenth of a second, so call it in a thread.

        Args:
            is_whole: it is compiled to see that it can be; else it becomes a part of another.

        Raises:
            RequestError: with the reason.
        """
        try:
            return READER.read("constraint", self.kind, self.value, is_whole)
        except Unreadable as error:
            raise invalid_value(self.param, f"cannot be compiled: {error.what}") from error


def read_constraint(body: chats.Generated) -> Constraint | None:
    """Read the form that the answer must have; None if it is free."""
    found = [*_response_format(body.response_format), *_structured_outputs(body)]
    older = {  # vLLM's older names, and llama.cpp's
        "guided_json": ("json", body.guided_json),
        "guided_regex": ("regex", body.guided_regex),
        "guided_choice": ("choice", body.guided_choice),
        "guided_grammar": ("grammar", body.guided_grammar),
        "json_schema": ("json", body.json_schema or None),
        "grammar": ("grammar", body.grammar or None),
    }
    found += [
        Constraint(kind, value, name) for name, (kind, value) in older.items() if value is not None
    ]
    if len(found) > 1:
        raise invalid_value(found[1].param, f"cannot be together with `{found[0].param}`")
    return found[0] if found else None


def _response_format(wanted: chats.ResponseFormat | None) -> list[Constraint]:
    if isinstance(wanted, chats.SchemaFormat):
        inner = wanted.json_schema
        kind = "json" if inner.strict else "lenient_json"
        return [Constraint(kind, inner.schema, "response_format.json_schema.schema")]
    if isinstance(wanted, chats.JsonFormat):
        if wanted.schema is not None:  # llama.cpp's, and of several hosted services
            return [Constraint("json", wanted.schema, "response_format.schema")]
        return [Constraint("json_object", True, "response_format")]
    return []


def _structured_outputs(body: chats.Generated) -> list[Constraint]:
    wanted = body.structured_outputs
    if wanted is None:
        return []
    return [
        Constraint(kind, value, f"structured_outputs.{kind}")
        for kind, value in msgspec.structs.asdict(wanted).items()
        if value is not None and value is not False
    ]
