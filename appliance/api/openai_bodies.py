"""Declare the fields of OpenAI's chats and completions, with vLLM's and llama.cpp's additions.

Owns: each field's name, type and range; from here come parsing, errors and the OpenAPI document.
Invariant: unknown fields are allowed, and null counts as absent.
Never: decides what a field means.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from appliance.json_fields import INT64_MAX, Json

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_IDS = 128
MAX_BIASES = 300
MAX_LOGPROBS = 20
MAX_DOCUMENTS = 256
MAX_BAD_WORDS = 128
MAX_ALLOWED_IDS = 4096
"""A request keeps them while it waits, and sends them to the worker."""
MAX_SALT_CHARS = 1024
MAX_MESSAGES = 4096
MAX_PARTS = 1024
"""Maximum of parts per message: parts of its content, and calls."""
MAX_TOOLS = 128
MAX_GUIDED_CHOICES = 1000
COMPONENTS = "#/components/schemas/"


def ref_to(kind: type[Struct]) -> Json:
    """Describe in the document an object that is checked later."""
    return {"$ref": COMPONENTS + kind.__name__}


def items_of(*kinds: type[Struct]) -> Json:
    """Describe in the document the items of a list that are checked one by one."""
    refs = [ref_to(kind) for kind in kinds]
    return {"items": refs[0] if len(refs) == 1 else {"anyOf": refs}}


Count = Annotated[int, Meta(ge=0, le=INT64_MAX)]
LimitOrRoom = Annotated[int, Meta(ge=-1, le=INT64_MAX, extra_json_schema={"not": {"const": 0}})]
"""A number of output tokens; -1 is the room left in the context."""
TokenId = Annotated[int, Meta(ge=0, extra_json_schema={"$ref": f"{COMPONENTS}TokenId"})]
NumChoices = Annotated[int, Meta(ge=1, le=MAX_CHOICES)]
NumLogprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Meta(gt=0, le=2)]
Word = Annotated[str, Meta(min_length=1)]
StopText = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
Stops = Annotated[list[StopText], Meta(max_length=MAX_STOPS)]
Salt = Annotated[str, Meta(min_length=1, max_length=MAX_SALT_CHARS)]
FunctionName = Annotated[
    str, Meta(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_.-]+(?![\s\S])")
]
Schema = dict[str, Any] | str
"""A JSON schema, or one written as a string."""


class Sampled(Struct, kw_only=True):
    """The fields that chats, completions, responses and messages share."""

    model: str | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Fraction | None = None
    top_k: Annotated[int, Meta(ge=-1, le=INT64_MAX)] | None = None
    min_p: Fraction | None = None
    seed: Annotated[int, Meta(ge=-INT64_MAX - 1, le=INT64_MAX)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: (
        Annotated[
            dict[
                Annotated[str, Meta(extra_json_schema={"pattern": "^[0-9]+$"})],
                Annotated[float, Meta(ge=-100, le=100)],
            ],
            Meta(max_length=MAX_BIASES),
        ]
        | None
    ) = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_IDS)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None


class StreamOptions(Struct):
    """What a stream tells besides its text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class TextFormat(Struct, tag_field="type", tag="text"):
    """An answer of any form."""


class JsonFormat(Struct, tag_field="type", tag="json_object"):
    """An answer that is a JSON object; llama.cpp's clients may give its schema."""

    schema: Schema | None = None


class NamedSchema(Struct):
    """A schema as OpenAI's clients send it."""

    schema: Schema
    name: str | None = None
    strict: bool | None = None


class SchemaFormat(Struct, tag_field="type", tag="json_schema"):
    """An answer that follows a schema."""

    json_schema: NamedSchema


ResponseFormat = TextFormat | JsonFormat | SchemaFormat
Choices = Annotated[list[Word], Meta(min_length=1, max_length=MAX_GUIDED_CHOICES)]


class StructuredOutputs(Struct, forbid_unknown_fields=True):
    """vLLM's forms of an answer; at most one may be given."""

    json: Schema | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None


class Generated(Sampled, kw_only=True):
    """The fields that chats and completions share."""

    max_tokens: Annotated[int, Meta(ge=-1, le=INT64_MAX)] | None = None
    n_predict: Annotated[int, Meta(ge=-1, le=INT64_MAX)] | None = None
    n: NumChoices | None = None
    best_of: NumChoices | None = None
    stop: StopText | Stops | None = None
    stream_options: StreamOptions | None = None
    repeat_penalty: RepetitionPenalty | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: (
        Annotated[dict[str, Any], Meta(extra_json_schema=ref_to(StructuredOutputs))] | None
    ) = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    json_schema: Schema | None = None
    grammar: str | None = None
    return_token_ids: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=INT64_MAX)] | None = None
    cache_salt: Salt | None = None
    prompt_logprobs: NumLogprobs | None = None
    allowed_token_ids: (
        Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_ALLOWED_IDS)] | None
    ) = None
    bad_words: Annotated[list[StopText], Meta(max_length=MAX_BAD_WORDS)] | None = None
    echo: bool | None = None


