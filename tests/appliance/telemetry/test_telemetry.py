"""The parts of a frame, from a router that really places and workers that only say they step."""

from __future__ import annotations

import math
import time
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.frame.histograms import GAP_S, REQUEST_S, STAGE_S, Histogram, token_edges
from appliance.frame.latency import stages
from appliance.frame.protocol import TodayFrame, UserFrame, WorkerFrame
from appliance.telemetry import telemetry
from appliance.telemetry.telemetry import Telemetry, Today
from appliance.telemetry.windows import MIN_STALL_MS, WINDOW_S, UsualTimes, Windows
from engine.schedule.elastic import Slo
from engine.schedule.sequence import FinishReason, Phase, Sequence, Stamps
from engine.wire.messages import SequenceStep, Stepped
from engine.wire.run_spec import RunSpec
from engine.wire.sampling import SamplingParams
from tests.appliance.machine import Machine, make_machine
from tests.engine.schedule.harness import World

# What was seen lately, in figures; and what was ever seen, in counts.


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


# --------------------------------------------------------------------------------------------------


@pytest.fixture
def machine(tiny_llama, tmp_path):
    yield from make_machine(tiny_llama, tmp_path)


def step(machine: Machine, worker: str, *, is_last: bool = False) -> None:
    """The worker computes one step for all that it has: the prompt, or one token."""
    now_ns = time.monotonic_ns()
    running = [s for s in machine.router.at.running.values() if s.worker == worker]
    entries = []
    for one in running:
        was_prefilling = one.num_computed_tokens < one.num_prompt_tokens
        computed = one.num_prompt_tokens if was_prefilling else one.num_computed_tokens + 1
        moves = was_prefilling and worker == "prefill"
        entries.append(
            SequenceStep(
                seq_id=one.seq_id,
                generation=one.generation,
                num_computed_tokens=computed,
                token_ids=[7],
                logprobs=[],
                finish_reason="stop" if is_last else None,
                released="ended" if is_last else "moved" if moves else None,
                num_scheduled_tokens=computed - one.num_computed_tokens,
                admitted_ns=now_ns,
            )
        )
    num_tokens = sum(entry.num_scheduled_tokens for entry in entries)
    is_prefill = worker == "prefill"
    report = Stepped(
        now_ns,
        now_ns + 2_000_000,
        num_tokens if is_prefill else 0,
        0 if is_prefill else num_tokens,
        entries,
    )
    machine.service.worker_reported(worker, report)


def test_a_pool_knows_who_holds_its_blocks(machine):
    machine.start_workers()
    machine.submit("her", num_sequences=2)
    machine.submit("him")
    machine.submit("her")
    (pool,) = machine.frame["pools"]
    assert pool["owners"] == [
        {"user": "her", "num_blocks": 3, "num_requests": 2},
        {"user": "him", "num_blocks": 1, "num_requests": 1},
    ]
    held = sum(owner["num_blocks"] for owner in pool["owners"])
    assert held == pool["num_blocks"] - pool["free"]


def test_what_waits_holds_no_blocks_and_says_for_what_it_waits(machine):
    machine.submit("her")
    assert machine.frame["pools"][0]["owners"] == []
    assert machine.frame["limit"] == "queue: 1 sequence waits for a worker to be ready"
    machine.start_workers()
    assert machine.frame["limit"] == ""


def test_a_full_pool_is_what_limits(machine):
    machine.start_workers()
    pool = machine.router.ledger.pools["kv"]
    assert machine.router.ledger.reserve(0, {"kv": pool.num_free - 1})
    machine.service.submit(machine.request("her", num_sequences=3))
    assert machine.frame["limit"] == "queue: 2 sequences wait for KV blocks"


