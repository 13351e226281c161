"""Translate Ollama's chat and generate requests to ours.

Invariant: what is answered is what a client of OpenAI's API would have asked for.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Container
from typing import Any

import msgspec

from appliance.api.core import fields as chats
from appliance.api.core.ask import Ask, PromptTooLong
from appliance.api.core.chat_messages import Conversation, read_messages
from appliance.api.core.endpoint import NothingToGenerate
from appliance.api.ollama import fields as bodies
from appliance.api.openai.ask import ask_of_chat, ask_of_completion
from appliance.daemon.requests.request import ModelInfo
from appliance.json.fields import Json, check, invalid_value, undeclared, unsupported
from appliance.observe.frame.protocol import utc_now
from engine.errors import RequestError
from engine.wire.not_json import NOT_JSON

_READ = ("temperature", "top_p", "top_k", "min_p", "seed", "stop", "presence_penalty")
_READ_TOO = ("frequency_penalty", "repeat_penalty")
"""Options that have the same names in a chat."""
_UNASKED: dict[str, tuple[object, ...]] = {
    "typical_p": (1,),
    "tfs_z": (1,),
    "mirostat": (0,),
    "penalize_newline": (True,),
}
"""Options that are not supported, with the values that ask for nothing; Ollama ignores them."""
_NO_EFFECT = {
    *("num_ctx", "num_keep", "num_batch", "num_gpu", "main_gpu", "num_thread", "low_vram"),
    *("use_mmap", "use_mlock", "numa", "vocab_only", "f16_kv", "repeat_last_n"),
    *("mirostat_tau", "mirostat_eta"),
}
"""Options about loading a model, which here is for the operator to decide."""
_REFUSED = {
    "images": "are not supported: this model reads text",
    "template": "is a program, and is not run; `raw` sends a bare prompt",
}
"""Fields of /api/generate that are known and not supported, unless they are empty."""


def chat_ask_of(values: Json, model: ModelInfo) -> Ask:
    """Validate a body of /api/chat."""
    body = check(values, bodies.OllamaChatRequest)
    # a request to load has no messages, and its other fields are checked, too
    messages = body.messages or [{"role": "user", "content": ""}]
    conversation = read_messages(messages, bodies.OllamaMessage, may_be_empty=True)
    chat = chats.ChatSettings(**_common(body), tools=body.tools)
    ask = ask_of_chat(chat, model, conversation, _ignored(values, bodies.OllamaChatRequest))
    if not body.messages:
        raise _loaded(body, model, {"message": {"role": "assistant", "content": ""}})
    kept_s = keep_alive_s(body.keep_alive)
    return dataclasses.replace(ask, drops_oldest=body.truncate is not False, keep_alive_s=kept_s)


def generate_ask(values: Json, model: ModelInfo) -> Ask:
    """Validate a body of /api/generate: a chat of one message, or with `raw` a bare prompt."""
    for name, why in _REFUSED.items():
        if values.get(name):
            raise unsupported(name, why)
    body = check(values, bodies.OllamaGenerateRequest)
    prompt, common = body.prompt or "", _common(body)
    ignored = _ignored(values, bodies.OllamaGenerateRequest, _REFUSED)
    if (body.raw and prompt) or body.suffix:
        common.pop("think")
        plain = chats.CompletionRequest(**common, prompt=prompt, suffix=body.suffix)
        if not prompt:
            raise invalid_value("prompt", "is empty")
        ask = ask_of_completion(plain, model, 1, ignored)
        kept_s, most = keep_alive_s(body.keep_alive), model.default_max_tokens
        return dataclasses.replace(ask, default_max_tokens=most, keep_alive_s=kept_s)
    conversation = Conversation()
    if body.system is not None:
        conversation.say("system", body.system, "system")
    conversation.say("user", prompt, "prompt")
    ask = ask_of_chat(chats.ChatSettings(**common), model, conversation, ignored)
    if not prompt:
        raise _loaded(body, model, {"response": ""})
    return dataclasses.replace(ask, keep_alive_s=keep_alive_s(body.keep_alive))


def in_ollamas_words(error: RequestError) -> RequestError:
    """Say as Ollama does that a prompt is too long."""
    if isinstance(error, PromptTooLong):
        count = f"{error.num_prompt_tokens} tokens, {error.max_model_len} with the answer at most"
        return RequestError(
            f"the input length exceeds the context length: {count}", code=error.code
        )
    return error


def _common(body: bodies.OllamaChatRequest | bodies.OllamaGenerateRequest) -> Json:
    """Write the fields that both have as a chat's."""
    options = body.options or bodies.Options()
    limit = options.num_predict
    return {
        "model": body.model,
        "stream": body.stream is not False,
        **{name: getattr(options, name) for name in (*_READ, *_READ_TOO)},
        "max_tokens": limit if limit is not None and limit > 0 else None,
        "response_format": _form(body.format),
        "think": body.think,
    }


def _ignored(
    values: Json, kind: type[msgspec.Struct], known: Container[str] = ()
) -> tuple[str, ...]:
    """List the fields and options that have no effect; those about loading need none."""
    options = values.get("options") or {}
    names = [
        name
        for name in undeclared(options, bodies.Options, _NO_EFFECT)
        if options[name] not in _UNASKED.get(name, ())
    ]
    others = undeclared({**values, "options": None}, kind, known)
    return (*(f"options.{name}" for name in names), *others)


def _loaded(
    body: bodies.OllamaChatRequest | bodies.OllamaGenerateRequest, model: ModelInfo, empty: Json
) -> NothingToGenerate:
    """Answer a request without a prompt: by now its model is loaded."""
    told = {"model": model.model_id, "created_at": utc_now(), **empty, "done": True}
    return NothingToGenerate(told, keep_alive_s(body.keep_alive))


def keep_alive_s(value: float | str | None) -> float | None:
    """Read Ollama's `keep_alive`, seconds or `1h30m`; less than 0 is for ever; None: not given."""
    if isinstance(value, str):
        parts = re.findall(r"([0-9.]+)(ns|us|ms|s|m|h)?", value)
        total_s = sum(float(number) * _UNITS_S[unit] for number, unit in parts)
        value = -total_s if value.startswith("-") else total_s
    return math.inf if value is not None and value < 0 else value


_UNITS_S = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1, "": 1, "m": 60, "h": 3600}


class _Unloading(msgspec.Struct):
    """All of a body that decides whether it only unloads a model."""

    keep_alive: float | str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None


def unloaded(empty: Json, body: bytes, name: str) -> NothingToGenerate | None:
    """Answer a request that only unloads a model; None: it asks for something else.

    Args:
        empty: the reply's empty part.
    """
    try:
        asked = msgspec.json.decode(body, type=_Unloading)
        is_unloading = keep_alive_s(asked.keep_alive) == 0
    except (*NOT_JSON, ValueError):
        return None  # it will be refused in the usual words
    if not is_unloading or asked.prompt or asked.messages:
        return None
    told = {"model": name, "created_at": utc_now(), **empty, "done": True}
    return NothingToGenerate(told, 0.0)


def _form(value: str | Json | None) -> chats.ResponseFormat | None:
    """Read `json`, or a schema."""
    if isinstance(value, dict):
        return chats.SchemaFormat(chats.NamedSchema(value))
    return chats.JsonFormat() if value else None
