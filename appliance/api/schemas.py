"""Hold the JSON schemas of requests and replies, as data.

Owns: the bodies of POSTs in all three APIs; the shapes of replies, of frames by their own types, of
the log's rows and of errors.
Invariant: a body that satisfies its schema is refused only for what a schema cannot say: how fields
go together, another model's name, a prompt longer than the context, more answers than the queue
takes, a grammar that cannot be compiled, a text that is not the JSON it must be.
Never: checks anything; what a field may be is decided where it is read.
"""

from __future__ import annotations

import msgspec

from appliance.api.ollama_api import KEEP_ALIVE, MAX_KEEP_ALIVE_CHARS
from appliance.api.openai_bodies import (
    MAX_STOPS,
    MAX_TOOLS,
    ChatRequest,
    CompletionRequest,
    StructuredOutputs,
    Tool,
)
from appliance.api.operator_api import MAX_TARGET_MS
from appliance.api.responses import PASSED
from appliance.api.schema_words import (
    BOOLEAN,
    COUNT,
    INTEGER,
    NUMBER,
    OBJECT,
    STRING,
    Json,
    items,
    nullable,
    one_of,
    ref,
    shape,
    whole,
    within,
)
from appliance.configuration.settings import ROLES
from appliance.frame.figures import STAGES
from appliance.frame.protocol import Frame

_, _DECLARED = msgspec.json.schema_components(
    [ChatRequest, CompletionRequest, StructuredOutputs, Tool],
    ref_template=ref("{name}")["$ref"],
)
SAMPLING: Json = _DECLARED["ChatRequest"]["properties"]
STOPS: Json = items({"type": "string", "minLength": 1, "maxLength": 1024}, maxItems=MAX_STOPS)
_LIMIT: Json = SAMPLING["max_tokens"]

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
_EFFORT: Json = one_of("none", "minimal", "low", "medium", "high", "xhigh")
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
_PROMPT: Json = {"type": "string", "minLength": 1}

TOKEN_ID = "TokenId"
WHEN: Json = {
    "anyOf": [
        {"type": "string", "format": "date-time"},
        {"type": "string", "pattern": "^-?[0-9]{1,4}[smhdw]$"},
    ]
}
"""A moment: ISO 8601, or an age such as 30m, 1h, 2d."""

REQUESTS: Json = {
    TOKEN_ID: COUNT,
    **_DECLARED,
    "ResponseRequest": shape(
        {"input": {"anyOf": [_PROMPT, items(ref("InputItem"), minItems=1)]}},
        {
            **{n: SAMPLING[n] for n in PASSED},
            "chat_template_kwargs": OBJECT,
            "instructions": STRING,
            "previous_response_id": {"type": "string", "maxLength": 0},  # one that is kept
            "reasoning": shape(
                {}, {"effort": _EFFORT, "summary": one_of("auto", "concise", "detailed")}
            ),
            "max_output_tokens": _LIMIT,
            "truncation": one_of("auto", "disabled"),
            "text": shape({}, {"format": ref("FlatFormat")}),
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
                    "output": _INPUT_TEXT,
                },
                {"call_id": STRING},
            ),
        ]
    },
    "FlatFormat": {
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
            {"allOf": [ref("ChatRequest"), shape({}, _TOKENIZE)]},
        ]
    },
    "DetokenizeRequest": shape({"tokens": items(ref("TokenId"))}, {"model": STRING}),
    "RolesRequest": {
        **shape(
            {},
            {
                "roles": one_of(*ROLES),
                "slo_ttft_ms": whole(0, MAX_TARGET_MS),
                "slo_itl_ms": whole(0, MAX_TARGET_MS),
            },
        ),
        "additionalProperties": {"type": "null"},
    },
}


