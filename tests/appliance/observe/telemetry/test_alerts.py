"""Alerts neither flap nor stick, and each row of the table reads what it says."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.observe.frame.late_frames import (
    LateFrame,
    RefusalFrame,
    SurvivedFrame,
    UnwrittenFrame,
)
from appliance.observe.frame.protocol import (
    DeviceFrame,
    Frame,
    LatencyFrame,
    QueueFrame,
    TotalsFrame,
)
from appliance.observe.frame.tier_frames import TierFrame
from appliance.observe.telemetry.alerts import MIN_CLEAR_S, THRESHOLDS, Alerts, Threshold
from appliance.observe.telemetry.signals import PAST_S, LastMinute, Signal, ttft_over_usual
from tests.tui.frames import busy, idle, pool, worker

WARN, CRIT, FOR_S = 10.0, 20.0, 4.0
readings = st.lists(
    st.tuples(st.floats(0.1, 5), st.sampled_from([None, 0.0, 9.9, 10.0, 19.9, 20.0])), max_size=60
)


def signal_alerts(for_s: float = FOR_S) -> tuple[list[float | None], Alerts]:
    """Alerts on one signal, whose value is the list's only item."""
    value: list[float | None] = [None]

    def read(frame, past):
        if value[0] is not None:
            yield Signal(value[0], f"it is {value[0]}")

    return value, Alerts((Threshold("a.b", read, WARN, CRIT, "it is less", for_s),))


def at(seconds: float, **changes) -> Frame:
    return idle(1, **{"uptime_s": seconds, "at": f"T{seconds:g}", **changes})


def run(*values: float | None, for_s: float = FOR_S) -> list[tuple[list[str], list[str]]]:
    """Severities of what is raised and of what has changed, second by second."""
    value, alerts = signal_alerts(for_s)
    told = []
    for second, value[0] in enumerate(values):
        changes = [change.severity for change in alerts.update(at(second))]
        told.append(([alert.severity for alert in alerts.frames()], changes))
    return told


def test_a_signal_must_stay_above_before_it_is_told():
    told = run(*[15.0] * 6)
    assert told[:4] == [([], [])] * 4
    assert told[4] == (["warning"], ["warning"])
    assert told[5] == (["warning"], [])


def test_a_break_begins_the_wait_again():
    assert run(*[15.0] * 4, 0.0, *[15.0] * 4)[-1] == ([], [])


def test_it_is_cleared_after_twice_as_long_below():
    told = run(*[15.0] * 5, *[0.0] * 9)
    assert told[-2] == (["warning"], [])
    assert told[-1] == ([], ["info"])


def test_what_is_not_reported_any_more_is_cleared_as_what_is_below():
    assert run(*[15.0] * 5, *[None] * 9)[-1] == ([], ["info"])


def test_it_gets_worse_and_better():
    told = run(*[15.0] * 5, *[25.0] * 5, *[15.0] * 9, *[0.0] * 9)
    assert [changes for _, changes in told if changes] == [["warning"], ["error"], ["info"]]
    assert [raised for raised, _ in told][9] == ["error"]
    assert [raised for raised, _ in told][18] == ["warning"]


def test_what_is_an_error_at_once_is_told_once():
    told = run(*[25.0] * 6, for_s=0)
    assert [changes for _, changes in told if changes] == [["error"]]


def test_an_alert_says_since_when_and_what_was_last_wrong():
    value, alerts = signal_alerts()
    for second, value[0] in enumerate((15.0, 16.0, 17.0, 18.0, 19.0, 0.0)):
        alerts.update(at(second))
    (alert,) = alerts.frames()
    assert (alert.code, alert.since, alert.message) == ("a.b", "T0", "it is 19.0")


