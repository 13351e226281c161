from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from tui import format as fmt

FORMATTERS = [
    fmt.count,
    fmt.short_count,
    fmt.rate,
    fmt.millis,
    fmt.millis_unit,
    fmt.seconds,
    fmt.whole_seconds,
    fmt.size,
    fmt.percent,
    fmt.ratio,
]


@pytest.mark.parametrize("formatter", FORMATTERS)
def test_not_reported_is_a_dash_and_never_zero(formatter):
    assert formatter(None) == "-"
    assert formatter(0).startswith("0")


@pytest.mark.parametrize(
    ("value_s", "text"),
    [
        (0.42, "0.4s"),
        (99.9, "99.9s"),
        (99.96, "1m40s"),
        (185, "3m05s"),
        (3599.6, "1h00m"),
        (7440, "2h04m"),
        (86_400, "1d00h"),
        (273_840, "3d04h"),
        (120 * 86_400, "120d"),
    ],
)
def test_seconds_go_over_to_larger_units(value_s, text):
    assert fmt.seconds(value_s) == text


@pytest.mark.parametrize(
    ("value_ms", "text"),
    [(0.44, "0.4"), (99.94, "99.9"), (99.96, "100"), (9_999, "9999"), (12_340, "12.3s")],
)
def test_milliseconds_go_over_to_seconds(value_ms, text):
    assert fmt.millis(value_ms) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(9_999, "9999"), (10_000, "10.0k"), (281_002, "281k"), (999_600, "1.0M"), (2_412_333, "2.4M")],
)
def test_large_counts_are_shortened(value, text):
    assert fmt.short_count(value) == text


@pytest.mark.parametrize(
    ("value_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 KiB"), (640 << 20, "640 MiB"), (5 << 30, "5.0 GiB")],
)
def test_sizes_have_a_binary_unit(value_bytes, text):
    assert fmt.size(value_bytes) == text


def test_a_part_is_in_the_unit_of_its_whole():
    assert fmt.part(512 << 20, 23 << 30) == "0.5/23.0 GiB"
    assert fmt.part(None, 23 << 30) == "-"
    assert fmt.part(1 << 30, None) == "1.0 GiB"


@given(st.floats(min_value=0, max_value=1e7))
def test_durations_stay_within_six_cells(value_s):
    assert len(fmt.seconds(value_s)) <= 6
    assert len(fmt.millis(value_s * 1000)) <= 6


@given(st.integers(min_value=0, max_value=10**15))
def test_short_counts_stay_within_five_cells(value):
    assert len(fmt.short_count(value)) <= 5


@given(st.text(), st.integers(min_value=0, max_value=40), st.booleans())
def test_padded_text_has_exactly_the_width_and_nothing_unprintable(text, width, right):
    padded = fmt.pad(text, width, right=right)
    assert cell_len(padded) == width
    assert padded.isprintable()


def test_a_cut_is_marked():
    assert fmt.clip("penstock", 5) == "pens…"
    assert fmt.clip("penstock", 8) == "penstock"


def test_the_clock_shows_the_time_of_day():
    assert fmt.clock("2026-11-21T14:02:11.004Z") == "14:02:11Z"
    assert fmt.clock("yesterday") == "-"


def test_short_ids_leave_out_the_prefix():
    assert fmt.short_id("chatcmpl-3f9a21c0d7e2b1a4c0583f96") == "3f9a21c0"
    assert fmt.short_id("resp_3f9a21c0d7e2b1a4c0583f96") == "3f9a21c0"
    assert fmt.short_id("plain") == "plain"
