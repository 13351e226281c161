"""Translate OpenAI's /v1/responses to chats and back, and store responses.

Tools that OpenAI's servers run (a search, an interpreter) are left out and named in the header
x-penstock-ignored. So are items that only their own server could read: encrypted reasoning.

Owns: what is refused; `previous_response_id`, `store`, and the routes of one response.
Invariant: what is answered is the chat that a client of /v1/chat/completions would have asked for.
Never: keeps a response longer than its memory has room for, or shows it to another client.
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

from appliance.api import openai_bodies as chats
from appliance.api import response_bodies as bodies
from appliance.api.ask import Ask
from appliance.api.chat_messages import left_out
from appliance.api.openai import ask_of_chat, refuse_unsupported
from appliance.api.wire import json_response, peer_of, require, response_not_found
from appliance.journal import drawn
from appliance.json_fields import Json, check, invalid_value, renamed, undeclared, unsupported
from appliance.request import ModelInfo, Role
from engine.errors import RequestError

NEUTRAL: dict[str, tuple[object, ...]] = {
    "conversation": (),
    "prompt": (),
    "background": (False,),
    "top_logprobs": (0,),
    "include": ([], ["reasoning.encrypted_content"]),
}
"""Fields that are known and not supported, with the values that ask for nothing."""

_OUR_WORDS = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
}
"""The names here of a chat's fields."""


def response_ask(values: Json, model: ModelInfo, previous_items: Sequence[Any] = ()) -> Ask:
    """Validate a body of /v1/responses, which may continue the items of an earlier one."""
    body = check(values, bodies.ResponseRequest)
    chat = {
        "max_completion_tokens": body.max_output_tokens,
        "stop": body.stop,
        "cache_salt": body.cache_salt,
    }
    ask = _ask(values, body, model, previous_items, **chat)
    ignored = (*ask.ignored, *undeclared(values, bodies.ResponseRequest, NEUTRAL))
    return dataclasses.replace(ask, ignored=ignored)


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
    tools, others = _tools(body.tools or [])
    choice = _tool_choice(body.tool_choice)
    chat = chats.ChatRequest(
        **body.shared(),
        **own,
        messages=_messages(body, previous_items),
        response_format=_response_format(body.text),
        tools=tools,
        tool_choice=None if others and not tools and choice == "auto" else choice,
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
        chat_template_kwargs=body.chat_template_kwargs,
    )
    ask = ask_of_chat(chat, model, tuple(f"tools.{index}" for index in others))
    return dataclasses.replace(ask, drops_oldest=body.truncation == "auto")


def _messages(
    body: bodies.CountedRequest, previous_items: Sequence[Any]
) -> list[chats.ChatMessage]:
    """Read the conversation; an assistant's calls belong to the message before them."""
    is_text = isinstance(body.input, str)
    items = [{"role": "user", "content": body.input}] if is_text else list(body.input)
    if len(previous_items) + len(items) > chats.MAX_MESSAGES:
        raise invalid_value(
            "input", f"has more than {chats.MAX_MESSAGES} items, earlier ones included"
        )
    messages: list[chats.ChatMessage] = []
    if body.instructions is not None:
        messages.append(chats.ChatMessage(role="system", content=body.instructions))
    thought = ""
    for index, value in enumerate([*previous_items, *items], start=-len(previous_items)):
        where = f"input[{index}]"
        item = _item(value, where)
        if isinstance(item, bodies.ReasoningItem):
            parts = item.content or item.summary or []
            thought = "\n".join(part.text for part in parts if part.text)
            continue
        if isinstance(item, bodies.UnreadItem):
            continue
        message = _message(item, where, is_last=index == len(items) - 1)
        last = messages[-1] if messages else None
        if message.role == "assistant":
            message.reasoning_content, thought = thought or None, ""
            if message.tool_calls and last and last.role == "assistant":
                last.tool_calls = last.tool_calls or []
                last.tool_calls += message.tool_calls
                continue
        messages.append(message)
    return messages


def _item(value: Any, where: str) -> bodies.Item:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind is not None and (not isinstance(kind, str) or kind not in bodies.ITEMS):
        raise unsupported(f"{where}.type", "is not supported; messages and function calls are")
    item: bodies.Item = check(value, bodies.ITEMS[kind], where)
    return item


def _message(
    item: bodies.MessageItem | bodies.FunctionCallItem | bodies.CustomCallItem | bodies.OutputItem,
    where: str,
    *,
    is_last: bool,
) -> chats.ChatMessage:
    """Write an item as a chat's message."""
    if isinstance(item, bodies.MessageItem):
        is_asked = is_last and item.role == "user"
        text = _text(item.content, where, is_last=is_asked)
        return chats.ChatMessage(role=item.role, content=text)
    if isinstance(item, bodies.FunctionCallItem | bodies.CustomCallItem):
        if isinstance(item, bodies.CustomCallItem):
            arguments: str | Json = {"input": item.input}
        else:
            arguments = item.arguments
        call = chats.ToolCall(chats.CalledFunction(item.name, arguments), id=item.call_id)
        return chats.ChatMessage(role="assistant", tool_calls=[call])
    text = _text(item.output, where, name="output")
    if item.call_id is None:  # Codex tells a goal so, which answers no call
        return chats.ChatMessage(role="user", content=text)
    return chats.ChatMessage(role="tool", content=text, tool_call_id=item.call_id)


