"""Rebuild the requests of a past second from their rows in the log.

Invariant: stages and phases come from the stamps; other values (tokens between the first and the
last, blocks) are estimates, and `is_estimated` says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from appliance.observe.frame.logged_requests import ended_frame, of_all, stages_of_row
from appliance.observe.frame.protocol import Frame, RequestFrame

_KEPT = (  # an older row may lack some
    "endpoint", "model", "user", "num_sequences", "prompt_tokens", "cached_tokens", "received_at",
    "restored_tokens", "client", "waited_for",
)  # fmt: skip


class PastRequest(RequestFrame):
    """A request at a past time."""

    is_estimated: bool = True
    """Whether its tokens and blocks are estimates."""


def request_at(row: Mapping[str, Any], age_ms: float, frame: Frame) -> PastRequest:
    """Rebuild a row's request at an age before its end.

    Args:
        age_ms: the time since its arrival.
        frame: of that moment, for its workers and pools.
    """
    row = dict(row)
    now_us = age_ms * 1000
    phase = _phase(row, now_us)
    transport = row["transport"] if _is_past(row, "t_attached_us", now_us) else None
    output_tokens = _output_tokens(row, now_us)
    route = row["route"] if phase != "queued" else None
    has_blocks = phase != "queued" and row["max_tokens"] is not None
    return PastRequest(
        id=row["rid"],
        phase=phase,
        stream=bool(row["stream"]),
        computed_tokens=_computed_tokens(row, now_us, output_tokens),
        output_tokens=None if row["max_tokens"] is None else output_tokens,
        max_tokens=of_all(row["max_tokens"], row["num_sequences"]),
        num_blocks=_num_blocks(row, output_tokens, frame) if has_blocks else 0,
        worker=None if phase == "queued" else _worker(row, phase, frame),
        transport=transport,
        age_ms=age_ms,
        handoff_bytes=row["handoff_bytes"] if transport else None,
        route=route,
        route_reason=row["route_reason"] if route else None,
        is_estimated=phase != "queued",
        **{name: row[name] for name in _KEPT if name in row},
        **stages_of_row(row, now_us),
    )


def ended(row: Mapping[str, Any]) -> RequestFrame:
    """Rebuild a row's request at its end, like the log's own view."""
    row = dict(row)
    # a row that moved does not name its two workers
    worker = None if row["route"] == "move" else row["route"]
    return ended_frame({**row, **stages_of_row(row), "id": row["rid"]}, worker)


def _is_past(row: Mapping[str, Any], stamp: str, now_us: float) -> bool:
    at_us = row[stamp]
    return at_us is not None and at_us <= now_us


def _phase(row: Mapping[str, Any], now_us: float) -> str:
    """Find the phase from the stamps; a sequence waiting in a worker counts as queued."""
    if not _is_past(row, "t_started_us", now_us):
        return "queued"
    if not _is_past(row, "t_first_token_us", now_us):
        return "prefilling"
    is_attaching = row["t_attached_us"] is not None
    if is_attaching and not _is_past(row, "t_attached_us", now_us):
        return "handing_off"
    return "decoding"


def _output_tokens(row: Mapping[str, Any], now_us: float) -> int:
    """Estimate the output tokens, evenly between the stamps."""
    num_all, num_sequences = int(row["completion_tokens"] or 0), int(row["num_sequences"])
    if not _is_past(row, "t_first_token_us", now_us):
        return 0
    if _is_past(row, "t_last_token_us", now_us) or row["t_last_token_us"] is None:
        return num_all
    if not _is_past(row, "t_second_token_us", now_us):
        return min(num_sequences, num_all)
    second_us, last_us = row["t_second_token_us"], row["t_last_token_us"]
    num_first = min(2 * num_sequences, num_all)
    return num_first + int((now_us - second_us) / (last_us - second_us) * (num_all - num_first))


def _computed_tokens(row: Mapping[str, Any], now_us: float, output_tokens: int) -> int:
    """Estimate the computed tokens, evenly from the first step to token 1."""
    started_us, first_us = row["t_started_us"], row["t_first_token_us"]
    prompt_tokens = int(row["prompt_tokens"])
    if not _is_past(row, "t_started_us", now_us):
        return 0
    if output_tokens:
        return prompt_tokens + max(0, output_tokens - int(row["num_sequences"]))
    end_us = first_us if first_us is not None else row["t_finished_us"]
    if end_us is None or end_us <= started_us:
        return 0
    return int(prompt_tokens * min(1.0, (now_us - started_us) / (end_us - started_us)))


def _num_blocks(row: Mapping[str, Any], output_tokens: int, frame: Frame) -> int:
    """Estimate the blocks for its tokens, in a pool of the frame."""
    if not frame.pools or frame.pools[0].block_size <= 0:
        return 0
    each: float = (row["prompt_tokens"] + output_tokens) / row["num_sequences"]
    return math.ceil(each / frame.pools[0].block_size) * int(row["num_sequences"])


def _worker(row: Mapping[str, Any], phase: str, frame: Frame) -> str | None:
    """Find the worker from the route, or from the phase if the request moved."""
    if len(frame.workers) == 1:
        return frame.workers[0].name
    if row["route"] == "move":
        return "decode" if phase == "decoding" else "prefill"
    names = (worker.name for worker in frame.workers)
    return next((name for name in names if name == row["route"]), None)
