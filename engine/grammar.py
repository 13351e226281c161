"""Grammars that an output must match: the one door to llguidance.

A grammar is a text, llguidance's JSON around a schema or a Lark grammar. The daemon writes it and
validates it; workers compile it against the model's tokens and ask, before each draw, which tokens
may come next.
Owns: how grammars are written, and the limits that keep hostile ones harmless.
Called by: the api (the *_grammar functions, validate), engine.workers (GrammarTokenizer, Matcher).
Invariant: a matcher's state is a function of the output ids alone. What a grammar may use is
bounded at every step; one that wants more ends its own sequence, and nothing else.
Never: imports torch, knows a request, samples.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import llguidance
from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

from engine.tokenizer import Tokenizer

MAX_GRAMMAR_CHARS = 65_536
"""Compiling takes time and stack in proportion: so much is a tenth of a second and 50 MB."""
_MAX_LARK_RULES = 256
"""An error at the end of a chain of rules is told once per rule: time grows with the cube."""
_COMPILER_STACK_BYTES = 256 << 20
_LIMITS = llguidance.LLParserLimits(
    initial_lexer_fuel=500_000,
    step_lexer_fuel=100_000,
    step_max_items=10_000,
    max_lexer_states=50_000,
    verbose_errors=False,  # else the client reads its whole grammar again
)
_MAX_ERROR_CHARS = 300
_ANY_OBJECT = {"type": "object"}

R = TypeVar("R")


class GrammarError(ValueError):
    """A grammar cannot be compiled, or has used up its limits; the message is for the client."""


def json_grammar(
    schema: Mapping[str, Any] | bool | None = None, *, is_lenient: bool = False
) -> str:
    """JSON that matches a schema; without one, any JSON object.

    Properties come in the schema's order. Keywords that cannot be enforced make `validate` fail,
    or are ignored if `is_lenient`.
    """
    return json.dumps({"grammars": [{"json_schema": _schema(schema, is_lenient)}]})


def regex_grammar(pattern: str) -> str:
    """Text that a regular expression matches from end to end; no look-around, no back-reference."""
    return llguidance.LLMatcher.grammar_from_regex(pattern)


def choice_grammar(choices: Sequence[str]) -> str:
    """One of these texts."""
    # a terminal: as alternatives of a rule they would count one by one against the limits
    return _lark("start: CHOICE\nCHOICE: " + " | ".join(map(_text, choices)))


def lark_grammar(text: str) -> str:
    """What a client's own grammar says: Lark with a `start` rule, or GBNF with a `root` rule.

    Raises:
        GrammarError: it is too large, or looks like GBNF and is not.
    """
    _check_length(text)
    num_rules = len(re.findall(r"[\w\]})]\s*:", text))
    if num_rules > _MAX_LARK_RULES:
        raise GrammarError(
            f"the grammar has {num_rules} rules, at most {_MAX_LARK_RULES} are compiled"
        )
    try:
        return _lark(any_to_lark(text))
    except (GbnfToLarkError, RecursionError, ValueError, LookupError) as error:
        raise GrammarError(_shorten(str(error))) from error


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
        ValueError: free text needs a marker to tell a call by.
    """
    marker = syntax.opening + syntax.begin
    if not is_required and not marker:
        raise ValueError("without a text that marks calls they cannot be told from free text")

    def literal(text: str) -> str:
        return _literal(text, special_ids)

    rules = []
    for index, (name, schema) in enumerate(tools.items()):
        head = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{syntax.arguments_key}": '
        arguments = json.dumps(_schema(schema or _ANY_OBJECT, is_lenient))
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
        GrammarError: it does not, or is too large.
    """
    _check_length(grammar)
    error = _with_deep_stack(lambda: llguidance.LLMatcher.validate_grammar(grammar, limits=_LIMITS))
    if error:
        raise GrammarError(_shorten(error))


class GrammarTokenizer:
    """A model's tokens as grammars see them.

    Args:
        tokenizer: the checkpoint's.
        vocab_size: of the model's logits; ids that only one of the two has are never allowed.
        eos_token_ids: what ends an output, allowed where the grammar is complete.

    Raises:
        GrammarError: the model has no end-of-text id, so that no output could ever end.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        if not eos_token_ids:
            raise GrammarError("this model has no end-of-text id, which a grammar needs to end")
        tokens = [tokenizer.token_bytes(i) or b"" for i in range(vocab_size)]
        special_ids = {i for i in range(vocab_size) if tokenizer.is_silent(i)} | {*eos_token_ids}
        names = _Tokens(tokenizer, tokens, special_ids, eos_token_ids[0])
        self.compiler = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(names), eos_token=[*eos_token_ids]
        )
        """Holds the tokens as a tree."""


