"""Write a response of /v1/responses whole, or as its events.

Invariant: the whole reply is what the events build up; every event that opens something is
followed by the one that closes it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from appliance.api.core.offered_tools import Origin
from appliance.api.core.stream import Delta
from appliance.api.formats.text_reading import CallDelta
from appliance.api.openai.logprobs import chat_entries
from appliance.api.openai.replies import EVENTS, event, input_of, keep_alive
from appliance.daemon.requests.request import Request
from appliance.daemon.survival.journal import Replayed
from appliance.json.fields import Json
from engine.errors import RequestError
from engine.text.tokenizer import Tokenizer
from engine.wire.finish_reason import FinishReason

_ECHOED: Json = {
    "previous_response_id": None,
    "reasoning": {"effort": None, "summary": None},
    "store": True,
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
    "truncation": "disabled",
    "user": None,
    "service_tier": "default",
    "prompt_cache_key": None,
    "safety_identifier": None,
    "max_tool_calls": None,
    "top_logprobs": 0,
    "background": False,
}
"""Fields of the body that a response repeats, with their defaults."""

_STATUS = {
    FinishReason.STOP: "completed",
    FinishReason.LENGTH: "incomplete",
    FinishReason.ABORT: "cancelled",
}


_FUNCTION_CALL = ("function_call", "arguments")


class _ThoughtForm(NamedTuple):
    """How reasoning is told."""

    place: str
    part: str
    text_event: str
    part_event: str


_THOUGHTS = {
    False: _ThoughtForm("content", "reasoning_text", "reasoning_text", "response.content_part"),
    True: _ThoughtForm(
        "summary", "summary_text", "reasoning_summary_text", "response.reasoning_summary_part"
    ),
}
"""The form of reasoning, by whether a summary was asked for.

