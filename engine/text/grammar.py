"""Check and compile output grammars, and follow them token by token.

A grammar is a text for llguidance: its JSON around a schema, or around a grammar in Lark.

Owns: the form of grammars, also of tool calls, and the limits that keep hostile ones harmless; the
state of each match: which tokens may come next.
Invariant: size, time, memory and stack of a compilation are bounded for any input; a match's state
follows from the output ids alone, so that a sequence can move to another worker.
Never: imports torch, samples.
"""

from __future__ import annotations

import functools
import json
import re
import threading
from _thread import start_new_thread
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import llguidance
from llguidance.gbnf_to_lark import any_to_lark

from engine.errors import Unavailable
from engine.text.endless_schemas import endless_reference
from engine.text.tokenizer import Tokenizer

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
_STACK_SIZE_LOCK = threading.Lock()  # a process has one size for all new threads
_MAX_ERROR_CHARS = 300
_ANY_OBJECT = {"type": "object"}
_WHITESPACE = r"[ \n\r\t]{1,64}"
"""Whitespace for an indent of four over a dozen levels."""
_NO_WAY_ON = "NoExtensionBias"
"""llguidance's name of a state without a next token or an end."""
_TOO_MANY = "too many expressions constructed"
"""The error when `initial_lexer_fuel` or `step_lexer_fuel` is used up."""

R = TypeVar("R")


class GrammarError(ValueError):
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

    A thread started elsewhere at this moment gets a deep stack, too, which costs only address
    space. `Thread.start` would wait without end for a thread that has no memory to begin, and a
    pool holds a lock meanwhile that all pools of the process need.

    Raises:
        Unavailable: the machine has no thread left, or no memory for one.
    """
    outcome: Future[R] = Future()

    def run() -> None:
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
        about = "no memory for a thread that compiles"
        raise Unavailable(about, code="busy", retry_after_ms=_RETRY_MS) from error


def enforced(schema: Mapping[str, Any] | bool | None, is_lenient: bool) -> Mapping[str, Any] | bool:
    """Adapt a schema for the compiler.

    Whitespace between two JSON tokens is limited, unless the schema sets its own: a small model
    might write nothing but line breaks. Lenient mode ignores unsupported keywords.
    """
    if schema is False:
        return False
    known: Mapping[str, Any] = _ANY_OBJECT if schema is None else {} if schema is True else schema
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


class GrammarTokenizer:
    """Show a model's tokens to grammars.

    Args:
        vocab_size: of the model's logits; ids missing in one of the two are never allowed.
        eos_token_ids: end an output, allowed where the grammar is complete.

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
    """The tokenizer in llguidance's interface."""

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
        """Encode a forced text with the model's own ids, if they spell it.

        Tokenizers that prepend a space do not; then the longest fitting tokens are taken.
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
    """Follow one output through a grammar.

    Raises:
        GrammarError: the grammar does not compile.
    """

    def __init__(self, tokenizer: GrammarTokenizer, grammar: str) -> None:
        check_length(grammar)
        self._matcher = with_deep_stack(
            lambda: llguidance.LLMatcher(tokenizer.compiler, grammar, log_level=0, limits=LIMITS)
        )
        self._num_consumed = 0
        self._draft: list[int] = []
        """Guessed tokens that it has consumed, too."""
        self._check()

    def copy(self) -> Matcher:
        """Make another output's matcher in the present state; cheap beside compiling."""
        other = Matcher.__new__(Matcher)
        other._matcher = self._matcher.deep_copy()
        other._num_consumed, other._draft = self._num_consumed, list(self._draft)
        return other

    def allowed(self, output_ids: Sequence[int]) -> bytes:
        """Compute the tokens that may follow these outputs, as allowed_along() does."""
        return self.allowed_along(output_ids, ())[0]

    def allowed_along(self, output_ids: Sequence[int], draft: Sequence[int]) -> list[bytes]:
        """Compute the tokens that may follow these outputs, and each token of a draft of more.

        Args:
            output_ids: the last call's, and the ids sampled since.
            draft: a guess of the ids after these; the next call's outputs need not have them.

        Returns:
            one byte per token id, 0 where it is forbidden: after the outputs, then after each token
            of the draft, as far as the grammar allows that.

        Raises:
            GrammarError: they do not match the grammar, or the step would take too long.
        """
        self._go_to(output_ids)
        masks = [self._matcher.compute_logit_bias()]
        self._check()
        for token_id in draft:
            if not masks[-1][token_id]:
                break
            self._matcher.consume_token(token_id)
            self._draft.append(token_id)
            masks.append(self._matcher.compute_logit_bias())
            if self._matcher.is_error():  # not an error of the output, which may be another
                self._matcher.reset()
                self._num_consumed, self._draft = 0, []
                return masks[:-1]
        return masks

    def _go_to(self, output_ids: Sequence[int]) -> None:
        """Follow the outputs, back from the draft where they are others."""
        new_ids, draft = list(output_ids[self._num_consumed :]), self._draft
        num_right = len(draft)
        while draft[:num_right] != new_ids[:num_right]:
            num_right -= 1
        if num_right < len(draft):
            self._matcher.rollback(len(draft) - num_right)
        self._num_consumed, self._draft = len(output_ids), []
        if new_ids[num_right:]:
            self._matcher.consume_tokens(new_ids[num_right:])

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(shorten(self._matcher.get_error()))


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """A model's syntax of tool calls: `opening (begin head arguments tail end)+ closing`."""

    opening: str = ""
    """The text before the first call, such as `[TOOL_CALLS][`."""
    begin: str = ""
    """The text before each call, such as `<tool_call>` and a line break."""
    head: str = '{{"name": "{name}", "arguments": '
    """The text from a function's name to its arguments; names need no escaping in JSON."""
    tail: str = "}"
    end: str = ""
    separator: str = ""
    closing: str = ""
    style: str = "json"
    """The form of arguments: one `json` object; `elements`; `python` or `gemma`, a list with
    commas."""
    key: str = ""
    """The text before a value in `elements`, with its `name`."""
    value_end: str = ""
    key_separator: str = ", "
    quote: str = ""
    """The quote of texts in the style `gemma`."""