def test_rates_and_batches_are_of_the_steps_since_the_last_frame(machine):
    machine.start_workers()
    machine.submit("her", num_sequences=2)
    machine.service.make_frame()
    before = {worker["name"]: worker for worker in machine.frame["workers"]}
    assert before["prefill"]["batch_size_mean"] is None
    assert before["prefill"]["last_step_age_ms"] is not None
    assert before["decode"]["last_step_age_ms"] is None
    step(machine, "prefill")
    step(machine, "decode")
    machine.service.make_frame()
    frame = machine.frame
    after = {worker["name"]: worker for worker in frame["workers"]}
    assert after["prefill"]["batch_size_mean"] == after["decode"]["batch_size_mean"] == 2.0
    assert after["prefill"]["last_step_age_ms"] is None
    assert after["decode"]["last_step_age_ms"] is not None
    assert frame["handoff"]["transport"] == "alias"
    assert frame["handoff"]["handoffs_per_s"] > 0
    machine.service.make_frame()
    assert machine.frame["handoff"]["handoffs_per_s"] == 0


def test_histograms_and_totals_count_the_same(machine):
    machine.start_workers()
    requests = [machine.submit("her") for _ in range(3)]
    for _ in range(3):
        step(machine, "prefill")
        step(machine, "decode")
    step(machine, "decode", is_last=True)
    for request in requests:
        machine.service.close(request, 200)
    readings = machine.service.readings()
    frame, histograms = readings.frame, readings.histograms
    assert frame.totals.finished == histograms.e2e_s.total == frame.latency.num_requests == 3
    assert histograms.finished["stop"] == 3
    assert histograms.output_tokens.sum == frame.totals.output_tokens
    assert histograms.prompt_tokens.sum == frame.totals.prompt_tokens
    assert histograms.ttft_s.total + histograms.itl_s.total == frame.totals.output_tokens
    assert histograms.step_tokens.sum == 3 * 3 + 3 * 4
    assert frame.latency.e2e_ms_p50 is not None


def test_a_request_says_where_it_is_and_when_it_has_ended_where_it_was(machine):
    machine.start_workers()
    request, dropped = machine.submit("her"), machine.submit("her")

    def at(request):
        frame = machine.service.request_frame(request.request_id)
        return frame["phase"], frame["worker"]

    assert at(request) == ("prefilling", "prefill")
    machine.router.finish(dropped.sequences[0], FinishReason.ABORT, time.monotonic_ns())
    assert at(dropped) == ("finished", "prefill")
    step(machine, "prefill")
    assert at(request) == ("decoding", "decode")
    step(machine, "decode", is_last=True)
    assert at(request) == ("finished", "decode")
    machine.service.close(request, 200)
    assert at(request) == ("finished", "decode")


def test_a_request_that_waited_says_so_while_it_runs_and_after(machine):
    request = machine.submit("her")
    stamps = request.sequences[0].stamps
    stamps.arrived_ns = stamps.tokenized_ns = time.monotonic_ns() - 3_000_000_000
    assert machine.frame["requests"][0]["slow_because"].startswith("queue: 3.0s")
    machine.service.cancel(request.request_id, "her")
    machine.service.close(request, 200)
    (ended,) = machine.service.request_frames()
    assert ended["slow_because"].startswith("queue: 3.0s")


def test_an_alert_is_in_the_frame_and_in_the_events_until_it_is_over(machine):
    machine.start_workers()
    state = machine.supervisor.workers["decode"]
    state.state = "restarting"
    machine.service.make_frame()
    (alert,) = machine.frame["alerts"]
    assert (alert["code"], alert["severity"], alert["subject"]) == (
        "worker.down",
        "error",
        "decode",
    )
    machine.service.make_frame()
    told = [event for event in machine.frame["events"] if event["code"] == "worker.down"]
    assert [event["severity"] for event in told] == ["error"]


def owes(world: World, worker: str) -> bool:
    return world.router.snapshot(world.now_ns).workers[worker].owes


