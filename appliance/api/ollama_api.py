"""Ollama's POST /api/chat and /api/generate: their fields, brought into those of a chat.

Owns: which fields there are, and what is refused by name.
Invariant: what is answered is what a client of OpenAI's API would have asked for.
Never: keeps anything between two requests.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from appliance.api.ask import Ask
from appliance.api.chat_messages import MAX_MESSAGES
from appliance.api.openai import chat_ask, completion_ask
from appliance.json_fields import Fields, invalid_type, invalid_value, unsupported
from appliance.request import ModelInfo

Json = dict[str, Any]

_OPTIONS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "seed": "seed",
    "stop": "stop",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}
"""Ollama's options, and what they are called in OpenAI's or vLLM's API."""
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "typical_p": (1, 1.0),
    "tfs_z": (1, 1.0),
    "mirostat": (0,),
    "penalize_newline": (True,),
}
"""Options that would change the answer, and the values with which they do not."""
_NO_EFFECT = {
    *("num_ctx", "num_keep", "num_batch", "num_gpu", "main_gpu", "num_thread", "low_vram"),
    *("use_mmap", "use_mlock", "numa", "vocab_only", "f16_kv", "repeat_last_n"),
    *("mirostat_tau", "mirostat_eta"),
}
"""Options about how a model is loaded; what is loaded here is the operator's."""


def chat_ask_of(fields: Fields, model: ModelInfo) -> Ask:
    """Validate a body of /api/chat."""
    messages = fields.get("messages")
    if messages is not None and not isinstance(messages, list):
        raise invalid_type("messages", "a list of messages", messages)
    if len(messages or []) > MAX_MESSAGES:
        raise invalid_value("messages", f"has more than {MAX_MESSAGES} messages")
    places = [f"messages[{index}]" for index in range(len(messages or []))]
    said = [_message(Fields.of(m, at)) for m, at in zip(messages or [], places, strict=True)]
    chat = {**_common(fields), "messages": said, "tools": _tools(fields.get("tools"))}
    return _finished(chat_ask(Fields(chat), model), fields, chat)


def generate_ask(fields: Fields, model: ModelInfo) -> Ask:
    """Validate a body of /api/generate: a chat of one message, or with `raw` a bare prompt."""
    prompt, system = fields.text("prompt") or "", fields.text("system")
    if fields.get("images"):
        raise unsupported("images", "are not supported: this model reads text")
    if fields.get("template"):
        raise unsupported("template", "is a program, and is not run; `raw` sends a bare prompt")
    if fields.get("context"):
        raise unsupported("context", "is not kept; send the conversation to /api/chat")
    common, suffix = _common(fields), fields.text("suffix")
    if fields.boolean("raw") or suffix:
        plain = {**common, "prompt": prompt, "suffix": suffix}
        plain.pop("chat_template_kwargs", None)
        if plain.get("max_tokens") is None:
            plain["max_tokens"] = 128
        return _finished(completion_ask(Fields(plain), model, 1), fields, plain)
    messages = [{"role": "user", "content": prompt}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    chat = {**common, "messages": messages}
    return _finished(chat_ask(Fields(chat), model), fields, chat)


def _common(fields: Fields) -> Json:
    """What both have; options that nobody knows are told as ignored."""
    options = fields.nested("options") or Fields({}, "options")
    asked: Json = {"model": fields.get("model"), "stream": fields.boolean("stream", default=True)}
    asked |= {ours: options.get(theirs) for theirs, ours in _OPTIONS.items()}
    for name, neutral in _NEUTRAL.items():
        value = options.get(name)
        if value is not None and value not in neutral:
            raise unsupported(options.path(name))
    num_predict = options.integer("num_predict", -2)
    if num_predict is not None and num_predict > 0:
        asked["max_tokens"] = num_predict
    asked["response_format"] = _form(fields.get("format"))
    think = fields.get("think")
    if think is not None:
        asked["chat_template_kwargs"] = {"enable_thinking": think not in (False, "none")}
    fields.get("keep_alive")  # the model stays as long as the daemon
    unknown = [name for name in options.ignored if name not in _NO_EFFECT]
    asked["_ignored"] = tuple(f"options.{name}" for name in unknown)
    return asked


def _finished(ask: Ask, fields: Fields, asked: Json) -> Ask:
    return dataclasses.replace(ask, ignored=(*asked["_ignored"], *fields.ignored))


def _form(value: object) -> Json | None:
    """`json`, or a schema."""
    if value in (None, ""):
        return None
    if value == "json":
        return {"type": "json_object"}
    if isinstance(value, dict):
        return {"type": "json_schema", "json_schema": {"schema": value}}
    raise invalid_value("format", "must be json, or a JSON schema")


def _message(fields: Fields) -> Json:
    """Ollama's calls have no ids, and their arguments are objects."""
    if fields.get("images"):
        raise unsupported(fields.path("images"), "are not supported: this model reads text")
    message: Json = {"role": fields.get("role"), "content": fields.get("content") or ""}
    if calls := fields.get("tool_calls"):
        message["tool_calls"] = calls
    if thinking := fields.text("thinking"):
        message["reasoning_content"] = thinking
    for name in ("tool_name", "tool_call_id"):
        if (text := fields.text(name)) is not None:
            message["name" if name == "tool_name" else name] = text
    return message


def _tools(value: object) -> object:
    """Older clients leave out what type a tool is."""
    if not isinstance(value, list):
        return value
    return [
        {"type": "function", **one} if isinstance(one, dict) and one.get("type") is None else one
        for one in value
    ]