def calls_grammar(
    tools: Mapping[str, Mapping[str, Any] | None],
    syntax: CallSyntax,
    *,
    special_ids: Mapping[str, int],
    is_required: bool,
    is_parallel: bool = True,
    is_lenient: bool = True,
    answer: str | None = None,
) -> str:
    """Make the grammar of calls of these tools, with arguments that match their schemas.

    Args:
        tools: names to the JSON schemas of their arguments; None is any object.
        syntax: how this model writes calls.
        special_ids: ids of special tokens that may occur in the syntax, by their text.
        is_required: the output is calls and nothing else. Otherwise it is free text, in which the
            syntax's opening and begin must be followed by a call; they may not be empty.
        is_parallel: any number of calls; otherwise one, and with it the output ends.
        is_lenient: ignore unsupported keywords of the schemas.
        answer: a grammar for an output without a call, instead of free text.

    Raises:
        GrammarError: the schemas are too large, or a part of one refers only to itself.
        ValueError: free text needs a marker to recognise a call.
    """
    check_size(tools)
    for tool_schema in tools.values():
        check_references(tool_schema)
    marker = syntax.opening + syntax.begin
    if not is_required and answer is None and not marker:
        raise ValueError("without a text that marks calls they cannot be told from free text")
    writer = _Writer(syntax, special_ids, is_lenient=is_lenient)
    rules = writer.calls(tools)
    more = f"({writer.literal(syntax.separator + syntax.begin)} tool)*" if is_parallel else ""
    calls = f"tool {more} {writer.literal(syntax.closing)}"
    if is_required:
        rules.append(f"start: {writer.literal(marker)} {calls}")
    elif answer is not None:
        rules.append(f"start: {writer.literal(marker)} {calls} | @answer")
    else:
        rules += writer.free_text(marker, calls, is_parallel=is_parallel)
    lark = lark_of("\n".join(rules))
    if answer is None or is_required:
        return lark
    (own,), (other,) = (json.loads(one)["grammars"] for one in (lark, answer))
    return json.dumps({"grammars": [own, {**other, "name": "answer"}]})


