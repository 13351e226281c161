"""Derive the form that an answer must have: calls of functions, or text of a schema.

Owns: `tools`, `tool_choice`, `parallel_tool_calls`, and the grammar that calls must match; the
translation of these fields into a grammar.
Invariant: a call that is required is written in the model's own format, with arguments that
match their schema.
Never: calls a function.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from appliance.api import openai_bodies as chats
from appliance.formats.tool_format import OutputFormat
from appliance.json_fields import check, invalid_type, invalid_value
from engine.errors import RequestError
from engine.text.grammar import (
    GrammarError,
    calls_grammar,
    choice_grammar,
    json_grammar,
    lark_grammar,
    regex_grammar,
    validate,
)
from engine.text.tokenizer import Tokenizer
from engine.wire.not_json import NOT_JSON


@dataclass(frozen=True, slots=True)
class Tools:
    """Functions that the model may call; there is at least one."""

    definitions: list[dict[str, Any]]
    """The client's definitions for the template, unchanged but for cache marks."""
    schemas: dict[str, dict[str, Any] | None]
    """Schemas of the arguments, by the name of each function that may be called."""
    is_required: bool
    is_parallel: bool
    is_strict: bool
    is_legacy: bool = False
    """They came as `functions`, and a call is told as `function_call`."""
    marked: tuple[int, ...] = ()
    """Numbers of leading definitions that end at a cache mark of the client."""

    def grammar(
        self, output_format: OutputFormat, tokenizer: Tokenizer, answer: str | None = None
    ) -> str | None:
        """Make the grammar of the output; None if free text and calls begin alike.

        Args:
            output_format: the model's.
            tokenizer: the model's.
            answer: a grammar that the output must match where it is no call.

        Raises:
            RequestError: the schemas are too large.
        """
        tool_format = output_format.tools
        special_ids = tokenizer.special_ids(output_format.tokens)
        is_free = not self.is_required and answer is None
        if is_free and (tool_format.is_bare or tool_format.is_harmony):
            return None
        # A grammar of free text has no place for special tokens that begin something else.
        if (
            is_free
            and output_format.thoughts
            and special_ids.keys()
            & {
                *output_format.thoughts.begins,
                *output_format.thoughts.ends,
            }
        ):
            return None
        try:
            return calls_grammar(
                self.schemas,
                tool_format.syntax,
                special_ids=special_ids,
                is_required=self.is_required,
                is_parallel=self.is_parallel,
                is_lenient=not self.is_strict,
                answer=answer,
            )
        except GrammarError as error:
            raise invalid_value("tools", f"cannot be compiled: {error}") from error


def read_tools(body: chats.ChatRequest) -> Tools | None:
    """Read the tools that a chat may use; None if there are none, or `tool_choice` is `none`."""
    is_legacy = bool(body.functions) and not body.tools
    where = "functions" if is_legacy else "tools"
    marked: list[int] = []
    choice: chats.ToolMode | chats.ChosenTool | chats.ChosenTools | None
    if is_legacy:  # as OpenAI's API was before tools
        functions, name = list(body.functions or ()), "function_call"
        definitions = [{"type": "function", "function": _plain(one)} for one in functions]
        asked = body.function_call
        choice = chats.ChosenTool(asked) if isinstance(asked, chats.ChosenFunction) else asked
    else:
        choice, name = body.tool_choice, "tool_choice"
        tools = [check(one, chats.Tool, f"tools[{i}]") for i, one in enumerate(body.tools or [])]
        marked = [i for i, tool in enumerate(tools, 1) if tool.cache_control is not None]
        functions = [tool.function for tool in tools]
        definitions = [
            {key: value for key, value in one.items() if key != "cache_control"}
            for one in body.tools or []
        ]
    schemas = {function.name: function.parameters or None for function in functions}
    if len(schemas) < len(functions):
        raise invalid_value(where, "has two functions of the same name")
    mode, callable_names = _choice(choice, schemas, name)
    # Small models repeat a call that they must make until they run out of tokens.
    is_parallel = body.parallel_tool_calls
    is_parallel = mode != "required" if is_parallel is None else is_parallel
    if mode == "required" and not schemas:
        raise invalid_value(name, f"needs `{where}`")
    if mode == "none" or not schemas:
        return None
    return Tools(
        definitions=definitions,
        schemas={one: schemas[one] for one in callable_names},
        is_required=mode in ("required", "named"),
        is_parallel=is_parallel and mode != "named" and not is_legacy,
        is_strict=any(function.strict for function in functions),
        is_legacy=is_legacy,
        marked=tuple(marked),
    )


