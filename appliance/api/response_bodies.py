"""Declare the fields of OpenAI's /v1/responses, with vLLM's additions.

Invariant: unknown fields are allowed, and null counts as absent.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from msgspec import Meta, Struct

from appliance.api.openai_bodies import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
    ChosenFunction,
    Function,
    FunctionName,
    JsonFormat,
    LimitOrRoom,
    RefusalPart,
    Role,
    Salt,
    Sampled,
    Schema,
    Stops,
    StopText,
    TemplateVariables,
    TextFormat,
    TextPart,
    ToolMode,
    Word,
    items_of,
)


class InputText(Struct, tag_field="type", tag="input_text"):
    text: str


class OutputText(Struct, tag_field="type", tag="output_text"):
    text: str


class InputImage(Struct, tag_field="type", tag="input_image"):
    """An image, which no model here reads."""


ItemContent = (
    str
    | Annotated[
        list[InputText | OutputText | TextPart | RefusalPart | InputImage],
        Meta(max_length=MAX_PARTS),
    ]
)


class MessageItem(Struct):
    role: Role
    content: ItemContent
    type: Literal["message"] | None = None


class ReasoningText(Struct):
    text: str | None = None


Reasonings = Annotated[list[ReasoningText], Meta(max_length=MAX_PARTS)]


class ReasoningItem(Struct, tag_field="type", tag="reasoning"):
    """The reasoning of an earlier answer; what is encrypted is not read."""

    content: Reasonings | None = None
    summary: Reasonings | None = None


class FunctionCallItem(Struct, tag_field="type", tag="function_call"):
    name: Word
    arguments: str
    call_id: str


class CustomCallItem(Struct, tag_field="type", tag="custom_tool_call"):
    name: Word
    input: str
    call_id: str


_Output = Literal["function_call_output", "custom_tool_call_output", "local_shell_call_output"]


class OutputItem(Struct):
    """What a tool returned; Codex tells a goal as the output of no call."""

    type: _Output
    output: ItemContent
    call_id: str | None = None


_Unread = Literal[
    "web_search_call", "file_search_call", "image_generation_call", "local_shell_call"
]


class UnreadItem(Struct):
    """A call of a tool that OpenAI's servers run; a model reads nothing of it."""

    type: _Unread


Item = MessageItem | ReasoningItem | FunctionCallItem | CustomCallItem | OutputItem | UnreadItem
ITEMS: dict[str | None, type[Item]] = {
    None: MessageItem,
    "message": MessageItem,
    "reasoning": ReasoningItem,
    "function_call": FunctionCallItem,
    "custom_tool_call": CustomCallItem,
    **dict.fromkeys(get_args(_Output), OutputItem),
    **dict.fromkeys(get_args(_Unread), UnreadItem),
}


class FlatSchemaFormat(Struct, tag_field="type", tag="json_schema"):
    schema: Schema
    name: str | None = None
    strict: bool | None = None


class TextSettings(Struct):
    format: TextFormat | JsonFormat | FlatSchemaFormat | None = None


class ReasoningSettings(Struct):
    effort: str | None = None
    summary: str | None = None


class FunctionTool(Function, tag_field="type", tag="function"):
    """A function that the model may call."""


class CustomFormat(Struct):
    definition: str | None = None


class CustomTool(Struct, tag_field="type", tag="custom"):
    """A tool that takes a text, as Codex's patch."""

    name: FunctionName
    description: str | None = None
    format: CustomFormat | None = None


class OtherTool(Struct):
    """A tool that OpenAI's servers would run."""

    type: Annotated[str, Meta(extra_json_schema={"not": {"enum": ["function", "custom"]}})]


class FunctionChoice(ChosenFunction, tag_field="type", tag="function"):
    """The one function to call."""


class CustomChoice(ChosenFunction, tag_field="type", tag="custom"):
    """The one custom tool to call."""


class AllowedChoice(Struct, tag_field="type", tag="allowed_tools"):
    mode: Literal["auto", "required"]
    tools: Annotated[list[FunctionChoice | CustomChoice], Meta(max_length=MAX_TOOLS)]


class StoredResponses(Struct, kw_only=True):
    """The fields about responses that are kept."""

    previous_response_id: str | None = None
    store: bool | None = None


class CountedRequest(Sampled, kw_only=True):
    input: (
        Word
        | Annotated[
            list[Any],
            Meta(
                min_length=1,
                max_length=MAX_MESSAGES,
                extra_json_schema=items_of(*dict.fromkeys(ITEMS.values())),
            ),
        ]
    )
    instructions: str | None = None
    previous_response_id: str | None = None
    reasoning: ReasoningSettings | None = None
    truncation: Literal["auto", "disabled"] | None = None
    text: TextSettings | None = None
    tools: (
        Annotated[
            list[Any],
            Meta(
                max_length=MAX_TOOLS,
                extra_json_schema=items_of(FunctionTool, CustomTool, OtherTool),
            ),
        ]
        | None
    ) = None
    tool_choice: ToolMode | FunctionChoice | CustomChoice | AllowedChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: TemplateVariables | None = None


class ResponseRequest(CountedRequest, kw_only=True):
    max_output_tokens: LimitOrRoom | None = None
    stop: StopText | Stops | None = None
    cache_salt: Salt | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