@given(readings)
def test_raised_and_clear_hold_for_their_times(steps):
    """However the signal jumps, each change is after an unbroken time on its side."""
    value, alerts = signal_alerts()
    now, is_raised, above_s, below_s = 100.0, False, None, None
    for step, value[0] in steps:
        now += step
        is_above = value[0] is not None and value[0] >= WARN
        above_s = (now if above_s is None else above_s) if is_above else None
        below_s = (now if below_s is None else below_s) if not is_above else None
        alerts.update(at(now))
        before, is_raised = is_raised, bool(alerts.frames())
        if is_raised and not before:
            assert above_s is not None
            assert now - above_s >= FOR_S
        if before and not is_raised:
            assert below_s is not None
            assert now - below_s >= 2 * FOR_S
        if above_s is not None and now - above_s >= FOR_S:
            assert is_raised, "it sticks to clear"
        if below_s is not None and now - below_s >= 2 * FOR_S:
            assert not is_raised, "it sticks to raised"


@given(readings)
def test_events_alternate_and_end_as_the_alerts_do(steps):
    value, alerts = signal_alerts()
    now, told = 100.0, []
    for step, value[0] in steps:
        now += step
        told += [change.severity for change in alerts.update(at(now))]
    rank = {"info": 0, "warning": 1, "error": 2}
    for before, after in zip(["info", *told], told, strict=False):
        assert rank[before] < rank[after] or (after == "info" and before != "info")
    assert bool(alerts.frames()) == (bool(told) and told[-1] != "info")


def raised_by(*frames: Frame) -> dict[str, str]:
    """The worst severity by code, after the last of these has stood for an hour."""
    alerts = Alerts()
    for second, frame in enumerate(frames):
        alerts.update(msgspec.structs.replace(frame, uptime_s=float(second)))
    for later in (*range(60), 3600):
        uptime_s = float(len(frames) + later)
        alerts.update(msgspec.structs.replace(frames[-1], uptime_s=uptime_s))
    return {alert.code: alert.severity for alert in reversed(alerts.frames())}


def late(waited_ms: float, limit_ms: float) -> LateFrame:
    """The longest wait of two requests."""
    return LateFrame("cmpl-23ee909fd7e2", "python 9495", 3825, waited_ms, limit_ms, 2)


def refusal(status: int, code: str, **counts: float) -> RefusalFrame:
    """Refusals of one program."""
    known = {"number": 9, "last_minute": 0, "per_s": 0.0, **counts}
    about = "the model `x` does not exist here; `starter` does"
    return RefusalFrame("ana", "python 9495", status, code, about, last_at="T", **known)


