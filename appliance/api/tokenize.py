"""Serve /tokenize and /detokenize in vLLM's and llama.cpp's shapes.

Invariant: work that grows with the text is done in turns, replies included, so that generating
keeps its threads.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from appliance.api.anthropic.ask import count_ask, in_anthropics_words
from appliance.api.core.appliance import Appliance
from appliance.api.core.ask import Ask, Chat
from appliance.api.core.chat_messages import read_messages
from appliance.api.core.fair_threads import Turns
from appliance.api.core.fields import ChatRequest, TokenId
from appliance.api.core.model_choice import check_model
from appliance.api.core.prompts import checked_ids
from appliance.api.core.wire import appliance_of, json_response
from appliance.api.openai.ask import read_chat
from appliance.api.responses.ask import counted_ask, in_our_words
from appliance.api.responses.store import previous_items, with_items
from appliance.daemon.requests.request import ModelInfo
from appliance.daemon.survival.journal import anew
from appliance.json.fields import Json, check, decode_object, invalid_value
from engine.errors import RequestError
from engine.text.tokenizer import Tokenizer

MAX_AT_ONCE = 2
MAX_TEXT_CHARS = 1 << 20
MAX_TOKENS = 1 << 20


def tokenize_routes() -> list[Route]:
    """List the routes, which share their turns."""
    api = _TokenizeApi()
    return [
        Route("/tokenize", api.tokenize, methods=["POST"]),
        Route("/detokenize", api.detokenize, methods=["POST"]),
        Route("/v1/messages/count_tokens", api.count_messages, methods=["POST"]),
        Route("/v1/responses/input_tokens", api.count_input, methods=["POST"]),
    ]


class _Tokenized(Struct, kw_only=True):
    model: str | None = None
    add_special_tokens: bool | None = None
    add_special: bool | None = None
    return_token_strs: bool | None = None
    with_pieces: bool | None = None


class TokenizePrompt(_Tokenized, kw_only=True):
    """A text to tokenize, as vLLM's clients send it."""

    prompt: str


class TokenizeContent(_Tokenized, kw_only=True):
    """A text to tokenize, as llama.cpp's clients send it."""

    content: str


class TokenizeChat(ChatRequest, kw_only=True):
    """A chat to tokenize the prompt of."""

    add_special_tokens: bool | None = None
    add_special: bool | None = None
    return_token_strs: bool | None = None
    with_pieces: bool | None = None


class DetokenizeRequest(Struct, kw_only=True):
    """A body of /detokenize."""

    tokens: Annotated[list[TokenId], Meta(max_length=MAX_TOKENS)]
    model: str | None = None


class _TokenizeApi:
    def __init__(self) -> None:
        self._turns = Turns("tokenize", MAX_AT_ONCE, num_each=1)

    async def tokenize(self, http: Request) -> Response:
        """Return a text, or the prompt that a chat becomes, as token ids."""
        appliance, body = appliance_of(http), await http.body()

        def work() -> Json:
            asked = _asked(decode_object(body))
            check_model(asked.model, appliance.model)
            tokenizer = appliance.tokenizer
            ids = _encode(asked, tokenizer, appliance.model)
            strings = None
            if asked.return_token_strs:
                strings = [tokenizer.token(one) or "" for one in ids]
            return {
                "count": len(ids),
                "max_model_len": appliance.model.max_model_len,
                "tokens": [_piece(one, tokenizer) for one in ids] if asked.with_pieces else ids,
                "token_strs": strings,
            }

        return await self._turns.run(http, lambda: json_response(work()))

    async def count_messages(self, http: Request) -> Response:
        """Count the tokens of the prompt that Anthropic's messages become."""
        appliance, body = appliance_of(http), await http.body()

        def work() -> Json:
            try:
                ask = count_ask(decode_object(body), appliance.model)
                return {"input_tokens": _num_tokens(ask, appliance)}
            except RequestError as error:
                raise in_anthropics_words(error) from error

        return await self._turns.run(http, lambda: json_response(work()))

    async def count_input(self, http: Request) -> Response:
        """Count the tokens of the prompt that a response's input becomes."""
        appliance, body = appliance_of(http), await http.body()

        def work() -> Json:
            try:
                values = with_items(decode_object(body), http, anew)
                ask = counted_ask(
                    values,
                    appliance.model,
                    [one.read() for one in previous_items(values, http, anew)],
                )
                num_tokens = _num_tokens(ask, appliance)
            except RequestError as error:
                raise in_our_words(error) from error
            return {"object": "response.input_tokens", "input_tokens": num_tokens}

        return await self._turns.run(http, lambda: json_response(work()))

    async def detokenize(self, http: Request) -> Response:
        """Return the text of token ids, special tokens included."""
        appliance, body = appliance_of(http), await http.body()

        def work() -> Json:
            asked = check(decode_object(body), DetokenizeRequest)
            check_model(asked.model, appliance.model)
            tokenizer = appliance.tokenizer
            ids = checked_ids(asked.tokens, "tokens", tokenizer.vocab_size) if asked.tokens else []
            text = tokenizer.decode(ids, skip_special_tokens=False)
            return {"prompt": text, "content": text}

        return await self._turns.run(http, lambda: json_response(work()))


def _asked(values: Json) -> TokenizePrompt | TokenizeContent | TokenizeChat:
    given = [one for one in _KINDS if values.get(one) is not None]
    if len(given) > 1:
        raise invalid_value(given[1], f"cannot be together with `{given[0]}`")
    return check(values, _KINDS[given[0] if given else "prompt"])


_KINDS: dict[str, type[TokenizePrompt | TokenizeContent | TokenizeChat]] = {
    "prompt": TokenizePrompt,
    "content": TokenizeContent,
    "messages": TokenizeChat,
}


def _encode(
    asked: TokenizePrompt | TokenizeContent | TokenizeChat, tokenizer: Tokenizer, model: ModelInfo
) -> list[int]:
    """Tokenize as requests that generate do: a chat's template writes its own special tokens."""
    match asked:
        case TokenizeChat():
            chat = read_chat(asked, read_messages(asked.messages))
            name, text = "messages", _render(chat, tokenizer, model)
        case TokenizePrompt():
            name, text = "prompt", asked.prompt
        case _:
            name, text = "content", asked.content
    _check_chars(text, name)
    is_text = name == "prompt" or bool(asked.add_special)
    adds = is_text if asked.add_special_tokens is None else asked.add_special_tokens
    return tokenizer.encode(text, adds)


def _num_tokens(ask: Ask, appliance: Appliance) -> int:
    """Count the tokens of a chat's prompt."""
    tokenizer, model = appliance.tokenizer, appliance.model
    assert ask.chat is not None
    text = _render(ask.chat, tokenizer, model)
    _check_chars(text, "messages")
    return len(tokenizer.encode(text, add_special_tokens=False))


def _render(chat: Chat, tokenizer: Tokenizer, model: ModelInfo) -> str:
    return chat.render(tokenizer, model.output_format).text


def _check_chars(text: str, name: str) -> None:
    if len(text) > MAX_TEXT_CHARS:
        raise invalid_value(name, f"has more than {MAX_TEXT_CHARS} characters")


def _piece(token_id: int, tokenizer: Tokenizer) -> Json:
    """Write a token and its text, or its bytes where it is a part of a character."""
    data = tokenizer.token_bytes(token_id) or b""
    try:
        return {"id": token_id, "piece": data.decode()}
    except UnicodeDecodeError:
        return {"id": token_id, "piece": list(data)}