def _plain(function: chats.Function) -> dict[str, Any]:
    """Write a function for a template, without what its client left out."""
    told: dict[str, Any] = msgspec.to_builtins(function)
    return {name: value for name, value in told.items() if value is not None}


def _choice(
    choice: chats.ToolMode | chats.ChosenTool | chats.ChosenTools | None,
    schemas: dict[str, Any],
    param: str,
) -> tuple[str, list[str]]:
    """Read how a model must choose (none, auto, required, named), and among which functions."""
    if isinstance(choice, chats.ChosenTool):
        return "named", [_named(choice, schemas, param)]
    if isinstance(choice, chats.ChosenTools):
        allowed = choice.allowed_tools
        return allowed.mode, [_named(tool, schemas, param) for tool in allowed.tools]
    return choice or "auto", list(schemas)


def _named(tool: chats.ChosenTool, schemas: dict[str, Any], param: str) -> str:
    name = tool.function.name
    if name not in schemas:
        raise invalid_value(param, "names a function that is not in `tools`")
    return name


# Tools for a chat template that knows none: told in words, as a model would be told by its own.
#
# Owns: the words.
# Invariant: what the model reads of earlier calls and results is written as its own calls are read.
# Never: changes a conversation without tools.
# The rule, also in docs/api.md: a first message of the role system describes the functions and how
# a call is written; if the client has one of its own, the words are put behind it. A call that the
# assistant made stands behind its text; a result is a message of the role user.


Message = dict[str, Any]

_WORDS = """\
You can call functions. These are there, each with the JSON schema of its arguments:
<tools>
{definitions}
</tools>
To call one, write its name and its arguments as JSON between these marks, and nothing behind them:
<tool_call>
{{"name": "NAME", "arguments": {{"ARGUMENT": "VALUE"}}}}
</tool_call>
The result comes in the next message between <tool_response> and </tool_response>. Call a function \
only if you need it; otherwise answer in words."""


def in_words(messages: list[Message], tools: list[dict[str, Any]] | None) -> list[Message]:
    """Write the conversation with its tools, calls and results as text."""
    spelled = [_spelled(message) for message in messages]
    merged: list[Message] = []
    for message, was in zip(spelled, messages, strict=True):
        is_next = was["role"] == "tool" and merged and merged[-1].get("_is_result")
        if is_next:
            merged[-1]["content"] += "\n" + message["content"]
        else:
            merged.append({**message, "_is_result": was["role"] == "tool"})
    plain = [{k: v for k, v in one.items() if k != "_is_result"} for one in merged]
    if not tools:
        return plain
    words = _WORDS.format(definitions="\n".join(map(_written, tools)))
    if plain[0]["role"] == "system":
        first = {**plain[0], "content": f"{plain[0]['content']}\n\n{words}"}
        return [first, *plain[1:]]
    return [{"role": "system", "content": words}, *plain]


def needs_words(messages: Iterable[Message]) -> bool:
    """Tell whether a conversation has calls or results in it."""
    return any(one["role"] == "tool" or one.get("tool_calls") for one in messages)


def _spelled(message: Message) -> Message:
    if message["role"] == "tool":
        text = f"<tool_response>\n{message['content']}\n</tool_response>"
        return {"role": "user", "content": text}
    calls = message.get("tool_calls")
    if not calls:
        return message
    written = [f"<tool_call>\n{_call(one)}\n</tool_call>" for one in calls]
    content = "\n".join([message["content"], *written] if message["content"] else written)
    return {k: v for k, v in message.items() if k != "tool_calls"} | {"content": content}


def _call(call: dict[str, Any]) -> str:
    function = call["function"]
    return _written({"name": function["name"], "arguments": function["arguments"]})


def _written(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


# Which form an answer must have: `response_format`, and vLLM's `structured_outputs`.
# Invariant: at most one form is asked for.
# Never: compiles a grammar: that takes time, and is done in a thread.


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
