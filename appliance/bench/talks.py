"""Keep a conversation as a client of each of four APIs keeps it.

Owns: how histories, tools and results are written.
Invariant: a request has all that was said and answered before, so that each prompt begins as the
one before it did.
Never: sends anything.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from appliance.bench.exchange import Target
from appliance.bench.reply_events import ReceivedReply

Json = dict[str, Any]

_TOOLS = {
    "read_file": "Read a file of the project and return its lines with their numbers.",
    "write_file": "Write a text into a file of the project, in place of what it has.",
    "search": "Search the project for a regular expression; at most a hundred lines come back.",
    "run": "Run a command in the shell of the project and return what it prints.",
    "list_folder": "List the files of a folder with their sizes and times of change.",
    "fetch": "Fetch a page of the documentation by its address and return it as plain text.",
}
_PARAMETERS: Json = {
    "type": "object",
    "properties": {
        "target": {"type": "string", "description": "A path, pattern, command or address."},
        "limit": {"type": "integer", "description": "How many lines to return at most."},
    },
    "required": ["target"],
}


class ClientConversation(Protocol):
    """One conversation as a client of one API keeps it."""

    def request(self, new: Any, output_tokens: int) -> bytes:
        """What is asked next, ready to send.

        Args:
            new: what the user says, or the result of the last call.
            output_tokens: at most.
        """

    def hear(self, reply: ReceivedReply) -> None:
        """Keep the model's answer as a turn of the conversation."""


class CompletionTalk:
    """Bare tokens: the prompt is what was said and answered, id by id."""

    def __init__(self, target: Target, shared: list[int] | str) -> None:
        self._target = target
        self._said = shared

    def request(self, new: list[int] | str, output_tokens: int) -> bytes:
        """All that was said, and more."""
        self._say(new)
        return self._target.completion(self._said, output_tokens)

    def hear(self, reply: ReceivedReply) -> None:
        """Keep the model's answer as a turn of the conversation."""
        self._say("".join(reply.text) if isinstance(self._said, str) else reply.token_ids)

    def _say(self, new: list[int] | str) -> None:
        if isinstance(self._said, str) and isinstance(new, str):
            self._said = f"{self._said} {new}".strip()
        elif isinstance(self._said, list) and isinstance(new, list):
            self._said = [*self._said, *new]


class MessageTalk:
    """Messages, which each API has in a form of its own.

    An agent answers each turn with a call, whether or not this model has made one, and the next
    turn is its result: so loops look alike whatever a model says.
    """

    def __init__(self, target: Target, api: str, system: str, *, has_tools: bool) -> None:
        self._target = target
        self._api = _APIS[api]
        self._system = system
        self._has_tools = has_tools
        self._items: list[Json] = []
        self._call_id: str | None = None
        """Of the call that waits for its result."""

    def request(self, new: str, output_tokens: int) -> bytes:
        """All messages, and a user's or a result."""
        if self._call_id is None:
            self._items.append({"role": "user", "content": new})
        else:
            self._items.append(self._api.result(self._call_id, new))
        return self._target.post(
            self._api.path,
            self._api.body(self._system, self._items, output_tokens, has_tools=self._has_tools),
        )

    def hear(self, reply: ReceivedReply) -> None:
        """Keep the model's answer as a turn of the conversation."""
        text = "".join(reply.text)
        if self._has_tools:
            self._call_id = f"call_{len(self._items)}"
            name = list(_TOOLS)[len(self._items) % len(_TOOLS)]
            self._items += self._api.called(text, self._call_id, name, {"target": "src/main.py"})
        else:
            self._items.append({"role": "assistant", "content": text})


class _Chat:
    path = "/v1/chat/completions"

    @staticmethod
    def body(system: str, items: list[Json], output_tokens: int, *, has_tools: bool) -> Json:
        messages = [{"role": "system", "content": system}, *items] if system else items
        body: Json = {
            "messages": messages,
            "max_tokens": output_tokens,
            "stream_options": {"include_usage": True},
        }
        functions = [_function(name) for name in _TOOLS]
        tools = [{"type": "function", "function": each} for each in functions]
        return body | {"tools": tools} if has_tools else body

    @staticmethod
    def called(text: str, call_id: str, name: str, arguments: Json) -> list[Json]:
        function = {"name": name, "arguments": _written(arguments)}
        call = {"id": call_id, "type": "function", "function": function}
        return [{"role": "assistant", "content": text, "tool_calls": [call]}]

    @staticmethod
    def result(call_id: str, text: str) -> Json:
        return {"role": "tool", "tool_call_id": call_id, "content": text}


class _Messages:
    path = "/v1/messages"

    @staticmethod
    def body(system: str, items: list[Json], output_tokens: int, *, has_tools: bool) -> Json:
        body: Json = {"messages": items, "max_tokens": output_tokens}
        if system:
            body["system"] = system
        tools = [
            {"name": name, "description": about, "input_schema": _PARAMETERS}
            for name, about in _TOOLS.items()
        ]
        return body | {"tools": tools} if has_tools else body

    @staticmethod
    def called(text: str, call_id: str, name: str, arguments: Json) -> list[Json]:
        call = {"type": "tool_use", "id": call_id, "name": name, "input": arguments}
        said = [{"type": "text", "text": text}] if text else []
        return [{"role": "assistant", "content": [*said, call]}]

    @staticmethod
    def result(call_id: str, text: str) -> Json:
        block = {"type": "tool_result", "tool_use_id": call_id, "content": text}
        return {"role": "user", "content": [block]}


class _Responses:
    path = "/v1/responses"

    @staticmethod
    def body(system: str, items: list[Json], output_tokens: int, *, has_tools: bool) -> Json:
        body: Json = {"input": items, "max_output_tokens": output_tokens, "store": False}
        if system:
            body["instructions"] = system
        tools = [{"type": "function", **_function(name)} for name in _TOOLS]
        return body | {"tools": tools} if has_tools else body

    @staticmethod
    def called(text: str, call_id: str, name: str, arguments: Json) -> list[Json]:
        call = {"type": "function_call", "call_id": call_id, "name": name}
        said = [{"role": "assistant", "content": text}] if text else []
        return [*said, call | {"arguments": _written(arguments)}]

    @staticmethod
    def result(call_id: str, text: str) -> Json:
        return {"type": "function_call_output", "call_id": call_id, "output": text}


class _Api(Protocol):
    path: str

    @staticmethod
    def body(system: str, items: list[Json], output_tokens: int, *, has_tools: bool) -> Json: ...
    @staticmethod
    def called(text: str, call_id: str, name: str, arguments: Json) -> list[Json]: ...
    @staticmethod
    def result(call_id: str, text: str) -> Json: ...


_APIS: dict[str, _Api] = {"chat": _Chat(), "messages": _Messages(), "responses": _Responses()}
APIS = ("completions", *_APIS)


def _function(name: str) -> Json:
    return {"name": name, "description": _TOOLS[name], "parameters": _PARAMETERS}


def _written(arguments: Json) -> str:
    return msgspec.json.encode(arguments).decode()
