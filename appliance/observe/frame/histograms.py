"""Count requests and tokens by their latencies since the daemon started.

Invariant: counts only grow; every edge of vLLM's dashboards is an edge here, so that one count has
both names.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

from appliance.observe.frame.latency import Stages
from appliance.observe.frame.request_facts import STAGES
from engine.scheduler.sequences.sequence import Sequence as EngineSequence
from engine.wire.finish_reason import FinishReason

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