LATE = LatencyFrame(60.0, 1, *[None] * 8, ttft_slo_ratio=0.97, itl_slo_ratio=0.5)
SEEN = LatencyFrame(60.0, 9, 4000.0, 8700.0, *[None] * 6)
GPU = {"name": "gpu0", "kind": "gpu"}
SILENT = "worker prefill: no progress for 5 s of at most 10 s"
WRONG = {
    "kv warning": (idle(pools=[pool(active=950)]), {"kv.occupancy": "warning"}),
    "kv error": (idle(pools=[pool(active=1020)]), {"kv.occupancy": "error"}),
    "a ring": (idle(pools=[pool("ring", reserved=1024)]), {}),
    "queue half full": (idle(queue=QueueFrame(32, 0, 0, 0, 64, 9.0)), {"queue.full": "warning"}),
    "tokens wait": (
        idle(queue=QueueFrame(1, 0, 0, 0, 64, 9.0, 1, 95, 100)),
        {"queue.full": "error"},
    ),
    "a wait": (
        idle(queue=QueueFrame(1, 0, 0, 0, 64, 600.0, first_token=late(600.0, 1000.0))),
        {"queue.wait": "warning"},
    ),
    "a wait in a worker": (
        idle(queue=QueueFrame(0, 1, 0, 0, 64, None, first_token=late(127e3, 17e3))),
        {"queue.wait": "error"},
    ),
    "a short wait": (
        idle(queue=QueueFrame(1, 0, 0, 0, 64, 4000.0, first_token=late(4000.0, 10e3))),
        {},
    ),
    "a stream without tokens": (
        idle(queue=QueueFrame(0, 0, 0, 1, 64, None, next_token=late(2000.0, 2000.0))),
        {"decode.stall": "warning"},
    ),
    "one for long": (
        idle(queue=QueueFrame(0, 0, 0, 1, 64, None, next_token=late(10e3, 2000.0))),
        {"decode.stall": "error"},
    ),
    "a stream": (
        idle(queue=QueueFrame(0, 0, 0, 1, 64, None, next_token=late(40.0, 2000.0))),
        {},
    ),
    "a machine that others keep busy": (
        idle(starved="starved by other programs"),
        {"cpu.starved": "warning"},
    ),
    "a refused request": (
        idle(refusals=[refusal(429, "queue_full", last_minute=1)]),
        {"requests.refused": "warning"},
    ),
    "what is not served": (idle(refusals=[refusal(501, "not_served", last_minute=9)]), {}),
    "an old refusal": (idle(refusals=[refusal(429, "queue_full", number=9)]), {}),
    "what the state explains": (
        idle(refusals=[refusal(503, "draining", last_minute=9, per_s=9.0)]),
        {},
    ),
    "a client that spins": (
        idle(refusals=[refusal(404, "model_not_found", last_minute=27_000, per_s=450.0)]),
        {"client.errors": "warning"},
    ),
    "a client that errs": (idle(refusals=[refusal(400, "x", last_minute=40, per_s=0.7)]), {}),
    "targets": (idle(latency=LATE, slo_ttft_ms=9, slo_itl_ms=9), {"slo.missed": "error"}),
    "slow first tokens": (
        idle(latency=msgspec.structs.replace(SEEN, ttft_over_usual=31.0)),
        {"ttft.slow": "warning"},
    ),
    "usual first tokens": (idle(latency=msgspec.structs.replace(SEEN, ttft_over_usual=4.9)), {}),
    "a dead worker": (
        idle(workers=[worker("decode", state="restarting")], state="degraded"),
        {"worker.down": "error"},
    ),
    "one on its way back": (
        idle(workers=[worker("decode", state="loading", num_restarts=1)], state="degraded"),
        {"worker.down": "error"},
    ),
    "no SSD cache that was asked for": (
        idle(ssd=TierFrame("failed", "it is not a folder", "/a")),
        {"ssd.off": "warning"},
    ),
    "a disk that hangs": (
        idle(ssd=TierFrame("down", "no block was stored in 5 s", "/a")),
        {"ssd.down": "warning"},
    ),
    "a disk that others fill": (
        idle(ssd=TierFrame("on", "", "/a", limit="its disk is full")),
        {"ssd.full": "warning"},
    ),
    "copies to DRAM that fail": (
        idle(dram=TierFrame("down", "reading fails", "")),
        {"dram.down": "warning"},
    ),
    "no DRAM cache": (idle(dram=TierFrame("failed", "x", "")), {"dram.down": "warning"}),
    "no SSD cache": (idle(ssd=TierFrame("off", "switched off", "/a")), {}),
    "a start": (idle(workers=[worker("decode", state="loading")], state="loading"), {}),
    "books": (idle(state="degraded", state_reason="x"), {"state.degraded": "error"}),
    "a worker without progress": (
        idle(state="degraded", state_reason=f"{SILENT}; new requests go to decode"),
        {"worker.stuck": "warning"},
    ),
    "the same and more": (
        idle(state="degraded", state_reason=f"block 7 is lost; {SILENT}"),
        {"worker.stuck": "warning"},
    ),
    "a long step": (idle(workers=[worker("decode", last_step_age_ms=99_000.0)]), {}),
    "power": (
        idle(devices=[DeviceFrame(**GPU, power_w=680.0, power_limit_w=700.0)]),
        {"device.power": "warning"},
    ),
    "heat": (
        idle(devices=[DeviceFrame(**GPU, temperature_c=96.0)]),
        {"device.temperature": "error"},
    ),
    "throttled": (
        idle(devices=[DeviceFrame(**GPU, throttle_reasons=["thermal"])]),
        {"device.throttled": "warning"},
    ),
    "xid": (idle(devices=[DeviceFrame(**GPU, last_xid=79)]), {"device.xid": "error"}),
    "silent devices": (idle(devices=[DeviceFrame(**GPU)]), {}),
    "busy": (busy(), {"slo.missed": "warning"}),
}