_IDS: Json = {"type": "array", "items": {"$ref": f"{COMPONENTS}TokenId"}, "minItems": 1}
_TEXT: Json = {"type": "string", "minLength": 1}
Prompts = Annotated[
    list[Any],
    Meta(
        min_length=1,
        extra_json_schema={"anyOf": [{"items": one} for one in (_IDS["items"], _TEXT, _IDS)]},
    ),
]
"""Token ids, or texts, or lists of token ids: too many to look at each before they are counted."""


class CompletionRequest(Generated, kw_only=True):
    """A body of /v1/completions."""

    prompt: Word | Prompts
    logprobs: NumLogprobs | None = None
    suffix: str | None = None
    output_offset: Count | None = None
    return_tokens_as_token_ids: bool | None = None


class TextPart(Struct, tag_field="type", tag="text"):
    """A text as a part of a message."""

    text: str


class RefusalPart(Struct, tag_field="type", tag="refusal"):
    """A refusal as a part of an assistant's message."""

    refusal: str


class ImagePart(Struct, tag_field="type", tag="image_url"):
    """An image, which no model here reads."""


Content = str | Annotated[list[TextPart | RefusalPart | ImagePart], Meta(max_length=MAX_PARTS)]


class CalledFunction(Struct):
    """The function of a call, with arguments as JSON text or as an object."""

    name: Word
    arguments: str | dict[str, Any] | None = None


class ToolCall(Struct):
    """A call that the assistant made in an earlier turn."""

    function: CalledFunction
    id: str | None = None
    type: Literal["function"] | None = None


class _Message(Struct, kw_only=True, tag_field="role"):
    name: str | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class _Heard(_Message, kw_only=True, tag_field="role"):
    content: Content
    tool_calls: Annotated[list[Any], Meta(max_length=0)] | None = None


class SystemMessage(_Heard, tag="system"):
    """Instructions."""


class DeveloperMessage(_Heard, tag="developer"):
    """Instructions, in OpenAI's newer word."""


class UserMessage(_Heard, tag="user"):
    """What the user says."""


class ToolMessage(_Heard, tag="tool"):
    """The result of a call."""


class FunctionMessage(_Heard, tag="function"):
    """The result of a call, in OpenAI's older word."""


class AssistantMessage(_Message, kw_only=True, tag="assistant"):
    """An earlier answer, or one to continue."""

    content: Content | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=MAX_PARTS)] | None = None
    function_call: CalledFunction | None = None
    audio: Any = None


ChatMessage = (
    SystemMessage
    | DeveloperMessage
    | UserMessage
    | AssistantMessage
    | ToolMessage
    | FunctionMessage
)


class Function(Struct):
    """A function that the model may call."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct):
    """A function as a tool."""

    type: Literal["function"]
    function: Function


class ChosenFunction(Struct):
    """A function by its name."""

    name: str


class ChosenTool(Struct, tag_field="type", tag="function"):
    """The one function to call."""

    function: ChosenFunction


class AllowedTools(Struct):
    """The functions to choose from."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[ChosenTool], Meta(max_length=MAX_TOOLS)]


class ChosenTools(Struct, tag_field="type", tag="allowed_tools"):
    """A choice among some of the functions."""

    allowed_tools: AllowedTools


ToolMode = Literal["none", "auto", "required"]
OWN_VARIABLES = ("messages", "tools", "add_generation_prompt", "continue_final_message")
"""Variables of templates that have fields of their own."""


class ChatRequest(Generated, kw_only=True):
    """A body of /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    tools: (
        Annotated[list[Any], Meta(max_length=MAX_TOOLS, extra_json_schema=items_of(Tool))] | None
    ) = None
    tool_choice: ToolMode | ChosenTool | ChosenTools | None = None
    functions: Annotated[list[Function], Meta(max_length=MAX_TOOLS)] | None = None
    function_call: Literal["none", "auto"] | ChosenFunction | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: (
        Annotated[
            dict[str, Any],
            Meta(extra_json_schema={"propertyNames": {"not": {"enum": list(OWN_VARIABLES)}}}),
        ]
        | None
    ) = None
    reasoning_effort: str | None = None
    documents: Annotated[list[Json], Meta(max_length=MAX_DOCUMENTS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    max_tokens: LimitOrRoom | None = None
    max_completion_tokens: LimitOrRoom | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
