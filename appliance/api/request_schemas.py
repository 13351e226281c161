"""JSON schemas of what can be asked, as data.

Owns: the bodies of POSTs.
Invariant: a body that satisfies its schema is refused only for what a schema cannot say: another
model's name, a prompt longer than the context, a grammar that cannot be compiled.
Never: checks anything; what a field may be is decided where it is read.
"""

from __future__ import annotations

from appliance.api.ask import MAX_SALT_CHARS
from appliance.api.control import MAX_TARGET_MS
from appliance.api.openai import (
    MAX_BAD_WORDS,
    MAX_BIASES,
    MAX_CHOICES,
    MAX_LOGPROBS,
    MAX_STOP_CHARS,
    MAX_STOP_IDS,
    MAX_STOPS,
)
from appliance.api.schemas import (
    BOOLEAN,
    COUNT,
    OBJECT,
    STRING,
    Json,
    items,
    one_of,
    ref,
    shape,
    whole,
    within,
)
from appliance.api.tools import MAX_TOOLS
from appliance.configuration.settings import ROLES
from appliance.json_fields import INT64_MAX

_STOP: Json = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
STOPS: Json = items(_STOP, maxItems=MAX_STOPS)
_SHARE: Json = {"type": "number", "exclusiveMinimum": 0, "maximum": 1}
_PENALTY: Json = {"type": "number", "exclusiveMinimum": 0, "maximum": 2}

SAMPLING: Json = {
    "model": STRING,
    "max_tokens": whole(1),
    "min_tokens": whole(0),
    "n": whole(1, MAX_CHOICES),
    "best_of": whole(1, MAX_CHOICES),
    "temperature": within(0, 2),
    "top_p": _SHARE,
    "top_k": whole(-1),
    "min_p": within(0, 1),
    "seed": whole(-INT64_MAX - 1),
    "presence_penalty": within(-2, 2),
    "frequency_penalty": within(-2, 2),
    "repetition_penalty": _PENALTY,
    "logit_bias": {
        "type": "object",
        "propertyNames": {"pattern": "^[0-9]+$"},
        "additionalProperties": within(-100, 100),
        "maxProperties": MAX_BIASES,
    },
    "stop": {"anyOf": [_STOP, STOPS]},
    "stop_token_ids": items(COUNT, maxItems=MAX_STOP_IDS),
    "ignore_eos": BOOLEAN,
    "stream": BOOLEAN,
    "stream_options": shape({}, {"include_usage": BOOLEAN, "continuous_usage_stats": BOOLEAN}),
    "response_format": ref("ResponseFormat"),
    "structured_outputs": {
        "anyOf": [
            shape({"json": {"anyOf": [OBJECT, STRING]}}),
            shape({"json_object": {"const": True}}),
            shape({"regex": STRING}),
            shape({"choice": items({"type": "string", "minLength": 1}, minItems=1)}),
            shape({"grammar": STRING}),
        ]
    },
    "return_token_ids": BOOLEAN,
    "skip_special_tokens": BOOLEAN,
    "include_stop_str_in_output": BOOLEAN,
    "truncate_prompt_tokens": whole(1),
    "cache_salt": {"type": "string", "minLength": 1, "maxLength": MAX_SALT_CHARS},
    "prompt_logprobs": whole(0, MAX_LOGPROBS),
    "allowed_token_ids": items(COUNT, minItems=1),
    "bad_words": items(_STOP, maxItems=MAX_BAD_WORDS),
    "echo": BOOLEAN,
    "n_predict": whole(-1),
    "repeat_penalty": _PENALTY,
}
"""What both generating POSTs read."""

_NOT_OF_RESPONSES = {
    *("max_tokens", "n", "best_of", "stream_options", "return_token_ids"),
    *("response_format", "structured_outputs", "skip_special_tokens", "n_predict"),
    *("include_stop_str_in_output", "truncate_prompt_tokens", "repeat_penalty", "echo"),
    *("prompt_logprobs", "allowed_token_ids", "bad_words"),
}
_ROLE: Json = one_of("system", "developer", "user", "assistant", "tool", "function")
FUNCTION_NAME: Json = {"type": "string", "pattern": "^[a-zA-Z0-9_.-]{1,64}$"}
_FUNCTION: Json = shape(
    {"name": FUNCTION_NAME},
    {"description": STRING, "parameters": OBJECT, "strict": BOOLEAN},
)
TOOL_CALL: Json = shape(
    {"function": shape({"name": {"type": "string", "minLength": 1}}, {"arguments": STRING})},
    {"id": STRING, "type": {"const": "function"}},
)
_CHAT_INPUT: Json = {
    "tools": items(
        shape({"type": {"const": "function"}, "function": _FUNCTION}), maxItems=MAX_TOOLS
    ),
    "tool_choice": {
        "anyOf": [
            one_of("none", "auto", "required"),
            shape({"type": {"const": "function"}, "function": shape({"name": STRING})}),
        ]
    },
    "chat_template_kwargs": OBJECT,
    "documents": items(OBJECT),
    "add_generation_prompt": BOOLEAN,
    "continue_final_message": BOOLEAN,
}
_CONTENT: Json = {"anyOf": [STRING, items(shape({"type": {"const": "text"}, "text": STRING}))]}
_INPUT_TEXT: Json = {
    "anyOf": [
        STRING,
        items(shape({"type": one_of("input_text", "output_text", "text"), "text": STRING})),
    ]
}
_TOKENIZE: Json = {
    "model": STRING,
    "add_special_tokens": BOOLEAN,
    "add_special": BOOLEAN,
    "return_token_strs": BOOLEAN,
    "with_pieces": BOOLEAN,
}
_TOKEN_IDS: Json = items(COUNT, minItems=1)
_PROMPT: Json = {"type": "string", "minLength": 1}

