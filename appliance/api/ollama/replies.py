"""Shape a reply of Ollama's /api/chat and /api/generate: JSON objects, one per line.

Invariant: the lines of a stream add up to the whole reply; only the last line is done.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from appliance.api.core.dialects import Dialect, error_body
from appliance.api.core.stream import Delta
from appliance.daemon.requests.request import Request
from appliance.daemon.survival.journal import Replayed
from appliance.json.fields import Json
from appliance.json.lines import encode_line
from appliance.observe.frame.protocol import utc_now
from engine.errors import RequestError
from engine.wire.finish_reason import FinishReason
from engine.wire.not_json import NOT_JSON


class OllamaShape:
    """The shape of one reply.

    Args:
        request: the request to answer; it has one sequence.
        is_chat: a message, or a response as /api/generate gives it.
    """

    media_type = "application/x-ndjson"

    def __init__(self, request: Request, replayed: Replayed, *, is_chat: bool) -> None:
        self._request, self._replayed = request, replayed
        self._is_chat = is_chat
        self._calls: list[list[str]] = []
        """Name and arguments of each; a call is told once it is complete."""
        self._num_told = 0
        self._last: Delta | None = None

    def whole(self, deltas: Iterable[Delta]) -> Json:
        (delta,) = deltas
        self._take(delta)
        return self._object(delta.text, delta.reasoning, self._complete(is_last=True)) | self._end()

    def opening(self) -> bytes:
        """Begin a stream with nothing."""
        return b""

    def events(self, delta: Delta) -> bytes:
        self._take(delta)
        calls = self._complete(is_last=delta.finish_reason is not None)
        if not (delta.text or delta.reasoning or calls):
            return b""
        told = self._object(delta.text, delta.reasoning, calls)
        return _line(told | {"done": False})

    def closing(self) -> bytes:
        return _line(self._object("", "", []) | self._end())

    def failure(self, error: RequestError) -> bytes:
        return _line(error_body(Dialect.OLLAMA, error))

    def alive(self, place: int | None) -> bytes:
        """Nothing: every line is an object for the client."""
        return b""

    def _take(self, delta: Delta) -> None:
        self._last = delta
        for part in delta.calls:
            if part.name is not None:
                self._calls.append([part.name, ""])
            self._calls[-1][1] += part.arguments

    def _complete(self, *, is_last: bool) -> list[Json]:
        """Calls that are complete and not told; one that a limit has cut off never is."""
        told = []
        while self._num_told < len(self._calls):
            name, text = self._calls[self._num_told]
            try:
                arguments = msgspec.json.decode(text or "null")
            except NOT_JSON:
                arguments = None
            is_next = self._num_told < len(self._calls) - 1
            if not isinstance(arguments, dict):
                if not (is_next or is_last):
                    break  # more of it may come
            else:
                told.append({"function": {"name": name, "arguments": arguments}})
            self._num_told += 1
        return told

    def _object(self, text: str, reasoning: str, calls: list[Json]) -> Json:
        said: Json = {"thinking": reasoning} if reasoning else {}
        if self._is_chat:
            said = {"role": "assistant", "content": text, **said}
            if calls:
                said["tool_calls"] = calls
            said = {"message": said}
        else:
            said["response"] = text
        return {"model": self._request.model, "created_at": self._replayed(utc_now), **said}

    def _end(self) -> Json:
        """Write the reason and the times in nanoseconds, without those not measured."""
        (sequence,) = self._request.sequences
        reason = self._last.finish_reason if self._last else FinishReason.STOP
        stamps, told = sequence.stamps, {}
        last_ns = stamps.last_token_ns
        if last_ns is not None and stamps.first_token_ns is not None:
            told["total_duration"] = last_ns - stamps.arrived_ns
            begun_ns = stamps.started_ns or stamps.arrived_ns
            told["prompt_eval_duration"] = stamps.first_token_ns - begun_ns
            told["eval_duration"] = last_ns - stamps.first_token_ns
        return {
            "done": True,
            "done_reason": "length" if reason is FinishReason.LENGTH else "stop",
            **told,
            "load_duration": 0,
            "prompt_eval_count": sequence.num_prompt_tokens,
            "eval_count": sequence.num_output_tokens,
            **self._request.miss_usage,
        }


def _line(content: Json) -> bytes:
    return encode_line(content) + b"\n"
