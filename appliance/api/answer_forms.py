"""Read which form an answer must have: `response_format`, and vLLM's `structured_outputs`.

Invariant: a request has at most one form.
Never: compiles a grammar, which takes time and is done in a thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from appliance.api import openai_bodies as chats
from appliance.json_fields import invalid_type, invalid_value
from engine.errors import RequestError
from engine.text.grammar import (
    GrammarError,
    choice_grammar,
    json_grammar,
    lark_grammar,
    regex_grammar,
    validate,
)
from engine.wire.not_json import NOT_JSON


@dataclass(frozen=True, slots=True)
class Constraint:
    """A grammar, and the field that asked for it."""

    grammar: str
    param: str

    def check(self) -> None:
        """Compile it once; up to a tenth of a second.

        Raises:
            RequestError: with the compiler's reason.
        """
        try:
            validate(self.grammar)
        except GrammarError as error:
            raise _refusal(self.param, error) from error


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
        _made(kind, value, name) for name, (kind, value) in older.items() if value is not None
    ]
    if len(found) > 1:
        raise invalid_value(found[1].param, f"cannot be together with `{found[0].param}`")
    return found[0] if found else None


def _response_format(wanted: chats.ResponseFormat | None) -> list[Constraint]:
    if isinstance(wanted, chats.SchemaFormat):
        inner = wanted.json_schema
        kind = "json" if inner.strict else "lenient_json"
        return [_made(kind, inner.schema, "response_format.json_schema.schema")]
    if isinstance(wanted, chats.JsonFormat):
        if wanted.schema is not None:  # llama.cpp's, and of several hosted services
            return [_made("json", wanted.schema, "response_format.schema")]
        return [_made("json_object", True, "response_format")]
    return []


def _structured_outputs(body: chats.Generated) -> list[Constraint]:
    wanted = body.structured_outputs
    if wanted is None:
        return []
    return [
        _made(kind, value, f"structured_outputs.{kind}")
        for kind, value in msgspec.structs.asdict(wanted).items()
        if value is not None and value is not False
    ]


def _made(maker: str, value: Any, param: str) -> Constraint:
    try:
        return Constraint(_MAKERS[maker](value, param), param)
    except RecursionError as error:
        raise invalid_value(param, "is nested too deeply") from error
    except GrammarError as error:
        raise _refusal(param, error) from error


def _refusal(param: str, error: GrammarError) -> RequestError:
    return invalid_value(param, f"cannot be compiled: {error}")


def _of_schema(value: Any, param: str, *, is_lenient: bool = False) -> str:
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except NOT_JSON as error:
            raise invalid_value(param, f"is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise invalid_type(param, "a JSON schema", value)
    return json_grammar(value, is_lenient=is_lenient)


_MAKERS: dict[str, Callable[[Any, str], str]] = {
    "json": _of_schema,
    "lenient_json": partial(_of_schema, is_lenient=True),
    "json_object": lambda _value, _param: json_grammar(),
    "regex": lambda value, _param: regex_grammar(value),
    "choice": lambda value, _param: choice_grammar(value),
    "grammar": lambda value, _param: lark_grammar(value),
}
