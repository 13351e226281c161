"""JSON schemas of what Anthropic's and Ollama's APIs are asked, and answer.

Owns: them, as data.
Invariant: as that of request_schemas.
Never: checks anything.
"""

from __future__ import annotations

from appliance.api.request_schemas import FUNCTION_NAME, SAMPLING, STOPS
from appliance.api.schemas import (
    BOOLEAN,
    COUNT,
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
from appliance.api.tools import MAX_TOOLS

_TEXT_BLOCK: Json = shape({"type": {"const": "text"}, "text": STRING})
_TEXTS: Json = {"anyOf": [STRING, items(_TEXT_BLOCK)]}
_OLLAMA: Json = {
    "model": STRING,
    "stream": BOOLEAN,
    "format": {"anyOf": [one_of("json"), OBJECT]},
    "think": {"anyOf": [BOOLEAN, one_of("low", "medium", "high")]},
    "keep_alive": {"anyOf": [STRING, whole(-1)]},
    "options": shape(
        {},
        {
            **{name: SAMPLING[name] for name in ("temperature", "top_k", "top_p", "min_p")},
            **{name: SAMPLING[name] for name in ("repeat_penalty", "presence_penalty")},
            "frequency_penalty": SAMPLING["frequency_penalty"],
            "seed": whole(0),
            "num_predict": whole(-2),
            "num_ctx": COUNT,
            "stop": STOPS,
        },
    ),
}

REQUESTS: Json = {
    "MessagesRequest": shape(
        {"messages": items(ref("AnthropicMessage"), minItems=1), "max_tokens": whole(1)},
        {
            "model": STRING,
            "system": _TEXTS,
            "temperature": within(0, 1),
            "top_p": SAMPLING["top_p"],
            "top_k": whole(0),
            "stop_sequences": STOPS,
            "stream": BOOLEAN,
            "thinking": shape({"type": one_of("enabled", "adaptive", "disabled")}),
            "tools": items(
                shape({"name": FUNCTION_NAME, "input_schema": OBJECT}, {"description": STRING}),
                maxItems=MAX_TOOLS,
            ),
            "tool_choice": shape(
                {"type": one_of("auto", "none")}, {"disable_parallel_tool_use": BOOLEAN}
            ),
            "metadata": OBJECT,
        },
    ),
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
        {"messages": items(ref("OllamaMessage"), minItems=1)},
        {**_OLLAMA, "tools": items(OBJECT, maxItems=0)},
    ),
    "OllamaMessage": shape(
        {"role": one_of("system", "user", "assistant", "tool"), "content": STRING},
        {"thinking": STRING, "tool_name": STRING},
    ),
    "OllamaGenerateRequest": shape(
        {"prompt": {"type": "string", "minLength": 1}},
        {**_OLLAMA, "system": STRING, "raw": BOOLEAN},
    ),
    "OllamaPullRequest": shape(
        {"model": {"type": "string", "pattern": "^[A-Za-z0-9]{1,20}/[A-Za-z0-9]{1,20}$"}},
        {"stream": BOOLEAN},
    ),
    "OllamaModelRequest": shape({"model": STRING}, {"name": STRING, "stream": BOOLEAN}),
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
            "usage": shape({"input_tokens": COUNT, "output_tokens": COUNT}),
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
        {"message": shape({"role": STRING, "content": STRING}), "response": STRING},
    ),
    "OllamaModels": shape({"models": items(shape({"name": STRING, "model": STRING}))}),
    "OllamaModel": shape({"capabilities": items(STRING), "model_info": OBJECT}),
    "OllamaError": shape({"error": STRING}),
}
