"""Declare the fields of Ollama's chat, generate and model endpoints."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from appliance.api.core.fields import (
    MAX_MESSAGES,
    MAX_TOOLS,
    Fraction,
    Function,
    Penalty,
    Role,
    Seed,
    Stops,
    StopText,
    TopK,
    items_of,
)
from appliance.json.fields import INT64_MAX

_UNIT = "(ns|us|ms|s|m|h)"
KEEP_ALIVE = rf"^[-+]?[0-9]+(\.[0-9]+)?({_UNIT}([0-9]+(\.[0-9]+)?{_UNIT})*)?(?![\s\S])"
"""A duration as Ollama's clients write it: `5m`, `1h30m`, `-1`; a number is seconds."""
HUB_NAME = "^[A-Za-z0-9]{1,20}/[A-Za-z0-9]{1,20}(?![\\s\\S])"
"""An example of names on the hub; other forms are read too."""


class Options(Struct):
    """The options that are read; others are about how a model is loaded."""

    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Fraction | None = None
    top_k: TopK | None = None
    min_p: Fraction | None = None
    seed: Seed | None = None
    stop: StopText | Stops | None = None
    repeat_penalty: Annotated[float, Meta(gt=0)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    num_predict: Annotated[int, Meta(ge=-2, le=INT64_MAX)] | None = None


class _Generating(Struct, kw_only=True):
    model: str | None = None
    stream: bool | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    think: bool | str | None = None
    keep_alive: float | Annotated[str, Meta(max_length=32, pattern=KEEP_ALIVE)] | None = None
    options: Options | None = None


class OllamaMessage(Struct):
    role: Role
    content: Any = None
    thinking: Any = None
    reasoning: Any = None
    reasoning_content: Any = None
    reasoning_details: Any = None
    images: list[Any] | None = None
    tool_calls: Any = None
    tool_name: str | None = None
    name: str | None = None
    tool_call_id: str | None = None


class OllamaTool(Struct):
    """A function as a tool; older clients leave out its type."""

    function: Function
    type: Literal["function"] | None = None


class OllamaChatRequest(_Generating, kw_only=True):
    messages: (
        Annotated[
            list[Any], Meta(max_length=MAX_MESSAGES, extra_json_schema=items_of(OllamaMessage))
        ]
        | None
    ) = None
    tools: (
        Annotated[list[Any], Meta(max_length=MAX_TOOLS, extra_json_schema=items_of(OllamaTool))]
        | None
    ) = None
    truncate: bool | None = None


class OllamaGenerateRequest(_Generating, kw_only=True):
    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None


class OllamaModelRequest(Struct):
    model: str | None = None
    name: str | None = None


class OllamaPullRequest(Struct):
    model: Annotated[str, Meta(extra_json_schema={"pattern": HUB_NAME})] | None = None
    name: str | None = None
    stream: bool | None = None
