"""Declare the fields of Anthropic's /v1/messages, with vLLM's additions.

Invariant: unknown fields are allowed, and null counts as absent.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from appliance.api.openai_bodies import (
    MAX_MESSAGES,
    MAX_PARTS,
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


class ImageBlock(Struct, tag_field="type", tag="image"):
    """An image, which no model here reads."""


class DocumentBlock(Struct, tag_field="type", tag="document"):
    """A document, which no model here reads."""


class ToolResult(Struct, tag_field="type", tag="tool_result"):
    tool_use_id: str
    content: (
        str
        | Annotated[list[TextBlock | ImageBlock | DocumentBlock], Meta(max_length=MAX_PARTS)]
        | None
    ) = None
    is_error: bool | None = None
    cache_control: dict[str, Any] | None = None


class ThinkingBlock(Struct, tag_field="type", tag="thinking"):
    thinking: str


class RedactedThinking(Struct, tag_field="type", tag="redacted_thinking"):
    """Encrypted reasoning, which is not read."""


class ToolUse(Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


SaidBlock = TextBlock | ImageBlock | DocumentBlock | ToolResult
SaidContent = str | Annotated[list[SaidBlock], Meta(max_length=MAX_PARTS)]


class UserTurn(Struct, tag_field="role", tag="user"):
    content: SaidContent


class SystemTurn(Struct, tag_field="role", tag="system"):
    content: SaidContent


class AssistantTurn(Struct, tag_field="role", tag="assistant"):
    content: (
        str
        | Annotated[
            list[TextBlock | ThinkingBlock | RedactedThinking | ToolUse],
            Meta(max_length=MAX_PARTS),
        ]
    )


class Thinking(Struct):
    type: Literal["enabled", "adaptive", "disabled"]


class AnyTool(Struct):
    """A tool of any type, also one that Anthropic's servers would run."""

    type: str | None = None


class ClientTool(Struct):
    name: FunctionName
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
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
    format: SchemaOutput | None = None


class CountTokensRequest(Sampled, kw_only=True):
    messages: Annotated[
        list[UserTurn | AssistantTurn | SystemTurn], Meta(min_length=1, max_length=MAX_MESSAGES)
    ]
    system: str | Annotated[list[TextBlock], Meta(max_length=MAX_PARTS)] | None = None
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
