"""Write the grammar of tool calls in a model's own notation.

Invariant: arguments match their function's schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Mapping
from typing import Any
from urllib.parse import unquote

from engine.text.call_syntax import CallSyntax
from engine.text.grammar import (
    ANY_OBJECT,
    MAX_GRAMMAR_CHARS,
    GrammarError,
    bare,
    check_references,
    check_size,
    enforced,
    lark_of,
    lark_text,
)

_DEFINITIONS = ("$defs", "definitions")
"""Where a schema keeps parts that others refer to."""


def calls_grammar(
    tools: Mapping[str, Mapping[str, Any] | None],
    syntax: CallSyntax,
    *,
    special_ids: Mapping[str, int],
    is_required: bool,
    is_parallel: bool = True,
    strict: Container[str] = (),
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
        strict: names of tools whose schemas may have no keyword that is not enforced.
        answer: a grammar for an output without a call, instead of free text.

    Raises:
        GrammarError: the schemas are too large, or a part of one refers only to itself.
        ValueError: free text needs a marker to recognise a call.
    """
    tools = {name: bare(schema) for name, schema in tools.items()}
    check_size(tools)
    for tool_schema in tools.values():
        check_references(tool_schema)
    marker = syntax.opening + syntax.begin
    if not is_required and answer is None and not marker:
        raise ValueError("without a text that marks calls they cannot be told from free text")
    writer = _Writer(syntax, special_ids, strict)
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
        self, syntax: CallSyntax, special_ids: Mapping[str, int], strict: Container[str]
    ) -> None:
        self._syntax = syntax
        self._special_ids = special_ids
        self._strict = strict
        self._is_lenient = True
        """Whether the tool that is written may have keywords that are not enforced."""
        self._num_chars = 0
        """Length of all schemas written so far."""

    def calls(self, tools: Mapping[str, Mapping[str, Any] | None]) -> list[str]:
        """Write a rule for each function, and `tool`, which is any of them."""
        syntax, rules = self._syntax, []
        free = [name for name, schema in tools.items() if not schema and syntax.style == "json"]
        if len(free) > 1:
            tools = {name: schema for name, schema in tools.items() if name not in set(free)}
            rules.append(self._free_calls(free))
        for index, (name, schema) in enumerate(tools.items()):
            self._is_lenient = name not in self._strict
            head = self.literal(syntax.head.format(name=_shown(name)))
            arguments, more = self._arguments(f"tool_{index}", schema or {})
            tail = self.literal(syntax.tail + syntax.end)
            rules.append(f"tool_{index}: {head} {arguments} {tail}")
            rules += more
        if syntax.style != "json":
            rules += self._text_rules()
        kinds = [f"tool_{index}" for index in range(len(tools))]
        rules.append("tool: " + " | ".join([*kinds, "free_tool"] if len(free) > 1 else kinds))
        return rules

    def _free_calls(self, names: list[str]) -> str:
        """Write one rule for functions with any arguments, of which there may be hundreds."""
        before, after = self._syntax.head.format(name="\0").split("\0")
        either = " | ".join(lark_text(_shown(name)) for name in names)
        value = f"%json {self._json(ANY_OBJECT)}"
        tail = self.literal(self._syntax.tail + self._syntax.end)
        return f"free_tool: {self.literal(before)} ({either}) {self.literal(after)} {value} {tail}"

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
            return f"%json {self._json({**ANY_OBJECT, **schema})}", []
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
        value = {**own, **_definitions(own, schema)} if isinstance(own, dict) else {}
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
        text = json.dumps(enforced(schema, self._is_lenient))
        self._num_chars += len(text)
        if self._num_chars > MAX_GRAMMAR_CHARS:  # each argument has its definitions with it
            raise GrammarError(
                f"the arguments' schemas have more than {MAX_GRAMMAR_CHARS} characters in all"
            )
        return text

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


def _shown(name: str) -> str:
    return json.dumps(name, ensure_ascii=False)[1:-1]


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


def _definitions(own: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """Copy those definitions of a schema which one argument refers to, directly or not."""
    found: dict[str, Any] = {}
    unseen: list[Any] = [own]
    while unseen:
        one = unseen.pop()
        if isinstance(one, list):
            unseen += one
        elif isinstance(one, dict):
            unseen += one.values()
            _root, *path = str(one.get("$ref", "")).split("/")
            place = path[0] if path else ""
            if place not in _DEFINITIONS or not isinstance(schema.get(place), dict):
                continue
            name = unquote(path[1]).replace("~1", "/").replace("~0", "~") if path[1:] else ""
            known = found.setdefault(place, {})
            if name in schema[place] and name not in known:
                known[name] = schema[place][name]
                unseen.append(known[name])
    return found


def _is_words(values: object) -> bool:
    return (
        isinstance(values, list)
        and bool(values)
        and all(isinstance(one, str) and one for one in values)
    )
