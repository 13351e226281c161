"""Hold the JSON schemas of requests and replies, as data.

Invariant: a body that satisfies its schema is refused only for what a schema cannot say: how fields
go together, another model's name, a prompt longer than the context, more answers than the queue
takes, a grammar that cannot be compiled, a text that is not the JSON it must be.
"""

from __future__ import annotations

import re

import msgspec

from appliance.api.anthropic.fields import ClientTool, CountTokensRequest, MessagesRequest, Turn
from appliance.api.core.fields import ChatMessage, ChatRequest, CompletionRequest, Tool
from appliance.api.ollama.fields import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaMessage,
    OllamaModelRequest,
    OllamaPullRequest,
    OllamaTool,
)
from appliance.api.operator.handlers import RolesRequest
from appliance.api.responses.fields import CountedRequest, ResponseRequest
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
)
from appliance.api.texts.fields import (
    EmbeddingsRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    RerankRequest,
    ScoreRequest,
)
from appliance.api.tokenize import (
    DetokenizeRequest,
    TokenizeChat,
    TokenizeContent,
    TokenizePrompt,
)
from appliance.configuration.settings import ROLES
from appliance.daemon.requests.row import LogRow
from appliance.observe.frame.protocol import Frame
from appliance.observe.frame.request_facts import STAGES

TOKEN_ID = "TokenId"
WHEN: Json = {
    "anyOf": [
        {"type": "string", "format": "date-time"},
        {"type": "string", "pattern": "^-?[0-9]{1,4}[smhdw]$"},
    ]
}
"""A moment: ISO 8601, or an age such as 30m, 1h, 2d."""

_BODIES = [
    *(CompletionRequest, ChatRequest, ChatMessage, Tool),
    *(ResponseRequest, CountedRequest),
    *(MessagesRequest, CountTokensRequest, Turn, ClientTool),
    *(OllamaChatRequest, OllamaMessage, OllamaGenerateRequest, OllamaModelRequest),
    *(OllamaPullRequest, OllamaTool),
    *(EmbeddingsRequest, RerankRequest, ScoreRequest, OllamaEmbedRequest, OllamaEmbeddingsRequest),
    *(TokenizePrompt, TokenizeContent, TokenizeChat, DetokenizeRequest, RolesRequest),
]
TOKENIZE: Json = {"anyOf": [ref("TokenizePrompt"), ref("TokenizeContent"), ref("TokenizeChat")]}


def requests() -> Json:
    """Make the JSON schemas of all bodies by name."""
    _, bodies = msgspec.json.schema_components(_BODIES, ref_template=ref("{name}")["$ref"])
    bodies["RolesRequest"]["additionalProperties"] = {"type": "null"}
    return {TOKEN_ID: COUNT, **bodies}


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
                {"input_tokens": COUNT, "output_tokens": COUNT},
                {"max_tokens_cut_to": COUNT, "cache_miss": STRING},
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
    "OllamaVectors": shape(
        {
            "model": STRING,
            "embeddings": items(items(NUMBER)),
            "total_duration": COUNT,
            "load_duration": COUNT,
            "prompt_eval_count": COUNT,
        }
    ),
    "OllamaVector": shape({"embedding": items(NUMBER)}),
    "CohereError": shape({"id": STRING, "message": STRING}),
}


