"""Panels are pure: frames in, lines out."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.protocol import PHASES, LatencyFrame, QueueFrame, RequestFrame
from tests.tui import frames
from tui.lines import text_of, width_of
from tui.panels import gauges, header, lanes, requests, waterfall
from tui.view import Link, View

MAKERS = [
    frames.idle,
    frames.busy,
    frames.loading,
    frames.draining,
    frames.colocated,
    frames.three_pools,
]
PANELS = [
    lanes.prefill,
    lanes.handoff,
    lanes.decode,
    gauges.kv,
    gauges.latency,
    gauges.machine,
    header.events,
]


def text(lines):
    return "\n".join(text_of(line) for line in lines)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("panel", PANELS)
@pytest.mark.parametrize("size", [(24, 3), (36, 6), (37, 5), (64, 6), (180, 12)])
def test_no_panel_is_higher_than_its_room(make, panel, size):
    width, height = size
    assert len(panel(View().after(make()), width, height)) <= height


@pytest.mark.parametrize("panel", PANELS[:-1])
def test_panels_are_empty_before_the_first_frame(panel):
    assert panel(View(), 36, 6) == []


@given(st.integers(40, 220), st.sampled_from(MAKERS), st.booleans())
def test_the_header_fits_and_always_shows_the_link_and_a_known_state(width, make, is_live):
    view = View().after(make())
    if not is_live:
        view = view.over(Link("DISCONNECTED", "why", 3.0, 2.0))
    line = header.header(view, width)
    assert width_of(line) <= width
    assert (view.frame.state.upper() in text_of(line)) is is_live
    assert ("LIVE" if is_live else "DISCONNECTED 3s, retry in 2s") in text_of(line)


def test_all_is_well_is_said_in_words():
    assert "ok" in text_of(header.alert_line(View().after(frames.idle()), 80))


@pytest.mark.parametrize(
    ("num_active", "severity"), [(900, None), (930, "warning"), (1010, "error")]
)
def test_a_full_pool_raises_an_alert(num_active, severity):
    view = View().after(frames.idle(pools=[frames.pool(active=num_active)]))
    assert [alert.severity for alert in header.alerts(view)] == ([severity] if severity else [])


@pytest.mark.parametrize(
    "change",
    [
        {"state": "draining"},
        {"state": "degraded", "state_reason": "decode is coming back"},
        {"workers": [frames.worker("decode", state="restarting")]},
        {"pools": [frames.pool(quarantined=1)]},
        {"queue": QueueFrame(32, 0, 0, 0, 64, 1000.0)},
        {"totals": msgspec.structs.replace(frames.idle().totals, log_rows_lost=1)},
    ],
)
def test_what_is_wrong_raises_an_alert(change):
    assert header.alerts(View().after(frames.idle(**change)))


def test_the_worst_alert_comes_first_and_the_others_are_counted():
    view = View().after(
        frames.busy(
            state="draining",
            workers=[frames.worker("decode", state="restarting")],
            pools=[frames.pool("prefill", active=950), frames.pool("decode", active=950)],
        )
    )
    line = text_of(header.alert_line(view, 80))
    assert line.startswith(" ■ ERROR worker decode is restarting")
    assert line.endswith("more)")
    assert len(line) <= 80


def test_missed_frames_are_said():
    view = View().after(frames.idle(1)).after(frames.idle(4))
    assert "2 frames missed" in text_of(header.alert_line(view, 80))


def test_events_come_newest_first():
    lines = header.events(View().after(frames.busy()), 120, 2)
    assert "queue.high" in text_of(lines[0])
    assert "request.cancelled" in text_of(lines[1])


def test_colocated_has_no_handoff():
    view = View().after(frames.colocated())
    assert "one worker does both" in text(lanes.handoff(view, 36, 6))


def test_a_missing_power_reading_is_said_and_not_zero():
    shown = text(gauges.machine(View().after(frames.idle()), 36, 5))
    assert "not reported" in shown
    assert " W" not in shown


def test_power_domains_that_do_not_fit_are_summed():
    view = View().after(frames.three_pools())
    assert "996 W over 3 devices" in text(gauges.machine(view, 36, 5))
    assert "512/700 W" in text(gauges.machine(view, 36, 12))


def test_a_loading_worker_shows_how_far_it_is():
    assert "loading 43%" in text(lanes.prefill(View().after(frames.loading()), 36, 6))


def test_quantiles_that_are_not_reported_are_dashes():
    lines = gauges.latency(View().after(frames.idle()), 36, 4)
    assert [text_of(line).split()[1:] for line in lines[1:]] == [["-", "-", "-"]] * 3


def test_the_latency_title_names_the_window():
    frame = frames.idle(latency=LatencyFrame(30.0, 12, *[None] * 8))
    assert gauges.latency_title(View().after(frame)) == "LATENCY  last 30s, 12 requests"


@given(st.integers(40, 220), st.sampled_from(PHASES))
def test_a_row_is_as_wide_as_its_heading_and_fits(width, phase):
    columns = requests.columns_for(width)
    row = requests.row(frames.request(3, phase), columns, is_selected=True)
    assert width_of(row) == width_of(requests.heading(columns, "age")) <= width


def test_the_most_important_columns_stay_when_it_gets_narrow():
    titles = [column.title for column in requests.columns_for(40)]
    assert titles[:3] == ["ID", "PHASE", "IN"]
    assert {column.title for column in requests.COLUMNS} == {
        column.title for column in requests.columns_for(230)
    }


def test_sorting_is_stable_and_puts_the_unreported_last():
    rows = [frames.request(number, ttft_ms=value) for number, value in enumerate((None, 5.0, 9.0))]
    rows.append(frames.request(9, ttft_ms=9.0))
    assert [row.ttft_ms for row in requests.ordered(rows, "ttft")] == [9.0, 9.0, 5.0, None]
    assert requests.ordered(rows, "ttft")[0] is rows[2]


def test_prefill_progress_is_shown_in_percent():
    request = frames.request(1, "prefilling", prompt_tokens=200, computed_tokens=50)
    assert requests.phase_text(request) == "prefilling 25%"


def finished(**changes) -> RequestFrame:
    values = {
        "tokenize_ms": 1.0,
        "queue_ms": 9.0,
        "prefill_ms": 90.0,
        "handoff_ms": 2.0,
        "decode_wait_ms": 3.0,
        "decode_ms": 894.5,
        "e2e_ms": 1000.0,
        "finish_reason": "stop",
    }
    return frames.request(1, "finished", **{**values, **changes})


def test_the_waterfall_prints_what_the_stages_leave_unexplained():
    shown = text(waterfall.waterfall(finished(), 60))
    assert [line.split()[:2] for line in shown.splitlines()[-3:]] == [
        ["sum", "1000"],
        ["end", "to"],
        ["residual", "0.5"],
    ]


def test_the_waterfall_of_a_live_request_shows_the_stage_it_is_in():
    shown = text(waterfall.waterfall(frames.request(5, "prefilling"), 60))
    assert "prefilling…" in shown
    assert "residual" not in shown


stage_ms = st.none() | st.floats(0, 1e6)


@given(st.tuples(*[stage_ms] * 6), st.floats(0, 1e6), st.integers(30, 120))
def test_waterfall_bars_stay_in_order_and_inside(values, e2e_ms, width):
    names = ("tokenize", "queue", "prefill", "handoff", "decode_wait", "decode")
    stages = {f"{name}_ms": value for name, value in zip(names, values, strict=True)}
    lines = waterfall.waterfall(finished(**stages, e2e_ms=e2e_ms), width)
    assert all(width_of(line) <= width for line in lines)
    starts = [text_of(line).index("█") for line in lines if "█" in text_of(line)]
    assert starts == sorted(starts)


def test_the_detail_names_the_error():
    lines = waterfall.detail(finished(finish_reason="error", error="worker gone\x1b[2J"), 70)
    assert "worker gone?[2J" in text(lines)
