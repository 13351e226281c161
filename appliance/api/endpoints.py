"""List the POSTs that generate: how each decodes its body, and what its reply looks like.

Owns: the table, and the first step of a request: bytes to a validated Ask.
Invariant: what is asked by any of them takes the four steps of generation.generate.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from starlette.requests import Request as HttpRequest

from appliance.api.anthropic.ask import in_anthropics_words, messages_ask
from appliance.api.anthropic.replies import MessageShape
from appliance.api.core.ask import Ask
from appliance.api.core.respond import ReplyForm
from appliance.api.core.wire import appliance_of
from appliance.api.ollama.ask import chat_ask_of, generate_ask, in_ollamas_words
from appliance.api.ollama.replies import OllamaShape
from appliance.api.openai.ask import chat_ask, completion_ask
from appliance.api.openai.replies import ReplyShape, fingerprint
from appliance.api.responses.ask import in_our_words, response_ask
from appliance.api.responses.replies import ResponseShape
from appliance.api.responses.store import keep_for, previous_items, with_items
from appliance.daemon.requests.request import Request
from appliance.daemon.survival.journal import drawn
from appliance.json.fields import Json, decode_object, invalid_value
from engine.errors import RequestError


class Asked(NamedTuple):
    """A decoded body."""

    ask: Ask
    fields: Json
    """The body's own words."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Describe one POST that generates."""

    id_prefix: str
    """Of its requests' ids."""
    decode: Callable[[Json, HttpRequest], Ask]
    """Validates a body; called in a thread where that is large."""
    form: Callable[[Asked, Request, HttpRequest], ReplyForm]
    """What its replies look like."""
    refusal: Callable[[RequestError], RequestError] = lambda error: error
    """A refusal of what was asked, in words that its clients know."""
    read: Callable[[Json, HttpRequest], Json] = lambda fields, _http: fields
    """Completes a body by what is kept here."""


def decode(http: HttpRequest, endpoint: Endpoint, body: bytes) -> Asked:
    """Decode and validate a body; refuse more choices than the queue would take.

    Raises:
        RequestError: names the field that is wrong.
    """
    appliance, fields = appliance_of(http), endpoint.read(decode_object(body), http)
    ask = endpoint.decode(fields, http)
    _check_choices(ask, appliance.max_per_request, appliance.max_tokens_per_request)
    return Asked(ask, fields)


def _check_choices(ask: Ask, most: int, most_tokens: int) -> None:
    """Refuse what the queue would, before work is spent on it; texts it counts when it can."""
    num_sequences = max(len(ask.prompts), 1) * ask.num_choices
    if num_sequences > most:
        raise invalid_value(
            "n",
            f"asks for {num_sequences} choices in all; the queue takes {most} from one request",
        )
    num_ids = sum(len(prompt) for prompt in ask.prompts if isinstance(prompt, list))
    if num_sequences > 1 and num_ids * ask.num_choices > most_tokens:
        raise invalid_value(
            "prompt",
            f"has {num_ids * ask.num_choices} tokens in all its choices; "
            f"the queue takes {most_tokens} from one request",
        )


def _reply_form(asked: Asked, request: Request, http: HttpRequest) -> ReplyShape:
    appliance = appliance_of(http)
    return ReplyShape(
        ask=asked.ask,
        request=request,
        tokenizer=appliance.tokenizer,
        created=int(drawn(time.time)),
        fingerprint=fingerprint(appliance.model),
    )


def _response_form(asked: Asked, request: Request, http: HttpRequest) -> ResponseShape:
    """Shape a response, which is kept when it has ended unless its client declines."""
    ask, tokenizer = asked.ask, appliance_of(http).tokenizer
    return ResponseShape(
        request,
        asked.fields,
        created_at=int(drawn(time.time)),
        origins=ask.tools.origins if ask.tools else {},
        tokenizer=tokenizer if ask.logprobs is not None else None,
        keep=keep_for(asked.fields, http),
    )


ENDPOINTS = {
    "/v1/completions": Endpoint(
        id_prefix="cmpl-",
        decode=lambda fields, http: completion_ask(
            fields, appliance_of(http).model, appliance_of(http).max_per_request
        ),
        form=_reply_form,
    ),
    "/v1/chat/completions": Endpoint(
        id_prefix="chatcmpl-",
        decode=lambda fields, http: chat_ask(fields, appliance_of(http).model),
        form=_reply_form,
    ),
    "/v1/responses": Endpoint(
        id_prefix="resp_",
        decode=lambda fields, http: response_ask(
            fields, appliance_of(http).model, previous_items(fields, http)
        ),
        form=_response_form,
        refusal=in_our_words,
        read=with_items,
    ),
    "/v1/messages": Endpoint(
        id_prefix="msg_",
        decode=lambda fields, http: messages_ask(fields, appliance_of(http).model),
        form=lambda _asked, request, _http: MessageShape(request),
        refusal=in_anthropics_words,
    ),
    "/api/chat": Endpoint(
        id_prefix="chat-",
        decode=lambda fields, http: chat_ask_of(fields, appliance_of(http).model),
        form=lambda _asked, request, _http: OllamaShape(request, is_chat=True),
        refusal=in_ollamas_words,
    ),
    "/api/generate": Endpoint(
        id_prefix="gen-",
        decode=lambda fields, http: generate_ask(fields, appliance_of(http).model),
        form=lambda _asked, request, _http: OllamaShape(request, is_chat=False),
        refusal=in_ollamas_words,
    ),
}
