"""Declare the fields of OpenAI's /v1/responses, with vLLM's additions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from appliance.api.core.fields import (
    MAX_MESSAGES,
    MAX_TOOLS,
    JsonFormat,
    LimitOrRoom,
    NumLogprobs,
    Role,
    Salt,
    Sampled,
    Schema,
    Stops,
    StopText,
    TemplateVariables,
    TextFormat,
    Tool,
    ToolMode,
    Word,
    items_of,
)


class Item(Struct):
    """An item of a conversation; what other servers may have put into it is read with care."""

    type: str | None = None
    role: Role | None = None
    content: Any = None
    """A message's text, or a list of parts of any API."""
    name: str | None = None
    arguments: Any = None
    input: Any = None
    call_id: str | None = None
    namespace: str | None = None
    output: Any = None
    summary: Any = None
    id: str | None = None


class FlatSchemaFormat(Struct, tag_field="type", tag="json_schema"):
    schema: Schema
    name: str | None = None
    strict: bool | None = None


class TextSettings(Struct):
    format: TextFormat | JsonFormat | FlatSchemaFormat | None = None


class ReasoningSettings(Struct):
    effort: str | None = None
    summary: str | None = None


class StoredResponses(Struct, kw_only=True):
    """The fields about responses that are kept."""

    previous_response_id: str | None = None
    store: bool | None = None


class CountedRequest(Sampled, kw_only=True):
    input: (
        Word
        | Annotated[
            list[Any],
            Meta(min_length=1, max_length=MAX_MESSAGES),
        ]
    )
    instructions: str | list[Any] | None = None
    previous_response_id: str | None = None
    reasoning: ReasoningSettings | None = None
    truncation: Literal["auto", "disabled"] | None = None
    text: TextSettings | None = None
    tools: (
        Annotated[
            list[Any],
            Meta(
                max_length=MAX_TOOLS,
                extra_json_schema=items_of(Tool),
            ),
        ]
        | None
    ) = None
    tool_choice: ToolMode | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: TemplateVariables | None = None


class ResponseRequest(CountedRequest, kw_only=True):
    max_output_tokens: LimitOrRoom | None = None
    stop: StopText | Stops | None = None
    cache_salt: Salt | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    background: bool | None = None
    include: list[str] | None = None
    top_logprobs: NumLogprobs | None = None