@pytest.mark.parametrize("case", WRONG)
def test_each_threshold_reads_what_it_says(case):
    frame, expected = WRONG[case]
    assert raised_by(frame) == expected


def test_the_end_of_an_alert_is_told_in_words_of_its_own():
    alerts, told = Alerts(), []
    reasons = ("worker prefill is restarting", "", SILENT, "")
    for second, reason in enumerate(reasons):
        state = "restarting" if "restarting" in reason else "ready"
        frame = at(second, workers=[worker("prefill", state=state)], state_reason=reason)
        told += [(change.code, change.message) for change in alerts.update(frame)]
    codes, (down, up, stuck, over) = zip(*told, strict=True)
    assert codes == ("worker.down", "worker.down", "worker.stuck", "worker.stuck")
    assert down == reasons[0]
    assert up.endswith(" is ready again")
    assert stuck.startswith(f"{SILENT}; ")
    assert over.endswith(" makes progress again")
    assert "{" not in "".join(each.over.format("x") for each in THRESHOLDS)


def with_totals(seconds: float, finished: int, failed: int, rows_lost: int) -> Frame:
    totals = TotalsFrame(9999, finished, 0, 0, failed, 0, 0, 0, 0, 0, 0, rows_lost)
    return at(seconds, totals=totals)


def test_failures_and_lost_rows_count_within_the_last_minute():
    alerts = Alerts()
    told = []
    for second in range(200):
        frame = with_totals(second, 10 * second, second > 20, 7 * (second > 20))
        told += [(second, change.severity, change.code) for change in alerts.update(frame)]
    raised = [each for each in told if each[0] == 21]
    assert raised == [(21, "warning", "requests.failing"), (21, "error", "log.rows_lost")]
    cleared = [(second, code) for second, severity, code in told if severity == "info"]
    assert [code for _, code in cleared] == ["requests.failing", "log.rows_lost"]
    assert all(21 + PAST_S <= second <= 22 + PAST_S + MIN_CLEAR_S for second, _ in cleared)


def test_preemptions_are_told_when_they_begin_and_when_there_are_none_any_more():
    alerts, told = Alerts(), []
    for second in range(200):
        preemptions = min(max(second - 20, 0), 30)
        totals = TotalsFrame(*[0] * 12, preemptions=preemptions)
        told += [(second, change) for change in alerts.update(at(second, totals=totals))]
    (begun, change), (over, last) = told
    assert (begun, change.severity, change.code) == (21, "warning", "kv.preempted")
    assert "1 preemption in 60 s" in change.message
    assert (last.severity, last.code) == ("info", "kv.preempted")
    assert 50 + PAST_S <= over <= 51 + PAST_S + MIN_CLEAR_S


def test_failures_of_an_idle_hour_ago_do_not_count_for_ever():
    assert raised_by(with_totals(0, 0, 5, 5)) == {}


class Timeline:
    """Alerts on six streams, second by second."""

    def __init__(self) -> None:
        self.alerts, self.now, self.told = Alerts(), 0, []

    def run(self, seconds: int, rate: float | None = None, streams: int = 6, **late_ms) -> None:
        """Let so many seconds pass: tokens a second of each stream (None: there is none)."""
        for _ in range(seconds):
            self.now += 1
            decoding = 0 if rate is None else streams
            waits = {name: late(ms, 2000.0) for name, ms in late_ms.items()}
            frame = idle(
                uptime_s=float(self.now),
                queue=QueueFrame(0, 1, 0, decoding, 64, None, **waits),
                workers=[worker("decode", decode_tokens_per_s=(rate or 0.0) * decoding)],
            )
            changes = self.alerts.update(frame)
            self.told += [(self.now, change.severity, change.code) for change in changes]

    @property
    def raised(self) -> list[str]:
        return [alert.code for alert in self.alerts.frames()]