_MISS: Json = {
    "cache_miss": STRING,
    "cache_miss_texts": shape({"prompt": STRING, "earlier": STRING}),
}
_USAGE: Json = shape(
    {"prompt_tokens": COUNT, "completion_tokens": COUNT, "total_tokens": COUNT},
    {
        "prompt_tokens_details": shape({"cached_tokens": COUNT}, _MISS),
        "completion_tokens_details": shape(
            {},
            dict.fromkeys(
                ("reasoning_tokens", "accepted_prediction_tokens", "rejected_prediction_tokens"),
                COUNT,
            ),
        ),
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

_TEXTS_USAGE: Json = shape({"prompt_tokens": COUNT, "total_tokens": COUNT})
_SHARE: Json = {"type": "number", "minimum": 0, "maximum": 1}

_REPLIES: Json = {
    "Embeddings": shape(
        {
            "object": {"const": "list"},
            "model": STRING,
            "data": items(
                shape(
                    {
                        "object": {"const": "embedding"},
                        "index": COUNT,
                        "embedding": {"anyOf": [items(NUMBER), STRING]},
                    }
                )
            ),
            "usage": _TEXTS_USAGE,
        }
    ),
    "Ranking": shape(
        {
            "id": STRING,
            "model": STRING,
            "results": items(
                shape(
                    {"index": COUNT, "relevance_score": _SHARE},
                    {"document": shape({"text": STRING})},
                )
            ),
            "usage": _TEXTS_USAGE,
            "meta": OBJECT,
        }
    ),
    "Scores": shape(
        {
            "id": STRING,
            "object": {"const": "list"},
            "created": COUNT,
            "model": STRING,
            "data": items(shape({"object": {"const": "score"}, "index": COUNT, "score": _SHARE})),
            "usage": _TEXTS_USAGE,
        }
    ),
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
        {"refusal": STRING, "tool_calls": items(OBJECT)},
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
    "TextModel": shape(
        {
            "id": STRING,
            "object": {"const": "model"},
            "created": COUNT,
            "owned_by": STRING,
            "max_model_len": COUNT,
            "kind": one_of("embedding", "rerank"),
            "prompts": items(STRING),
        },
        {"num_dimensions": COUNT},
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

_TEXT_OR_NULL, _NUMBER_OR_NULL, _WHOLE = nullable(STRING), nullable(NUMBER), nullable(INTEGER)
_OF_TYPE = {
    "str": STRING, "bool": BOOLEAN, "int": COUNT,
    "str | None": _TEXT_OR_NULL, "int | None": _WHOLE, "float | None": _NUMBER_OR_NULL,
}  # fmt: skip
_NOT_SHOWN = re.compile(r"t_\w+_us|restored_us|paused_us|num_timed_tokens|rid|prompt")
"""Columns of which the log shows stages, another name, or nothing."""
_LOG: Json = {
    "LogRow": shape(
        {"cursor": INTEGER, "id": STRING, "run_id": INTEGER, "user": STRING}
        | {
            name: _OF_TYPE[str(type_)]
            for name, type_ in LogRow.__annotations__.items()
            if not _NOT_SHOWN.fullmatch(name)
        }
        | dict.fromkeys(("handoff_bytes", "handoff_blocks"), _WHOLE)
        | dict.fromkeys((f"{stage}_ms" for stage in STAGES), _NUMBER_OR_NULL)
        | dict.fromkeys(("ttft_ms", "first_itl_ms", "tpot_ms", "e2e_ms"), _NUMBER_OR_NULL)
    ),
    "LogEvent": shape(
        {"cursor": INTEGER, "run_id": INTEGER, "actor": _TEXT_OR_NULL}
        | dict.fromkeys(("at", "severity", "code", "message"), STRING)
    ),
    "Usage": shape(
        dict.fromkeys(("requests", "errors", "prompt_tokens"), COUNT)
        | {"completion_tokens": _WHOLE}
        | dict.fromkeys(("prefill_ms", "decode_ms", "prefill_j", "decode_j"), _NUMBER_OR_NULL)
        | dict.fromkeys(("energy_j", "j_per_token"), _NUMBER_OR_NULL),
        dict.fromkeys(("user", "model", "day"), STRING)
        | {"refused": COUNT, "refused_most": _TEXT_OR_NULL},
    ),
}


def replies() -> Json:
    """Return the JSON schemas of all replies by name; frames have types of their own."""
    _, frames = msgspec.json.schema_components([Frame], ref_template=ref("{name}")["$ref"])
    return {**_REPLIES, **_LOG, **frames}