class _Tokens:
    """What llguidance asks of a tokenizer, by its names."""

    bos_token_id = None

    def __init__(
        self, tokenizer: Tokenizer, tokens: list[bytes], special_ids: set[int], eos_token_id: int
    ) -> None:
        self.tokens = tokens
        self.special_token_ids = sorted(special_ids)
        self.eos_token_id = eos_token_id
        self._tokenizer = tokenizer
        self._ids = {token: i for i, token in enumerate(tokens) if i not in special_ids and token}
        self._max_token_bytes = max(map(len, tokens), default=1)

    def __call__(self, data: bytes) -> list[int]:
        """Ids of a text that a grammar leaves no choice in: the model's own, if they spell it.

        Those that put a space in front do not; then the longest tokens that fit are taken.
        """
        ids = self._tokenizer.encode(data.decode(errors="replace"), add_special_tokens=False)
        spelled = b"".join(self.tokens[i] for i in ids if i < len(self.tokens))
        return ids if spelled == data else list(self._longest(data))

    def _longest(self, data: bytes) -> Iterator[int]:
        start = 0
        while start < len(data):
            for end in range(min(start + self._max_token_bytes, len(data)), start, -1):
                if data[start:end] in self._ids:
                    yield self._ids[data[start:end]]
                    break
            else:
                return  # not a byte of it is in the vocabulary: nothing is forced
            start = end


class Matcher:
    """One output's way through a grammar.

    Raises:
        GrammarError: the grammar does not compile.
    """

    def __init__(self, tokenizer: GrammarTokenizer, grammar: str) -> None:
        _check_length(grammar)
        self._matcher = _with_deep_stack(
            lambda: llguidance.LLMatcher(tokenizer.compiler, grammar, log_level=0, limits=_LIMITS)
        )
        self._num_consumed = 0
        self._check()

    def copy(self) -> Matcher:
        """Another output's matcher, at the same place; cheap beside compiling."""
        other = Matcher.__new__(Matcher)
        other._matcher = self._matcher.deep_copy()
        other._num_consumed = self._num_consumed
        return other

    def allowed(self, output_ids: Sequence[int]) -> bytes:
        """One byte per token id, 0 where it may not follow these outputs.

        Args:
            output_ids: those of the last call and what has been sampled since.

        Raises:
            GrammarError: they do not match the grammar, or the step would take too long.
        """
        new_ids = output_ids[self._num_consumed :]
        self._num_consumed = len(output_ids)
        if new_ids:
            self._matcher.consume_tokens(list(new_ids))
        mask = self._matcher.compute_logit_bias()
        self._check()
        return mask

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(_shorten(self._matcher.get_error()))


def _schema(schema: Mapping[str, Any] | bool | None, is_lenient: bool) -> Mapping[str, Any] | bool:
    if schema is None:
        return _ANY_OBJECT
    if not is_lenient or isinstance(schema, bool):
        return schema
    return {**schema, "x-guidance": {"lenient": True}}


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


def _check_length(grammar: str) -> None:
    if len(grammar) > MAX_GRAMMAR_CHARS:
        raise GrammarError(
            f"the grammar has {len(grammar)} characters, at most {MAX_GRAMMAR_CHARS} are compiled"
        )


def _shorten(error: str) -> str:
    """The first line that says something; what follows is the compiler's state."""
    message = re.split(r"\n<(?:state|non-verbose)", error, maxsplit=1)[0].strip()
    return message if len(message) <= _MAX_ERROR_CHARS else f"{message[:_MAX_ERROR_CHARS]}…"


def _with_deep_stack(function: Callable[[], R]) -> R:
    """Run in a thread of its own: the compiler recurses as deep as a grammar refers.

    A process has one size for new threads; a thread started elsewhere in between gets a stack
    that it does not use, which costs address space only.
    """
    results: list[R] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    size = threading.stack_size(_COMPILER_STACK_BYTES)
    try:
        thread.start()
    finally:
        threading.stack_size(size)
    thread.join()
    return results[0]
