"""Why a request was slow, and what limits the appliance, each in one sentence."""

from __future__ import annotations

from dataclasses import replace

import pytest

from appliance.observe.frame.protocol import LatencyFrame
from appliance.observe.telemetry.explain import QueueWaits, limit, slow_because
from appliance.observe.telemetry.windows import UsualTimes
from tests import golden
from tests.tui.frames import idle, request, worker

USUAL = UsualTimes(20.0, 0.2, 1.0, 1.0, 10.0)
QUICK = {"tokenize_ms": 1.0, "queue_ms": 20.0, "prefill_ms": 100.0, "ttft_ms": 121.0}
DONE = {**QUICK, "handoff_ms": 1.0, "decode_wait_ms": 1.0, "decode_ms": 290.0, "tpot_ms": 10.0}


def finished(**changes):
    frame = {**DONE, "output_tokens": 30, "e2e_ms": 413.0, "age_ms": 413.0, **changes}
    return request(1, "finished", prompt_tokens=500, **frame)


def live(phase, **changes):
    stages = dict.fromkeys(("queue_ms", "prefill_ms", "ttft_ms", "handoff_ms"), None)
    stages |= dict.fromkeys(("decode_wait_ms", "tpot_ms"), None)
    return request(1, phase, **{**stages, "tokenize_ms": 1.0, **changes})


@pytest.mark.parametrize(
    ("changes", "because"),
    [
        ({}, None),
        ({"queue_ms": 99.0}, None),
        ({"queue_ms": 1500.0}, "queue: 1.5s, usually 20ms"),
        (
            {"prefill_ms": 2100.0},
            "prefill: 2.1s, usually 100ms",
        ),
        ({"prefill_ms": 199.0}, None),
        ({"handoff_ms": 300.0}, "handoff: 300ms, usually 1ms"),
        ({"decode_wait_ms": 400.0}, "decode wait: 400ms, usually 1ms"),
        ({"tpot_ms": 60.0}, "decode: 60ms/token, usually 10ms"),
        (
            {"tpot_ms": 60.0, "queue_ms": 2000.0},
            "queue: 2.0s, usually 20ms",
        ),
        ({"queue_ms": 150.0, "e2e_ms": 9000.0}, None),
    ],
)
def test_the_stage_that_took_most_too_much_is_named(changes, because):
    assert slow_because(finished(**changes), USUAL) == because


def test_other_programs_are_named_and_a_worker_without_a_core_is_not_what_limits():
    starved = "starved by other programs"
    busy = worker("prefill", busy_ratio=1.0, num_sequences=5, cpu_percent=15.0)
    latency = idle().latency
    assert limit("ready", "", QueueWaits(), [busy], latency, starved) == starved
    assert "saturated" not in limit("ready", "", QueueWaits(), [busy], latency)
    busy.cpu_percent = 99.0
    assert "saturated" in limit("ready", "", QueueWaits(), [busy], latency)
    told = slow_because(finished(prefill_ms=3000.0), USUAL, 0.0, 2500.0)
    assert told is not None
    assert "2.5s" in told
    assert "2.5s" in slow_because(finished(), USUAL, 0.0, 2500.0)[:24], "as much as a note shows"


def test_a_disk_that_workers_wait_for_is_what_limits():
    slow = worker("decode", busy_ratio=1.0, num_sequences=1, cpu_percent=3.0)
    slow.disk_wait_ratio, slow.disk_bytes_per_s = 0.93, float(310 << 20)
    found = limit("ready", "", QueueWaits(), [slow], idle().latency)
    assert "93%" in found
    assert "310 MiB/s" in found
    slow.disk_wait_ratio = 0.1
    assert "disk" not in limit("ready", "", QueueWaits(), [slow], idle().latency)


def test_a_wait_shorter_than_is_usual_is_told_without_what_is_usual():
    usual = replace(USUAL, queue_ms=2000.0)
    because = "queue: 1.8s"
    assert slow_because(finished(queue_ms=1800.0), usual) == because
    assert slow_because(finished(queue_ms=2500.0), usual) == ("queue: 2.5s, usually 2.0s")


def test_a_wait_for_another_model_is_told_from_a_wait_for_a_turn():
    frame = finished(queue_ms=6000.0, e2e_ms=6400.0, age_ms=6400.0)
    assert slow_because(frame, USUAL, 5900.0) == "swap: 5.9s for its model"
    assert slow_because(frame, USUAL, 500.0).startswith("queue: 5.5s")


def test_a_long_prompt_is_compared_with_what_its_tokens_usually_take():
    long = finished(prefill_ms=900.0)
    long.prompt_tokens = 4100
    assert slow_because(long, USUAL) is None
    long.prefill_ms = 3000.0
    assert slow_because(long, USUAL) == "prefill: 3.0s, usually 820ms"


def test_waiting_needs_no_comparison_and_computing_does():
    assert slow_because(finished(queue_ms=1500.0), UsualTimes()) == "queue: 1.5s"
    assert slow_because(finished(prefill_ms=9000.0, tpot_ms=900.0), UsualTimes()) is None


@pytest.mark.parametrize(
    ("frame", "because"),
    [
        (live("queued", age_ms=50.0), None),
        (live("queued", age_ms=801.0), "queue: 800ms, usually 20ms"),
        (
            live("prefilling", age_ms=1021.0, queue_ms=20.0, prompt_tokens=700),
            "prefill: 1.0s, usually 140ms",
        ),
        (
            live("handing_off", age_ms=621.0, queue_ms=20.0, prefill_ms=100.0, ttft_ms=121.0),
            "handoff: 500ms, usually 1ms",
        ),
    ],
)
def test_a_live_request_is_explained_by_the_stage_it_is_in(frame, because):
    assert slow_because(frame, USUAL) == because


IDLE = LatencyFrame(60.0, 0, *[None] * 8)
LATE = LatencyFrame(60.0, 9, *[None] * 8, ttft_slo_ratio=0.4, itl_slo_ratio=0.2)
RESTS = worker("decode", num_sequences=0)
WORKS = worker("prefill", num_sequences=1, busy_ratio=0.99, prefill_tokens_per_s=400.0)


LIMITS = (
    ("ready", "", QueueWaits(), [RESTS], IDLE),
    ("ready", "", QueueWaits(), [RESTS], LATE),
    ("ready", "", QueueWaits(12, 3), [WORKS], LATE),
    ("ready", "", QueueWaits(for_prefill=1), [WORKS], LATE),
    ("ready", "", QueueWaits(for_prefill=1, for_swap=2), [WORKS], IDLE),
    ("loading", "x", QueueWaits(for_workers=2), [RESTS], IDLE),
    ("ready", "", QueueWaits(), [WORKS], LATE),
    ("ready", "", QueueWaits(), [WORKS], IDLE),
    ("ready", "", QueueWaits(), [worker("decode")], IDLE),
    ("degraded", "worker decode is restarting", QueueWaits(3), [WORKS], LATE),
    ("draining", "draining", QueueWaits(), [], IDLE),
)


def test_the_limit_is_the_first_thing_to_be_cured():
    golden.check(golden.SENTENCES / "limits.txt", "".join(f"{limit(*each)}\n" for each in LIMITS))


def test_a_wait_over_a_death_is_told_from_a_wait_for_a_turn():
    waited = slow_because(finished(queue_ms=1500.0, recoveries=1), USUAL)
    paused = slow_because(finished(queue_ms=1500.0, recoveries=1, paused_ms=5.0), USUAL)
    assert waited != paused == slow_because(finished(queue_ms=1500.0), USUAL)
