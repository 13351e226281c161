"""Panels are pure: frames in, lines out."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.observe.frame import figures
from appliance.observe.frame.late_frames import SurvivedFrame
from appliance.observe.frame.protocol import PHASES, LatencyFrame, RequestFrame, WayFrame
from appliance.observe.frame.request_facts import STAGES
from appliance.observe.frame.tier_frames import fields
from tests.tui import frames
from tui import feed
from tui.history import has_meter
from tui.lines import text_of, width_of
from tui.panels import events, gauges, handoff, header, lanes, latencies, request_page, requests
from tui.panels.glossary import GLOSSARY, REQUEST, glossary, markdown
from tui.request_order import RequestListing
from tui.view import DaemonLink, View
from tui.widgets import overview

MAKERS = [
    frames.idle,
    frames.busy,
    frames.loading,
    frames.draining,
    frames.colocated,
    frames.three_pools,
    frames.kv_critical,
    frames.worker_dead,
    frames.no_gpu,
    frames.mig,
]
PANELS = [
    lanes.prefill,
    lanes.handoff,
    lanes.decode,
    gauges.kv,
    latencies.latency,
    gauges.machine,
    events.events,
]


def text(lines):
    return "\n".join(text_of(line) for line in lines)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("panel", PANELS)
def test_no_panel_is_higher_than_its_room(make, panel):
    view = View().after(make())
    for width, height in ((24, 3), (36, 6), (37, 5), (64, 6), (180, 12)):
        assert len(panel(view, width, height)) <= height


@pytest.mark.parametrize("panel", PANELS[:-1])
def test_panels_are_empty_before_the_first_frame(panel):
    assert panel(View(), 36, 6) == []


@given(st.integers(40, 220), st.sampled_from(MAKERS), st.booleans())
def test_the_header_fits_and_always_shows_the_link_and_a_known_state(width, make, is_live):
    view = View().after(make())
    if not is_live:
        view = view.over(DaemonLink("DISCONNECTED", "why", 3.0, 2.0))
    line = header.header(view, width)
    assert width_of(line) <= width
    assert (view.frame.state.upper() in text_of(line)) is is_live
    assert ("LIVE" if is_live else "DISCONNECTED 3s, retry in 2s") in text_of(line)


def test_all_is_well_is_said_in_words():
    assert "ok" in text_of(header.alert_line(View().after(frames.idle()), 80))


def test_alerts_are_the_daemons_and_its_marks_stand_at_their_readings():
    view = View().after(frames.kv_critical())
    assert [alert.severity for alert in header.alerts(view)] == ["error", "warning"]
    assert "99%■" in text(gauges.kv(view, 60, 4))
    assert "68% " in text(gauges.kv(view, 60, 4))
    assert "97.1%▲" in text(latencies.latency(view, 60, 4))


def test_no_reading_is_judged_here():
    full = frames.busy(pools=[frames.pool(active=1020)])
    assert header.alerts(View().after(full)) == []


@pytest.mark.parametrize(
    ("change", "severity"),
    [({"state": "draining"}, "warning"), ({"state": "degraded", "state_reason": "x"}, "error")],
)
def test_a_state_that_is_not_ready_is_said_with_the_alerts(change, severity):
    view = View().after(frames.idle(**change))
    assert [alert.severity for alert in header.alerts(view)] == [severity]


def test_the_worst_alert_comes_first_and_the_others_are_counted():
    alerts = [frames.alert(message=f"pool {number} is full") for number in range(3)]
    alerts.append(frames.alert("worker.down", severity="error", message="worker decode is down"))
    line = text_of(header.alert_line(View().after(frames.busy(alerts=alerts)), 80))
    assert line.startswith(" ■ ERROR worker decode ")
    assert line.endswith("more)")
    assert len(line) <= 80


def test_a_reading_of_a_daemon_that_is_gone_says_since_when_it_is_stale():
    view = View().after(frames.busy())
    lost = view.over(DaemonLink("DISCONNECTED", "no daemon listens", 3.0, 2.0))
    stale = f"figures stale since {figures.clock(view.frame.at)}: no daemon listens"
    assert stale in text_of(header.alert_line(lost, 120))
    assert stale in header.summary(lost)
    assert "stale" not in text_of(header.alert_line(View().over(lost.link), 120))


@pytest.mark.parametrize(
    ("loss", "told"),
    [
        (
            feed.FeedAbsent("no such socket", "/run/p.sock"),
            "penstock serve",
        ),
        (feed.FeedLost("no daemon speaks so"), "daemon speaks so"),
    ],
)
def test_an_empty_table_says_how_to_start_a_daemon_where_there_is_none(loss, told):
    assert text_of(requests.placeholder(View().over(loss.link))).endswith(f" {told}")


def test_an_empty_table_suggests_a_request_only_before_the_first():
    served = frames.idle()
    fresh = frames.idle(today=msgspec.structs.replace(served.today, requests=0))
    counted = msgspec.structs.replace(served.totals, accepted=11, finished=11)
    used = frames.idle(today=fresh.today, totals=counted)
    assert "penstock run" in text_of(requests.placeholder(View().after(fresh)))
    assert "penstock run" not in text_of(requests.placeholder(View().after(used)))
    assert "penstock run" not in text_of(requests.placeholder(View().after(served))), "today's"


@pytest.mark.parametrize("state", ["loading", "ready"])
def test_an_empty_table_says_what_kept_requests_wait_for(state):
    frame = frames.idle(survived=SurvivedFrame("SIGKILL", "", 8, 8), state=state)
    shown = text_of(requests.placeholder(View().after(frame)))
    assert ("8 requests" in shown, "loaded" in shown) == (True, state == "loading")


def test_while_the_next_daemon_loads_the_death_before_it_is_told_first():
    told = frames.alert(message="the daemon was killed 3s ago; 8 requests continue")
    view = View().after(frames.idle(alerts=[told], state="loading"))
    assert [alert.severity for alert in header.alerts(view)] == ["warning", "warning"]
    assert "8 requests" in text_of(header.alert_line(view, 80))


def test_an_alert_ends_with_the_command_that_says_more_or_the_keys_of_its_request():
    told = frames.alert(message="starved", action="top")
    assert text_of(header.alert_line(View().after(frames.idle(alerts=[told])), 120)).endswith(
        "ago; run `top`"
    )
    listed = frames.request(7)
    told = frames.alert(message="late", action="penstock show 7", request_id=listed.id)
    view = View().after(frames.busy(alerts=[told], requests=[listed]))
    assert "a shows it" in text_of(header.alert_line(view, 120))
    other = msgspec.structs.replace(told, code="decode.stall")
    view = View().after(frames.busy(alerts=[told, other], requests=[listed]))
    assert text_of(header.alert_line(view, 200)).count("a shows it") == 1


def test_a_pool_that_all_share_is_named_once():
    shared = View().after(frames.busy(pools=[frames.pool(active=10)]))
    assert "kv kv" not in header.summary(shared)


def test_what_limits_the_appliance_stands_beside_the_alerts_if_it_fits():
    view = View().after(frames.kv_critical())
    assert "4 sequences wait" not in text_of(header.alert_line(view, 80))
    assert "4 sequences wait" in text_of(header.alert_line(view, 200))
    assert "4 sequences wait" in text_of(header.alert_line(View().after(frames.busy()), 80))


def test_missed_frames_are_said():
    view = View().after(frames.idle(1)).after(frames.idle(4))
    assert "missed 2 frames" in text_of(header.header(view, 120))
    assert "no alerts" in text_of(header.alert_line(view, 80))


def test_a_title_leaves_out_whole_what_does_not_fit():
    view = View().after(frames.busy())
    whole = requests.title(view, 30, 22, 28)
    assert whole.endswith("1,204 done, 2 refused, 31 cancelled")
    least = len(requests.title(view, 30, 22, 28, 1))
    for room in range(20, 120):
        title = requests.title(view, 30, 22, 28, room)
        assert len(title) <= max(room, least)
        assert title.endswith(("by TIME ↓", "done", "cancelled", "refused"))


def test_what_is_wrong_stands_above_what_only_informs_each_the_newest_first():
    lines = events.events(View().after(frames.busy()), 120, 3)
    for line, code in zip(lines, ("queue.high", "worker.died", "request.cancelled"), strict=True):
        assert code in text_of(line)


def test_after_ten_minutes_what_was_wrong_stands_below_what_informs():
    happened = [
        frames.EventFrame("2026-11-21T13:50:00.000Z", "error", "daemon.died", "killed"),
        frames.EventFrame("2026-11-21T14:02:00.000Z", "info", "worker.ready", "ready"),
    ]
    lines = events.events(View().after(frames.idle(events=happened)), 120, 2)
    assert "worker.ready" in text_of(lines[0])
    assert "daemon.died" in text_of(lines[1])


def test_handoffs_have_a_lane_only_where_they_copy_kv():
    for make, is_shown in ((frames.colocated, 0), (frames.busy, 0), (frames.three_pools, 1)):
        assert bool(lanes.handoff(View().after(make()), 40, 6)) == is_shown
    assert "handed off 1,560" in text(lanes.decode(View().after(frames.busy()), 40, 7))
    assert "handed off" not in text(lanes.decode(View().after(frames.colocated()), 40, 7))


def test_each_core_has_a_bar_with_its_worker_and_many_cores_a_cell_each():
    frame = frames.busy(devices=[], energy=None)
    shown = text(gauges.machine(View().after(frame), 40, 6))
    assert "cpu 0     99% prefill" in shown
    assert "cpu 1     96% decode" in shown
    frame.host.core_percents = [0, 50, 100] * 20
    shown = text(gauges.machine(View().after(frame), 40, 6))
    assert shown.count("▁▅█") + shown.count("█▁▅") >= 10
    assert "cores" in shown


def test_things_that_go_wrong_have_no_zero():
    quiet = View().after(frames.idle())
    shown = text([*lanes.handoff(quiet, 60, 20), *lanes.decode(quiet, 60, 20)])
    shown += text(handoff.page(quiet, 100, 40)) + requests.title(quiet, 0, 0, 0)
    troubles = {"failed", "stale", "recovered", "restarts", "stalls", "paused", "preempted"}
    assert not troubles & set(shown.split())
    frame = frames.idle(queue=frames.QueueFrame(0, 0, 0, 0, 64, None, paused=2))
    frame.totals.stale_messages, frame.totals.failed = 3, 4
    trouble = View().after(frame)
    assert "stale 3" in text(lanes.decode(trouble, 60, 20))
    assert "paused 2" in text(lanes.decode(trouble, 60, 20))
    assert "4 failed" in requests.title(trouble, 0, 0, 0)


def test_an_event_that_only_informs_leaves_the_overview_after_a_while():
    frame = frames.busy()
    codes = [line[2].text.strip() for line in events.events(View().after(frame), 120, 9)]
    assert "daemon.ready" not in codes, "21 minutes ago"
    assert {"worker.died", "request.cancelled", "queue.high"} <= set(codes)
    assert "daemon.ready" in text(events.all_events(View().after(frame), 120))


def test_a_note_says_what_went_wrong_or_is_waited_for_or_made_it_slow():
    columns = [column for column in requests.columns_for(200) if column.title == "NOTE"]

    def note(number, phase="queued", **changes):
        row = requests.row(frames.request(number, phase, **changes), columns, is_selected=False)
        return text_of(row).strip()

    assert note(1) == "behind aaa971e6, 4,730 left"
    assert note(1, behind=None, waits_for="KV blocks; 1 s so far") == "waits for KV blocks"
    assert note(4, "decoding") == "queue: 1.2s, usually 20ms"
    assert note(1, "decoding") == ""
    assert note(1, error="worker gone") == "worker gone"


@pytest.mark.parametrize("width", [40, 80, 100, 140])
def test_the_summary_of_users_is_cut_between_users(width):
    line = text_of(requests.summary(View().after(frames.busy()), width))
    assert line.startswith(" today 1,237 requests, 2.41M in, ")
    assert line.endswith({40: "+3 users", 80: "+3 users", 100: "+2 users", 140: "tok/s"}[width])
    assert len(line) <= max(width, 60)


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        ("stop", "done (stop)"),
        ("length", "done (length)"),
        ("tool_calls", "done (tools)"),
        ("abort", "cancelled"),
        ("error", "failed"),
    ],
)
def test_a_finished_request_says_how_it_ended(reason, told):
    assert requests.phase_text(frames.finished(1, finish_reason=reason)) == told


def test_power_domains_that_do_not_fit_are_summed():
    view = View().after(frames.three_pools())
    assert "996/1,525 W, 3 devices 61C" in text(gauges.machine(view, 36, 5))
    assert "512/700 W" in text(gauges.machine(view, 36, 12))


def test_a_loading_worker_shows_how_far_it_is():
    assert "loading 43%" in text(lanes.prefill(View().after(frames.loading()), 36, 6))


def test_quantiles_that_are_not_reported_are_dashes():
    quiet = frames.idle().latency
    quiet.ttft_ms_p50 = 12.0
    lines = latencies.latency(View().after(frames.idle(latency=quiet)), 36, 4)
    assert [text_of(line).split()[1:] for line in lines[2:]] == [["-", "-", "-"]] * 2


def test_shares_and_targets_have_columns_only_where_a_target_is_set():
    frame = frames.busy()
    for width in (36, 80):
        shown = text(latencies.latency(View().after(frame), width, 6))
        assert ("97.1%" in shown, "<=500" in shown) == (True, width == 80)
    frame.slo_ttft_ms = frame.slo_itl_ms = None
    for width in (36, 80):
        head = text(latencies.latency(View().after(frame), width, 6)).splitlines()[0].split()
        assert not {"ok", "target"} & set(head)


def test_alerts_that_were_raised_and_cleared_are_counted_with_their_mean_length():
    def event(second, severity, code="queue.wait"):
        return frames.EventFrame(f"2026-11-21T14:01:{second:02}.000Z", severity, code, "x")

    happened = [
        event(1, "error", "worker.died"), event(2, "warning"), event(4, "error"),
        event(12, "info"), event(20, "warning"), event(40, "info"), event(50, "warning"),
    ]  # fmt: skip
    shown = text(events.page(View().after(frames.idle(events=happened)), 120, 40))
    (row,) = [line.split() for line in shown.splitlines() if line.startswith("queue.wait")]
    assert row[:4] + row[-1:] == ["queue.wait", "2", "times", "15.0s", "14:01:40Z"]
    assert "CLEARED" not in text(events.page(View().after(frames.idle()), 120, 40))


def test_stages_of_the_first_token_that_took_time_are_all_shown():
    frame = frames.busy()
    frame.latency.restore_ms_mean = 12_340.0
    shown = "ttft mean tokenize 1.4 + queue 61.0 + restore 12.3s + prefill 142"
    assert shown in text(latencies.latency(View().after(frame), 80, 6))
    lines = text(latencies.latency(View().after(frame), 38, 9))
    assert "restore 12.3s + prefill 142" in lines
    assert "queue 61.0 + tokenize 1.4" in " ".join(lines.split())
    frame.latency.restore_ms_mean = None
    assert "restore" not in text(latencies.latency(View().after(frame), 80, 6))


@pytest.mark.parametrize("width", range(24, 80))
def test_stages_of_the_first_token_are_left_out_whole(width):
    frame = frames.busy()
    frame.latency.prefill_ms_mean, frame.latency.queue_ms_mean = 690.0, 333.0
    lines = latencies.latency(View().after(frame), width, 6 - (width < 36))
    last = text(lines).splitlines()[-1].rstrip()
    assert "prefill 690" in last
    assert last.endswith(("690", "rest 334", "queue 333", "1.4"))
    assert len(last) <= width


def test_a_note_that_does_not_fit_loses_whole_parts():
    request = frames.busy().requests[4]
    request.slow_because = "prefill: 12.5s, usually 1024ms"
    (note,) = (column for column in requests.COLUMNS if column.title == "NOTE")
    for width, shown in ((34, "prefill: 12.5s, usually 1024ms"), (20, "prefill: 12.5s")):
        (_, cell) = requests.row(request, [replace(note, width=width)], is_selected=False)
        assert cell.text.strip() == shown


@pytest.mark.parametrize(("own", "shown"), [(97.0, "decode"), (3.0, "other")])
def test_a_core_that_other_programs_keep_busy_is_not_put_down_to_its_worker(own, shown):
    frame = frames.busy()
    worker = frame.workers[-1]
    worker.cpus_used, worker.cpu_percent = [1], own
    frame.host.core_percents = [0, 98]
    assert f"98% {shown}" in text(gauges.machine(View().after(frame), 40, 8))


@pytest.mark.parametrize("queued", [0, 999, 4_000, 9_949, 99_900, 1_048_575])
def test_prompt_tokens_that_wait_are_never_cut_inside_a_number(queued):
    frame = frames.busy()
    frame.queue.queued_tokens, frame.queue.max_queued_tokens = queued, 1_048_576
    for width in range(26, 60):
        line = text(lanes.prefill(View().after(frame), width, 6)).splitlines()[5]
        assert len(line) <= width
        assert line.split()[-2] == "waiting"
        assert queued != 4_000 or width != 36 or line.endswith("waiting 4.0k/1.05M")


def test_where_nothing_was_measured_a_sentence_says_so():
    shown = text(latencies.latency(View().after(frames.idle()), 36, 6))
    assert shown.strip().startswith("no tokens for 60 s")
    young = frames.idle()
    young.uptime_s = 6.0
    assert "60" not in text(latencies.latency(View().after(young), 36, 6))


def test_a_memory_reading_does_not_run_into_its_bar():
    frame = frames.busy()
    frame.host.memory_used_bytes = int(10.2 * 2**30)
    frame.host.memory_total_bytes = int(23.5 * 2**30)
    assert "10.2/23.5 GiB " in text(gauges.machine(View().after(frame), 60, 8))


@pytest.mark.parametrize(
    ("used", "title"),
    [
        ([1], "DECODE  cpu 1"),
        ([0, 1], "DECODE  cpu 1 + cpu 0"),
        ([], "DECODE  lent: prefill"),
    ],
)
def test_a_lane_says_on_which_cores_its_worker_computes_now(used, title):
    frame = frames.busy()
    decode = next(worker for worker in frame.workers if worker.name == "decode")
    decode.cpus_used = used
    frame.workers[0].cpus_used = [0, 1]
    assert lanes.decode_title(View().after(frame)) == title


def test_the_handoff_page_says_in_words_why_sequences_went_where_they_did():
    new = "some new reason"
    frame = frames.busy()
    frame.totals.routes = {"move unknown": 3, f"decode {new}": 1}
    shown = text(handoff.page(View().after(frame), 100, 40))
    assert f"3  handed off {handoff.REASONS['unknown']}" in shown
    assert f"1  on decode  {new}" in shown
    frame.transport = "shm"
    assert "no timings" in text(lanes.handoff(View().after(frame), 40, 20))


def test_the_handoff_page_says_what_came_of_predictions_and_which_ways_are_closed():
    frame = frames.busy()
    assert "PREDICTIONS" not in text(handoff.page(View().after(frame), 120, 40))
    frame.totals.ways = [
        WayFrame("move", "prefill", True, False, 512, 7, 0, 0, 1.12, False),
        WayFrame("decode", "decode", True, True, 64, 3, 2, 1, 2.6, True),
    ]
    shown = text(handoff.page(View().after(frame), 140, 40))
    told = "on prefill, own cores, beside decode steps, steps of 512 tokens, predictions off 1.1x"
    assert f"7  handed off {told}" in shown
    missed = "2 took twice as long or more, 1 moved away"
    closed = f"predictions off 2.6x, {missed}, not used until measured again"
    told = "on decode, all cores, beside decode steps, steps of 64 tokens"
    assert f"3  on decode  {told}, {closed}" in shown
    assert shown.index("not used until") < shown.index("off 1.1x"), "what is wrong comes first"


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (78, "python3  "),
        (80, "python3  "),
        (116, "python3  "),
        (160, "python3 93066"),
        (200, "python3 93066"),
    ],
)
def test_a_client_is_shown_from_eighty_columns_on_and_no_number_is_cut(width, shown):
    request = frames.request(14)
    request.client = "python3 93066"
    line = text([requests.row(request, requests.columns_for(width), is_selected=False)])
    assert (shown in line) == (width >= 80)
    assert "python3 9 " not in line


def test_the_title_counts_requests_since_the_start_and_not_the_listed_ones():
    view = View(frame=frames.busy(), finished=(frames.finished(31),))
    assert "rows 1-9 by TIME" in requests.title(view, 31, 1, 9)
    assert "1,204 done" in requests.title(view, 31, 1, 9)


@pytest.mark.parametrize("frame", [frames.busy(), frames.idle(), frames.colocated()])
def test_roles_and_transport_stand_in_a_header_of_80_cells(frame):
    line = text_of(header.header(View().after(frame), 80))
    assert f"{frame.roles}/{frame.transport}" in line or f" {frame.roles} " in line
    assert len(line) <= 80


def test_the_latency_title_names_the_window():
    frame = frames.idle(latency=LatencyFrame(30.0, 12, *[None] * 8))
    assert latencies.title(View().after(frame), 36) == "LATENCY  last 30s, 12 finished"
    assert latencies.title(View().after(frame), 25) == "LATENCY  last 30s"


@given(st.integers(40, 220), st.sampled_from(PHASES))
def test_a_row_is_as_wide_as_its_heading_and_fits(width, phase):
    columns = requests.columns_for(width)
    row = requests.row(frames.request(3, phase), columns, is_selected=True)
    assert width_of(row) == width_of(requests.heading(columns, RequestListing())) <= width


def test_the_most_important_columns_stay_when_it_gets_narrow():
    titles = [column.title for column in requests.columns_for(40)]
    assert titles[:3] == ["ID", "PHASE", "IN"]
    assert {column.title for column in requests.COLUMNS} == {
        column.title for column in requests.columns_for(230)
    }


def test_a_limit_takes_the_room_of_what_ok_says_already():
    limit = "decode worker saturated, 2 sequences"
    view = View().after(frames.idle(limit=limit))
    assert limit in text_of(header.alert_line(view, 80))[:80]
    assert "no alerts" in text_of(header.alert_line(view, 120))


def test_prefill_progress_is_told_once_a_step_has_ended():
    begun = frames.request(1, "prefilling", prompt_tokens=200, computed_tokens=0)
    assert requests.phase_text(begun) == "prefilling"
    found = frames.request(1, "prefilling", prompt_tokens=200, computed_tokens=64, cached_tokens=64)
    assert requests.phase_text(found) == "prefilling"


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
    shown = text(request_page.waterfall(fields(finished()), 60))
    assert [line.split()[:2] for line in shown.splitlines()[-3:]] == [
        ["sum", "1.0s"],
        ["end", "to"],
        ["unattributed", "0.5"],
    ]


def test_the_waterfall_of_a_live_request_shows_the_stage_it_is_in():
    shown = text(request_page.waterfall(fields(frames.request(5, "prefilling")), 60))
    assert "prefilling…" in shown
    assert "unattributed" not in shown


stage_ms = st.none() | st.floats(0, 1e6)


@given(st.tuples(*[stage_ms] * 6), st.floats(0, 1e6), st.integers(30, 120))
def test_waterfall_bars_stay_in_order_and_inside(values, e2e_ms, width):
    names = ("tokenize", "queue", "prefill", "handoff", "decode_wait", "decode")
    stages = {f"{name}_ms": value for name, value in zip(names, values, strict=True)}
    lines = request_page.waterfall(fields(finished(**stages, e2e_ms=e2e_ms)), width)
    assert all(width_of(line) <= width for line in lines)
    starts = [text_of(line).index("█") for line in lines if "█" in text_of(line)]
    assert starts == sorted(starts)


def test_the_detail_names_the_error():
    lines = request_page.detail(finished(finish_reason="error", error="worker gone\x1b[2J"), 70)
    assert "worker gone?[2J" in text(lines)


def test_a_fact_without_room_beside_another_is_not_cut():
    model = "an-owner/" + "long-name-" * 5
    lines = request_page.detail(frames.request(14, model=model), 60)
    assert all(width_of(line) <= 60 for line in lines)
    assert model in text(lines).replace("\n", "")
    assert "blocks 19" in text(lines)


def test_the_kv_page_counts_recurrent_states_and_what_each_takes():
    frame = frames.kv_critical()
    for pool in frame.pools:
        pool.record_blocks, pool.records, pool.snapshots, pool.block_bytes = 1, 2, 1, 1 << 15
    frame.totals.has_prefix_cache = True
    shown = text(overview.LINED["kv"](View().after(frame), 78, 40))
    assert "2 running, 1 snapshot " in shown
    assert "1 block, 32.0 KiB" in shown


@pytest.mark.parametrize("page", ["kv", "handoff", "power"])
@given(st.sampled_from(MAKERS), st.integers(60, 220))
def test_bars_and_rules_of_a_page_fit(page, make, width):
    drawn = [
        line
        for line in overview.LINED[page](View().after(make()), width, 40)
        if set(text_of(line)) & set("█░▁─")
    ]
    assert drawn
    assert all(width_of(line) <= width for line in drawn)


@pytest.mark.parametrize("page", overview.LINED)
def test_pages_are_empty_before_the_first_frame(page):
    assert overview.LINED[page](View(), 78, 20) == []


def test_energy_of_a_page_adds_up_and_says_its_method():
    shown = text(overview.LINED["power"](View().after(frames.busy()), 78, 20))
    energy = frames.busy().energy
    assert energy.prefill_j + energy.decode_j + energy.unattributed_j == energy.total_j
    assert energy.method in shown
    assert "unattributed" in shown


def test_where_no_meter_is_nothing_speaks_of_energy():
    view = View().after(frames.no_gpu())
    shown = text([*gauges.machine(view, 36, 9), *request_page.detail(view.frame.requests[0], 70)])
    assert "not reported" not in shown
    assert not {"power", "J/token", "energy"} & set(shown.split())
    titles = {column.title for column in requests.columns_for(300, has_meter(view.frame))}
    assert "J" not in titles
    assert "power" not in overview.pages(view.frame)
    metered = View().after(frames.busy())
    assert "J/token" in text(gauges.machine(metered, 36, 9))
    assert "power" in overview.pages(metered.frame)


def test_slices_stand_under_their_gpu_whatever_the_order():
    frame = frames.mig()
    frame.devices.reverse()
    shown = text(overview.LINED["power"](View().after(frame), 118, 20)).splitlines()
    rows = [line.split()[0].lstrip("▲") for line in shown if line.lstrip(" ▲").startswith("gpu")]
    assert rows == ["gpu1", "gpu0", "gpu0/2", "gpu0/1"]


def test_a_transport_without_a_measurement_is_said_to_be_unproven():
    shm = frames.busy(transport="shm", handoff=frames.HandoffFrame("shm", 0, 0.0, 0.0))
    assert "not measured" in text(overview.LINED["handoff"](View().after(shm), 78, 20))
    assert "verified" in text(overview.LINED["handoff"](View().after(frames.kv_critical()), 78, 20))


def test_the_events_page_says_since_when_an_alert_stands():
    shown = text(overview.LINED["events"](View().after(frames.kv_critical()), 118, 20))
    assert "kv.occupancy" in shown
    assert "41s" in shown
    assert len(frames.busy().events) == sum("Z " in line for line in shown.splitlines())


def test_the_documentation_has_the_glossary_and_the_glossary_every_column_and_stage():
    docs = Path(__file__).parents[2] / "docs/console.md"
    page = docs.read_text(encoding="utf-8")
    if os.environ.get("PENSTOCK_UPDATE_GOLDEN"):
        page = page[: page.index("### overview\n")] + markdown()
        docs.write_text(page, encoding="utf-8")
    assert page.endswith(markdown())
    words = {entry.word for entries in GLOSSARY.values() for entry in entries}
    known = {word for entry in words for word in entry.lower().split(", ")}
    columns = {column.title for column in requests.COLUMNS} - {"ID", "USER", "ENDPOINT"}
    stages = {stage.replace("_", " ") for stage in STAGES}
    assert [word for word in columns | stages if word.lower() not in known] == []


def test_every_page_has_a_glossary():
    assert set(GLOSSARY) == {*overview.NAMES, REQUEST}
    for page in GLOSSARY:
        assert all(width_of(line) <= 60 for line in glossary(page, 60))


def test_the_detail_says_route_energy_and_what_held_it_up():
    shown = text(request_page.detail(frames.request(14), 60))
    assert "; decode is free sooner" in " ".join(shown.split())
    assert "energy 55 J = prefill 20 J + decode 35 J" in shown
    assert "slow because queue: 1.2s" in shown