class _Writer:
    """Write Lark for the calls of one request."""

    def __init__(
        self, syntax: CallSyntax, special_ids: Mapping[str, int], *, is_lenient: bool
    ) -> None:
        self._syntax = syntax
        self._special_ids = special_ids
        self._is_lenient = is_lenient

    def calls(self, tools: Mapping[str, Mapping[str, Any] | None]) -> list[str]:
        """Write a rule for each function, and `tool`, which is any of them."""
        syntax, rules = self._syntax, []
        for index, (name, schema) in enumerate(tools.items()):
            shown = json.dumps(name, ensure_ascii=False)[1:-1]
            head = self.literal(syntax.head.format(name=shown))
            arguments, more = self._arguments(f"tool_{index}", schema or {})
            tail = self.literal(syntax.tail + syntax.end)
            rules.append(f"tool_{index}: {head} {arguments} {tail}")
            rules += more
        if syntax.style != "json":
            rules += self._text_rules()
        rules.append("tool: " + " | ".join(f"tool_{index}" for index in range(len(tools))))
        return rules

    def _text_rules(self) -> list[str]:
        """Write rules for plain texts, up to their end marks."""
        if self._syntax.style == "python":
            return []
        end = self._syntax.value_end or self._syntax.quote
        if end in self._special_ids:
            return [r"TEXT_VALUE: /(.|\n)*/", f"text_value: TEXT_VALUE {self.literal(end)}"]
        return [f"text_value[lazy]: /(.|\\n)*/ {lark_text(end)}"]

    def _arguments(self, rule: str, schema: Mapping[str, Any]) -> tuple[str, list[str]]:
        """Write the arguments of one function, and the rules that they need."""
        if self._syntax.style == "json":
            return f"%json {self._json({**_ANY_OBJECT, **schema})}", []
        properties = schema.get("properties")
        if not isinstance(properties, dict):
            properties = {}
        required = schema.get("required")
        names = set(required) if isinstance(required, list) else set()
        items = [
            (self._member(name, own, schema), name in names) for name, own in properties.items()
        ]
        return f"{rule}_0", _members(rule, items, self.literal(self._syntax.key_separator))

    def _member(self, name: str, own: Any, schema: Mapping[str, Any]) -> str:
        """Write one argument: its name and its value."""
        syntax = self._syntax
        is_text = isinstance(own, dict) and own.get("type") == "string" and "enum" not in own
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        value = {**own, **shared} if isinstance(own, dict) else {}
        as_json = f"%json {self._json(value)}"
        if syntax.style == "elements":
            key = self.literal(syntax.key.format(name=name))
            if is_text:
                return f"{key} text_value"
            if isinstance(own, dict) and _is_words(own.get("enum")):
                as_json = "(" + " | ".join(map(lark_text, own["enum"])) + ")"
            return f"{key} {as_json} {self.literal(syntax.value_end)}"
        if syntax.style == "python":
            return f"{lark_text(name + '=')} {as_json}"
        if is_text or (isinstance(own, dict) and _is_words(own.get("enum"))):
            quote = self.literal(syntax.quote)
            words = " | ".join(map(lark_text, own["enum"])) if not is_text else ""
            text = f"({words}) {quote}" if words else "text_value"
            return f"{lark_text(name + ':')} {quote} {text}"
        return f"{lark_text(name + ':')} {as_json}"

    def _json(self, schema: Mapping[str, Any]) -> str:
        return json.dumps(enforced(schema, self._is_lenient))

    def free_text(self, marker: str, calls: str, *, is_parallel: bool) -> list[str]:
        """Write rules for free text in which a marker always begins a call."""
        first, *others = self._pieces(marker)
        rest = "".join(others)
        rules = [r"TEXT: /(.|\n)*/"]
        if first in self._special_ids:
            trigger = f"TEXT {self.literal(first)}"
        else:
            # what may follow the marker is forced; so let a line break after it be forced, too
            stripped = first.rstrip() or first
            rest = first[len(stripped) :] + rest
            rules.append(f"trigger[lazy]: TEXT {lark_text(stripped)}")
            trigger = "trigger"
        rules.append(f"call: {trigger} {self.literal(rest)} {calls}")
        return [*rules, "start: call* TEXT" if is_parallel else "start: call | TEXT"]

    def literal(self, text: str) -> str:
        """Write a text in Lark: special tokens by their ids, the rest as strings."""
        return " ".join(
            f"<[{self._special_ids[piece]}]>" if piece in self._special_ids else lark_text(piece)
            for piece in self._pieces(text)
        )

    def _pieces(self, text: str) -> list[str]:
        """Split a text around the special tokens in it."""
        names = sorted((name for name in self._special_ids if name), key=len, reverse=True)
        if not names:
            return [text] if text else []
        return [piece for piece in re.split(f"({'|'.join(map(re.escape, names))})", text) if piece]


def _members(rule: str, items: list[tuple[str, bool]], separator: str) -> list[str]:
    """Write rules for a list with optional members: `rule_N` begins at its Nth member.

    `rule_N_more` begins there after another member, with a separator.
    """
    rules = []
    for index, (item, is_required) in enumerate(items):
        skipped = "" if is_required else f" | {rule}_{index + 1}"
        skipped_more = "" if is_required else f" | {rule}_{index + 1}_more"
        rules.append(f"{rule}_{index}: {item} {rule}_{index + 1}_more{skipped}")
        rules.append(
            f"{rule}_{index}_more: {separator} {item} {rule}_{index + 1}_more{skipped_more}"
        )
    return [*rules, f'{rule}_{len(items)}: ""', f'{rule}_{len(items)}_more: ""']


def _is_words(values: object) -> bool:
    return (
        isinstance(values, list)
        and bool(values)
        and all(isinstance(one, str) and one for one in values)
    )