Clients that ask for one read nothing else: the reasoning is sent as it."""


def _wants_summary(fields: Json) -> bool:
    reasoning = fields.get("reasoning")
    summary = reasoning.get("summary") if isinstance(reasoning, dict) else None
    return summary not in (None, "none")


class ResponseShape:
    """The shape of one response.

    Args:
        request: the request to answer; it has one sequence.
        fields: the body, of which a response repeats some.
        created_at: Unix seconds.
        origins: how the client knows its functions, by the names that the model is told.
        tokenizer: spells the log-probabilities; None: there are none.
        keep: keeps the whole response unless that is too long; None: it is not to be kept.
    """

    media_type = EVENTS

    def __init__(
        self,
        request: Request,
        fields: Json,
        replayed: Replayed,
        *,
        created_at: int,
        origins: Mapping[str, Origin],
        tokenizer: Tokenizer | None = None,
        keep: Callable[[Json], bool] | None = None,
    ) -> None:
        self._request, self._replayed = request, replayed
        self._keep, self._tokenizer = keep, tokenizer
        self.is_kept = False
        """Whether the whole response can be read later."""
        self._num_tokens = 0
        self._entries: list[Any] = []
        """Log-probabilities of tokens whose text has not come yet."""
        self._num_reasoning_tokens = 0
        self._echoed = {
            name: default if fields.get(name) is None else fields.get(name)
            for name, default in _ECHOED.items()
        }
        sampling = request.sequences[0].sampling
        self._echoed |= {"temperature": sampling.temperature, "top_p": sampling.top_p}
        text = fields.get("text") or {}
        self._echoed["text"] = {"format": text.get("format") or {"type": "text"}}
        self._created_at = created_at
        self._num_events = 0
        self._output: list[Json] = []
        """Items; only the last one may be open."""
        self._is_open = False
        self._call_index: int | None = None
        """The open item's call; None: the item is a message."""
        self._thought = _THOUGHTS[_wants_summary(fields)]
        self._origins = origins
        self._arguments = ""
        """The open call's arguments so far."""
        self._finish_reason: FinishReason | None = None

    def whole(self, deltas: Iterable[Delta]) -> Json:
        """Write the response in one piece."""
        for delta in deltas:
            self.events(delta)
        self._end_output()
        return self._ended()

    def opening(self) -> bytes:
        response = self._response("in_progress")
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def events(self, delta: Delta) -> bytes:
        self._finish_reason = delta.finish_reason
        self._num_reasoning_tokens = delta.num_reasoning_tokens
        if self._tokenizer is not None:
            self._collect(delta, self._tokenizer)
        thought = self._think(delta.reasoning) if delta.reasoning else b""
        said = thought + self._say(delta.text) if delta.text else thought
        return said + b"".join(map(self._call, delta.calls))

    def closing(self) -> bytes:
        """End a stream; there is no `[DONE]` here."""
        last, status = self._end_output(), self._status()
        name = "response.completed" if status == "completed" else "response.incomplete"
        return last + self._event(name, response=self._ended())

    def _ended(self) -> Json:
        """Write the whole response, and keep it where its client wants that."""
        response = self._response(self._status())
        self.is_kept = self._keep is not None and self._keep(response)
        return response

    def begun(self) -> Json:
        """Write a response that is generated behind its reply, and keep it."""
        if self._keep is not None:
            self._keep(self._response("in_progress"))
        return self._response("queued")

    def failed(self, why: Json) -> None:
        """Keep that it has failed, without what came of it."""
        if self._keep is not None:
            self._keep({**self._response("failed"), "error": why, "output": []})

    def alive(self, place: int | None) -> bytes:
        return keep_alive(place)

    def failure(self, error: RequestError) -> bytes:
        response = self._response("failed")
        response["error"] = {"code": "server_error", "message": error.what}
        return self._event("response.failed", response=response)

    def _say(self, text: str) -> bytes:
        """Text, in the message that is open or in a new one."""
        begun = b""
        if not self._is_open or self._output[-1]["type"] != "message":
            begun = self._begin_message()
        entries, self._entries = self._entries, []
        part = self._output[-1]["content"][0]
        part["text"] += text
        part["logprobs"] += entries
        return begun + self._part_event("response.output_text.delta", delta=text, logprobs=entries)

    def _collect(self, delta: Delta, tokenizer: Tokenizer) -> None:
        """Collect the log-probabilities of the answer's tokens, without reasoning and calls."""
        before, self._num_tokens = self._num_tokens, self._num_tokens + len(delta.token_ids)
        start = max(delta.num_reasoning_tokens - before, 0)
        offsets = delta.text_offsets[start:]
        # of a whole reply, the text comes before its calls
        end = offsets[0] + len(delta.text) if offsets and delta.calls and delta.text else None
        told = zip(
            delta.token_ids[start:], chat_entries(tokenizer, delta)[start:], offsets, strict=True
        )
        self._entries += [
            entry
            for token_id, entry, at in told
            if not tokenizer.is_silent(token_id) and (end is None or at < end)
        ]

    def _begin_message(self) -> bytes:
        message: Json = {"id": f"msg_{self._replayed(secrets.token_hex, 12)}", "type": "message"}
        begun = self._begin({**message, "role": "assistant", "content": []}, None)
        part: Json = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self._output[-1]["content"].append(part)
        return begun + self._part_event("response.content_part.added", part=part)

    def _think(self, text: str) -> bytes:
        """Reasoning, in an item of its own."""
        begun = b""
        if not self._is_open or self._output[-1]["type"] != "reasoning":
            item: Json = {"id": f"rs_{self._replayed(secrets.token_hex, 12)}", "type": "reasoning"}
            begun = self._begin({**item, "summary": [], "content": []}, None)
            part = {"type": self._thought.part, "text": ""}
            self._output[-1][self._thought.place].append(part)
            begun += self._thought_event(f"{self._thought.part_event}.added", part=part)
        self._output[-1][self._thought.place][0]["text"] += text
        return begun + self._thought_event(f"response.{self._thought.text_event}.delta", delta=text)

    def _thought_event(self, name: str, /, **told: Any) -> bytes:
        return self._item_event(name, **{f"{self._thought.place}_index": 0}, **told)

    def _call(self, call: CallDelta) -> bytes:
        """Write a part of a call, in its own item."""
        begun = b""
        if not self._is_open or self._call_index != call.index:
            origin = self._origins.get(call.name or "") or Origin(call.name or "", None, False)
            is_custom = origin.is_custom
            kind, holds = ("custom_tool_call", "input") if is_custom else _FUNCTION_CALL
            item: Json = {"id": f"fc_{self._replayed(secrets.token_hex, 12)}", "type": kind}
            item |= {"call_id": call.call_id, "name": origin.name, holds: ""}
            if origin.namespace is not None:
                item["namespace"] = origin.namespace
            begun = self._begin(item, call.index)
            self._arguments = ""
        self._arguments += call.arguments
        if not call.arguments or self._output[-1]["type"] == "custom_tool_call":
            return begun  # its text stands within JSON until that is complete
        self._output[-1]["arguments"] = self._arguments
        return begun + self._item_event(
            "response.function_call_arguments.delta", delta=call.arguments
        )

    def _begin(self, item: Json, call_index: int | None) -> bytes:
        ended = self._end_item("completed")
        self._output.append(item | {"status": "in_progress"})
        self._is_open, self._call_index = True, call_index
        return ended + self._event(
            "response.output_item.added", output_index=self._index, item=self._output[-1]
        )

    def _end_output(self) -> bytes:
        """Close the last item; a response without any says nothing, in a message."""
        begun = b"" if self._output else self._begin_message()
        is_whole = self._finish_reason is FinishReason.STOP
        return begun + self._end_item("completed" if is_whole else "incomplete")

    def _end_item(self, status: str) -> bytes:
        if not self._is_open:
            return b""
        self._is_open = False
        item = self._output[-1]
        item["status"] = status
        if item["type"] == "message":
            (part,) = item["content"]
            ended = self._part_event(
                "response.output_text.done", text=part["text"], logprobs=part["logprobs"]
            ) + self._part_event("response.content_part.done", part=part)
        elif item["type"] == "reasoning":
            (part,) = item[self._thought.place]
            ended = self._thought_event(
                f"response.{self._thought.text_event}.done", text=part["text"]
            ) + self._thought_event(f"{self._thought.part_event}.done", part=part)
        elif item["type"] == "custom_tool_call":
            item["input"] = text = input_of(self._arguments)
            ended = self._item_event(
                "response.custom_tool_call_input.delta", delta=text
            ) + self._item_event("response.custom_tool_call_input.done", input=text)
        else:
            ended = self._item_event(
                "response.function_call_arguments.done",
                name=item["name"],
                arguments=item["arguments"],
            )
        return ended + self._event("response.output_item.done", output_index=self._index, item=item)

    @property
    def _index(self) -> int:
        return len(self._output) - 1

    def _part_event(self, name: str, /, **told: Any) -> bytes:
        return self._item_event(name, content_index=0, **told)

    def _item_event(self, name: str, /, **told: Any) -> bytes:
        item_id = self._output[-1]["id"]
        return self._event(name, item_id=item_id, output_index=self._index, **told)

    def _event(self, name: str, /, **told: Any) -> bytes:
        number = self._num_events
        self._num_events += 1
        return event({"type": name, "sequence_number": number, **told}, name)

    def _status(self) -> str:
        return _STATUS.get(self._finish_reason or FinishReason.STOP, "failed")

    def _response(self, status: str) -> Json:
        is_cut = self._finish_reason is FinishReason.LENGTH
        return {
            "id": self._request.request_id,
            "object": "response",
            "created_at": self._created_at,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "model": self._request.model,
            "output": self._output,
            "usage": None if status in ("queued", "in_progress") else self._usage(),
            **self._echoed,
        }

    def _usage(self) -> Json:
        (sequence,) = self._request.sequences
        return {
            "input_tokens": sequence.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": self._request.cached_tokens or 0}
            | self._request.miss_usage,
            "output_tokens": sequence.num_output_tokens,
            "output_tokens_details": {"reasoning_tokens": self._num_reasoning_tokens},
            "total_tokens": sequence.num_tokens,
            **self._request.cut_usage,
        }
