"""Turn timestamps into stages, and stages into quantiles.

Invariant: the stages of a finished sequence that are not None add up to its e2e_ms.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from engine.scheduler.sequences.sequence import Stamps

_STAGES = (
    ("tokenize_ms", "tokenized_ns", "queue_ms"),
    ("queue_ms", "started_ns", "prefill_ms"),
    # Only attached_ns says that there was a handoff, so that stage can end but not be left open.
    ("prefill_ms", "first_token_ns", "decode_wait_ms"),
    ("handoff_ms", "attached_ns", "decode_wait_ms"),
    ("decode_wait_ms", "decode_started_ns", "decode_ms"),
)
"""Each stage, the stamp that ends it, and the stage that follows; in order."""


@dataclass(frozen=True, slots=True)
class Stages:
    """The time of one sequence by stage; None: the stage was not reached.

    ttft = tokenize + queue + restore + prefill; e2e = ttft + handoff + decode_wait + decode +
    paused.
    """

    tokenize_ms: float | None = None
    queue_ms: float | None = None
    restore_ms: float | None = None
    """Queue time spent loading the prompt's blocks from a cache. None: none were loaded."""
    prefill_ms: float | None = None
    handoff_ms: float | None = None
    decode_wait_ms: float | None = None
    decode_ms: float | None = None
    paused_ms: float | None = None
    """Time after preemption until the next token, added up; a pause before token 1 is queue_ms.

    None: never paused."""
    ttft_ms: float | None = None
    first_itl_ms: float | None = None
    """Time from token 1 to token 2: handoff, decode_wait and the first decode step."""
    tpot_ms: float | None = None
    """Mean time between output tokens; None: fewer than two."""
    e2e_ms: float | None = None


def in_order(stamps: Stamps) -> Stamps:
    """Sort the stamps' times: each at least the one before, and at most `finished_ns`.

    The daemon stamps token 1 when it reads it. A worker may already have begun the next step, which
    would make the wait for decode negative.
    """
    last_ns = math.inf if stamps.finished_ns is None else stamps.finished_ns
    cursor_ns = stamps.arrived_ns
    ordered: dict[str, int] = {}
    for _, name, _ in _STAGES:
        end_ns = getattr(stamps, name)
        if end_ns is not None:
            cursor_ns = int(min(max(end_ns, cursor_ns), last_ns))
            ordered[name] = cursor_ns
    return replace(stamps, **ordered)


def stages(stamps: Stamps, num_output_tokens: int) -> Stages:
    """Divide one sequence's life into stages.

    `finished_ns` closes the open stage: a request cancelled in prefill has the time until then as
    prefill_ms, and no ttft_ms. A stage whose end has no stamp, although a later stage has one, is
    None, and its time counts for the next stage.
    """
    stamps = in_order(stamps)
    cut: dict[str, float] = {}
    cursor_ns, open_stage = stamps.arrived_ns, "tokenize_ms"
    for stage, stamp, following in _STAGES:
        end_ns = getattr(stamps, stamp)
        if end_ns is not None:
            cut[stage] = ms(cursor_ns, end_ns)
            cursor_ns, open_stage = end_ns, following
    if stamps.finished_ns is not None:
        cut[open_stage] = ms(cursor_ns, stamps.finished_ns)
        cut["e2e_ms"] = ms(stamps.arrived_ns, stamps.finished_ns)
    if stamps.paused_ns is not None and stamps.decode_started_ns is not None:
        cut["paused_ms"] = stamps.paused_ns / 1e6
        if "decode_ms" in cut:  # in which all pauses lie
            cut["paused_ms"] = min(cut["paused_ms"], cut["decode_ms"])
            cut["decode_ms"] -= cut["paused_ms"]
    if stamps.restored_ns is not None and "queue_ms" in cut:  # in which all of it lies
        cut["restore_ms"] = min(stamps.restored_ns / 1e6, cut["queue_ms"])
        cut["queue_ms"] -= cut["restore_ms"]
    if stamps.first_token_ns is not None:
        cut |= _token_gaps(stamps, stamps.first_token_ns, num_output_tokens)
    return Stages(**cut)


def _token_gaps(stamps: Stamps, first_token_ns: int, num_output_tokens: int) -> dict[str, float]:
    gaps = {"ttft_ms": ms(stamps.arrived_ns, first_token_ns)}
    if stamps.second_token_ns is not None:
        gaps["first_itl_ms"] = ms(first_token_ns, stamps.second_token_ns)
    if num_output_tokens >= 2 and stamps.last_token_ns is not None:
        gaps["tpot_ms"] = ms(first_token_ns, stamps.last_token_ns) / (num_output_tokens - 1)
    return gaps


def ms(begin_ns: int, end_ns: int) -> float:
    return (end_ns - begin_ns) / 1e6


def quantile(values: Iterable[float], q: float) -> float | None:
    """Return the nearest-rank quantile, always one of the values; None: no values.

    Args:
        values: in any order.
        q: 0 is the least value, 1 the greatest.
    """
    return quantile_of(sorted(values), q)


def quantile_of(ranked: Sequence[float], q: float) -> float | None:
    """Return the nearest-rank quantile of sorted values; None: no values."""
    if not ranked:
        return None
    return ranked[max(0, math.ceil(q * len(ranked)) - 1)]


class Window:
    """The newest values of the last `window_s` seconds; at most `max_values`."""

    def __init__(self, window_s: float, max_values: int = 100_000) -> None:
        self.window_s = window_s
        self._window_ns = int(window_s * 1e9)
        self._at_ns: deque[int] = deque(maxlen=max_values)
        self._values: deque[float] = deque(maxlen=max_values)

    def add(self, at_ns: int, value: float) -> None:
        """Add a value; `at_ns` never decreases."""
        self._at_ns.append(at_ns)
        self._values.append(value)

    def values(self, now_ns: int) -> list[float]:
        """Return the values in the window at `now_ns`, oldest first; drop older ones."""
        while self._at_ns and self._at_ns[0] <= now_ns - self._window_ns:
            self._at_ns.popleft()
            self._values.popleft()
        return list(self._values)
