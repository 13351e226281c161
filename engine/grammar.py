"""Grammars that an output must match, as texts: written and validated here, followed by matchers.

A grammar is a text for llguidance: its JSON around a schema, or around a grammar in Lark.
Owns: how grammars are written, and the limits that keep hostile ones harmless.
Called by: the api; engine.matcher, which compiles under the same limits.
Invariant: size, time, memory and stack of a compilation are bounded whatever a client writes.
Never: looks at tokens: a grammar says which texts there may be.
"""

from __future__ import annotations

import functools
import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import llguidance
from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

from engine.schema_references import endless_reference

MAX_GRAMMAR_CHARS = 65_536
"""Compiling takes time and stack in proportion: so much is a tenth of a second and 50 MB."""
_MAX_LARK_RULES = 256
"""An error at the end of a chain of rules is told once per rule: time grows with the cube."""
_COMPILER_STACK_BYTES = 256 << 20
LIMITS = llguidance.LLParserLimits(
    initial_lexer_fuel=500_000,
    step_lexer_fuel=100_000,
    step_max_items=10_000,
    max_lexer_states=50_000,
    verbose_errors=False,  # else the client reads its whole grammar again
)
_STACK_SIZE_LOCK = threading.Lock()  # a process has one size for all new threads
_MAX_ERROR_CHARS = 300
_ANY_OBJECT = {"type": "object"}
_NO_WAY_ON = "NoExtensionBias"
"""llguidance's word for a state in which no token may follow, and the output may not end."""

R = TypeVar("R")


class GrammarError(ValueError):
    """A grammar cannot be compiled, or has used up its limits; the message is for the client."""


def json_grammar(
    schema: Mapping[str, Any] | bool | None = None, *, is_lenient: bool = False
) -> str:
    """JSON that matches a schema; without one, any JSON object.

    Properties come in the schema's order. Keywords that cannot be enforced make `validate` fail,
    or are ignored if `is_lenient`.

    Raises:
        GrammarError: it is too large, or a part of it refers only to itself.
    """
    _check_size(schema)
    _check_references(schema)
    return json.dumps({"grammars": [{"json_schema": _schema(schema, is_lenient)}]})


def regex_grammar(pattern: str) -> str:
    """Text that a regular expression matches from end to end; no look-around, no back-reference.

    Raises:
        GrammarError: it is too large, or has half of a surrogate pair in it.
    """
    check_length(pattern)
    try:
        return llguidance.LLMatcher.grammar_from_regex(pattern)
    except UnicodeEncodeError as error:
        raise GrammarError(f"the pattern is no text: {error.reason}") from error


def choice_grammar(choices: Sequence[str]) -> str:
    """One of these texts.

    Raises:
        GrammarError: they are too large.
    """
    _check_size(choices)
    # a terminal: as alternatives of a rule they would count one by one against the limits
    return _lark("start: CHOICE\nCHOICE: " + " | ".join(map(_text, choices)))


def lark_grammar(text: str) -> str:
    """What a client's own grammar says: Lark with a `start` rule, or GBNF with a `root` rule.

    Raises:
        GrammarError: it is too large, or looks like GBNF and is not.
    """
    check_length(text)
    num_rules = len(re.findall(r"[\w\]})]\s*:", text))
    if num_rules > _MAX_LARK_RULES:
        raise GrammarError(
            f"the grammar has {num_rules} rules, at most {_MAX_LARK_RULES} are compiled"
        )
    try:
        return _lark(any_to_lark(text))
    except (GbnfToLarkError, RecursionError, ValueError, LookupError) as error:
        raise GrammarError(shorten(str(error))) from error


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """How a model writes tool calls, in its own words: `opening (begin call end)+ closing`."""

    opening: str = ""
    """Before the first call, such as `[TOOL_CALLS][`."""
    begin: str = ""
    """Before each call, such as `<tool_call>` and a line break."""
    end: str = ""
    separator: str = ""
    closing: str = ""
    arguments_key: str = "arguments"
    """The other key is `name`, and comes first."""


def calls_grammar(
    tools: Mapping[str, Mapping[str, Any] | None],
    syntax: CallSyntax,
    *,
    special_ids: Mapping[str, int],
    is_required: bool,
    is_parallel: bool = True,
    is_lenient: bool = True,
) -> str:
    """Calls of these tools, as the model writes them, with arguments that match their schemas.

    Args:
        tools: names to the JSON schemas of their arguments; None is any object.
        syntax: how this model writes calls.
        special_ids: ids of special tokens that may occur in the syntax, by their text.
        is_required: the output is calls and nothing else. Otherwise it is free text, in which
            what follows the syntax's opening and begin must be a call; they may not be empty.
        is_parallel: any number of calls; otherwise one, and with it the output ends.
        is_lenient: ignore keywords of the schemas that cannot be enforced.

    Raises:
        GrammarError: the schemas are too large, or a part of one refers only to itself.
        ValueError: free text needs a marker to tell a call by.
    """
    _check_size(tools)
    for tool_schema in tools.values():
        _check_references(tool_schema)
    marker = syntax.opening + syntax.begin
    if not is_required and not marker:
        raise ValueError("without a text that marks calls they cannot be told from free text")

    def literal(text: str) -> str:
        return _literal(text, special_ids)

    rules = []
    for index, (name, schema) in enumerate(tools.items()):
        head = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{syntax.arguments_key}": '
        arguments = json.dumps(_schema({**_ANY_OBJECT, **(schema or {})}, is_lenient))
        rules.append(f"tool_{index}: {_text(head)} %json {arguments} {literal('}' + syntax.end)}")
    rules.append("tool: " + " | ".join(f"tool_{index}" for index in range(len(tools))))
    more = f"({literal(syntax.separator + syntax.begin)} tool)*" if is_parallel else ""
    calls = f"tool {more} {literal(syntax.closing)}"
    if is_required:
        rules.append(f"start: {literal(marker)} {calls}")
    else:
        rules += _free_text(marker, calls, special_ids, is_parallel=is_parallel)
    return _lark("\n".join(rules))


