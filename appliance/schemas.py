"""JSON schemas of what is asked and answered, as data.

Owns: the components of the OpenAPI document.
Called by: openapi.
Invariant: a body that satisfies its schema is refused only for what a schema cannot say: another
model's name, a prompt longer than the context, a grammar that cannot be compiled.
Never: checks anything; what a field may be is decided where it is read, and tests hold both equal.
"""

from __future__ import annotations

from typing import Any

import msgspec

from appliance.openai import (
    MAX_BIASES,
    MAX_CHOICES,
    MAX_INTEGER,
    MAX_LOGPROBS,
    MAX_STOP_CHARS,
    MAX_STOP_IDS,
    MAX_STOPS,
)
from appliance.protocol import Frame
from appliance.tools import MAX_TOOLS

Json = dict[str, Any]

STRING: Json = {"type": "string"}
INTEGER: Json = {"type": "integer"}
NUMBER: Json = {"type": "number"}
BOOLEAN: Json = {"type": "boolean"}
OBJECT: Json = {"type": "object"}
COUNT: Json = {"type": "integer", "minimum": 0}


def ref(name: str) -> Json:
    """A component by its name."""
    return {"$ref": f"#/components/schemas/{name}"}


def one_of(*words: str) -> Json:
    """One of some words."""
    return {"type": "string", "enum": list(words)}


def within(low: float, high: float) -> Json:
    """A number in [low, high]."""
    return {"type": "number", "minimum": low, "maximum": high}


def whole(low: int, high: int = MAX_INTEGER) -> Json:
    """An integer in [low, high]."""
    return {"type": "integer", "minimum": low, "maximum": high}


def items(schema: Json, **limits: int) -> Json:
    """A list."""
    return {"type": "array", "items": schema, **limits}


def nullable(schema: Json) -> Json:
    """The schema, or null."""
    return {"anyOf": [schema, {"type": "null"}]}


def shape(required: Json, optional: Json | None = None) -> Json:
    """An object with fields that are there, and fields that may be absent or null; and others."""
    absent = {name: nullable(schema) for name, schema in (optional or {}).items()}
    return {"type": "object", "required": list(required), "properties": {**required, **absent}}


def listing(schema: Json) -> Json:
    """Things as every list here is sent."""
    return shape({"object": {"const": "list"}, "data": items(schema)})


_SAMPLING: Json = {
    "model": STRING,
    "max_tokens": whole(1),
    "min_tokens": whole(0),
    "n": whole(1, MAX_CHOICES),
    "temperature": within(0, 2),
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "top_k": whole(-1),
    "min_p": within(0, 1),
    "seed": whole(-MAX_INTEGER - 1),
    "presence_penalty": within(-2, 2),
    "frequency_penalty": within(-2, 2),
    "repetition_penalty": {"type": "number", "exclusiveMinimum": 0, "maximum": 2},
    "logit_bias": {
        "type": "object",
        "propertyNames": {"pattern": "^[0-9]+$"},
        "additionalProperties": within(-100, 100),
        "maxProperties": MAX_BIASES,
    },
    "stop": {
        "anyOf": [
            {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS},
            items(
                {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}, maxItems=MAX_STOPS
            ),
        ]
    },
    "stop_token_ids": items(COUNT, maxItems=MAX_STOP_IDS),
    "ignore_eos": BOOLEAN,
    "stream": BOOLEAN,
    "stream_options": shape({}, {"include_usage": BOOLEAN, "continuous_usage_stats": BOOLEAN}),
    "response_format": ref("ResponseFormat"),
    "return_token_ids": BOOLEAN,
}
"""What both generating POSTs read."""

_FUNCTION: Json = shape(
    {"name": {"type": "string", "pattern": "^[a-zA-Z0-9_.-]{1,64}$"}},
    {"description": STRING, "parameters": OBJECT, "strict": BOOLEAN},
)
_TOOL_CALL: Json = shape(
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
    "add_generation_prompt": BOOLEAN,
    "continue_final_message": BOOLEAN,
}
_TOKEN_IDS: Json = items(COUNT, minItems=1)
_PROMPT: Json = {"type": "string", "minLength": 1}

_REQUESTS: Json = {
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
        {**_SAMPLING, "logprobs": whole(0, MAX_LOGPROBS), "echo": BOOLEAN},
    ),
    "ChatRequest": shape(
        {"messages": items(ref("Message"), minItems=1)},
        {
            **_SAMPLING,
            **_CHAT_INPUT,
            "max_completion_tokens": whole(1),
            "logprobs": BOOLEAN,
            "top_logprobs": whole(0, MAX_LOGPROBS),
            "parallel_tool_calls": BOOLEAN,
        },
    ),
    "Message": shape(
        {"role": one_of("system", "developer", "user", "assistant", "tool", "function")},
        {
            "content": {
                "anyOf": [STRING, items(shape({"type": {"const": "text"}, "text": STRING}))]
            },
            "name": STRING,
            "tool_call_id": STRING,
            "tool_calls": items(_TOOL_CALL),
        },
    ),
    "ResponseFormat": {
        "anyOf": [
            shape({"type": one_of("text", "json_object")}),
            shape(
                {
                    "type": {"const": "json_schema"},
                    "json_schema": shape({"schema": OBJECT}, {"name": STRING, "strict": BOOLEAN}),
                }
            ),
        ]
    },
    "TokenizeRequest": {
        "anyOf": [
            shape(
                {"prompt": STRING},
                {"model": STRING, "add_special_tokens": BOOLEAN, "return_token_strs": BOOLEAN},
            ),
            shape(
                {"messages": items(ref("Message"), minItems=1)},
                {
                    **_CHAT_INPUT,
                    "model": STRING,
                    "add_special_tokens": BOOLEAN,
                    "return_token_strs": BOOLEAN,
                },
            ),
        ]
    },
    "DetokenizeRequest": shape({"tokens": items(COUNT)}, {"model": STRING}),
}