_TEXT_BLOCK: Json = shape({"type": {"const": "text"}, "text": STRING})
_TEXTS: Json = {"anyOf": [STRING, items(_TEXT_BLOCK)]}
_OLLAMA: Json = {
    "model": STRING,
    "stream": BOOLEAN,
    "format": {"anyOf": [one_of("json"), OBJECT]},
    "think": {"anyOf": [BOOLEAN, one_of("low", "medium", "high")]},
    "keep_alive": {
        "anyOf": [
            {"type": "string", "pattern": KEEP_ALIVE, "maxLength": MAX_KEEP_ALIVE_CHARS},
            NUMBER,
        ]
    },
    "options": shape(
        {},
        {
            **{name: SAMPLING[name] for name in ("temperature", "top_k", "top_p", "min_p")},
            **{name: SAMPLING[name] for name in ("repeat_penalty", "presence_penalty")},
            "frequency_penalty": SAMPLING["frequency_penalty"],
            "seed": whole(0),
            "num_predict": whole(-2),
            "stop": SAMPLING["stop"],
        },
    ),
}

_MESSAGES: Json = items(ref("AnthropicMessage"), minItems=1)
_MESSAGE_FIELDS: Json = {
    "model": STRING,
    "system": _TEXTS,
    "temperature": within(0, 1),
    "top_p": SAMPLING["top_p"],
    "top_k": whole(0),
    "stop_sequences": STOPS,
    "thinking": shape({"type": one_of("enabled", "adaptive", "disabled")}),
    "tools": items(
        shape({"name": FUNCTION_NAME, "input_schema": OBJECT}, {"description": STRING}),
        maxItems=MAX_TOOLS,
    ),
    "tool_choice": shape({"type": one_of("auto", "none")}, {"disable_parallel_tool_use": BOOLEAN}),
}

DIALECT_REQUESTS: Json = {
    "MessagesRequest": shape(
        {"messages": _MESSAGES, "max_tokens": whole(1)}, {**_MESSAGE_FIELDS, "stream": BOOLEAN}
    ),
    "CountTokensRequest": shape({"messages": _MESSAGES}, _MESSAGE_FIELDS),
    "AnthropicMessage": {
        "anyOf": [
            shape(
                {
                    "role": {"const": "user"},
                    "content": {
                        "anyOf": [
                            STRING,
                            items(
                                {
                                    "anyOf": [
                                        _TEXT_BLOCK,
                                        shape(
                                            {
                                                "type": {"const": "tool_result"},
                                                "tool_use_id": STRING,
                                            },
                                            {"content": _TEXTS, "is_error": BOOLEAN},
                                        ),
                                    ]
                                }
                            ),
                        ]
                    },
                }
            ),
            shape(
                {
                    "role": {"const": "assistant"},
                    "content": {
                        "anyOf": [
                            STRING,
                            items(
                                {
                                    "anyOf": [
                                        _TEXT_BLOCK,
                                        shape({"type": {"const": "thinking"}, "thinking": STRING}),
                                        shape(
                                            {
                                                "type": {"const": "tool_use"},
                                                "id": STRING,
                                                "name": FUNCTION_NAME,
                                                "input": OBJECT,
                                            }
                                        ),
                                    ]
                                }
                            ),
                        ]
                    },
                }
            ),
        ]
    },
    "OllamaChatRequest": shape(
        {},
        {
            **_OLLAMA,
            "messages": items(ref("OllamaMessage")),
            "truncate": BOOLEAN,
            "tools": items(OBJECT, maxItems=0),
        },
    ),
    "OllamaMessage": shape(
        {"role": one_of("system", "user", "assistant", "tool"), "content": STRING},
        {"thinking": STRING, "tool_name": STRING},
    ),
    "OllamaGenerateRequest": shape(
        {}, {**_OLLAMA, "prompt": STRING, "system": STRING, "raw": BOOLEAN}
    ),
    "OllamaPullRequest": shape(
        {"model": {"type": "string", "pattern": "^[A-Za-z0-9]{1,20}/[A-Za-z0-9]{1,20}$"}},
        {"stream": BOOLEAN},
    ),
    "OllamaModelRequest": shape({}, {"model": STRING, "name": STRING}),
}

