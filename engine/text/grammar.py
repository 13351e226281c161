"""Write and check output grammars, so that hostile ones do no harm.

A grammar is a text for llguidance: its JSON around a schema, or around a grammar in Lark.

Invariant: size, time, memory and stack of a compilation are bounded for any input.
"""

from __future__ import annotations

import functools
import json
import re
import threading
from _thread import start_new_thread
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import llguidance
from llguidance.gbnf_to_lark import any_to_lark

from engine.errors import Unavailable, Unreadable
from engine.text.endless_schemas import endless_reference

MAX_GRAMMAR_CHARS = 65_536
"""Maximum size; compiling takes time and stack in proportion, here 0.1 s and 50 MB."""
_MAX_LARK_RULES = 256
"""Maximum rules: an error at the end of a chain is reported per rule, in cubic time."""
_COMPILER_STACK_BYTES = 256 << 20
LIMITS = llguidance.LLParserLimits(
    initial_lexer_fuel=500_000,
    step_lexer_fuel=100_000,
    step_max_items=10_000,
    max_lexer_states=50_000,
    verbose_errors=False,  # else the client reads its whole grammar again
)
_RETRY_MS = 1000
_LONGEST_S = 30.0
"""Hundreds of times what compiling takes: a thread that has not answered has never begun."""
_DEEP = threading.local()
"""Whether a thread has a deep stack already."""
_STACK_SIZE_LOCK = threading.Lock()  # a process has one size for all new threads
_MAX_ERROR_CHARS = 300
ANY_OBJECT = {"type": "object"}
_WHITESPACE = r"[ \n\r\t]{1,64}"
"""Whitespace for an indent of four over a dozen levels."""
_NO_WAY_ON = "NoExtensionBias"
"""llguidance's name of a state without a next token or an end."""
_TOO_MANY = "too many expressions constructed"
"""The error when `initial_lexer_fuel` or `step_lexer_fuel` is used up."""

R = TypeVar("R")


class GrammarError(Unreadable):
    """A grammar cannot be compiled, or has used up its limits; the message is for the client."""


def json_grammar(
    schema: Mapping[str, Any] | bool | None = None, *, is_lenient: bool = False
) -> str:
    """Make the grammar of JSON that matches a schema; without one, of any JSON object.

    Properties come in the schema's order. Unsupported keywords make `validate` fail, or are ignored
    if `is_lenient`.

    Raises:
        GrammarError: it is too large, or a part of it refers only to itself.
    """
    schema = bare(schema)
    check_size(schema)
    check_references(schema)
    return json.dumps({"grammars": [{"json_schema": enforced(schema, is_lenient)}]})


def regex_grammar(pattern: str) -> str:
    """Make the grammar of a regular expression over the whole text, without look-around.

    Raises:
        GrammarError: it is too large, or has half of a surrogate pair in it.
    """
    check_length(pattern)
    try:
        return llguidance.LLMatcher.grammar_from_regex(pattern)
    except UnicodeEncodeError as error:
        raise GrammarError(f"the pattern is not a string: {error.reason}") from error


def choice_grammar(choices: Sequence[str]) -> str:
    """Make the grammar of exactly these texts.

    Raises:
        GrammarError: they are too large.
    """
    check_size(choices)
    # a terminal: as alternatives of a rule they would count one by one against the limits
    return lark_of("start: CHOICE\nCHOICE: " + " | ".join(map(lark_text, choices)))


def lark_grammar(text: str) -> str:
    """Make the grammar of a client's text: Lark with a `start` rule, or GBNF with a `root` rule.

    Raises:
        GrammarError: it is too large, or looks like invalid GBNF.
    """
    check_length(text)
    num_rules = len(re.findall(r"[\w\]})]\s*:", text))
    if num_rules > _MAX_LARK_RULES:
        raise GrammarError(
            f"the grammar has {num_rules} rules, at most {_MAX_LARK_RULES} are compiled"
        )
    try:
        return lark_of(any_to_lark(text))
    except IndexError as error:  # it looks at what follows a backslash
        raise GrammarError("it ends within an escape sequence") from error
    except Exception as error:
        raise GrammarError(shorten(str(error))) from error


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
    """Return the compiler's error, or that no text can match."""
    error: str = llguidance.LLMatcher.validate_grammar(grammar, limits=LIMITS)
    if error:
        return error
    # Bytes stand in for the model's tokens: a grammar without a first byte has no first token.
    matcher = llguidance.LLMatcher(_bytes_as_tokens(), grammar, log_level=0, limits=LIMITS)
    matcher.compute_logit_bias()
    if matcher.is_error() and matcher.get_error().startswith(_NO_WAY_ON):
        return "no text matches it: it refers to itself without end"
    # Forced text is tokenized before each step: the maximum takes 0.03 s.
    num_forced = len(matcher.compute_ff_bytes())
    if num_forced > MAX_GRAMMAR_CHARS:
        return f"it fixes its first {num_forced} bytes, at most {MAX_GRAMMAR_CHARS}"
    return ""