def validate(grammar: str) -> None:
    """Check that a grammar compiles; up to a tenth of a second, so call it in a thread.

    Raises:
        GrammarError: it does not, is too large, or no text matches it.
    """
    check_length(grammar)
    error = with_deep_stack(lambda: _compile_error(grammar))
    if error:
        raise GrammarError(shorten(error))


def _compile_error(grammar: str) -> str:
    """What the compiler has against it, or that it compiles and no text could ever match it."""
    error: str = llguidance.LLMatcher.validate_grammar(grammar, limits=LIMITS)
    if error:
        return error
    # Bytes stand in for the model's tokens: a grammar without a first byte has no first token.
    matcher = llguidance.LLMatcher(_bytes_as_tokens(), grammar, log_level=0, limits=LIMITS)
    matcher.compute_logit_bias()
    is_empty = matcher.is_error() and matcher.get_error().startswith(_NO_WAY_ON)
    return "no text matches it: it can only go on by referring to itself" if is_empty else ""


def check_length(grammar: str) -> None:
    """Refuse what would take long to read.

    Raises:
        GrammarError: it is too large.
    """
    if len(grammar) > MAX_GRAMMAR_CHARS:
        raise GrammarError(
            f"the grammar has {len(grammar)} characters, at most {MAX_GRAMMAR_CHARS} are compiled"
        )


def _check_size(value: object) -> None:
    """Refuse what would become too long, before time is spent on writing it."""
    num_chars, unseen = 0, [value]
    while unseen:
        one = unseen.pop()
        num_chars += len(one) if isinstance(one, str | Mapping | Sequence) else 1
        if num_chars > MAX_GRAMMAR_CHARS:
            raise GrammarError(
                f"the grammar has more than the {MAX_GRAMMAR_CHARS} characters that are compiled"
            )
        if isinstance(one, Mapping):
            unseen += [*one.keys(), *one.values()]
        elif isinstance(one, Sequence) and not isinstance(one, str):
            unseen += one


def _check_references(schema: object) -> None:
    """Refuse what the compiler takes, and what ends an output at the place where it is met."""
    if (reference := endless_reference(schema)) is not None:
        raise GrammarError(shorten(f"the reference {reference} leads only to itself"))


def shorten(error: str) -> str:
    """The first line that says something; what follows is the compiler's state."""
    message = re.split(r"\n<(?:state|non-verbose)", error, maxsplit=1)[0].strip()
    return message if len(message) <= _MAX_ERROR_CHARS else f"{message[:_MAX_ERROR_CHARS]}…"


def with_deep_stack(function: Callable[[], R]) -> R:
    """Run in a thread of its own: the compiler recurses as deep as a grammar refers.

    A thread that is started elsewhere at the same moment gets a deep one too, which costs address
    space only.
    """
    with ThreadPoolExecutor(1, "grammar-stack") as executor:
        with _STACK_SIZE_LOCK:
            threading.stack_size(_COMPILER_STACK_BYTES)
            try:
                future = executor.submit(function)  # starts the thread
            finally:
                threading.stack_size(0)
        return future.result()


def _schema(schema: Mapping[str, Any] | bool | None, is_lenient: bool) -> Mapping[str, Any] | bool:
    if schema is None:
        return _ANY_OBJECT
    if not is_lenient or isinstance(schema, bool):
        return schema
    return {**schema, "x-guidance": {"lenient": True}}


class _Bytes:
    """All bytes, each a token, and an end: what llguidance asks of a tokenizer, by its names."""

    eos_token_id = 256
    bos_token_id = None
    tokens = [bytes([byte]) for byte in range(256)] + [b"<end>"]
    special_token_ids = [256]  # noqa: RUF012

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


@functools.cache
def _bytes_as_tokens() -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes()))


def _free_text(
    marker: str, calls: str, special_ids: Mapping[str, int], *, is_parallel: bool
) -> list[str]:
    """Rules for free text in which a marker begins a call, and cannot be anything else."""
    first, *others = _pieces(marker, special_ids)
    rest = "".join(others)
    rules = [r"TEXT: /(.|\n)*/"]
    if first in special_ids:
        trigger = f"TEXT {_literal(first, special_ids)}"
    else:
        # what may follow the marker is forced; so let a line break after it be forced, too
        stripped = first.rstrip() or first
        rest = first[len(stripped) :] + rest
        rules.append(f"trigger[lazy]: TEXT {_text(stripped)}")
        trigger = "trigger"
    rules.append(f"call: {trigger} {_literal(rest, special_ids)} {calls}")
    return [*rules, "start: call* TEXT" if is_parallel else "start: call | TEXT"]


def _literal(text: str, special_ids: Mapping[str, int]) -> str:
    """Lark for a text: special tokens by their ids, the rest as strings."""
    return " ".join(
        f"<[{special_ids[piece]}]>" if piece in special_ids else _text(piece)
        for piece in _pieces(text, special_ids)
    )


def _pieces(text: str, special_ids: Mapping[str, int]) -> list[str]:
    """A text cut around the special tokens in it."""
    names = sorted((name for name in special_ids if name), key=len, reverse=True)
    if not names:
        return [text] if text else []
    return [piece for piece in re.split(f"({'|'.join(map(re.escape, names))})", text) if piece]


def _text(text: str) -> str:
    return json.dumps(text)


def _lark(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": text}]})
