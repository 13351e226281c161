"""Conversations with one server, kept as a client keeps them in each of four APIs.

Owns: how histories, tools and results are written in each; their pace, and what of each prompt an
infinite cache would have had.
Invariant: every turn that was due is a sample; a conversation ends at the first
that fails, and where the server's context does.
Never: computes a statistic.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from appliance.bench.load import PATIENCE_S, Measured, Target, Tick, send
from appliance.bench.reply_events import ReceivedReply
from appliance.bench.statistics import Sample
from appliance.bench.workloads import PlannedConversation

# A conversation as a client keeps it, in the words of four APIs: said so far, and asked next.
# Invariant: a request has all that was said and answered before, so that each prompt begins as the
# one before it did.
# Never: sends.


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


# --------------------------------------------------------------------------------------------------


MAX_WAIT_S = 3600.0
"""For all of it; a server that answers nothing has failed long before."""


@dataclass(frozen=True, slots=True)
class TurnPace:
    """How a workload is brought to a server."""

    api: str
    speed: float = 1.0
    """Times as fast, of pauses and beginnings."""
    length_scale: float = 1.0

    def length(self, num_tokens: int) -> int:
        """Tokens of a part that the workload has so many of."""
        return max(1, round(num_tokens * self.length_scale))

    def least_s(self, conversations: Iterable[PlannedConversation]) -> float:
        """Seconds that beginnings and pauses take, however fast a server is."""
        return max(
            (each.starts_at_s + sum(turn.think_s for turn in each.turns[1:])) / self.speed
            for each in conversations
        )


async def converse(
    target: Target,
    conversations: Sequence[PlannedConversation],
    pace: TurnPace,
    label: str,
    round_index: int,
    tick: Tick,
) -> Measured:
    """Have all conversations; the window is until the last has ended."""
    most = max(each.shared_tokens for each in conversations)
    shared = _Shared(target, pace, pace.length(most) if most else 0)
    origin_ns = time.perf_counter_ns()
    num_due, num_done = sum(len(each.turns) for each in conversations), 0

    def done(number: int) -> None:
        nonlocal num_done
        num_done += number
        tick(num_done / num_due)

    async def have(each: PlannedConversation) -> list[Sample]:
        await asyncio.sleep(each.starts_at_s / pace.speed)
        partner = _SimulatedUser(target, shared, pace, each, origin_ns)
        for _ in each.turns:
            if not await partner.take_turn():
                break
            done(1)
        done(len(each.turns) - len(partner.samples))
        return partner.samples

    ended = await asyncio.gather(*map(have, conversations))
    window_ms = max((time.perf_counter_ns() - origin_ns) / 1e6, 1.0)
    samples = [sample for each in ended for sample in each]
    return Measured(label, round_index, window_ms, samples)


class _Shared:
    """The system prompt of a workload, new for each server and turn."""

    def __init__(self, target: Target, pace: TurnPace, num_tokens: int) -> None:
        is_bare = pace.api == "completions"
        self.num_tokens = num_tokens
        self.ids = (target.ids(num_tokens) if is_bare else None) if num_tokens else None
        self.text = target.words(num_tokens) if num_tokens and self.ids is None else ""
        self.was_sent = False


class _SimulatedUser:
    """Who has one conversation."""

    def __init__(
        self,
        target: Target,
        shared: _Shared,
        pace: TurnPace,
        conversation: PlannedConversation,
        origin_ns: int,
    ) -> None:
        self._target = target
        self._shared = shared
        self._pace = pace
        self._conversation = conversation
        self._origin_ns = origin_ns
        self._is_bare = pace.api == "completions"
        self._talk: ClientConversation
        if self._is_bare:
            has_ids = target.ids(1) is not None
            self._talk = CompletionTalk(target, (shared.ids or []) if has_ids else shared.text)
        else:
            has_tools = conversation.has_tools
            self._talk = MessageTalk(target, pace.api, shared.text, has_tools=has_tools)
        self._num_known = 0
        """Tokens that the server has seen of this conversation, as it counts them."""
        self._num_asked = 0
        """As they were asked for."""
        self.samples: list[Sample] = []

    async def take_turn(self) -> bool:
        """The next turn; False if the conversation has ended with it, or before it."""
        number = len(self.samples)
        turn = self._conversation.turns[number]
        if number:
            await asyncio.sleep(turn.think_s / self._pace.speed)
        num_new = self._pace.length(turn.input_tokens)
        num_output = self._pace.length(turn.output_tokens)
        self._num_asked += num_new + (0 if number else self._shared.num_tokens)
        most = self._target.max_model_len
        if most is not None and max(self._num_known + num_new, self._num_asked) + num_output > most:
            return False
        new = self._target.ids(num_new) if self._is_bare else None
        request = self._talk.request(new or self._target.words(num_new), num_output)
        reusable = self._num_known if number else self._in_front()
        due_ns = time.perf_counter_ns()
        until_s = min((due_ns - self._origin_ns) / 1e9 + PATIENCE_S, MAX_WAIT_S)
        sample, reply = await send(self._target, request, self._origin_ns, due_ns, until_s)
        sample.turn = number + 1
        if reusable is not None and sample.prompt_tokens is not None:
            sample.reusable_tokens = min(reusable, sample.prompt_tokens)
        self.samples.append(sample)
        self._num_known = (sample.prompt_tokens or 0) + (sample.output_tokens or 0)
        self._num_asked += num_output
        self._talk.hear(reply)
        return sample.is_completed

    def _in_front(self) -> int:
        """What an earlier conversation had in front of its first message, too."""
        was_sent, self._shared.was_sent = self._shared.was_sent, True
        return self._shared.num_tokens if was_sent else 0