_OLLAMA_DETAILS: Json = shape(
    dict.fromkeys(("format", "family", "parameter_size", "quantization_level"), STRING)
    | {"parent_model": STRING, "families": items(STRING)}
)
_OLLAMA_MODEL: Json = {
    **dict.fromkeys(("name", "model", "modified_at", "digest"), STRING),
    "size": COUNT,
    "details": _OLLAMA_DETAILS,
}

REPLIES: Json = {
    "AnthropicReply": shape(
        {
            "id": STRING,
            "type": {"const": "message"},
            "role": {"const": "assistant"},
            "model": STRING,
            "content": items(shape({"type": one_of("text", "thinking", "tool_use")})),
            "stop_reason": one_of("end_turn", "max_tokens", "stop_sequence", "tool_use"),
            "stop_sequence": nullable(STRING),
            "usage": shape(
                {"input_tokens": COUNT, "output_tokens": COUNT}, {"max_tokens_cut_to": COUNT}
            ),
        }
    ),
    "AnthropicError": shape(
        {
            "type": {"const": "error"},
            "error": shape({"type": STRING, "message": STRING}),
            "request_id": STRING,
        }
    ),
    "TokenCount": shape({"input_tokens": COUNT}),
    "OllamaReply": shape(
        {"model": STRING, "created_at": STRING, "done": BOOLEAN},
        {
            "message": shape({"role": STRING, "content": STRING}),
            "response": STRING,
            "done_reason": one_of("stop", "length", "load", "unload"),
        },
    ),
    "OllamaModels": shape({"models": items(shape(_OLLAMA_MODEL))}),
    "OllamaRunning": shape(
        {
            "models": items(
                shape(
                    _OLLAMA_MODEL
                    | {"size_vram": COUNT, "expires_at": STRING, "context_length": COUNT}
                )
            )
        }
    ),
    "OllamaModel": shape(
        {
            "capabilities": items(STRING),
            "details": _OLLAMA_DETAILS,
            "model_info": OBJECT,
            "modelfile": STRING,
            "template": STRING,
            "modified_at": STRING,
        },
        {"parameters": STRING},
    ),
    "OllamaError": shape({"error": STRING}),
}


_USAGE: Json = shape(
    {"prompt_tokens": COUNT, "completion_tokens": COUNT, "total_tokens": COUNT},
    {
        "prompt_tokens_details": shape({"cached_tokens": COUNT}, {"cache_miss": STRING}),
        "max_tokens_cut_to": COUNT,
    },
)
_FINISH: Json = nullable(one_of("stop", "length", "abort", "tool_calls", "function_call"))
_BYTES: Json = nullable(items(whole(0, 255)))
_PIECE: Json = {"anyOf": [STRING, items(whole(0, 255))]}
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
        {"refusal": STRING, "tool_calls": items(TOOL_CALL)},
    ),
    "ChatLogprobs": shape(
        {"content": items({"allOf": [_LOGPROB, shape({"top_logprobs": items(_LOGPROB)})]})},
    ),
    "Response": shape(
        {
            "id": STRING,
            "object": {"const": "response"},
            "created_at": COUNT,
            "status": one_of("completed", "incomplete", "cancelled", "failed"),
            "model": STRING,
            "output": items(ref("OutputItem")),
            "usage": shape(
                {"input_tokens": COUNT, "output_tokens": COUNT, "total_tokens": COUNT},
                {"max_tokens_cut_to": COUNT},
            ),
        },
        {"error": ref("Error"), "incomplete_details": shape({"reason": STRING})},
    ),
    "OutputItem": {
        "anyOf": [
            shape(
                {
                    "id": STRING,
                    "type": {"const": "message"},
                    "role": {"const": "assistant"},
                    "status": STRING,
                    "content": items(shape({"type": {"const": "output_text"}, "text": STRING})),
                }
            ),
            shape({"id": STRING, "type": {"const": "reasoning"}, "status": STRING}),
            shape(
                {
                    "id": STRING,
                    "type": {"const": "function_call"},
                    "status": STRING,
                    "call_id": STRING,
                    "name": STRING,
                    "arguments": STRING,
                }
            ),
        ]
    },
    "Tokens": shape(
        {
            "count": COUNT,
            "max_model_len": COUNT,
            "tokens": {"anyOf": [items(COUNT), items(shape({"id": COUNT, "piece": _PIECE}))]},
        },
        {"token_strs": items(STRING)},
    ),
    "Text": shape({"prompt": STRING, "content": STRING}),
    "Model": shape(
        {
            "id": STRING,
            "object": {"const": "model"},
            "created": COUNT,
            "owned_by": STRING,
            "max_model_len": COUNT,
            "sampling": {
                "type": "object",
                "additionalProperties": shape(
                    {"value": NUMBER, "source": one_of("model", "default")}
                ),
            },
        },
        {"note": STRING, "root": STRING, "tool_parser": STRING, "reasoning_parser": STRING},
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
    "Roles": shape({"roles": one_of(*ROLES)}, {"slo_ttft_ms": COUNT, "slo_itl_ms": COUNT}),
    "Measurement": shape(
        {"num_facts": COUNT, "num_unknown": COUNT, "work_ms": NUMBER, "is_going_on": BOOLEAN}
    ),
    "Peer": shape(
        {"name": STRING, "role": one_of("viewer", "user", "operator")},
        {"uid": INTEGER, "key": STRING},
    ),
}

