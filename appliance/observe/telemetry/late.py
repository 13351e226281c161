"""Find the requests that have waited longest for their first or next token.

Invariant: a wait counts from the arrival or the last token, in whatever phase the request is.
"""

from __future__ import annotations

from collections.abc import Iterable

from appliance.daemon.requests.request import Request
from appliance.observe.frame.late_frames import LateFrame
from appliance.observe.frame.protocol import RequestFrame
from appliance.observe.telemetry.windows import UsualPace, WaitingPrompt
from engine.scheduler.sequences.sequence import Sequence

DEFAULT_TTFT_MS = 10_000
"""Longest wait for a first token without a target, plus its prompt's time."""
PREFILL_SHARE = 2.0
"""Usual prefill times of its prompt that a request may take besides."""
MIN_GAP_MS, UNKNOWN_GAP_MS = 2_000.0, 5_000.0
"""Shortest time without a token that is a stall; the same while no usual time is known."""
STALL_TOKENS = 20.0
"""Usual times between two tokens that are a stall, if they are longer than that."""


def waiting_prompts(live: Iterable[Request]) -> list[WaitingPrompt]:
    """List the prompts without a first token."""
    return [
        WaitingPrompt(one.stamps.arrived_ns, max(one.num_prompt_tokens - one.num_cached_tokens, 1))
        for request in live
        for one in _without_token(request)
    ]


def late_first(
    live: Iterable[Request],
    before_swap: Iterable[RequestFrame],
    target_ms: int | None,
    usual: UsualPace,
    now_ns: int,
) -> LateFrame | None:
    """Find the request furthest beyond its limit for a first token; None: none waits for one.

    Args:
        before_swap: requests that wait for another model.
        target_ms: the limit; None: DEFAULT_TTFT_MS, and what its prompt takes.
    """
    waiting = [
        _frame(request, arrived, target_ms or _limit_ms(request.prompt_tokens, usual), now_ns)
        for request in live
        if (arrived := [one.stamps.arrived_ns for one in _without_token(request)])
    ]
    limit_ms = target_ms or DEFAULT_TTFT_MS
    waiting += [
        LateFrame(each.id, each.user or "", each.prompt_tokens, each.age_ms, limit_ms, 0)
        for each in before_swap
    ]
    return _latest(waiting)


def late_next(live: Iterable[Request], usual: UsualPace, now_ns: int) -> LateFrame | None:
    """Find the stream that has stood still longest; None: none is under way."""
    limit_ms = UNKNOWN_GAP_MS
    if usual.itl_ms is not None:
        limit_ms = max(MIN_GAP_MS, STALL_TOKENS * usual.itl_ms)
    streams = [
        _frame(request, last, limit_ms, now_ns)
        for request in live
        if (
            last := [
                one.stamps.last_token_ns
                for one in request.sequences
                if one.stamps.last_token_ns is not None and not one.is_finished
            ]
        )
    ]
    return _latest(streams)


def _without_token(request: Request) -> list[Sequence]:
    """List the sequences that wait for their first token."""
    return [
        one
        for one in request.sequences
        if one.stamps.first_token_ns is None and not one.is_finished
    ]


def _frame(request: Request, since_ns: list[int], limit_ms: float, now_ns: int) -> LateFrame:
    """Describe a request that has waited since the first of these moments."""
    waited_ms = (now_ns - min(since_ns)) / 1e6
    caller, num_tokens = request.peer.caller, request.prompt_tokens
    return LateFrame(request.request_id, caller, num_tokens, waited_ms, limit_ms, 0)


def _limit_ms(prompt_tokens: int, usual: UsualPace) -> float:
    return DEFAULT_TTFT_MS + PREFILL_SHARE * prompt_tokens * (usual.prefill_ms_per_token or 0.0)


def _latest(waiting: list[LateFrame]) -> LateFrame | None:
    """Return the one with the longest wait by its limit, and how many wait so."""
    if not waiting:
        return None
    latest = max(waiting, key=lambda each: each.waited_ms / each.limit_ms)
    num_late = sum(each.waited_ms >= each.limit_ms for each in waiting)
    latest.number = max(num_late, 1)
    return latest
