"""Translate requests of OpenAI's /v1/responses to chats.

Tools that OpenAI's servers run (a search, an interpreter) are left out and named in the header
x-penstock-ignored. So are items that only their own server could read: encrypted reasoning.

Invariant: what is answered is the chat that a client of /v1/chat/completions would have asked for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from appliance.api.core import fields as chats
from appliance.api.core.ask import Ask
from appliance.api.core.chat_messages import Conversation
from appliance.api.core.offered_tools import Offer, read_offer
from appliance.api.openai.ask import ask_of_chat, refuse_unsupported
from appliance.api.responses import fields as bodies
from appliance.api.responses.items import ItemReader
from appliance.daemon.requests.request import ModelInfo
from appliance.json.fields import Json, check, invalid_value, renamed, undeclared
from engine.errors import RequestError

NEUTRAL: dict[str, tuple[object, ...]] = {
    "conversation": (),
    "prompt": (),
}
"""Fields that are known and not supported, with the values that ask for nothing."""

LOGPROBS = "message.output_text.logprobs"
_INCLUDED = (LOGPROBS, "reasoning.encrypted_content")  # the second has nothing to encrypt
_OUR_WORDS = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
}
"""The names here of a chat's fields."""


def response_ask(values: Json, model: ModelInfo, previous_items: Sequence[Any] = ()) -> Ask:
    """Validate a body of /v1/responses, which may continue the items of an earlier one."""
    body = check(values, bodies.ResponseRequest)
    if body.background and body.store is False:
        raise invalid_value("background", "needs `store`")
    included = body.include or []
    chat = {
        "max_completion_tokens": body.max_output_tokens,
        "stop": body.stop,
        "cache_salt": body.cache_salt,
        "logprobs": bool(body.top_logprobs) or LOGPROBS in included,
        "top_logprobs": body.top_logprobs,
    }
    ask = _ask(values, body, model, previous_items, **chat)
    others = [f"include.{i}" for i, one in enumerate(included) if one not in _INCLUDED]
    ignored = (*ask.ignored, *others, *undeclared(values, bodies.ResponseRequest, NEUTRAL))
    is_background = bool(body.background) and not ask.is_stream
    return dataclasses.replace(ask, ignored=ignored, is_background=is_background)


def counted_ask(values: Json, model: ModelInfo, previous_items: Sequence[Any] = ()) -> Ask:
    """Validate a body of /v1/responses/input_tokens, which generates nothing."""
    return _ask(values, check(values, bodies.CountedRequest), model, previous_items)


def _ask(
    values: Json,
    body: bodies.CountedRequest,
    model: ModelInfo,
    previous_items: Sequence[Any],
    **own: Any,
) -> Ask:
    refuse_unsupported(values, NEUTRAL)
    tools = body.tools or []
    chat = chats.ChatSettings(
        **body.shared(),
        **own,
        response_format=_response_format(body.text),
        tools=tools,
        tool_choice=body.tool_choice,
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
        chat_template_kwargs=body.chat_template_kwargs,
    )
    conversation = _conversation(body, previous_items, read_offer(tools))
    ask = ask_of_chat(chat, model, conversation)
    return dataclasses.replace(ask, drops_oldest=body.truncation == "auto")


def _conversation(
    body: bodies.CountedRequest, previous_items: Sequence[Any], offer: Offer
) -> Conversation:
    """Read the conversation; an assistant's calls belong to the message before them."""
    is_text = isinstance(body.input, str)
    items = [{"role": "user", "content": body.input}] if is_text else list(body.input)
    if len(previous_items) + len(items) > chats.MAX_MESSAGES:
        raise invalid_value(
            "input", f"has more than {chats.MAX_MESSAGES} items, earlier ones included"
        )
    reader = ItemReader(offer)
    if isinstance(body.instructions, str):
        reader.conversation.say("system", body.instructions, "instructions")
    else:
        for index, value in enumerate(body.instructions or []):
            reader.read(value, f"instructions[{index}]")
    last = len(items) - 1
    for index, value in enumerate([*previous_items, *items], start=-len(previous_items)):
        reader.read(value, f"input[{index}]", is_newest=index == last)
    return reader.ended()


def _response_format(text: bodies.TextSettings | None) -> chats.ResponseFormat | None:
    """Write the form as in a chat, where a schema has its name and strictness beside it."""
    form = text.format if text else None
    if isinstance(form, bodies.FlatSchemaFormat):
        return chats.SchemaFormat(chats.NamedSchema(form.schema, form.name, form.strict))
    return form


def in_our_words(error: RequestError) -> RequestError:
    """Name the field that the client knows, in a chat's refusal."""
    return renamed(error, _OUR_WORDS)
