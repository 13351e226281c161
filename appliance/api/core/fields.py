"""Declare the fields of OpenAI's chats and completions, with vLLM's and llama.cpp's additions.

Invariant: unknown fields are allowed, and null counts as absent.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from appliance.json.fields import INT64_MAX, Json

MAX_CHOICES = 128
MAX_STOPS = 64
MAX_STOP_CHARS = 1024
MAX_STOP_IDS = 128
MAX_BIASES = 1024
MAX_LOGPROBS = 20
MAX_DOCUMENTS = 256
MAX_BAD_WORDS = 128
MAX_ALLOWED_IDS = 4096
"""A request keeps them while it waits, and sends them to the worker."""
MAX_SALT_CHARS = 1024
MAX_MESSAGES = 4096
MAX_TOOLS = 1024
MAX_GUIDED_CHOICES = 1000
COMPONENTS = "#/components/schemas/"


def items_of(*kinds: type[Struct]) -> Json:
    """Describe in the document the items of a list that are checked one by one."""
    refs = [{"$ref": COMPONENTS + kind.__name__} for kind in kinds]
    return {"items": refs[0] if len(refs) == 1 else {"anyOf": refs}}


Count = Annotated[int, Meta(ge=0, le=INT64_MAX)]
LimitOrRoom = Annotated[int, Meta(ge=-1, le=INT64_MAX, extra_json_schema={"not": {"const": 0}})]
"""A number of output tokens; -1 is the room left in the context."""
TokenId = Annotated[int, Meta(ge=0, extra_json_schema={"$ref": f"{COMPONENTS}TokenId"})]
Temperature = Annotated[float, Meta(ge=0, le=2)]
TopK = Annotated[int, Meta(ge=-1, le=INT64_MAX)]
Seed = Annotated[int, Meta(ge=-INT64_MAX - 1, le=INT64_MAX)]
NumChoices = Annotated[int, Meta(ge=1, le=MAX_CHOICES)]
NumLogprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Meta(ge=1e-6, le=2)]
"""A smaller one makes infinity of logits."""
Word = Annotated[str, Meta(min_length=1)]
StopText = Annotated[str, Meta(max_length=MAX_STOP_CHARS)]
"""An empty one, which front ends send for none, stops nothing."""
FilledText = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
Stops = Annotated[list[StopText], Meta(max_length=MAX_STOPS)]
Salt = Annotated[str, Meta(min_length=1, max_length=MAX_SALT_CHARS)]
FunctionName = Annotated[
    str, Meta(min_length=1, max_length=256, pattern=r"^[a-zA-Z0-9_.-]+(?![\s\S])")
]
Schema = dict[str, Any] | str
"""A JSON schema, or one written as a string."""
OWN_VARIABLES = ("messages", "tools", "add_generation_prompt", "continue_final_message")
"""Variables of templates that have fields of their own."""
TemplateVariables = Annotated[
    dict[str, Any],
    Meta(extra_json_schema={"propertyNames": {"not": {"enum": list(OWN_VARIABLES)}}}),
]


class Sampled(Struct, kw_only=True):
    """The fields that chats, completions, responses and messages share."""

    model: str | None = None
    stream: bool | None = None
    temperature: Temperature | None = None
    top_p: Fraction | None = None
    top_k: TopK | None = None
    min_p: Fraction | None = None
    seed: Seed | None = None
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

    def shared(self) -> dict[str, Any]:
        """Read the fields that every API shares, for a body of another."""
        return {name: getattr(self, name) for name in Sampled.__struct_fields__}


class StreamOptions(Struct):
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
    structural_tag: None = None
    whitespace_pattern: None = None


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
    structured_outputs: StructuredOutputs | None = None
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
    bad_words: Annotated[list[FilledText], Meta(max_length=MAX_BAD_WORDS)] | None = None
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
    prompt: Word | Prompts
    logprobs: NumLogprobs | None = None
    suffix: str | None = None
    output_offset: Count | None = None
    return_tokens_as_token_ids: bool | None = None


Role = Literal["system", "developer", "user", "assistant", "tool", "function"]


class ChatMessage(Struct, kw_only=True):
    """A message of any role; what other servers may have written into it is read with care."""

    role: Role
    content: Any = None
    """A text, or a list of parts of any API."""
    name: str | None = None
    tool_call_id: str | None = None
    reasoning_content: Any = None
    reasoning: Any = None
    thinking: Any = None
    reasoning_details: Any = None
    tool_calls: Any = None
    function_call: Any = None
    refusal: Any = None
    audio: Any = None


ChatMessages = Annotated[
    list[Any],
    Meta(min_length=1, max_length=MAX_MESSAGES, extra_json_schema=items_of(ChatMessage)),
]


class Function(Struct):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class CustomGrammar(Struct):
    definition: str | None = None


class CustomFormat(Struct):
    definition: str | None = None
    grammar: CustomGrammar | None = None

    @property
    def text(self) -> str | None:
        """The grammar, which chats have one level deeper than responses."""
        return self.grammar.definition if self.grammar else self.definition


class CustomTool(Struct):
    """A tool that takes a text, as Codex's patch."""

    name: FunctionName
    description: str | None = None
    format: CustomFormat | None = None


class Tool(Struct):
    """A tool of any type; what only another server could run is left out."""

    type: str | None = None


class ChosenFunction(Struct):
    name: str


class AllowedTools(Struct):
    """A choice among some of the functions."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)]


ToolMode = Literal["none", "auto", "required"]


class PredictedPart(Struct, tag_field="type", tag="text"):
    text: str


class Prediction(Struct):
    type: Literal["content"]
    content: str | list[PredictedPart]

    @property
    def text(self) -> str:
        """Join the parts."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class ChatReasoning(Struct):
    """What OpenRouter's clients ask of reasoning."""

    effort: str | None = None
    enabled: bool | None = None


class ThinkingSwitch(Struct):
    """What clients of GLM and DeepSeek ask of it."""

    type: str


class ChatSettings(Generated, kw_only=True):
    """What is asked of a chat, besides its messages."""

    tools: (
        Annotated[list[Any], Meta(max_length=MAX_TOOLS, extra_json_schema=items_of(Tool))] | None
    ) = None
    tool_choice: ToolMode | dict[str, Any] | None = None
    functions: Annotated[list[Function], Meta(max_length=MAX_TOOLS)] | None = None
    function_call: Literal["none", "auto"] | ChosenFunction | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: TemplateVariables | None = None
    reasoning_effort: str | None = None
    reasoning: ChatReasoning | bool | str | None = None
    think: bool | str | None = None
    enable_thinking: bool | None = None
    thinking: ThinkingSwitch | bool | None = None
    documents: Annotated[list[Json], Meta(max_length=MAX_DOCUMENTS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    max_tokens: LimitOrRoom | None = None
    max_completion_tokens: LimitOrRoom | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    prediction: Prediction | None = None


class ChatRequest(ChatSettings, kw_only=True):
    messages: ChatMessages