_USAGE: Json = shape({"prompt_tokens": COUNT, "completion_tokens": COUNT, "total_tokens": COUNT})
_FINISH: Json = nullable(one_of("stop", "length", "abort", "tool_calls"))
_BYTES: Json = nullable(items(whole(0, 255)))
_LOGPROB: Json = shape({"token": STRING, "logprob": NUMBER, "bytes": _BYTES})
_REPLY: Json = {
    "id": STRING,
    "created": COUNT,
    "model": STRING,
    "system_fingerprint": STRING,
}

_REPLIES: Json = {
    "Completion": shape(
        {
            **_REPLY,
            "object": {"const": "text_completion"},
            "choices": items(
                shape(
                    {"index": COUNT, "text": STRING, "finish_reason": _FINISH},
                    {"logprobs": ref("CompletionLogprobs")},
                )
            ),
            "usage": _USAGE,
        }
    ),
    "CompletionLogprobs": shape(
        {
            "tokens": items(STRING),
            "token_logprobs": items(nullable(NUMBER)),
            "top_logprobs": items(nullable({"type": "object", "additionalProperties": NUMBER})),
            "text_offset": items(COUNT),
        }
    ),
    "ChatCompletion": shape(
        {
            **_REPLY,
            "object": {"const": "chat.completion"},
            "choices": items(
                shape(
                    {"index": COUNT, "message": ref("Answer"), "finish_reason": _FINISH},
                    {"logprobs": ref("ChatLogprobs")},
                )
            ),
            "usage": _USAGE,
        }
    ),
    "Answer": shape(
        {"role": {"const": "assistant"}, "content": nullable(STRING)},
        {"refusal": STRING, "tool_calls": items(_TOOL_CALL)},
    ),
    "ChatLogprobs": shape(
        {"content": items({"allOf": [_LOGPROB, shape({"top_logprobs": items(_LOGPROB)})]})},
    ),
    "Tokens": shape(
        {"count": COUNT, "max_model_len": COUNT, "tokens": items(COUNT)},
        {"token_strs": items(STRING)},
    ),
    "Text": shape({"prompt": STRING}),
    "Model": shape(
        {
            "id": STRING,
            "object": {"const": "model"},
            "created": COUNT,
            "owned_by": STRING,
            "max_model_len": COUNT,
        },
        {"note": STRING},
    ),
    "Error": shape(
        {
            "error": shape(
                {
                    "message": STRING,
                    "type": STRING,
                    "param": nullable(STRING),
                    "code": nullable(STRING),
                }
            )
        }
    ),
    "Peer": shape(
        {"name": STRING, "role": one_of("viewer", "user", "operator")},
        {"uid": INTEGER, "key": STRING},
    ),
}

_TEXT_OR_NULL, _MS, _WHOLE = nullable(STRING), nullable(NUMBER), nullable(INTEGER)
_LOG: Json = {
    "LogRow": shape(
        {"cursor": INTEGER, "rid": STRING, "run_id": INTEGER, "stream": BOOLEAN, "user": STRING}
        | dict.fromkeys(("received_at", "endpoint", "model"), STRING)
        | dict.fromkeys(("prompt_tokens", "completion_tokens", "num_sequences"), COUNT)
        | dict.fromkeys(("http_status", "recoveries"), COUNT)
        | dict.fromkeys(("client_rid", "peer_user", "key_name", "transport"), _TEXT_OR_NULL)
        | dict.fromkeys(("finish_reason", "error", "cancelled_by"), _TEXT_OR_NULL)
        | dict.fromkeys(("peer_uid", "peer_gid", "peer_pid", "max_tokens", "seed"), _WHOLE)
        | dict.fromkeys(("handoff_bytes", "handoff_blocks"), _WHOLE)
        | dict.fromkeys(("temperature", "top_p", "tokenize_ms", "queue_ms", "prefill_ms"), _MS)
        | dict.fromkeys(("ttft_ms", "handoff_ms", "decode_wait_ms", "decode_ms"), _MS)
        | dict.fromkeys(("first_itl_ms", "tpot_ms", "e2e_ms"), _MS)
    ),
    "LogEvent": shape(
        {"cursor": INTEGER, "run_id": INTEGER, "actor": _TEXT_OR_NULL}
        | dict.fromkeys(("at", "severity", "code", "message"), STRING)
    ),
    "Usage": shape(
        dict.fromkeys(("requests", "errors", "prompt_tokens", "completion_tokens"), COUNT)
        | dict.fromkeys(("prefill_ms", "decode_ms"), _MS),
        dict.fromkeys(("user", "model", "day"), STRING),
    ),
}


def components() -> Json:
    """All of them by name; frames are described by their own types."""
    _, frames = msgspec.json.schema_components([Frame], ref_template=ref("{name}")["$ref"])
    return {**_REQUESTS, **_REPLIES, **_LOG, **frames}
