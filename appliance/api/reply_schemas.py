"""JSON schemas of what is answered, as data.

Owns: the shapes of replies, of the log's rows, and of errors.
Invariant: every reply satisfies its schema; tests hold them together.
Never: checks anything.
"""

from __future__ import annotations

import msgspec

from appliance.api.request_schemas import (
    BOOLEAN,
    COUNT,
    INTEGER,
    NUMBER,
    STRING,
    TOOL_CALL,
    Json,
    items,
    nullable,
    one_of,
    ref,
    shape,
    whole,
)
from appliance.configuration.settings import ROLES
from appliance.frame.figures import STAGES
from appliance.frame.protocol import Frame

_USAGE: Json = shape(
    {"prompt_tokens": COUNT, "completion_tokens": COUNT, "total_tokens": COUNT},
    {"prompt_tokens_details": shape({"cached_tokens": COUNT})},
)
_FINISH: Json = nullable(one_of("stop", "length", "abort", "tool_calls"))
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
            "usage": shape({"input_tokens": COUNT, "output_tokens": COUNT, "total_tokens": COUNT}),
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
        | dict.fromkeys(("workers", "links"), _TEXT_OR_NULL)
        | dict.fromkeys(("peer_uid", "peer_gid", "peer_pid", "max_tokens", "seed"), _WHOLE)
        | dict.fromkeys(("handoff_bytes", "handoff_blocks", "cached_tokens"), _WHOLE)
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