@pytest.mark.parametrize("arm", ["alias", "shm", "elastic", "colocated"])
def test_a_worker_owes_something_until_it_has_answered_whatever_it_was_told(arm):
    world = World(arm)
    names = [world.topology.names[0], world.topology.names[-1]]
    world.tick()  # cores go to where the next prompt does
    assert not any(owes(world, name) for name in names)
    sequence = world.sequence(20, 30)
    world.submit(sequence)
    assert owes(world, names[0])
    while sequence.num_output_tokens < 4:
        world.tick()
    assert owes(world, sequence.worker)
    world.router.abort(sequence, FinishReason.ABORT, world.now_ns)
    assert owes(world, names[1])  # it has not let go of it yet
    world.run()
    assert not any(owes(world, name) for name in names)


def test_blocks_that_have_come_to_the_ring_are_owed_by_who_takes_them_from_there():
    world = World("shm", num_slots=2)
    sequence = world.sequence(30, 4)
    world.submit(sequence)
    prefill = world.workers["prefill"]
    for _ in range(20):
        while prefill.inbox:
            prefill.receive(world.now_ns)
        prefill.step(world.now_ns)
        prefill.copy(world.now_ns)
        while prefill.outbox:
            world.deliver(prefill)
    assert sequence.phase is Phase.HANDING_OFF
    assert not owes(world, "prefill")
    assert owes(world, "decode")


class Watched:
    """Telemetry of a prefill worker that has a prompt of 64 tokens, by a clock of the test's."""

    def __init__(self) -> None:
        self.world = World("alias")
        self.world.submit(self.world.sequence(64, 4))
        self.now_ns = self.world.now_ns
        self.telemetry = Telemetry(4096)
        self.telemetry.interval_s(self.now_ns)
        plan = SimpleNamespace(name="prefill", cpus=(0,), gpu=None)
        self.state = SimpleNamespace(
            plan=plan, state="ready", pid=None, device="cpu 0", attention=None, num_restarts=0,
            loaded_bytes=0, total_bytes=0,
        )  # fmt: skip

    def frame(self, after_s: float) -> WorkerFrame:
        self.now_ns += int(after_s * 1e9)
        elapsed_s = self.telemetry.interval_s(self.now_ns)
        states: Any = [self.state]
        snapshot = self.world.router.snapshot(self.now_ns)
        (shown,) = self.telemetry.workers(states, snapshot, self.now_ns, elapsed_s)
        return shown

    def step_ended(self, took_s: float, num_tokens: int) -> None:
        started_ns = self.now_ns - int(took_s * 1e9)
        self.telemetry.stepped("prefill", Stepped(started_ns, self.now_ns, num_tokens, 0, []))


def test_a_step_that_takes_seconds_counts_as_busy_while_it_is_made():
    watched = Watched()
    assert [watched.frame(1).busy_ratio for _ in range(3)] == [pytest.approx(1)] * 3
    watched.step_ended(3, 8)
    assert watched.frame(1).busy_ratio == pytest.approx(1), "and no more when it has ended"


def test_its_tokens_are_shown_as_they_come_and_once():
    watched = Watched()
    watched.now_ns += 2_000_000_000
    watched.step_ended(2, 8)
    assert watched.frame(0.5).prefill_tokens_per_s > 0
    shown = [watched.frame(0.5).prefill_tokens_per_s * 0.5 for _ in range(3)]
    assert shown == [pytest.approx(2)] * 3, "four a second, as in the last step"
    long = [watched.frame(1).prefill_tokens_per_s for _ in range(3)]
    assert long == [0, 0, 0], "a step has no more than it can have"
    watched.step_ended(5, 8)
    assert watched.frame(0.25).prefill_tokens_per_s == pytest.approx(8 / 5)


def test_a_worker_with_nothing_to_do_is_not_busy():
    watched = Watched()
    for sequence in list(watched.world.router.at.running.values()):
        watched.world.router.abort(sequence, FinishReason.ABORT, watched.now_ns)
    watched.world.run()
    assert watched.frame(1).busy_ratio == 0
