"""Shape a reply of Anthropic's /v1/messages: one message, or the events that build it up.

Invariant: the events add up to the whole message; each block that begins also ends.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from appliance.api.core.dialects import Dialect, error_body
from appliance.api.core.message_parts import arguments_of
from appliance.api.core.stream import Delta
from appliance.api.formats.text_reading import CallDelta
from appliance.api.openai.replies import EVENTS, event
from appliance.daemon.requests.request import Request
from appliance.daemon.survival.journal import Replayed
from appliance.json.fields import Json
from engine.errors import RequestError
from engine.wire.finish_reason import FinishReason


class MessageShape:
    """The shape of one message.

    Args:
        request: the request to answer; it has one sequence.
    """

    media_type = EVENTS

    def __init__(self, request: Request, replayed: Replayed) -> None:
        self._request, self._replayed = request, replayed
        self._content: list[Json] = []
        """Blocks; only the last one may be open. A call's input is text until it ends."""
        self._is_open = False
        self._call_index: int | None = None
        self._last: Delta | None = None

    def whole(self, deltas: Iterable[Delta]) -> Json:
        """Write the message in one piece."""
        for delta in deltas:
            self.events(delta)
        self._end_block()
        return self._message(is_ended=True)

    def opening(self) -> bytes:
        return _event("message_start", message=self._message(is_ended=False))

    def events(self, delta: Delta) -> bytes:
        self._last = delta
        told = b""
        if delta.reasoning:
            told += self._add("thinking", delta.reasoning)
        if delta.text:
            told += self._add("text", delta.text)
        return told + b"".join(map(self._add_call, delta.calls))

    def closing(self) -> bytes:
        ended = self._end_block()
        message = self._message(is_ended=True)
        change = {name: message[name] for name in ("stop_reason", "stop_sequence")}
        return (
            ended
            + _event("message_delta", delta=change, usage=message["usage"])
            + _event("message_stop")
        )

    def failure(self, error: RequestError) -> bytes:
        body = error_body(Dialect.ANTHROPIC, error, self._request.request_id)
        return event(body, "error")

    def alive(self, place: int | None) -> bytes:
        return _event("ping")

    def _add(self, kind: str, text: str) -> bytes:
        """Text or reasoning, in the block that is open or in a new one."""
        begun = b""
        if not self._is_open or self._content[-1]["type"] != kind:
            block: Json = {"type": kind, kind: ""} | (
                {"signature": ""} if kind == "thinking" else {}
            )
            begun = self._begin_block(block, None)
        self._content[-1][kind] += text
        return begun + self._delta({"type": f"{kind}_delta", kind: text})

    def _add_call(self, call: CallDelta) -> bytes:
        begun = b""
        if not self._is_open or self._call_index != call.index:
            block: Json = {"type": "tool_use", "id": call.call_id, "name": call.name, "input": {}}
            begun = self._begin_block(block, call.index)
            self._content[-1]["input"] = ""
        if not call.arguments:
            return begun
        self._content[-1]["input"] += call.arguments
        return begun + self._delta({"type": "input_json_delta", "partial_json": call.arguments})

    def _begin_block(self, block: Json, call_index: int | None) -> bytes:
        ended = self._end_block()
        self._content.append(block)
        self._is_open, self._call_index = True, call_index
        return ended + _event("content_block_start", index=self._index, content_block=block)

    def _end_block(self) -> bytes:
        if not self._is_open:
            return b""
        self._is_open = False
        block, signed = self._content[-1], b""
        if block["type"] == "tool_use":
            block["input"] = arguments_of(block["input"])
        elif block["type"] == "thinking":
            # Reasoning is not signed here; clients wait for a signature before they keep it.
            signed = self._delta({"type": "signature_delta", "signature": ""})
        return signed + _event("content_block_stop", index=self._index)

    @property
    def _index(self) -> int:
        return len(self._content) - 1

    def _delta(self, delta: Json) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)

    def _message(self, *, is_ended: bool) -> Json:
        (sequence,) = self._request.sequences
        stop_text = self._last.stop_text if self._last else None
        # at the beginning of a stream it is unknown, so all of it counts as input
        num_cached = (self._request.cached_tokens or 0) if is_ended else 0
        return {
            "id": self._request.request_id,
            "type": "message",
            "role": "assistant",
            "model": self._request.model,
            "content": list(self._content) if is_ended else [],
            "stop_reason": self._stop_reason() if is_ended else None,
            "stop_sequence": stop_text if is_ended else None,
            "usage": {
                # in Anthropic's words what was read from the cache is no input
                "input_tokens": sequence.num_prompt_tokens - num_cached,
                "output_tokens": sequence.num_output_tokens if is_ended else 0,
                # what is kept is kept without being asked, so nothing is written on request
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": num_cached,
                **self._request.cut_usage,
                **self._replayed(lambda: self._request.miss_usage),
            },
        }

    def _stop_reason(self) -> str:
        delta = self._last
        if delta is None or delta.finish_reason is FinishReason.ABORT:
            return "end_turn"
        if delta.finish_reason is FinishReason.LENGTH:
            return "max_tokens"
        if delta.has_called:
            return "tool_use"
        return "stop_sequence" if delta.stop_text is not None else "end_turn"


def _event(name: str, /, **told: Any) -> bytes:
    return event({"type": name, **told}, name)
