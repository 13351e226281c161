"""Read `tools` and `tool_choice`, and make the grammar that calls of functions must match.

Invariant: a call that is required is written in the model's own format, with arguments that
match their schema.
Never: calls a function.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from appliance.api import openai_bodies as chats
from appliance.formats.format_choice import OutputFormat
from appliance.json_fields import check, invalid_value
from engine.text.calls_grammar import calls_grammar
from engine.text.grammar import GrammarError
from engine.text.tokenizer import Tokenizer


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
