"""Turn timestamps into stages, and stages into quantiles and histograms.

Owns: the meaning of every latency figure; the edges and counts of every histogram in /metrics.
Invariant: the stages of a finished sequence that are not None add up to its e2e_ms.
Never: reads a clock; never reports an unreached stage as 0.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from appliance.frame.figures import STAGES
from engine.schedule.sequence import FinishReason, Stamps
from engine.schedule.sequence import Sequence as EngineSequence

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
            cut[stage] = _ms(cursor_ns, end_ns)
            cursor_ns, open_stage = end_ns, following
    if stamps.finished_ns is not None:
        cut[open_stage] = _ms(cursor_ns, stamps.finished_ns)
        cut["e2e_ms"] = _ms(stamps.arrived_ns, stamps.finished_ns)
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
    gaps = {"ttft_ms": _ms(stamps.arrived_ns, first_token_ns)}
    if stamps.second_token_ns is not None:
        gaps["first_itl_ms"] = _ms(first_token_ns, stamps.second_token_ns)
    if num_output_tokens >= 2 and stamps.last_token_ns is not None:
        gaps["tpot_ms"] = _ms(first_token_ns, stamps.last_token_ns) / (num_output_tokens - 1)
    return gaps


def _ms(begin_ns: int, end_ns: int) -> float:
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


# How often what was seen: counts by size since the daemon started.
# Invariant: counts only grow; every edge that dashboards made for vLLM ask for is an edge here, so
# that both sets of names are read from one count.
# Never: forgets (windows do), or knows the text that is made of it.


Edges = tuple[float, ...]

TTFT_S: Edges = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
GAP_S: Edges = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_S: Edges = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
STEP_TOKENS: Edges = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
NUM_SEQUENCES: Edges = (1, 2, 5, 10, 20)
"""vLLM's edges, so that queries written for it find its `le`."""
STAGE_S: Edges = (0.0001, 0.001, 0.01, 0.03, 0.1, 0.3, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
"""Our edges: from a handoff in shared memory to a long prompt on a CPU."""
FINE_GAP_S: Edges = (0.001, 0.0025, 0.005, *GAP_S)


def token_edges(max_model_len: int) -> Edges:
    """Return the edges 1, 2, 5, 10, 20, 50, ... up to the longest request."""
    decades = range(len(str(max_model_len)))
    edges = [digit * 10**exponent for exponent in decades for digit in (1, 2, 5)]
    return tuple(edge for edge in edges if edge <= max_model_len)


class Histogram:
    """Counts of values up to each edge, and their sum."""

    def __init__(self, *edges: Edges) -> None:
        self.edges = sorted(set().union(*edges))
        self.counts = [0] * (len(self.edges) + 1)
        """Counts between two edges each; the last has no upper edge."""
        self.sum = 0.0

    @property
    def total(self) -> int:
        return sum(self.counts)

    def observe(self, value: float) -> None:
        """Count one value in its bucket, and add it to the sum."""
        self.counts[bisect_left(self.edges, value)] += 1
        self.sum += value

    def up_to(self, edges: Sequence[float]) -> list[int]:
        """Count the values up to each of these edges, which are among its own."""
        cumulative, total = {}, 0
        for edge, count in zip(self.edges, self.counts[:-1], strict=True):
            total += count
            cumulative[edge] = total
        return [cumulative[edge] for edge in edges]


class Histograms:
    """All histograms; one sequence counts as a request does in vLLM."""

    def __init__(self, max_model_len: int) -> None:
        self.token_edges = token_edges(max_model_len)
        self.ttft_s = Histogram(TTFT_S)
        self.itl_s = Histogram(FINE_GAP_S)
        self.tpot_s = Histogram(GAP_S)
        self.e2e_s = Histogram(REQUEST_S)
        self.running_s = Histogram(REQUEST_S)
        """Time from the end of the queue to the end, without pauses."""
        self.stage_s = {stage: Histogram(STAGE_S, REQUEST_S) for stage in STAGES}
        self.prompt_tokens = Histogram(self.token_edges)
        self.output_tokens = Histogram(self.token_edges)
        self.max_tokens = Histogram(self.token_edges)
        self.num_sequences = Histogram(NUM_SEQUENCES)
        self.step_tokens = Histogram(STEP_TOKENS)
        self.finished: Counter[str] = Counter({str(reason): 0 for reason in FinishReason})
        """Sequences by finish reason."""

    def ended(self, sequence: EngineSequence, cut: Stages) -> None:
        """Add an ended sequence; the times of one cut off are ignored."""
        reason = sequence.finish_reason
        if reason is None:
            return
        self.finished[str(reason)] += 1
        if reason in (FinishReason.ABORT, FinishReason.ERROR) or cut.e2e_ms is None:
            return
        self.e2e_s.observe(cut.e2e_ms / 1e3)
        before = (cut.tokenize_ms, cut.queue_ms, cut.restore_ms, cut.paused_ms)
        waited_ms = sum(value_ms or 0.0 for value_ms in before)
        self.running_s.observe((cut.e2e_ms - waited_ms) / 1e3)
        for stage, histogram in self.stage_s.items():
            if (value_ms := getattr(cut, f"{stage}_ms")) is not None:
                histogram.observe(value_ms / 1e3)
        if cut.tpot_ms is not None:
            self.tpot_s.observe(cut.tpot_ms / 1e3)
        self.prompt_tokens.observe(sequence.num_prompt_tokens)
        self.output_tokens.observe(sequence.num_output_tokens)
        self.max_tokens.observe(sequence.sampling.max_tokens)
