"""What is usual is learnt from good minutes alone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from appliance.observe.telemetry.baseline import MAX_MINUTES, Baseline


def minutes(baseline: Baseline, values: list[float], begin: int = 1, *, is_wrong=False) -> int:
    """Add three readings in each minute; return the next minute."""
    for minute, value in enumerate(values, begin):
        for second in (0, 20, 40):
            baseline.add(1, value, 60 * minute + second)
            if is_wrong:
                baseline.leave_out(60 * minute + second)
    return begin + len(values)


def test_a_minute_counts_once_it_is_over_and_enough_of_them_are_there():
    baseline = Baseline(2)
    minutes(baseline, [5.0, 7.0])
    assert baseline.of(1) is None
    minutes(baseline, [100.0], 3)
    assert baseline.of(1) == 6.0
    assert (baseline.of(2), baseline.kinds) == (None, [1])


@given(st.integers(1, 200), st.floats(1, 1e6))
def test_an_alerts_time_is_no_part_of_what_is_usual(num_wrong, wrong):
    baseline = Baseline(1)
    after = minutes(baseline, [10.0] * 5)
    after = minutes(baseline, [wrong] * num_wrong, after, is_wrong=True)
    minutes(baseline, [10.0] * 2, after)
    assert baseline.of(1) == 10.0


def test_an_hour_moves_a_days_usual_value_by_nothing_and_a_day_replaces_it():
    baseline = Baseline(1)
    after = minutes(baseline, [10.0] * 300)
    after = minutes(baseline, [99.0] * 60, after)
    assert baseline.of(1) == 10.0
    minutes(baseline, [99.0] * MAX_MINUTES, after)
    assert baseline.of(1) == 99.0
