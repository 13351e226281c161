"""Counters and meters report sums and rates of any readings."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.devices.counters import Counter, EnergyMeter

S = 1_000_000_000


SIZE = 1 << 16


@given(st.lists(st.integers(0, SIZE - 1), min_size=2))
def test_what_a_wrapping_counter_gains_adds_up(gains: list[int]) -> None:
    counter, value, seen = Counter(), 0, 0
    for second, gain in enumerate(gains):
        value += gain
        growth = counter.growth(second * S, value % SIZE, SIZE)
        assert (growth is None) == (second == 0)
        seen += 0 if growth is None else growth.amount
    assert seen == sum(gains[1:])


@given(st.lists(st.none() | st.integers(0, 10**6), max_size=30))
def test_a_meter_never_runs_backwards_and_misses_nothing(gains: list[int | None]) -> None:
    meter, value, last_j = EnergyMeter(), 5 * 10**9, 0.0
    readings = []
    for second, gain in enumerate(gains):
        value += gain or 0
        energy = meter.count(second * S, None if gain is None else value, unit_j=1e-3)
        assert (energy.energy_j is None) == (gain is None)
        if energy.energy_j is not None:
            assert energy.energy_j >= last_j
            last_j = energy.energy_j
            readings.append(value)
    if readings:
        assert last_j == pytest.approx((readings[-1] - readings[0]) / 1e3)


def test_a_failed_reading_is_caught_up_with_by_the_next() -> None:
    meter = EnergyMeter()
    meter.count(0, 0, unit_j=1.0)
    assert meter.count(1 * S, None, unit_j=1.0) == (None, None)
    assert meter.count(2 * S, 60, unit_j=1.0) == (60.0, 30.0)


def test_a_counter_that_begins_again_is_not_reported_once_and_then_goes_on() -> None:
    meter = EnergyMeter()
    meter.count(0, 900, unit_j=1.0)
    assert meter.count(1 * S, 5, unit_j=1.0) == (0.0, None)
    assert meter.count(2 * S, 25, unit_j=1.0) == (20.0, 20.0)


def test_two_readings_at_one_time_give_no_rate() -> None:
    counter = Counter()
    counter.growth(S, 1)
    assert counter.growth(S, 2) is None


def test_power_is_integrated_between_readings() -> None:
    meter = EnergyMeter()
    assert meter.integrate(0, 10.0) == (0.0, 10.0)
    assert meter.integrate(2 * S, 20.0) == (30.0, 20.0)
    assert meter.integrate(3 * S, None) == (None, None)
    assert meter.integrate(4 * S, 20.0) == (70.0, 20.0)
