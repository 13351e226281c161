from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.observe.frame import figures as fig

FORMATTERS = [
    fig.count,
    fig.short_count,
    fig.rate,
    fig.millis,
    fig.duration,
    fig.seconds,
    fig.whole_seconds,
    fig.size,
    fig.percent,
    fig.ratio,
]


@pytest.mark.parametrize("formatter", FORMATTERS)
def test_not_reported_is_a_dash_and_never_zero(formatter):
    assert formatter(None) == "-"
    assert formatter(0).startswith("0")


@pytest.mark.parametrize(
    ("value_s", "text"),
    [
        (0.42, "0.4s"),
        (59.9, "59.9s"),
        (59.96, "1m00s"),
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
    assert fig.seconds(value_s) == text


@pytest.mark.parametrize(
    ("value_ms", "text"),
    [
        (0.44, "0.4"),
        (99.94, "99.9"),
        (99.96, "100"),
        (999.4, "999"),
        (12_340, "12.3s"),
        (1e6, "16m40s"),
    ],
)
def test_milliseconds_stay_so_below_a_second(value_ms, text):
    assert fig.millis(value_ms) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (9_999, "9,999"),
        (10_000, "10k"),
        (281_002, "281k"),
        (999_600, "1M"),
        (2_412_333, "2.41M"),
        (7.6e9, "7.6B"),
        (0.106, "0.106"),
        (12.3, "12.3"),
        (5712, "5,712"),
    ],
)
def test_large_counts_are_shortened(value, text):
    assert fig.short_count(value) == text


@pytest.mark.parametrize(
    ("value_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 KiB"), (640 << 20, "640 MiB"), (5 << 30, "5.0 GiB")],
)
def test_sizes_have_a_binary_unit(value_bytes, text):
    assert fig.size(value_bytes) == text


def test_a_part_is_in_the_unit_of_its_whole():
    assert fig.part(512 << 20, 23 << 30) == "0.5/23.0 GiB"
    assert fig.part(270 << 20, 270 << 20) == "270/270 MiB"
    assert fig.part(None, 23 << 30) == "-"
    assert fig.part(1 << 30, None) == "1.0 GiB"


@given(st.floats(min_value=0, max_value=1e7))
def test_durations_stay_within_six_cells(value_s):
    assert len(fig.seconds(value_s)) <= 6
    assert len(fig.millis(value_s * 1000)) <= 6


@given(st.integers(min_value=0, max_value=10**15))
def test_short_counts_stay_within_five_cells(value):
    assert len(fig.short_count(value)) <= 5
    assert len(fig.brief_count(min(value, 10**14))) <= 4


def test_a_part_of_the_most_is_shortened_as_far_as_it_must_be():
    shown = [fig.of_most(9_800, 1_048_576, width) for width in (11, 10, 9, 8)]
    assert shown == ["9,800/1.05M", "9.8k/1.05M", "9.8k/1.0M", "9.8k"]


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("ttft_ms_p50", 412.4, "412ms"),
        ("turn_01_ttft_ms", 4_200.0, "4.20s"),
        ("itl_ms_p50", 9.0, "9.00ms"),
        ("itl_ms_max", 99.96, "100ms"),
        ("e2e_ms_max", 59_949.0, "59.9s"),
        ("e2e_ms_max", 75_000.0, "1m15s"),
        ("goodput_ratio", 0.971, "97.1%"),
        ("goodput_ratio", 0.9999, "99.9%"),
        ("goodput_ratio", 1, "100%"),
        ("share_ratio", 2.56, "256%"),
        ("output_tokens_per_s", 48.333, "48.3 tok/s"),
        ("requests_per_s", 1.23456, "1.2/s"),
        ("joules_per_token", 0.0412345, "0.0412 J"),
        ("p99_loaded_over_p99_quiet", 1.23456, "1.235x"),
        ("p99_over_p50_quiet", 12.3456, "12.3x"),
        ("input_tokens", 512.0, "512.0"),
        ("output_tokens", 64.25, "64.2"),
        ("offered", 12_345, "12,345"),
        ("hit_ratio", None, "-"),
    ],
)
def test_a_figure_reads_by_the_unit_in_its_name(name, value, text):
    assert fig.named(name, value) == text


def test_a_unit_that_stands_with_the_value_is_not_in_the_name():
    names = ("ttft_ms_p50", "late_ms_max", "requests_per_s", "output_tokens_per_s", "output_tokens")
    shown = ["ttft_p50", "late_max", "requests", "output", "output_tokens", "energy_per_token"]
    assert [fig.unitless(name) for name in (*names, "joules_per_token")] == shown


def test_the_clock_shows_the_time_of_day():
    assert fig.clock("2026-11-21T14:02:11.004Z") == "14:02:11Z"
    assert fig.clock("yesterday") == "-"


def test_short_ids_leave_out_the_prefix():
    assert fig.short_id("chatcmpl-3f9a21c0d7e2b1a4c0583f96") == "3f9a21c0"
    assert fig.short_id("resp_3f9a21c0d7e2b1a4c0583f96") == "3f9a21c0"
    assert fig.short_id("plain") == "plain"


@pytest.mark.parametrize(
    ("value_ms", "shown"),
    [
        (None, "-"),
        (0.0, "0ms"),
        (0.0123, "12us"),
        (0.1, "0.1ms"),
        (9.999, "10ms"),
        (99.96, "100ms"),
        (999.6, "1.0s"),
        (59_949.0, "59.9s"),
        (59_960.0, "1m00s"),
        (3_599_400.0, "59m59s"),
        (3_600_000.0, "1h00m"),
    ],
)
def test_durations_carry_their_unit(value_ms, shown):
    assert fig.duration(value_ms) == shown


def test_what_names_something_has_no_commas():
    assert fig.plain(123456) == "123456"
    assert fig.count(123456) == "123,456"
