"""List the POSTs that generate: how each decodes its body, and what its reply looks like."""

from __future__ import annotations

import dataclasses
import re
import time
from functools import partial

from starlette.requests import Request as HttpRequest

from appliance.api.anthropic.ask import in_anthropics_words, messages_ask
from appliance.api.anthropic.replies import MessageShape
from appliance.api.core.ask import Ask
from appliance.api.core.endpoint import Asked, Endpoint
from appliance.api.core.wire import appliance_of
from appliance.api.ollama.ask import chat_ask_of, generate_ask, in_ollamas_words, unloaded
from appliance.api.ollama.replies import OllamaShape
from appliance.api.openai.ask import chat_ask, completion_ask
from appliance.api.openai.replies import ReplyShape, fingerprint
from appliance.api.responses.ask import in_our_words, response_ask
from appliance.api.responses.background import respond
from appliance.api.responses.replies import ResponseShape
from appliance.api.responses.store import conversation, keep_for, previous_items, with_items
from appliance.daemon.requests.request import Request
from appliance.daemon.survival.journal import Replayed
from appliance.json.fields import Json

_CONTINUES = re.compile(rb"previous_response_id|item_reference|\\u|\x00")
"""Marks a body that may continue a long conversation; names may be in escapes or UTF-16."""


def _reply_form(
    asked: Asked, request: Request, http: HttpRequest, replayed: Replayed
) -> ReplyShape:
    appliance = appliance_of(http)
    return ReplyShape(
        ask=asked.ask,
        request=request,
        tokenizer=appliance.tokenizer,
        created=int(replayed(time.time)),
        fingerprint=fingerprint(appliance.model),
    )


def _response_ask(fields: Json, http: HttpRequest, replayed: Replayed) -> Ask:
    previous = previous_items(fields, http, replayed)
    ask = response_ask(fields, appliance_of(http).model, [one.read() for one in previous])
    items = conversation(fields, previous, is_background=ask.is_background)
    return dataclasses.replace(ask, conversation=items)


def _response_form(
    asked: Asked, request: Request, http: HttpRequest, replayed: Replayed
) -> ResponseShape:
    """Shape a response, which is kept when it has ended unless its client declines."""
    ask, tokenizer = asked.ask, appliance_of(http).tokenizer
    return ResponseShape(
        request,
        asked.fields,
        replayed,
        created_at=int(replayed(time.time)),
        origins=ask.tools.origins if ask.tools else {},
        tokenizer=tokenizer if ask.logprobs is not None else None,
        keep=keep_for(asked.fields, http, ask.conversation),
    )


ENDPOINTS = {
    "/v1/completions": Endpoint(
        id_prefix="cmpl-",
        decode=lambda fields, http, _: completion_ask(
            fields, appliance_of(http).model, appliance_of(http).max_per_request
        ),
        form=_reply_form,
    ),
    "/v1/chat/completions": Endpoint(
        id_prefix="chatcmpl-",
        decode=lambda fields, http, _: chat_ask(fields, appliance_of(http).model),
        form=_reply_form,
    ),
    "/v1/responses": Endpoint(
        id_prefix="resp_",
        decode=_response_ask,
        slow_words=_CONTINUES,
        form=_response_form,
        refusal=in_our_words,
        read=with_items,
        respond=respond,
    ),
    "/v1/messages": Endpoint(
        id_prefix="msg_",
        decode=lambda fields, http, _: messages_ask(fields, appliance_of(http).model),
        form=lambda _asked, request, _http, replayed: MessageShape(request, replayed),
        refusal=in_anthropics_words,
    ),
    "/api/chat": Endpoint(
        id_prefix="chat-",
        decode=lambda fields, http, _: chat_ask_of(fields, appliance_of(http).model),
        form=lambda _asked, request, _http, replayed: OllamaShape(request, replayed, is_chat=True),
        refusal=in_ollamas_words,
        unloads=partial(unloaded, {"message": {"role": "assistant", "content": ""}}),
    ),
    "/api/generate": Endpoint(
        id_prefix="gen-",
        decode=lambda fields, http, _: generate_ask(fields, appliance_of(http).model),
        form=lambda _asked, request, _http, replayed: OllamaShape(request, replayed, is_chat=False),
        refusal=in_ollamas_words,
        unloads=partial(unloaded, {"response": ""}),
    ),
}