_TEXT_OR_NULL, _MS, _WHOLE = nullable(STRING), nullable(NUMBER), nullable(INTEGER)
_JOULES = nullable(NUMBER)
_LOG: Json = {
    "LogRow": shape(
        {"cursor": INTEGER, "id": STRING, "run_id": INTEGER, "stream": BOOLEAN, "user": STRING}
        | dict.fromkeys(("received_at", "endpoint", "model"), STRING)
        | dict.fromkeys(("prompt_tokens", "completion_tokens", "num_sequences"), COUNT)
        | dict.fromkeys(("http_status", "recoveries", "preemptions", "restored_tokens"), COUNT)
        | dict.fromkeys(("client_rid", "peer_user", "key_name", "transport"), _TEXT_OR_NULL)
        | dict.fromkeys(("finish_reason", "error", "cancelled_by"), _TEXT_OR_NULL)
        | dict.fromkeys(("route", "route_reason", "restore_reason"), _TEXT_OR_NULL)
        | dict.fromkeys(("workers", "links", "changes", "cache_miss"), _TEXT_OR_NULL)
        | dict.fromkeys(("peer_uid", "peer_gid", "peer_pid", "max_tokens", "seed"), _WHOLE)
        | dict.fromkeys(("handoff_bytes", "handoff_blocks", "cached_tokens"), _WHOLE)
        | {"output_offset": _WHOLE}
        | dict.fromkeys(("temperature", "top_p"), _MS)
        | dict.fromkeys((f"{stage}_ms" for stage in STAGES), _MS)
        | dict.fromkeys(("ttft_ms", "first_itl_ms", "tpot_ms", "e2e_ms"), _MS)
        | dict.fromkeys(("prefill_j", "decode_j"), _JOULES)
    ),
    "LogEvent": shape(
        {"cursor": INTEGER, "run_id": INTEGER, "actor": _TEXT_OR_NULL}
        | dict.fromkeys(("at", "severity", "code", "message"), STRING)
    ),
    "Usage": shape(
        dict.fromkeys(("requests", "errors", "prompt_tokens", "completion_tokens"), COUNT)
        | dict.fromkeys(("prefill_ms", "decode_ms"), _MS)
        | dict.fromkeys(("prefill_j", "decode_j", "energy_j", "j_per_token"), _JOULES),
        dict.fromkeys(("user", "model", "day"), STRING),
    ),
}


def replies() -> Json:
    """JSON schemas of all replies by name; frames are described by their own types."""
    _, frames = msgspec.json.schema_components([Frame], ref_template=ref("{name}")["$ref"])
    return {**_REPLIES, **_LOG, **frames}
