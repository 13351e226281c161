"""Translate OpenAI's /v1/responses to chats and back, and store responses.

Tools that OpenAI's servers run (a search, an interpreter) are left out and named in the header
x-penstock-ignored. So are items that only their own server could read: encrypted reasoning.

Owns: items of output, and the order and numbers of events; which fields and items there are, as
OpenAI's client and Codex send them, and what is refused; `previous_response_id`, `store`, and the
routes of one response.
Invariant: what is answered is the chat that a client of /v1/chat/completions would have asked for.
Never: keeps a response longer than its memory has room for, or shows it to anybody else.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from appliance.api.ask import Ask
from appliance.api.chat_messages import Message, left_out
from appliance.api.openai import chat_ask, refuse_unsupported
from appliance.api.openai_bodies import MAX_MESSAGES, MAX_PARTS, MAX_TOOLS
from appliance.api.response_events import Json
from appliance.api.wire import json_response, peer_of, require, response_not_found
from appliance.json_fields import Fields, invalid_type, invalid_value, renamed, unsupported
from appliance.request import ModelInfo, Role
from engine.errors import RequestError

NEUTRAL: dict[str, tuple[object, ...]] = {
    "conversation": (),
    "prompt": (),
    "background": (False,),
    "truncation": ("disabled", "auto"),
    "top_logprobs": (0,),
    "include": ([], ["reasoning.encrypted_content"]),
}
"""Known, not supported: the values that ask for nothing."""

PASSED = (
    *("model", "temperature", "top_p", "top_k", "min_p", "seed", "stream", "parallel_tool_calls"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "stop"),
    *("stop_token_ids", "ignore_eos", "min_tokens", "cache_salt", "chat_template_kwargs"),
)
"""The same in a chat, or vLLM's additions to both."""

_OUR_WORDS = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
}
"""What a chat's fields are called here."""

_TEXT_PARTS = ("input_text", "output_text", "text")


def response_ask(fields: Fields, model: ModelInfo, previous_items: Sequence[Any] = ()) -> Ask:
    """Validate a body of /v1/responses; it goes on from the items of an earlier one."""
    refuse_unsupported({n: fields.get(n) for n in NEUTRAL}, NEUTRAL)
    fields.get("previous_response_id"), fields.get("store")
    chat = {name: fields.get(name) for name in PASSED}
    chat["messages"] = _messages(fields, previous_items)
    chat["max_completion_tokens"] = fields.get("max_output_tokens")
    chat["response_format"] = _response_format(fields.nested("text"))
    tools = [
        Fields.of(one, f"tools[{index}]")
        for index, one in enumerate(fields.items("tools", MAX_TOOLS))
    ]
    chat["tools"] = [_tool(tool) for tool in tools if tool.get("type") in _CALLED]
    others = [f"tools.{index}" for index, one in enumerate(tools) if one.get("type") not in _CALLED]
    choice = fields.get("tool_choice")
    has_none = bool(others) and not chat["tools"]
    chat["tool_choice"] = None if has_none and choice == "auto" else _tool_choice(choice)
    reasoning = fields.nested("reasoning")
    chat["reasoning_effort"] = reasoning.text("effort") if reasoning else None
    _check_metadata(fields.nested("metadata"))
    drops_oldest = fields.get("truncation") == "auto"
    ignored = *others, *fields.ignored
    ask = chat_ask(chat, model)
    return dataclasses.replace(ask, drops_oldest=drops_oldest, ignored=ignored)


def _messages(fields: Fields, previous_items: Sequence[Any]) -> list[Message]:
    """The conversation; an assistant's calls belong to what it said just before."""
    asked = fields.required("input")
    if isinstance(asked, str):
        items: list[Any] = [{"role": "user", "content": asked}]
    else:
        items = fields.items("input", MAX_MESSAGES)
    if not items:
        raise invalid_value("input", "is empty")
    instructions = fields.text("instructions")
    messages: list[Message] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    if len(previous_items) + len(items) > MAX_MESSAGES:
        raise invalid_value("input", f"has more than {MAX_MESSAGES} items, earlier ones included")
    thought = ""
    for index, item in enumerate([*previous_items, *items], start=-len(previous_items)):
        message = _message(Fields.of(item, f"input[{index}]"), is_last=index == len(items) - 1)
        if message is None:
            continue
        if message["role"] == "":
            thought = message["content"]  # of what the assistant says next
            continue
        if thought and message["role"] == "assistant":
            message["reasoning_content"], thought = thought, ""
        last = messages[-1] if messages else {}
        if message.get("tool_calls") and last.get("role") == "assistant":
            last.setdefault("tool_calls", []).extend(message["tool_calls"])
        else:
            messages.append(message)
    return messages


_UNREADABLE = ("web_search_call", "file_search_call", "image_generation_call", "local_shell_call")
"""Items of tools that are not served here, and say nothing to a model."""