def test_a_stall_of_ten_minutes_is_told_once_and_until_the_rate_is_good_again():
    timeline = Timeline()
    timeline.run(300, 7.3)
    timeline.run(300, 0.4)
    assert timeline.raised == ["decode.slow"]
    timeline.run(300, 0.0)
    assert timeline.raised == ["decode.slow"]
    timeline.run(9, 7.3)
    assert timeline.raised == ["decode.slow"]
    timeline.run(60, 7.3)
    assert timeline.told == [(306, "warning", "decode.slow"), (911, "info", "decode.slow")]


def test_a_token_in_five_seconds_is_one_stall_and_not_many():
    timeline = Timeline()
    timeline.run(120, 7.3, next_token=140.0)
    for _ in range(120):
        for gap_ms in (1000.0, 2000.0, 3000.0, 4000.0, 5000.0):
            timeline.run(1, 0.2, next_token=gap_ms)
    timeline.run(60, 7.3, next_token=140.0)
    told = [each for each in timeline.told if each[2] == "decode.stall"]
    assert [severity for _, severity, _ in told] == ["warning", "info"]
    assert 120 < told[0][0] <= 123
    assert 720 < told[1][0] <= 720 + 1 + MIN_CLEAR_S


def test_what_gets_worse_within_an_hour_is_told_and_does_not_become_usual():
    timeline = Timeline()
    timeline.run(6 * 3600, 100.0)
    for minute in range(60):
        timeline.run(60, 100.0 - minute * 80 / 60)
    timeline.run(60, 20.0)
    assert timeline.raised == ["decode.slow"]
    timeline.run(3600, 20.0)
    assert timeline.raised == ["decode.slow"], "an hour of it is not usual"
    timeline.run(30, 60.0)
    assert timeline.raised == []


def test_a_quiet_night_is_forgotten_by_nobody_and_more_streams_are_no_stall():
    timeline = Timeline()
    timeline.run(600, 100.0, streams=2)
    timeline.run(8 * 3600)
    timeline.run(600, 45.0, streams=6)
    timeline.run(60, 8.0, streams=64)
    assert timeline.told == []
    timeline.run(30, 5.0, streams=2)
    assert timeline.raised == ["decode.slow"]


def test_the_first_minute_after_a_start_has_no_usual_rate_and_still_tells_a_standstill():
    timeline = Timeline()
    timeline.run(30, 100.0)
    timeline.run(20, 3.0)
    assert timeline.told == []
    timeline.run(1, 0.0, next_token=5000.0)
    assert timeline.raised == ["decode.stall"]


@given(st.lists(st.tuples(st.integers(1, 20), st.booleans()), max_size=40))
def test_a_rate_that_flaps_tells_no_more_than_its_times_allow(spans):
    timeline = Timeline()
    timeline.run(61, 7.3)
    for seconds, is_slow in spans:
        timeline.run(seconds, 0.4 if is_slow else 7.3)
    severities = [severity for _, severity, _ in timeline.told]
    assert severities == ["warning", "info"] * (len(severities) // 2) + ["warning"] * (
        len(severities) % 2
    )
    for (before_s, severity, _), (after_s, _, _) in itertools.pairwise(timeline.told):
        assert after_s - before_s >= (10 if severity == "warning" else 5)


def test_a_daemons_death_is_told_for_ten_minutes_with_its_requests_and_a_restart_is_not():
    def about(how: str, at: str, num_waiting: int = 0, state: str = "ready") -> str:
        alerts = Alerts()
        frame = idle(survived=SurvivedFrame(how, at, 8, num_waiting), state=state)
        assert alerts.update(frame) == [], "another event tells it"
        return "".join(alert.message for alert in alerts.frames())

    died = "2026-11-21T14:01:31.004Z"  # 40 s before the frame
    for part in ("40s ago", "SIGKILL", "8 requests"):
        assert part in about("SIGKILL", died)
    assert "8 requests continue once" in about("crash", died, 8, "loading")
    assert about("crash", died, 8).endswith("8 requests continue"), "the model is loaded"
    assert about("restart", died) == ""
    assert about("SIGKILL", "2026-11-21T13:51:00.000Z") == ""


