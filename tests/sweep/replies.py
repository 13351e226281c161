"""Reduce a reply to what its client may rely on: texts, finish reasons, tokens, errors.

How the text was cut into events, ids and times are left out: they may differ between two runs.
"""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

from tests.sweep.machine import Reply

_COUNTS = ("completion_tokens", "output_tokens", "eval_count", "prompt_tokens", "input_tokens")
_REASONS = ("finish_reason", "stop_reason", "done_reason")


class Said:
    """The text of each choice, and everything else that must be the same."""

    def __init__(self) -> None:
        self.texts: defaultdict[int, str] = defaultdict(str)
        self.reasons: list[str] = []
        self.counts: dict[str, int] = {}
        self.errors: list[str] = []
        self.is_ended = False

    def as_tuple(self) -> tuple[Any, ...]:
        return (
            sorted(self.texts.items()),
            sorted(self.reasons),
            sorted(self.counts.items()),
            self.errors,
            self.is_ended,
        )


def read(reply: Reply) -> Said:
    """Read a reply of any API, streamed or whole."""
    said, body = Said(), reply.body
    is_chunked = b"transfer-encoding: chunked" in reply.head.lower()
    if is_chunked:
        body, said.is_ended = _unchunked(body)
    else:
        said.is_ended = reply.is_whole
    text = body.decode(errors="replace")
    if b"text/event-stream" in reply.head:
        for event in text.split("\n\n"):
            for line in event.splitlines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    _take_json(line.removeprefix("data: "), said)
    else:
        for line in text.splitlines():
            _take_json(line, said)
    return said


def _unchunked(body: bytes) -> tuple[bytes, bool]:
    """Join the chunks, and say whether the last one came."""
    whole = b""
    while body:
        size, _, rest = body.partition(b"\r\n")
        try:
            num_bytes = int(size, 16)
        except ValueError:
            break
        if not num_bytes:
            return whole, True
        whole += rest[:num_bytes]
        body = rest[num_bytes + 2 :]
    return whole, False


def _take_json(line: str, said: Said) -> None:
    try:
        found = json.loads(line)
    except ValueError:
        return
    if isinstance(found, dict):
        _take(found, said, streams="delta" in str(found.get("type", "")))


def _take(found: dict[str, Any], said: Said, *, streams: bool) -> None:
    if found.get("error"):
        error = found["error"]
        code = error.get("code") or error.get("type") if isinstance(error, dict) else "error"
        said.errors.append(str(code))
    kind = str(found.get("type", ""))
    if kind == "content_block_delta":
        said.texts[0] += found["delta"].get("text", found["delta"].get("partial_json", ""))
    elif kind == "response.output_text.delta":
        said.texts[0] += found["delta"]
    elif "choices" in found:
        for choice in found["choices"]:
            message = choice.get("delta") or choice.get("message") or {}
            said.texts[choice["index"]] += choice.get("text") or message.get("content") or ""
            for tool_call in message.get("tool_calls") or ():
                function = tool_call["function"]
                said.texts[choice["index"]] += function.get("name") or ""
                said.texts[choice["index"]] += function.get("arguments") or ""
    elif kind == "message" and isinstance(found.get("content"), list):
        parts = [part.get("text") or json.dumps(part.get("input", "")) for part in found["content"]]
        said.texts[0] += "".join(parts)
    elif "response" in found and isinstance(found["response"], str):
        said.texts[0] += found["response"]
    elif isinstance(found.get("message"), dict) and isinstance(
        found["message"].get("content"), str
    ):
        said.texts[0] += found["message"]["content"]
    elif found.get("object") == "response":
        for item in found.get("output", []):
            said.texts[0] += "".join(part.get("text", "") for part in item.get("content", []))
    _look_for_ends(found, said)


def _look_for_ends(found: Any, said: Said) -> None:
    """Collect finish reasons and counted tokens, wherever an API puts them."""
    if isinstance(found, list):
        for each in found:
            _look_for_ends(each, said)
    elif isinstance(found, dict):
        for key, value in found.items():
            if key in _REASONS and value:
                said.reasons.append(value)
            elif key in _COUNTS and isinstance(value, int) and value:
                cached = found.get("cache_read_input_tokens") if key == "input_tokens" else 0
                said.counts[key] = value + (cached or 0)  # which were cached is a matter of time
            elif key not in ("prompt_tokens_details", "input_tokens_details"):
                _look_for_ends(value, said)