REQUESTS: Json = {
    "CompletionRequest": shape(
        {
            "prompt": {
                "anyOf": [
                    _PROMPT,
                    _TOKEN_IDS,
                    items(_PROMPT, minItems=1),
                    items(_TOKEN_IDS, minItems=1),
                ]
            }
        },
        {
            **SAMPLING,
            "logprobs": whole(0, MAX_LOGPROBS),
            "suffix": {"type": "string", "maxLength": 0},  # more, where the model can
            "output_offset": whole(0, 0),  # more, with a prompt of token ids
            "return_tokens_as_token_ids": BOOLEAN,
        },
    ),
    "ChatRequest": shape(
        {"messages": items(ref("Message"), minItems=1)},
        {
            **SAMPLING,
            **_CHAT_INPUT,
            "max_completion_tokens": whole(1),
            "logprobs": BOOLEAN,
            "top_logprobs": whole(0, MAX_LOGPROBS),
            "parallel_tool_calls": BOOLEAN,
        },
    ),
    "Message": {
        "anyOf": [
            shape({"role": _ROLE, "content": _CONTENT}, {"name": STRING, "tool_call_id": STRING}),
            shape(
                {"role": {"const": "assistant"}},
                {"content": _CONTENT, "name": STRING, "tool_calls": items(TOOL_CALL)},
            ),
        ]
    },
    "ResponseFormat": {
        "anyOf": [
            shape({"type": {"const": "text"}}),
            shape({"type": {"const": "json_object"}}, {"schema": OBJECT}),
            shape(
                {
                    "type": {"const": "json_schema"},
                    "json_schema": shape({"schema": OBJECT}, {"name": STRING, "strict": BOOLEAN}),
                }
            ),
        ]
    },
    "ResponseRequest": shape(
        {"input": {"anyOf": [_PROMPT, items(ref("InputItem"), minItems=1)]}},
        {
            **{n: schema for n, schema in SAMPLING.items() if n not in _NOT_OF_RESPONSES},
            "chat_template_kwargs": OBJECT,
            "instructions": STRING,
            "previous_response_id": {"type": "string", "maxLength": 0},  # one that is kept
            "reasoning": shape({}, {"effort": one_of("none", "low", "medium", "high")}),
            "max_output_tokens": whole(1),
            "text": shape({}, {"format": ref("TextFormat")}),
            "tools": items(
                {"allOf": [_FUNCTION, shape({"type": {"const": "function"}})]}, maxItems=MAX_TOOLS
            ),
            "tool_choice": {
                "anyOf": [
                    one_of("none", "auto", "required"),
                    shape({"type": {"const": "function"}, "name": STRING}),
                ]
            },
            "parallel_tool_calls": BOOLEAN,
            "metadata": {"type": "object", "additionalProperties": STRING},
            "store": BOOLEAN,
        },
    ),
    "InputItem": {
        "anyOf": [
            shape(
                {"role": _ROLE, "content": _INPUT_TEXT},
                {"type": {"const": "message"}},
            ),
            shape(
                {
                    "type": {"const": "function_call"},
                    "call_id": STRING,
                    "name": {"type": "string", "minLength": 1},
                    "arguments": STRING,
                }
            ),
            shape(
                {
                    "type": {"const": "function_call_output"},
                    "call_id": STRING,
                    "output": _INPUT_TEXT,
                }
            ),
        ]
    },
    "TextFormat": {
        "anyOf": [
            shape({"type": one_of("text", "json_object")}),
            shape(
                {"type": {"const": "json_schema"}, "schema": OBJECT},
                {"name": STRING, "strict": BOOLEAN},
            ),
        ]
    },
    "TokenizeRequest": {
        "anyOf": [
            shape({"prompt": STRING}, _TOKENIZE),
            shape({"content": STRING}, _TOKENIZE),
            shape({"messages": items(ref("Message"), minItems=1)}, {**_CHAT_INPUT, **_TOKENIZE}),
        ]
    },
    "DetokenizeRequest": shape({"tokens": items(COUNT)}, {"model": STRING}),
    "RolesRequest": {
        **shape(
            {},
            {
                "roles": one_of(*ROLES),
                "slo_ttft_ms": whole(0, MAX_TARGET_MS),
                "slo_itl_ms": whole(0, MAX_TARGET_MS),
            },
        ),
        "additionalProperties": False,
    },
}
