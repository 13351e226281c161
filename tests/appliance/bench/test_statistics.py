"""Figures from samples; ratios, bands and verdicts from figures."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.bench.sample import Sample
from appliance.bench.statistics import (
    QUANTILES,
    TIMES,
    GoodputTargets,
    Spread,
    band,
    ratio,
    spread,
    summarize,
    verdict,
)

NONE = GoodputTargets()
positive = st.floats(0.001, 1e6)


def done(ttft_ms: float, *itl_ms: float, offered_ms: float = 0.0) -> Sample:
    return Sample(
        offered_ms=offered_ms,
        late_ms=0.5,
        status=200,
        prompt_tokens=10,
        output_tokens=1 + len(itl_ms),
        ttft_ms=ttft_ms,
        itl_ms=list(itl_ms),
        e2e_ms=ttft_ms + sum(itl_ms),
    )


REFUSED = Sample(0, 0, status=429, error="full")
FAILED = Sample(0, 0, status=None, error="cannot connect")


def test_every_request_that_was_offered_is_counted_once() -> None:
    figures = summarize([done(10, 5), REFUSED, FAILED, FAILED], 1000, NONE)
    counts = [figures[name] for name in ("offered", "completed", "refused", "failed")]
    assert counts == [4, 1, 1, 2]


def test_goodput_is_a_share_of_what_was_offered() -> None:
    samples = [done(10, 5, 5), done(300, 5, 5), done(10, 5, 90), REFUSED]
    assert summarize(samples, 1000, GoodputTargets(100, 50))["goodput_ratio"] == 0.25
    assert summarize(samples, 1000, GoodputTargets(ttft_ms=100))["goodput_ratio"] == 0.5
    assert summarize(samples, 1000, GoodputTargets(itl_ms=50))["goodput_ratio"] == 0.5
    assert summarize(samples, 1000, NONE)["goodput_ratio"] is None


def test_a_reply_that_broke_off_has_no_end_to_end_time() -> None:
    broken = Sample(0, 0, status=200, error="it broke", ttft_ms=10, e2e_ms=999)
    figures = summarize([done(10, 5), broken], 1000, NONE)
    assert figures["e2e_ms_max"] == 15


def test_throughput_counts_what_came_within_the_window() -> None:
    samples = [done(100, 100, 100), done(100, 700, 100, offered_ms=500)]
    figures = summarize(samples, 1000, NONE, energy_j=8)
    assert figures["output_tokens_per_s"] == 4
    assert figures["requests_per_s"] == 1
    assert figures["joules_per_token"] == 2


def test_nothing_observed_is_none_and_not_zero() -> None:
    figures = summarize([REFUSED], 1000, GoodputTargets(1), energy_j=5)
    assert all(figures[f"{name}_{q}"] is None for name in TIMES for q in QUANTILES)
    assert figures["joules_per_token"] is None
    assert figures["output_tokens"] is None
    assert figures["goodput_ratio"] == 0
    assert summarize([], 1000, GoodputTargets(1))["goodput_ratio"] is None


@settings(deadline=None, max_examples=50)
@given(st.lists(st.builds(done, positive, positive, positive), min_size=1))
def test_quantiles_are_seen_values_in_order(samples: list[Sample]) -> None:
    figures = summarize(samples, 1000, NONE)
    for name in TIMES:
        ranked = [figures[f"{name}_{q}"] for q in QUANTILES]
        assert ranked == sorted(ranked)
    assert figures["itl_ms_max"] == max(gap for sample in samples for gap in sample.itl_ms)
    assert figures["ttft_ms_p50"] in [sample.ttft_ms for sample in samples]


@settings(deadline=None, max_examples=50)
@given(st.lists(positive, min_size=1))
def test_a_spread_holds_its_values(values: list[float]) -> None:
    found = Spread.of(values)
    assert found is not None
    assert found.low <= found.median <= found.high
    assert (found.low, found.high) == (min(values), max(values))
    assert sum(v <= found.median for v in values) >= len(values) / 2


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(positive, positive), min_size=1), positive)
def test_a_ratio_is_within_rounds_so_what_slows_a_round_cancels_out(
    pairs: list[tuple[float, float]], slowdown: float
) -> None:
    arm, base = ([{"x": pair[i]} for pair in pairs] for i in (0, 1))
    plain = ratio(arm, base, "x")
    slowed = ratio(
        [{"x": each["x"] * slowdown} for each in arm],
        [{"x": each["x"] * slowdown} for each in base],
        "x",
    )
    assert plain is not None
    assert slowed is not None
    assert all(abs(a / b - 1) < 1e-9 for a, b in zip(plain, slowed, strict=True))


def test_rounds_without_the_figure_are_left_out() -> None:
    arm, base = [{"x": 4.0}, {"x": None}, {"x": 9.0}], [{"x": 2.0}, {"x": 1.0}, {"x": 0.0}]
    assert ratio(arm, base, "x") == (2, 2, 2)
    assert spread(arm, "x") == (6.5, 4, 9)
    assert spread(arm, "y") is None


@settings(deadline=None, max_examples=50)
@given(st.lists(positive, min_size=1))
def test_the_band_is_the_same_whichever_of_two_equal_turns_is_the_base(values: list[float]) -> None:
    one = band(Spread.of(values))
    other = band(Spread.of([1 / value for value in values]))
    assert one is not None
    assert other is not None
    assert all(abs(a / b - 1) < 1e-9 for a, b in zip(one, other, strict=True))
    assert one[0] <= 1 <= one[1]
    assert verdict(Spread.of(values), one, is_more_better=True) == "same"


def test_a_verdict_needs_to_leave_the_band() -> None:
    noise = (0.8, 1.25)
    assert verdict(Spread(1.2, 1.0, 1.4), noise, is_more_better=True) == "same"
    assert verdict(Spread(1.3, 1.0, 1.4), noise, is_more_better=True) == "better"
    assert verdict(Spread(1.3, 1.0, 1.4), noise, is_more_better=False) == "worse"
    assert verdict(Spread(0.5, 0.4, 1.4), noise, is_more_better=False) == "better"
    assert verdict(None, noise, is_more_better=True) == ""
    assert verdict(Spread(2, 2, 2), None, is_more_better=True) == ""


def test_tokens_behind_others_in_a_burst_are_counted_as_such() -> None:
    steady, bursts = done(10, 5, 5, 5), done(10, 12, 0.01, 12, 0.02)
    assert summarize([steady], 1000, NONE)["burst_ratio"] == 0
    assert summarize([bursts], 1000, NONE)["burst_ratio"] == 0.5
    whole = Sample(0, 0, 200, output_tokens=5, ttft_ms=1, e2e_ms=1, merged_tokens=4)
    assert summarize([whole], 1000, NONE)["burst_ratio"] == 1
    assert summarize([FAILED], 1000, NONE)["burst_ratio"] is None
