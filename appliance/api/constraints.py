"""Which form an answer must have: `response_format`, and vLLM's `structured_outputs`.

Owns: the translation of these fields into a grammar.
Invariant: at most one form is asked for.
Never: compiles a grammar: that takes time, and is done in a thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from appliance.json_fields import Fields, invalid_type, invalid_value, unsupported
from engine.errors import RequestError
from engine.text.grammar import (
    GrammarError,
    choice_grammar,
    json_grammar,
    lark_grammar,
    regex_grammar,
    validate,
)

MAX_CHOICES = 1000


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


def read_constraint(fields: Fields) -> Constraint | None:
    """The form that the answer must have; None if it is free."""
    found = [*_response_format(fields), *_structured_outputs(fields), *_guided(fields)]
    found += _llamas(fields)
    if len(found) > 1:
        raise invalid_value(found[1].param, f"cannot be together with `{found[0].param}`")
    return found[0] if found else None


def _response_format(fields: Fields) -> list[Constraint]:
    wanted = fields.nested("response_format")
    kind = wanted.required("type") if wanted else "text"
    if wanted is None or kind == "text":
        return []
    if kind == "json_object":
        if wanted.get("schema") is not None:  # llama.cpp's, and of several hosted services
            return [_made("json", wanted.get("schema"), wanted.path("schema"))]
        return [_made("json_object", True, "response_format")]
    if kind != "json_schema":
        raise unsupported("response_format.type", "must be text, json_object or json_schema")
    inner = Fields.of(wanted.required("json_schema"), "response_format.json_schema")
    maker = "json" if inner.boolean("strict") else "lenient_json"
    return [_made(maker, inner.required("schema"), inner.path("schema"))]


def _structured_outputs(fields: Fields) -> list[Constraint]:
    wanted = fields.nested("structured_outputs")
    if wanted is None:
        return []
    given = {kind: wanted.get(kind) for kind in _KINDS}
    if wanted.ignored:
        raise unsupported(wanted.path(wanted.ignored[0]))
    return [
        _made(kind, value, wanted.path(kind))
        for kind, value in given.items()
        if value is not None and value is not False
    ]


def _guided(fields: Fields) -> list[Constraint]:
    """The same by vLLM's older names."""
    given = {kind: fields.get(f"guided_{kind}") for kind in _KINDS if kind != "json_object"}
    return [
        _made(kind, value, f"guided_{kind}") for kind, value in given.items() if value is not None
    ]


def _llamas(fields: Fields) -> list[Constraint]:
    """A schema or a grammar as llama.cpp's server takes them: at the top of the body."""
    given = {"json": "json_schema", "grammar": "grammar"}
    return [
        _made(kind, value, name)
        for kind, name in given.items()
        if (value := fields.get(name)) not in (None, "")
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
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
            raise invalid_value(param, f"is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise invalid_type(param, "a JSON schema", value)
    return json_grammar(value, is_lenient=is_lenient)


def _of_choices(value: Any, param: str) -> str:
    if not isinstance(value, list):
        raise invalid_type(param, "a list of strings", value)
    if not 1 <= len(value) <= MAX_CHOICES:
        raise invalid_value(param, f"must have 1 to {MAX_CHOICES} strings")
    for index, one in enumerate(value):
        if not isinstance(one, str):
            raise invalid_type(f"{param}[{index}]", "a string", one)
        if not one:
            raise invalid_value(f"{param}[{index}]", "is empty: an answer has at least a character")
    return choice_grammar(value)


def _of_switch(value: Any, param: str) -> str:
    if value is not True:
        raise invalid_type(param, "a boolean", value)
    return json_grammar()


def _of_text(maker: Callable[[str], str]) -> Callable[[Any, str], str]:
    def make(value: Any, param: str) -> str:
        if not isinstance(value, str):
            raise invalid_type(param, "a string", value)
        return maker(value)

    return make


_KINDS = ("json", "json_object", "regex", "choice", "grammar")
"""What `structured_outputs` may have."""
_MAKERS: dict[str, Callable[[Any, str], str]] = {
    "json": _of_schema,
    "lenient_json": partial(_of_schema, is_lenient=True),
    "json_object": _of_switch,
    "regex": _of_text(regex_grammar),
    "choice": _of_choices,
    "grammar": _of_text(lark_grammar),
}
