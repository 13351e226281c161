"""What was seen lately is told in figures, and what was ever seen in counts."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.observe.frame.histograms import GAP_S, REQUEST_S, STAGE_S, Histogram, token_edges
from appliance.observe.frame.latency import stages
from appliance.observe.frame.protocol import TodayFrame, UserFrame
from appliance.observe.telemetry import telemetry
from appliance.observe.telemetry.telemetry import Telemetry, Today
from appliance.observe.telemetry.windows import MIN_STALL_MS, WINDOW_S, UsualTimes, Windows
from engine.scheduler.routing.elastic import Slo
from engine.scheduler.sequences.sequence import Sequence, Stamps
from engine.wire.finish_reason import FinishReason
from engine.wire.run_spec import RunSpec
from engine.wire.sampling import SamplingParams

MS = 1_000_000
SECOND = 1_000_000_000


def sequence(reason=FinishReason.STOP, queue_ms=20, num_output_tokens=3) -> Sequence:
    """One that waited so long, and took 100 ms for its prompt and 10 for each later token."""
    started = (1 + queue_ms) * MS
    first = started + 100 * MS
    last = first + 10 * MS * (num_output_tokens - 1)
    stamps = Stamps(0, MS, started, first, first + MS, first + 2 * MS, last, last, last)
    made = Sequence(1, "cmpl-1", 0, [1], RunSpec(SamplingParams(max_tokens=8, seed=0)), stamps)
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
    for itl_ms in (10.0, 20.0):
        windows.itl(itl_ms, SECOND)
    assert windows.latency(Slo(200, 19), SECOND).ttft_slo_ratio == 0.5
    assert windows.latency(Slo(200, 19), SECOND).itl_slo_ratio == 0.5
    assert windows.latency(Slo(400, 20), SECOND).ttft_slo_ratio == 1.0
    assert windows.latency(Slo(99, None), SECOND).ttft_slo_ratio == 0.0
    assert windows.latency(Slo(), SECOND).ttft_slo_ratio is None
    assert windows.latency(Slo(200, 19), SECOND + 61 * SECOND).ttft_slo_ratio is None


def first_tokens(windows: Windows, now_s: float, *seen: tuple[int, float, float]) -> float | None:
    """Let prompts of (tokens, queue_ms, prefill_ms) get their first tokens; what the frame says."""
    for num_tokens, queue_ms, prefill_ms in seen:
        first = int(now_s * SECOND)
        started = first - int(prefill_ms * MS)
        arrived = started - int(queue_ms * MS)
        made = Sequence(
            1, "cmpl-1", 0, [1] * num_tokens, RunSpec(SamplingParams(max_tokens=8, seed=0)),
            Stamps(arrived, arrived, started, first),
        )  # fmt: skip
        windows.first_token(made, queue_ms + prefill_ms, first)
    return windows.latency(Slo(), int(now_s * SECOND)).ttft_over_usual


SHORT, LONG = (40, 10.0, 90.0), (4000, 10.0, 13_000.0)


def after_usual_minutes(*usual: tuple[int, float, float]) -> Windows:
    windows = Windows()
    for minute in range(5):
        first_tokens(windows, 60 * minute, *usual)
    return windows


def test_ttft_is_compared_with_what_is_usual_for_prompts_of_its_length():
    windows = after_usual_minutes(SHORT, LONG)
    assert first_tokens(windows, 400, SHORT, LONG, LONG, LONG) == 1.0
    assert first_tokens(windows, 430, *[(40, 3400.0, 100.0)] * 3) == pytest.approx(35.0)
    assert first_tokens(windows, 500, SHORT, SHORT, SHORT) == 1.0, "the window has passed"


def test_prompts_of_a_length_that_never_came_count_by_their_wait_alone():
    windows = after_usual_minutes(SHORT)
    assert first_tokens(windows, 400, *[LONG] * 10) == 1.0
    assert first_tokens(windows, 500, *[(4000, 91_000.0, 13_000.0)] * 3) == pytest.approx(8.0)


def test_computing_slower_than_usual_counts_as_waiting_does():
    windows = after_usual_minutes(LONG)
    assert first_tokens(windows, 400, *[(4000, 10.0, 130_090.0)] * 3) == pytest.approx(10.0)


def test_a_load_that_lasts_becomes_usual_and_another_model_starts_over():
    windows = after_usual_minutes(SHORT)
    loaded = (40, 3400.0, 100.0)
    for minute in range(10, 20):
        first_tokens(windows, 60 * minute, loaded)
    assert first_tokens(windows, 1800, loaded, loaded, loaded) == 1.0
    windows.begin_model(2000 * SECOND)
    assert first_tokens(windows, 2001, loaded, loaded, loaded) is None, "they waited for its load"
    assert first_tokens(windows, 2030, loaded, loaded, loaded) == pytest.approx(35.0)


@pytest.mark.parametrize(
    ("num_slow", "num_all", "is_told"),
    [(2, 2, False), (2, 30, False), (3, 30, True), (3, 50, False), (5, 50, True)],
)
def test_a_few_slow_first_tokens_are_not_told(num_slow, num_all, is_told):
    windows = after_usual_minutes(SHORT)
    seen = [(40, 3400.0, 100.0)] * num_slow + [SHORT] * (num_all - num_slow)
    assert (first_tokens(windows, 400, *seen) or 1.0) == pytest.approx(35.0 if is_told else 1.0)


def test_todays_sums_go_on_from_the_log_and_start_over_at_midnight(monkeypatch):
    monkeypatch.setattr(telemetry, "utc_now", lambda: "2026-11-22T23:59:58.000Z")
    today = Today()
    assert today.frame.since == "2026-11-22T23:59:58.000Z", "the log was not read"
    today.go_on_from([])
    assert today.frame == TodayFrame("2026-11-22T00:00:00.000Z", 0, 0, 0, 0)
    sums = {"requests": 7, "errors": 1, "prompt_tokens": 900, "completion_tokens": None}
    today.go_on_from([{"day": "2026-11-22", **sums}])
    ended = SimpleNamespace(has_failed=True, prompt_tokens=10, sequences=[sequence()])
    today.add(ended)
    assert today.frame == TodayFrame("2026-11-22T00:00:00.000Z", 8, 2, 910, 3)
    assert today.at("2026-11-23T00:00:01.000Z") == TodayFrame(
        "2026-11-23T00:00:00.000Z", 0, 0, 0, 0
    )


def test_users_have_their_tokens_of_the_last_second_also_when_none_is_live():
    seen, live = Telemetry(1024), [SimpleNamespace(peer=SimpleNamespace(name="bo"))]
    for count in (1, 2, 3):
        seen.tokens(sequence(), count, SECOND, "ana")
    assert seen.num_output_tokens == 6
    users = seen.users(live, elapsed_s=2.0)
    assert users == [UserFrame("ana", 0, 3.0), UserFrame("bo", 1, 0.0)]
    assert seen.users([], elapsed_s=1.0) == []


def test_means_are_of_first_tokens_and_ends_of_what_was_not_cut_short():
    windows = Windows()
    for queue_ms in (10, 30):
        windows.first_token(sequence(queue_ms=queue_ms), 0.0, SECOND)
        ended(windows, sequence(queue_ms=queue_ms))
    ended(windows, sequence(FinishReason.ABORT, queue_ms=9000))
    frame = windows.latency(Slo(), SECOND)
    assert (frame.tokenize_ms_mean, frame.queue_ms_mean) == (1.0, 20.0)
    assert (frame.restore_ms_mean, frame.prefill_ms_mean) == (None, 100.0)
    assert (frame.e2e_ms_p50, frame.e2e_ms_p99) == (131.0, 151.0)
    assert frame.handoff_ms_p50 == 1.0


def test_a_stall_is_long_against_the_usual_gap_and_for_a_person():
    windows = Windows()
    for itl_ms in (*[10.0] * 20, 41.0, MIN_STALL_MS, MIN_STALL_MS + 1, 900.0):
        windows.itl(itl_ms, SECOND)
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
