"""Serve /tokenize and /detokenize in vLLM's and llama.cpp's shapes.

Owns: their fields, and how many texts are worked on at once.
Invariant: work that grows with the text is done in turns, replies included, so that generating
keeps its threads.
Never: generates, or touches the queue; asks for a role.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from appliance.api.fair_threads import Turns
from appliance.api.messages_api import count_ask, in_anthropics_words
from appliance.api.model_choice import check_model
from appliance.api.openai import read_chat
from appliance.api.openai_bodies import ChatRequest
from appliance.api.wire import appliance_of, json_response
from appliance.json_fields import Fields, check, integer, invalid_type, invalid_value
from appliance.request import ModelInfo
from engine.errors import RequestError
from engine.text.tokenizer import Tokenizer

MAX_AT_ONCE = 2
MAX_TEXT_CHARS = 1 << 20
MAX_TOKENS = 1 << 20

Json = dict[str, Any]


def tokenize_routes() -> list[Route]:
    """Both, with their turns in common."""
    api = _TokenizeApi()
    return [
        Route("/tokenize", api.tokenize, methods=["POST"]),
        Route("/detokenize", api.detokenize, methods=["POST"]),
        Route("/v1/messages/count_tokens", api.count, methods=["POST"]),
    ]


class _TokenizeApi:
    def __init__(self) -> None:
        self._turns = Turns("tokenize", MAX_AT_ONCE)

    async def tokenize(self, http: Request) -> Response:
        """A text, or the prompt that a chat becomes, as token ids."""
        appliance, body = appliance_of(http), await http.body()

        def work() -> Json:
            fields = Fields.of_body(body)
            check_model(fields.get("model"), appliance.model)
            tokenizer = appliance.tokenizer
            ids = _encode(fields, tokenizer, appliance.model)
            strings = None
            if fields.boolean("return_token_strs"):
                strings = [tokenizer.token(one) or "" for one in ids]
            has_pieces = fields.boolean("with_pieces")
            return {
                "count": len(ids),
                "max_model_len": appliance.model.max_model_len,
                "tokens": [_piece(one, tokenizer) for one in ids] if has_pieces else ids,
                "token_strs": strings,
            }

        return await self._turns.run(http, lambda: json_response(work()))

    async def count(self, http: Request) -> Response:
        """How many tokens the prompt of Anthropic's messages has."""
        appliance, body = appliance_of(http), await http.body()
        tokenizer, model = appliance.tokenizer, appliance.model

        def work() -> Json:
            try:
                ask = count_ask(Fields.of_body(body), model)
            except RequestError as error:
                raise in_anthropics_words(error) from error
            assert ask.chat is not None
            text = ask.chat.render(tokenizer, model.output_format).text
            if len(text) > MAX_TEXT_CHARS:
                raise invalid_value("messages", f"has more than {MAX_TEXT_CHARS} characters")
            return {"input_tokens": len(tokenizer.encode(text, add_special_tokens=False))}

        return await self._turns.run(http, lambda: json_response(work()))

    async def detokenize(self, http: Request) -> Response:
        """Token ids as text, special tokens included."""
        appliance, body = appliance_of(http), await http.body()

        def work() -> Json:
            fields = Fields.of_body(body)
            check_model(fields.get("model"), appliance.model)
            ids = fields.required("tokens")
            if not isinstance(ids, list):
                raise invalid_type("tokens", "a list of token ids", ids)
            if len(ids) > MAX_TOKENS:
                raise invalid_value("tokens", f"has more than {MAX_TOKENS} ids")
            highest = appliance.tokenizer.vocab_size - 1
            ids = [integer(one, "tokens", 0, highest) for one in ids]
            text = appliance.tokenizer.decode(ids, skip_special_tokens=False)
            return {"prompt": text, "content": text}

        return await self._turns.run(http, lambda: json_response(work()))


def _encode(fields: Fields, tokenizer: Tokenizer, model: ModelInfo) -> list[int]:
    """Like the two POSTs that generate: a chat's template writes its own special tokens."""
    given = [one for one in ("prompt", "content", "messages") if fields.get(one) is not None]
    if len(given) > 1:
        raise invalid_value(given[1], f"cannot be together with `{given[0]}`")
    name = given[0] if given else "prompt"
    if name == "messages":
        chat = read_chat(check(fields.values, ChatRequest))
        text = chat.render(tokenizer, model.output_format).text
    else:
        text = fields.required(name)
    if not isinstance(text, str):
        raise invalid_type(name, "a string", text)
    if len(text) > MAX_TEXT_CHARS:
        raise invalid_value(name, f"has more than {MAX_TEXT_CHARS} characters")
    has_special = fields.boolean("add_special")
    is_text = name == "prompt" or has_special
    return tokenizer.encode(text, fields.boolean("add_special_tokens", default=is_text))


def _piece(token_id: int, tokenizer: Tokenizer) -> Json:
    """A token and its text, which is bytes where it is a part of a character."""
    data = tokenizer.token_bytes(token_id) or b""
    try:
        return {"id": token_id, "piece": data.decode()}
    except UnicodeDecodeError:
        return {"id": token_id, "piece": list(data)}
