"""What was seen lately, in figures; and what was ever seen, in counts."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.frame.latency import GAP_S, REQUEST_S, STAGE_S, Histogram, stages, token_edges
from appliance.watch.telemetry import MIN_STALL_MS, WINDOW_S, UsualTimes, Windows
from engine.schedule.elastic import Slo
from engine.schedule.sequence import FinishReason, Sequence, Stamps
from engine.wire.messages import SamplingParams

MS = 1_000_000
SECOND = 1_000_000_000


def sequence(reason=FinishReason.STOP, queue_ms=20, num_output_tokens=3) -> Sequence:
    """One that waited so long, and took 100 ms for its prompt and 10 for each later token."""
    started = (1 + queue_ms) * MS
    first = started + 100 * MS
    last = first + 10 * MS * (num_output_tokens - 1)
    stamps = Stamps(0, MS, started, first, first + MS, first + 2 * MS, last, last, last)
    made = Sequence(1, "cmpl-1", 0, [1], SamplingParams(max_tokens=8, seed=0), stamps)
    made.output_token_ids = [1] * num_output_tokens
    made.finish_reason = reason
    return made


def ended(windows: Windows, one: Sequence, now_ns: int = SECOND) -> None:
    windows.ended(one, stages(one.stamps, one.num_output_tokens), now_ns)


def test_nothing_seen_is_none_and_no_stall():
    frame = Windows().latency(Slo(500, 40), SECOND)
    figures = [getattr(frame, name) for name in frame.__struct_fields__]
    assert figures.count(None) == len(figures) - 3
    assert (frame.window_s, frame.num_requests, frame.num_stalls) == (WINDOW_S, 0, 0)
    assert Windows().usual(SECOND) == UsualTimes()


def test_shares_in_time_are_against_the_targets_of_the_moment():
    windows = Windows()
    for ttft_ms in (100.0, 200.0, 300.0, 400.0):
        windows.first_token(sequence(), ttft_ms, SECOND)
    for gap_ms in (10.0, 20.0):
        windows.gap(gap_ms, SECOND)
    assert windows.latency(Slo(200, 19), SECOND).ttft_slo_ratio == 0.5
    assert windows.latency(Slo(200, 19), SECOND).itl_slo_ratio == 0.5
    assert windows.latency(Slo(400, 20), SECOND).ttft_slo_ratio == 1.0
    assert windows.latency(Slo(99, None), SECOND).ttft_slo_ratio == 0.0
    assert windows.latency(Slo(), SECOND).ttft_slo_ratio is None
    assert windows.latency(Slo(200, 19), SECOND + 61 * SECOND).ttft_slo_ratio is None


def test_means_are_of_first_tokens_and_ends_of_what_was_not_cut_short():
    windows = Windows()
    for queue_ms in (10, 30):
        windows.first_token(sequence(queue_ms=queue_ms), 0.0, SECOND)
        ended(windows, sequence(queue_ms=queue_ms))
    ended(windows, sequence(FinishReason.ABORT, queue_ms=9000))
    frame = windows.latency(Slo(), SECOND)
    assert (frame.queue_ms_mean, frame.prefill_ms_mean) == (20.0, 100.0)
    assert (frame.e2e_ms_p50, frame.e2e_ms_p99) == (131.0, 151.0)
    assert frame.handoff_ms_p50 == 1.0


def test_a_stall_is_long_against_the_usual_gap_and_for_a_person():
    windows = Windows()
    for gap_ms in (*[10.0] * 20, 41.0, MIN_STALL_MS, MIN_STALL_MS + 1, 900.0):
        windows.gap(gap_ms, SECOND)
    assert windows.latency(Slo(), SECOND).num_stalls == 2


def test_the_usual_is_the_median_of_what_finished_also_when_it_is_quiet():
    windows = Windows()
    for queue_ms in (10, 20, 3000):
        assert windows.usual(SECOND) == UsualTimes(), "two say nothing of what is usual"
        ended(windows, sequence(queue_ms=queue_ms))
    usual = windows.usual(SECOND + 120 * SECOND)
    per_token = 100.0 / sequence().num_prompt_tokens
    assert (usual.queue_ms, usual.prefill_ms_per_token, usual.tpot_ms) == (20.0, per_token, 10.0)
    assert windows.usual(SECOND + 1000 * SECOND) == UsualTimes()


@given(st.lists(st.floats(0, 1e5)), st.sampled_from([(GAP_S,), (STAGE_S, REQUEST_S)]))
def test_counts_are_of_values_up_to_each_edge(values, edges):
    histogram = Histogram(*edges)
    for value in values:
        histogram.observe(value)
    for some in edges:
        counted = [sum(value <= edge for value in values) for edge in some]
        assert histogram.up_to(some) == counted
    assert histogram.total == len(values)
    assert math.isclose(histogram.sum, sum(values))


@pytest.mark.parametrize(
    ("longest", "edges"),
    [(1, (1,)), (4, (1, 2)), (100, (1, 2, 5, 10, 20, 50, 100)), (4096, None)],
)
def test_token_edges_are_one_two_and_five_up_to_the_longest(longest, edges):
    found = token_edges(longest)
    assert found == (edges or found)
    assert list(found) == sorted(found)
    assert longest / 2.5 <= found[-1] <= longest