def _text(
    content: bodies.ItemContent, where: str, *, name: str = "content", is_last: bool = False
) -> str:
    """Join the parts of a content by line breaks, as in a chat."""
    if isinstance(content, str):
        return content
    return "\n".join(
        left_out(f"{where}.{name}[{index}].type", "input_image", is_last=is_last)
        if isinstance(part, bodies.InputImage)
        else part.refusal
        if isinstance(part, chats.RefusalPart)
        else part.text
        for index, part in enumerate(content)
    )


def _response_format(text: bodies.TextSettings | None) -> chats.ResponseFormat | None:
    """Write the form as in a chat, where a schema has its name and strictness beside it."""
    form = text.format if text else None
    if isinstance(form, bodies.FlatSchemaFormat):
        return chats.SchemaFormat(chats.NamedSchema(form.schema, form.name, form.strict))
    return form


_INPUT: Json = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
}


def _tools(values: list[Any]) -> tuple[list[Json], list[int]]:
    """Write tools as in a chat; list the indexes of tools that OpenAI's servers would run."""
    tools, others = [], []
    for index, value in enumerate(values):
        where = f"tools[{index}]"
        kind = check(value, bodies.OtherTool, where).type
        if kind not in ("function", "custom"):
            others.append(index)
            continue
        tool = check(value, bodies.CustomTool if kind == "custom" else bodies.FunctionTool, where)
        if isinstance(tool, bodies.CustomTool):
            grammar = tool.format.definition if tool.format else None
            told = [tool.description, grammar and f"The input follows this grammar:\n{grammar}"]
            description = "\n\n".join(filter(None, told))
            function = {"name": tool.name, "description": description, "parameters": _INPUT}
        else:
            fields = msgspec.structs.asdict(tool)
            function = {name: one for name, one in fields.items() if one is not None}
        tools.append({"type": "function", "function": function})
    return tools, others


def _tool_choice(
    choice: chats.ToolMode
    | bodies.FunctionChoice
    | bodies.CustomChoice
    | bodies.AllowedChoice
    | None,
) -> chats.ToolMode | chats.ChosenTool | chats.ChosenTools | None:
    if isinstance(choice, bodies.AllowedChoice):
        tools = [chats.ChosenTool(chats.ChosenFunction(one.name)) for one in choice.tools]
        return chats.ChosenTools(chats.AllowedTools(choice.mode, tools))
    if isinstance(choice, bodies.FunctionChoice | bodies.CustomChoice):
        return chats.ChosenTool(chats.ChosenFunction(choice.name))
    return choice


def in_our_words(error: RequestError) -> RequestError:
    """Name the field that the client knows, in a chat's refusal."""
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
        """Return a response as it was sent, as JSON.

        Raises:
            RequestError: 404: it does not exist, or is another client's.
        """
        return self._of(response_id, owner).response

    def items(self, response_id: str, owner: str) -> list[Json]:
        """Return the conversation that a response ended.

        Raises:
            RequestError: 404: it does not exist, or is another client's.
        """
        items: list[Json] = msgspec.json.decode(self._of(response_id, owner).items)
        return items

    def forget(self, response_id: str, owner: str) -> None:
        """Delete a stored response.

        Raises:
            RequestError: 404: it does not exist, or is another client's.
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
    """List the routes of a kept response."""
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


def previous_items(values: Json, http: HttpRequest) -> list[Json]:
    """Find the items of the conversation to continue; empty where it begins.

    Raises:
        RequestError: 400 `previous_response_not_found`, as OpenAI says it.
    """
    previous = check(values, bodies.StoredResponses).previous_response_id
    if not previous:
        return []
    try:
        return drawn(_store(http).items, previous, peer_of(http).name)
    except RequestError as error:
        raise RequestError(
            f"there is no response `{previous[:200]}` to continue",
            code="previous_response_not_found",
            param="previous_response_id",
            hint="responses are kept in memory for a while; send the conversation in full",
        ) from error


def store_for(values: Json, http: HttpRequest) -> Callable[[Json], None] | None:
    """Make what keeps a response that has ended; None where its client does not want that."""
    if check(values, bodies.StoredResponses).store is False:
        return None
    owner, store, asked = peer_of(http).name, _store(http), values["input"]
    if isinstance(asked, str):
        asked = [{"type": "message", "role": "user", "content": asked}]
    items = [*previous_items(values, http), *asked]

    def keep(ended: Json) -> None:
        store.keep(owner, ended, [*items, *ended["output"]])

    return keep


def _store(http: HttpRequest) -> ResponseStore:
    return cast(ResponseStore, http.app.state.responses)
