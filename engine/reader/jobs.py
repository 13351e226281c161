"""List the jobs of the process that reads strangers' text.

Owns: each job's name and arguments; the templates compiled last.
Invariant: arguments are plain data, and the result is a text.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

from engine.errors import Unreadable
from engine.text.call_syntax import CallSyntax
from engine.text.calls_grammar import calls_grammar
from engine.text.grammar import (
    choice_grammar,
    json_grammar,
    lark_grammar,
    regex_grammar,
    validate,
)
from engine.text.jinja_templates import JinjaTemplate
from engine.text.schema_faults import mend

NUM_TEMPLATES = 8
"""A model has up to two, and several models may take turns."""

_template = functools.lru_cache(NUM_TEMPLATES)(JinjaTemplate)


def _takes_tools(source: str, tool_source: str) -> str:
    """Compile both templates of a model; say `yes` if the second one shows tools."""
    _template(source)
    return "yes" if _template(tool_source).uses("tools") else ""


def _render(source: str, variables: dict[str, Any]) -> str:
    return _template(source).render(variables)


def _constraint(kind: str, value: Any, is_whole: bool) -> str:
    """Make a grammar of what a client sent.

    Args:
        is_whole: it is tried; else it becomes a part of another.
    """
    grammar = _MAKERS[kind](value)
    if is_whole:
        validate(grammar)
    return grammar


def _schema(value: Any, *, is_lenient: bool = False) -> str:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise Unreadable(f"it is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise Unreadable("a JSON schema is an object")
    return json_grammar(value, is_lenient=is_lenient)


_MAKERS: dict[str, Callable[[Any], str]] = {
    "json": _schema,
    "lenient_json": functools.partial(_schema, is_lenient=True),
    "json_object": lambda _value: json_grammar(),
    "regex": regex_grammar,
    "choice": choice_grammar,
    "grammar": lark_grammar,
}


def _calls(schemas: dict[str, Any], syntax: dict[str, str], options: dict[str, Any]) -> str:
    """Make and try the grammar of tool calls, with the options of calls_grammar."""
    grammar = calls_grammar(schemas, CallSyntax(**syntax), **options)
    validate(grammar)
    return grammar


def _mended(schema: dict[str, Any], is_lenient: bool) -> str:
    """Leave out of a schema what cannot be enforced; the rest, and each place with its reason."""
    found = mend(schema, is_lenient=is_lenient)
    return json.dumps([found.schema, found.faults])


JOBS: dict[str, Callable[..., str]] = {
    "takes_tools": _takes_tools,
    "render": _render,
    "constraint": _constraint,
    "calls": _calls,
    "mended": _mended,
}