def bare(schema: Any) -> Any:
    """Leave out of a schema what says nothing about values: descriptions, titles, examples."""
    if isinstance(schema, list):
        return [bare(one) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    kept: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _NAMED_SCHEMAS and isinstance(value, Mapping):
            kept[key] = {name: bare(one) for name, one in value.items()}
        elif key not in _NOTES:
            kept[key] = value if key in _VALUES else bare(value)
    return kept


_NOTES = ("description", "title", "examples", "$comment", "default", "deprecated")
_VALUES = ("const", "enum")
_NAMED_SCHEMAS = ("properties", "$defs", "definitions", "patternProperties", "dependentSchemas")


def check_length(grammar: str) -> None:
    """Refuse a text that would take long to read.

    Raises:
        GrammarError: it is too large.
    """
    if len(grammar) > MAX_GRAMMAR_CHARS:
        raise GrammarError(
            f"the grammar has {len(grammar)} characters, at most {MAX_GRAMMAR_CHARS} are compiled"
        )


def check_size(value: object) -> None:
    """Refuse data that would become too long, before time is spent on writing it."""
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


def check_references(schema: object) -> None:
    """Refuse references that the compiler accepts but that end an output when met."""
    if (reference := endless_reference(schema)) is not None:
        raise GrammarError(shorten(f"the reference {reference} leads only to itself"))


def shorten(error: str) -> str:
    """Return the first meaningful line; the rest is the compiler's state."""
    message = re.split(r"\n<(?:state|non-verbose)", error, maxsplit=1)[0].strip()
    if _TOO_MANY in message:
        message = f"with its repetitions written out it is too large ({message})"
    return message if len(message) <= _MAX_ERROR_CHARS else f"{message[:_MAX_ERROR_CHARS]}…"


def with_deep_stack(function: Callable[[], R]) -> R:
    """Run a call in a thread of its own: the compiler recurses as deep as a grammar refers.

    Calls within it run there, too: of threads that end one after another the kernel may still hold
    the stacks, more than the reader may have.

    A thread started elsewhere at this moment gets a deep stack, too, which costs only address
    space. `Thread.start` would wait without end for a thread that has no memory to begin, and a
    pool holds a lock meanwhile that all pools of the process need.

    Raises:
        Unavailable: the machine has no thread left, or no memory for one.
    """
    if getattr(_DEEP, "is_here", False):
        return function()
    outcome: Future[R] = Future()

    def run() -> None:
        _DEEP.is_here = True
        try:
            outcome.set_result(function())
        except BaseException as error:  # noqa: BLE001 - it is raised where it is waited for
            outcome.set_exception(error)

    with _STACK_SIZE_LOCK:
        threading.stack_size(_COMPILER_STACK_BYTES)
        try:
            start_new_thread(run, ())
        except (RuntimeError, MemoryError) as error:
            raise Unavailable(str(error), code="busy", retry_after_ms=_RETRY_MS) from error
        finally:
            threading.stack_size(0)
    try:
        return outcome.result(_LONGEST_S)
    except TimeoutError as error:
        about = "the compiler has not answered: no memory or no core is left for it"
        raise Unavailable(about, code="busy", retry_after_ms=_RETRY_MS) from error


def enforced(schema: Mapping[str, Any] | bool | None, is_lenient: bool) -> Mapping[str, Any] | bool:
    """Adapt a schema for the compiler.

    Whitespace between two JSON tokens is limited, unless the schema sets its own: a small model
    might write nothing but line breaks. Lenient mode ignores unsupported keywords.
    """
    if schema is False:
        return False
    known: Mapping[str, Any] = ANY_OBJECT if schema is None else {} if schema is True else schema
    own = known.get("x-guidance") or {}
    if not isinstance(own, Mapping):
        return known  # which the compiler refuses
    guidance = dict(own)
    if own.get("whitespace_pattern") is None:
        guidance["whitespace_pattern"] = _WHITESPACE
    if own.get("whitespace_flexible") is False:
        del guidance["whitespace_pattern"]
    return {**known, "x-guidance": guidance | ({"lenient": True} if is_lenient else {})}


class _Bytes:
    """A tokenizer with every byte as a token, and an end, in llguidance's interface."""

    eos_token_id = 256
    bos_token_id = None
    tokens = [bytes([byte]) for byte in range(256)] + [b"<end>"]
    special_token_ids = [256]  # noqa: RUF012

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


@functools.cache
def _bytes_as_tokens() -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes()))


def lark_text(text: str) -> str:
    return json.dumps(text)


def lark_of(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": text}]})