def test_a_log_that_cannot_be_written_is_an_alert_until_it_is_written_again():
    full = UnwrittenFrame("cannot write the request log: database or disk is full", 3, "/a b", True)
    alerts = Alerts()
    told = alerts.update(at(0, unwritten=full))
    (alert,) = alerts.frames()
    assert (alert.code, alert.severity) == ("log.not_written", "error")
    for part in (full.reason, "3 requests", "a crash would lose"):
        assert part in alert.message
    assert alert.action == "df -h '/a b'"
    kept = msgspec.structs.replace(full, num_requests=1, would_crash_lose=False)
    told += alerts.update(at(1, unwritten=kept))
    (alert,) = alerts.frames()
    assert "1 request so" in alert.message
    assert "crash" not in alert.message
    told += alerts.update(at(2))
    assert alerts.frames() == []
    assert [change.severity for change in told] == ["error", "info"]


def test_an_alert_names_its_request_what_to_type_and_since_when():
    alerts = Alerts()
    frame = idle(queue=QueueFrame(0, 1, 0, 0, 64, None, first_token=late(127e3, 17e3)))
    alerts.update(frame)
    (alert,) = alerts.frames()
    assert (alert.request_id, alert.action) == ("cmpl-23ee909fd7e2", "penstock show 23ee909f")
    for part in ("2m07s", "17.0s", "23ee909f", "3,825 tok", "python 9495", "1 more"):
        assert part in alert.message
    alerts = Alerts()
    for second in range(9):
        alerts.update(at(second, refusals=[refusal(404, "model_not_found", per_s=450.0)]))
    (alert,) = alerts.frames()
    assert alert.action == "ps -fp 9495"
    for part in ("404", "450/s", "the model `x` does not exist here", "python 9495"):
        assert part in alert.message


def test_the_worst_comes_first_and_a_subject_has_its_own_alert():
    frame = idle(pools=[pool("prefill", active=950), pool("decode", active=1024)], slo_ttft_ms=9)
    frame.devices = [DeviceFrame(**GPU, last_xid=1)]
    alerts = Alerts()
    for second in range(20):
        alerts.update(msgspec.structs.replace(frame, uptime_s=float(second)))
    shown = [(alert.severity, alert.code, alert.subject) for alert in alerts.frames()]
    assert shown == [
        ("error", "kv.occupancy", "decode"),
        ("error", "device.xid", "gpu0"),
        ("warning", "kv.occupancy", "prefill"),
    ]


def test_the_table_is_in_order_and_its_codes_are_stable_words():
    codes = [threshold.code for threshold in THRESHOLDS]
    assert len(set(codes)) == len(codes)
    for threshold in THRESHOLDS:
        assert threshold.code.replace(".", "_").isidentifier()
        bounds = [bound for bound in (threshold.warn, threshold.crit) if bound is not None]
        assert bounds
        assert bounds == sorted(bounds)


def test_a_worker_that_died_in_a_swap_is_back_when_the_one_of_its_name_is_ready():
    alerts, told = Alerts(), []
    for state in ("loading", "restarting", "loading", "loading", "ready"):
        frame = idle(workers=[worker("decode", state=state)])
        told += [(state, change.message.split()[1:4]) for change in alerts.update(frame)]
    assert told == [(state, ["decode", "is", state]) for state in ("restarting", "ready")]


def test_a_worker_that_is_back_is_not_told_to_be_down():
    alerts = Alerts()
    down = idle(workers=[worker("decode", state="restarting")])
    assert [change.severity for change in alerts.update(down)] == ["error"]
    back = idle(workers=[worker("decode")])
    assert [change.severity for change in alerts.update(back)] == ["info"]
    assert alerts.frames() == []


def test_a_multiple_beyond_use_is_not_shown_as_a_figure():
    def shown(times):
        frame = idle(latency=msgspec.structs.replace(SEEN, ttft_over_usual=times))
        return next(ttft_over_usual(frame, LastMinute())).message

    assert "31x" in shown(31.0)
    assert "9590" not in shown(9590.0)