def _message(item: Fields, *, is_last: bool) -> Message | None:
    """One item; None if it says nothing. Reasoning has no role of its own."""
    kind = item.get("type")
    if kind in _UNREADABLE:
        return None
    if kind == "reasoning":
        return {"role": "", "content": _reasoning(item)}
    if kind == "custom_tool_call":
        function = {"name": _string(item, "name"), "arguments": {"input": _string(item, "input")}}
        call = {"type": "function", "id": _string(item, "call_id"), "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    if kind in (None, "message"):
        role = _string(item, "role")
        is_asked = is_last and role == "user"
        return {"role": role, "content": _text(item, "content", is_last=is_asked)}
    if kind == "function_call":
        function = {"name": _string(item, "name"), "arguments": _string(item, "arguments")}
        call = {"type": "function", "id": _string(item, "call_id"), "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    if kind == "function_call_output" and item.get("call_id") is None:
        # Codex tells a goal so, which answers no call
        return {"role": "user", "content": _text(item, "output")}
    if kind in ("function_call_output", "custom_tool_call_output", "local_shell_call_output"):
        call_id = _string(item, "call_id")
        return {"role": "tool", "tool_call_id": call_id, "content": _text(item, "output")}
    raise unsupported(item.path("type"), "is not supported; messages and function calls are")


def _reasoning(item: Fields) -> str:
    """Its text, or its summary; what is encrypted only says nothing here."""
    parts = item.items("content", MAX_PARTS) or item.items("summary", MAX_PARTS)
    places = [f"{item.path('content')}[{index}]" for index in range(len(parts))]
    texts = [Fields.of(one, at).text("text") for one, at in zip(parts, places, strict=True)]
    return "\n".join(filter(None, texts))


def _text(item: Fields, name: str, *, is_last: bool = False) -> str:
    """A string; parts are joined by line breaks, as in a chat."""
    value = item.required(name)
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise invalid_type(item.path(name), "a string or a list of text parts", value)
    if len(value) > MAX_PARTS:
        raise invalid_value(item.path(name), f"has {len(value)} parts, at most {MAX_PARTS} may be")
    parts = [Fields.of(one, f"{item.path(name)}[{index}]") for index, one in enumerate(value)]
    texts = []
    for part in parts:
        if part.get("type") == "refusal":
            texts.append(_string(part, "refusal"))
            continue
        if part.get("type") == "input_image":
            texts.append(left_out(part.path("type"), "input_image", is_last=is_last))
            continue
        if part.get("type") not in _TEXT_PARTS:
            raise unsupported(part.path("type"), "is not supported; only text is")
        texts.append(_string(part, "text"))
    return "\n".join(texts)


def _response_format(text: Fields | None) -> dict[str, Any] | None:
    """A chat has a schema's name and strictness in an object of their own."""
    form = text.nested("format") if text else None
    if form is None:
        return None
    kind = form.required("type")
    if kind != "json_schema":
        return {"type": kind}
    schema = {name: form.get(name) for name in ("name", "schema", "strict")}
    return {"type": kind, "json_schema": schema | {"schema": form.required("schema")}}


_CALLED = ("function", "custom")
"""Types of tools that a client runs itself."""
_INPUT: Json = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
}


def _tool(tool: Fields) -> dict[str, Any]:
    """Bring a tool into a chat's form; one that takes a text, as Codex's patch, gets one string."""
    if tool.get("type") == "custom":
        form = tool.nested("format")
        grammar = form.text("definition") if form else None
        told = [tool.text("description"), grammar and f"The input follows this grammar:\n{grammar}"]
        description = "\n\n".join(filter(None, told))
        function = {"name": tool.get("name"), "description": description, "parameters": _INPUT}
        return {"type": "function", "function": function}
    names = ("name", "description", "parameters", "strict")
    function = {name: tool.get(name) for name in names if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _tool_choice(choice: object) -> object:
    if not isinstance(choice, dict):
        return choice
    fields = Fields(choice, "tool_choice")
    if fields.get("type") == "allowed_tools":
        tools = [_tool_choice(one) for one in fields.items("tools", MAX_TOOLS)]
        allowed = {"mode": fields.get("mode"), "tools": tools}
        return {"type": "allowed_tools", "allowed_tools": allowed}
    if fields.get("type") not in _CALLED:
        raise unsupported("tool_choice.type", "is not supported; only functions are")
    return {"type": "function", "function": {"name": _string(fields, "name")}}


def _check_metadata(metadata: Fields | None) -> None:
    """It comes back with the response, so it is what OpenAI says it is."""
    if metadata is not None:
        for name in metadata.ignored:
            metadata.text(name)


def _string(fields: Fields, name: str) -> str:
    fields.required(name)
    return fields.text(name) or ""


def in_our_words(error: RequestError) -> RequestError:
    """A chat's refusal, naming the field that the client knows."""
    return renamed(error, _OUR_WORDS)


MAX_RESPONSES = 1024
MAX_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class _StoredResponse:
    owner: str
    response: bytes
    items: bytes
    """The conversation up to its end: items of input and output."""

    @property
    def num_bytes(self) -> int:
        return len(self.response) + len(self.items)


class ResponseStore:
    """Responses by id; used by the loop and by threads that read bodies."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses, self._max_bytes = max_responses, max_bytes
        self._kept: OrderedDict[str, _StoredResponse] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def keep(self, owner: str, response: Json, items: list[Json]) -> None:
        """Remember one, and forget the oldest beyond the bounds."""
        kept = _StoredResponse(owner, msgspec.json.encode(response), msgspec.json.encode(items))
        with self._lock:
            self._kept[response["id"]] = kept
            self._num_bytes += kept.num_bytes
            while len(self._kept) > self._max_responses or self._num_bytes > self._max_bytes:
                _, oldest = self._kept.popitem(last=False)
                self._num_bytes -= oldest.num_bytes

    def response(self, response_id: str, owner: str) -> bytes:
        """One as it was sent, as JSON.

        Raises:
            RequestError: 404: there is none, or it is another's.
        """
        return self._of(response_id, owner).response

    def items(self, response_id: str, owner: str) -> list[Json]:
        """The conversation that it ended.

        Raises:
            RequestError: 404, likewise.
        """
        items: list[Json] = msgspec.json.decode(self._of(response_id, owner).items)
        return items

    def forget(self, response_id: str, owner: str) -> None:
        """Delete a stored response.

        Raises:
            RequestError: 404, likewise.
        """
        kept = self._of(response_id, owner)
        with self._lock:
            if self._kept.pop(response_id, None) is not None:
                self._num_bytes -= kept.num_bytes

    def _of(self, response_id: str, owner: str) -> _StoredResponse:
        with self._lock:
            kept = self._kept.get(response_id)
            if kept is None or kept.owner != owner:
                raise response_not_found(response_id)
            self._kept.move_to_end(response_id)
            return kept


def memory_routes() -> list[Route]:
    """A response that is kept, by its id."""
    return [
        Route("/v1/responses/{id}", response),
        Route("/v1/responses/{id}", forget, methods=["DELETE"]),
        Route("/v1/responses/{id}/input_items", input_items),
    ]


async def response(http: HttpRequest) -> Response:
    """GET /v1/responses/{id}: a kept response, as it was sent."""
    found = _store(http).response(http.path_params["id"], peer_of(http).name)
    return Response(found, media_type="application/json")


async def input_items(http: HttpRequest) -> Response:
    """GET /v1/responses/{id}/input_items: the conversation that a kept response answered to."""
    response_id, owner = http.path_params["id"], peer_of(http).name
    kept = msgspec.json.decode(_store(http).response(response_id, owner))
    items = _store(http).items(response_id, owner)
    asked = items[: len(items) - len(kept["output"])]
    told = [{"id": f"item_{index}", **one} for index, one in enumerate(asked)]
    if http.query_params.get("order") != "asc":
        told.reverse()
    ends = {"first_id": told[0]["id"], "last_id": told[-1]["id"]} if told else {}
    return json_response({"object": "list", "data": told, "has_more": False, **ends})


async def forget(http: HttpRequest) -> Response:
    """Delete a stored response."""
    response_id = http.path_params["id"]
    _store(http).forget(response_id, require(http, Role.USER).name)
    return json_response({"id": response_id, "object": "response", "deleted": True})


def previous_items(fields: Fields, http: HttpRequest) -> list[Json]:
    """The items that a conversation goes on from; empty where it begins.

    Raises:
        RequestError: 400 `previous_response_not_found`, as OpenAI says it.
    """
    previous = fields.text("previous_response_id")
    if not previous:
        return []
    try:
        return _store(http).items(previous, peer_of(http).name)
    except RequestError as error:
        raise RequestError(
            f"there is no response `{previous[:200]}` to go on from",
            code="previous_response_not_found",
            param="previous_response_id",
            hint="responses are kept in memory for a while; send the conversation in full",
        ) from error


def store_for(fields: Fields, http: HttpRequest) -> Callable[[Json], None] | None:
    """What keeps a response that has ended; None where its client does not want that."""
    if not fields.boolean("store", default=True):
        return None
    owner, store = peer_of(http).name, _store(http)
    items = [*previous_items(fields, http), *_items(fields.get("input"))]

    def keep(ended: Json) -> None:
        store.keep(owner, ended, [*items, *ended["output"]])

    return keep


def _items(asked: object) -> list[Json]:
    if isinstance(asked, str):
        return [{"type": "message", "role": "user", "content": asked}]
    if not isinstance(asked, list):
        raise invalid_value("input", "must be a string or a list of items")
    return asked


def _store(http: HttpRequest) -> ResponseStore:
    return cast(ResponseStore, http.app.state.responses)
