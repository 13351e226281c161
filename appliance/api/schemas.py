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

from appliance.api.ask import MAX_SALT_CHARS
from appliance.api.ollama_api import KEEP_ALIVE, MAX_KEEP_ALIVE_CHARS
from appliance.api.openai import (
    MAX_BAD_WORDS,
    MAX_BIASES,
    MAX_CHOICES,
    MAX_LOGPROBS,
    MAX_STOP_CHARS,
    MAX_STOP_IDS,
    MAX_STOPS,
)
from appliance.api.operator_api import MAX_TARGET_MS
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
    one_form,
    one_of,
    ref,
    shape,
    whole,
    within,
)
from appliance.api.tools import MAX_CHOICES as MAX_CHOICES_OF
from appliance.api.tools import MAX_TOOLS
from appliance.configuration.settings import ROLES
from appliance.frame.figures import STAGES
from appliance.frame.protocol import Frame
from appliance.json_fields import INT64_MAX

_STOP: Json = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
STOPS: Json = items(_STOP, maxItems=MAX_STOPS)
_LIMIT: Json = {"anyOf": [whole(1), {"const": -1}]}
"""Of output tokens; -1 is the room left."""
_PENALTY: Json = {"type": "number", "exclusiveMinimum": 0, "maximum": 2}

SAMPLING: Json = {
    "model": STRING,
    "max_tokens": _LIMIT,
    "min_tokens": whole(0),
    "n": whole(1, MAX_CHOICES),
    "best_of": whole(1, MAX_CHOICES),
    "temperature": within(0, 2),
    "top_p": within(0, 1),
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
    "stop_token_ids": items(ref("TokenId"), maxItems=MAX_STOP_IDS),
    "ignore_eos": BOOLEAN,
    "stream": BOOLEAN,
    "stream_options": shape({}, {"include_usage": BOOLEAN, "continuous_usage_stats": BOOLEAN}),
    "response_format": ref("ResponseFormat"),
    "structured_outputs": one_form(
        {
            "json": {"anyOf": [OBJECT, STRING]},
            "json_object": {"const": True},
            "regex": STRING,
            "choice": items(
                {"type": "string", "minLength": 1}, minItems=1, maxItems=MAX_CHOICES_OF
            ),
            "grammar": STRING,
        }
    ),
    "return_token_ids": BOOLEAN,
    "skip_special_tokens": BOOLEAN,
    "include_stop_str_in_output": BOOLEAN,
    "truncate_prompt_tokens": whole(1),
    "cache_salt": {"type": "string", "minLength": 1, "maxLength": MAX_SALT_CHARS},
    "prompt_logprobs": whole(0, MAX_LOGPROBS),
    "allowed_token_ids": items(ref("TokenId"), minItems=1),
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
_EFFORT: Json = one_of("none", "minimal", "low", "medium", "high", "xhigh")
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
    "reasoning_effort": _EFFORT,
    "documents": items(OBJECT),
    "add_generation_prompt": BOOLEAN,
    "continue_final_message": BOOLEAN,
}
_PARTS: list[Json] = [
    shape({"type": {"const": kind}, kind: STRING}) for kind in ("text", "refusal")
]
_CONTENT: Json = {"anyOf": [STRING, items({"anyOf": _PARTS})]}
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
_TOKEN_IDS: Json = items(ref("TokenId"), minItems=1)
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
            "max_completion_tokens": _LIMIT,
            "functions": items(_FUNCTION, maxItems=MAX_TOOLS),
            "function_call": one_of("none", "auto"),  # or a name that is in `functions`
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
            "reasoning": shape(
                {}, {"effort": _EFFORT, "summary": one_of("auto", "concise", "detailed")}
            ),
            "max_output_tokens": _LIMIT,
            "truncation": one_of("auto", "disabled"),
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
                    "output": _INPUT_TEXT,
                },
                {"call_id": STRING},
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
    {"prompt_tokens_details": shape({"cached_tokens": COUNT}), "max_tokens_cut_to": COUNT},
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
        | dict.fromkeys(("workers", "links", "changes"), _TEXT_OR_NULL)
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
