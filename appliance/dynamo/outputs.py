"""Read the daemon's streamed outputs as Dynamo wants them.

Invariant: every token id is passed on once, in order.
"""

from __future__ import annotations

import msgspec

from appliance.dynamo.completion_requests import Json, UnsupportedRequest

_DATA = b"data:"
_DONE = b"[DONE]"
_PREFIX = "token_id:"
_ENDS = {"stop": "stop", "length": "length", "tool_calls": "stop", "abort": "cancelled"}


class LostError(Exception):
    """The daemon cannot continue this request; another worker can."""


def output_of(line: bytes) -> Json | None:
    """Decode the output in a line of the stream; None: no output.

    Raises:
        UnsupportedRequest: the daemon does not support the request.
        LostError: the daemon failed, or ends.
    """
    if not line.startswith(_DATA):
        return None
    data = line[len(_DATA) :].strip()
    if not data or data == _DONE:
        return None
    event = msgspec.json.decode(data)
    if "error" in event:
        raise_error(event["error"])
    output: Json = {}
    if usage := event.get("usage"):
        output["completion_usage"] = usage
    for choice in event["choices"]:
        output["token_ids"] = choice.get("token_ids") or []
        if choice.get("logprobs"):
            output |= _logprobs(choice["logprobs"])
        if reason := choice.get("finish_reason"):
            output["finish_reason"] = _ENDS.get(reason, "stop")
    return output or None


def raise_error(error: Json) -> None:
    """Raise the exception for an error object of the daemon.

    Raises:
        UnsupportedRequest: the client can correct it.
        LostError: another worker may serve it.
    """
    message = str(error.get("message") or "the daemon failed")
    if error.get("type") in ("invalid_request_error", "not_found_error"):
        raise UnsupportedRequest(message)
    raise LostError(message)


def _logprobs(columns: Json) -> Json:
    """Return each token's log-probability, and its alternatives, the likeliest first."""
    told: Json = {"log_probs": columns["token_logprobs"]}
    if any(columns.get("top_logprobs") or ()):
        told["top_logprobs"] = [_ranked(place or {}) for place in columns["top_logprobs"]]
    return told


def _ranked(place: dict[str, float]) -> list[Json]:
    ordered = sorted(place.items(), key=lambda one: -one[1])
    return [
        {
            "rank": rank,
            "token_id": int(key.removeprefix(_PREFIX)),
            "token": key,
            "logprob": logprob,
        }
        for rank, (key, logprob) in enumerate(ordered, 1)
    ]
