"""Declare the fields of Anthropic's /v1/messages, with vLLM's additions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from appliance.api.core.fields import (
    MAX_MESSAGES,
    MAX_STOPS,
    MAX_TOOLS,
    FilledText,
    FunctionName,
    LimitOrRoom,
    Sampled,
    Schema,
    items_of,
)


class TextBlock(Struct, tag_field="type", tag="text"):
    text: str
    cache_control: dict[str, Any] | None = None
    """Other prompts go on differently behind this block."""


class Turn(Struct):
    """A message; what other servers may have written into it is read with care."""

    role: Literal["user", "assistant", "system"]
    content: Any = None
    """A text, or a list of blocks of any API."""


class Thinking(Struct):
    type: Literal["enabled", "adaptive", "disabled"]


class AnyTool(Struct):
    """A tool of any type, also one that Anthropic's servers would run."""

    type: str | None = None


class ClientTool(Struct):
    name: FunctionName
    type: str | None = None
    description: str | None = None
    input_schema: Annotated[Any, Meta(extra_json_schema={"type": ["object", "null"]})] = None
    strict: bool | None = None
    cache_control: dict[str, Any] | None = None


class ToolChoice(Struct):
    """Whether to call a tool, and which."""

    type: Literal["auto", "any", "none", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class SchemaOutput(Struct, tag_field="type", tag="json_schema"):
    schema: Schema


class OutputConfig(Struct):
    effort: str | None = None
    format: SchemaOutput | None = None


class CountTokensRequest(Sampled, kw_only=True):
    messages: Annotated[
        list[Any],
        Meta(min_length=1, max_length=MAX_MESSAGES, extra_json_schema=items_of(Turn)),
    ]
    system: str | list[TextBlock] | None = None
    stop_sequences: Annotated[list[FilledText], Meta(max_length=MAX_STOPS)] | None = None
    thinking: Thinking | None = None
    tools: (
        Annotated[list[Any], Meta(max_length=MAX_TOOLS, extra_json_schema=items_of(ClientTool))]
        | None
    ) = None
    tool_choice: ToolChoice | None = None
    output_config: OutputConfig | None = None
    output_format: SchemaOutput | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    max_tokens: LimitOrRoom
