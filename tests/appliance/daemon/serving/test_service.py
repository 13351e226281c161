import asyncio
import time

import pytest

from appliance.daemon.requests.request import FAILED, HUNG_UP
from appliance.daemon.serving import service
from appliance.observe.frame.late_frames import SurvivedFrame
from appliance.observe.frame.protocol import utc_now
from appliance.observe.telemetry.alerts import Change
from engine.errors import QueueFull, RequestError, Unavailable
from engine.wire.finish_reason import FinishReason
from engine.wire.messages import PoolMade, SequenceStep, Stepped
from tests.appliance.machine import make_machine
from tests.tui import frames


@pytest.fixture
def machine(tiny_llama, tmp_path):
    yield from make_machine(tiny_llama, tmp_path)


def test_a_pool_that_turns_out_small_shortens_requests(machine):
    service = machine.service
    longest = service.model.max_model_len
    service.worker_reported("decode", PoolMade(100_000, None))
    assert service.model.max_model_len == longest
    service.worker_reported("decode", PoolMade(4, None))
    assert service.model.max_model_len == 3 * 64
    service.make_frame()
    assert machine.frame["max_model_len"] == 3 * 64
    assert machine.frame["pools"][0]["num_blocks"] == 3


def test_what_the_log_says_of_its_own_file_is_shown(tiny_llama, tmp_path):
    (tmp_path / "log.db").write_text("no database")
    for machine in make_machine(tiny_llama, tmp_path):
        machine.service.make_frame()
        ((code, message),) = machine.events()
        assert (code, "log.db.damaged-1" in message) == ("log.damaged", True)


def test_a_keeper_that_takes_nothing_degrades_it(machine, monkeypatch):
    assert machine.service.degraded_reason() is None
    monkeypatch.setattr(service, "keeper_problem", lambda: "the keeper cannot be reached")
    assert "keeper" in machine.service.degraded_reason()


def test_a_drain_refuses_new_work_and_keeps_what_is_accepted(machine):
    service, request = machine.service, machine.submit()
    service.drain("her")
    with pytest.raises(Unavailable) as refused:
        machine.submit()
    assert (refused.value.status, refused.value.code) == (503, "draining")
    assert "penstock resume" in str(refused.value)
    assert refused.value.retry_after_ms
    assert service.not_ready_reason() == "draining"
    assert machine.frame["state"] == "draining"
    assert not request.is_finished
    ((code, message),) = machine.events()
    assert (code, message.endswith(" by her; 1 running")) == ("drain.started", True)


def test_a_resume_takes_new_work_again(machine):
    machine.service.drain("her")
    machine.service.resume("him")
    machine.submit()
    assert machine.frame["state"] == "ready"
    assert [(code, message.split()[2:3]) for code, message in machine.events()] == [
        ("drain.started", ["her;"]),
        ("drain.ended", ["him"]),
    ]


def test_what_is_so_already_is_not_told_twice(machine):
    machine.service.resume("her")
    machine.service.drain("her")
    machine.service.drain("him")
    assert [code for code, _ in machine.events()] == ["drain.started"]


def test_the_drain_before_the_end_is_final(machine):
    machine.service.drain("her")
    machine.service.stop_accepting()
    with pytest.raises(RequestError) as refused:
        machine.service.resume("her")
    assert (refused.value.status, refused.value.code) == (409, "stopping")
    assert machine.service.not_ready_reason() == "draining"
    assert "a signal" in machine.events()[-1][1]


def test_that_an_alert_is_over_is_not_told_at_a_stop(machine, monkeypatch):
    changes = [Change("info", "queue.wait", "over"), Change("warning", "kv.preempted", "short")]
    monkeypatch.setattr(machine.service._frames, "make", lambda _: changes)
    machine.service.drain("her")
    codes = [code for code, _ in machine.events()]
    assert {"queue.wait", "kv.preempted"} <= {*codes}
    machine.service.stop_accepting()
    machine.service.make_frame()
    later = [code for code, _ in machine.events()]
    assert later.count("queue.wait") == codes.count("queue.wait")
    assert later.count("kv.preempted") > codes.count("kv.preempted")


def test_a_frame_has_the_time_at_which_its_ages_hold_however_long_it_takes(machine, monkeypatch):
    reads = []

    def read_slowly(now_ns):
        reads.append(utc_now())
        time.sleep(0.01)
        return []

    monkeypatch.setattr(machine.service._frames._devices, "read", read_slowly)
    machine.service.make_frame()
    assert machine.service.frame.at <= reads[0]


async def test_a_drain_is_over_when_the_last_reply_is(machine):
    service, request = machine.service, machine.submit()
    service.stop_accepting()
    drained = asyncio.create_task(service.drained(grace_s=5))
    await asyncio.sleep(0)
    assert not drained.done()
    service.cancel(request.request_id, "her")
    service.close(request, 200)
    await drained


def test_it_is_idle_once_the_last_of_its_requests_is_closed(machine):
    first, second = machine.submit(), machine.submit()
    machine.service.close(first, 499)
    assert not machine.service.idle.is_set()
    machine.service.close(second, 499)
    assert machine.service.idle.is_set()


def test_a_live_request_has_an_owner_and_others_have_none(machine):
    request = machine.submit("her")
    assert machine.service.owner_of(request.request_id) == "her"
    machine.service.cancel(request.request_id, "him")
    machine.service.close(request, 200)
    assert machine.service.owner_of(request.request_id) is None
    assert machine.service.owner_of("cmpl-none") is None
    assert request.cancelled_by == "him"
    assert request.sequences[0].finish_reason is FinishReason.ABORT


def test_a_cancel_is_told_and_a_hang_up_or_a_failure_is_not(machine):
    gone, failed, cancelled = machine.submit(), machine.submit(), machine.submit()
    machine.service.cancel(gone.request_id, HUNG_UP)
    machine.service.cancel(failed.request_id, FAILED)
    machine.service.cancel(cancelled.request_id, "him")
    assert gone.cancelled_by == HUNG_UP
    assert machine.events() == [
        ("request.cancelled", f"{cancelled.request_id} cancelled by him"),
    ]


def test_at_a_hand_over_only_what_the_next_daemon_cannot_continue_ends(machine):
    ending, staying = machine.submit(), machine.submit()
    staying.inbox.is_kept = True
    machine.service.abort_all(but_kept=True)
    assert (ending.cancelled_by, ending.is_finished) == ("drain", True)
    assert (staying.cancelled_by, staying.is_finished) == (None, False)


def test_a_place_in_the_queue_is_the_one_in_the_fair_order(machine):
    flood = [machine.submit("her") for _ in range(3)]
    late = machine.submit("him")
    place = machine.service.queue_place
    assert place(late) < max(map(place, flood))
    assert sorted(map(place, [*flood, late])) == [1, 2, 3, 4]
    machine.service.cancel(late.request_id, HUNG_UP)
    assert place(late) is None
    assert sorted(map(place, flood)) == [1, 2, 3]


def test_the_queue_is_shared_and_shown(machine):
    machine.submit("her", num_sequences=3)
    machine.submit("him", num_prompt_tokens=7)
    queue = machine.frame["queue"]
    assert (queue["queued"], queue["max_queued"]) == (4, 8)
    assert (queue["queued_tokens"], queue["max_queued_tokens"]) == (16, 100)
    assert queue["num_owners"] == 2
    assert [frame["user"] for frame in machine.frame["requests"]] == ["her", "him"]


def test_requests_that_a_dead_daemon_left_count_by_their_phase_until_this_one_continues_them(
    machine,
):
    left = [frames.request(1, "paused", num_sequences=3), frames.request(2, "queued")]
    machine.service.continue_from(SurvivedFrame("SIGKILL", utc_now(), 2, 2), lambda: left)
    machine.submit()
    queue = machine.frame["queue"]
    assert (queue["paused"], queue["queued"]) == (3, 2)
    left.clear()
    queue = machine.frame["queue"]
    assert (queue["paused"], queue["queued"]) == (0, 1)


def test_refusals_are_counted_and_leave_nothing_behind(machine):
    machine.submit("her", num_sequences=6)
    for num_sequences, code in ((1, "user_quota"), (3, "queue_full")):
        with pytest.raises(QueueFull) as full:
            machine.submit("her", num_sequences=num_sequences)
        assert full.value.code == code
    machine.submit("him")
    assert machine.frame["totals"]["refused"] == 2
    assert machine.frame["totals"]["accepted"] == machine.frame["num_requests"] == 2


def test_workers_and_queue_are_of_one_moment(machine):
    machine.start_workers()
    machine.service.make_frame()
    for num_live in (1, 2, 1, 0):
        requests = list(machine.service._live.values())
        if num_live > len(requests):
            machine.submit()
        else:
            machine.service.cancel(requests[0].request_id, HUNG_UP)
            machine.service.close(requests[0], 499)
        frame = machine.frame  # between two that are made
        of_workers = sum(worker["num_sequences"] for worker in frame["workers"])
        queue = frame["queue"]
        assert of_workers == queue["prefilling"] + queue["handing_off"] + queue["decoding"]
        assert of_workers == num_live


@pytest.mark.parametrize("is_fault", [True, False])
def test_whose_error_it_is_is_said_by_the_worker(machine, is_fault):
    machine.start_workers()
    (sequence,) = machine.submit().sequences
    entry = SequenceStep(
        seq_id=sequence.seq_id,
        generation=sequence.generation,
        num_computed_tokens=3,
        token_ids=[],
        logprobs=[],
        finish_reason="error",
        released="ended",
        num_scheduled_tokens=3,
        admitted_ns=1,
        error="why",
        is_fault=is_fault,
    )
    machine.service.worker_reported(sequence.worker, Stepped(1, 2, 3, 0, [entry]))
    assert (sequence.finish_reason, sequence.error) == (FinishReason.ERROR, "why")
    assert sequence.is_refused is not is_fault


@pytest.mark.parametrize("is_refused", [True, False])
def test_who_asked_what_cannot_be_gone_on_with_is_no_failure_of_ours(machine, is_refused):
    request = machine.submit()
    (sequence,) = request.sequences
    sequence.is_refused = is_refused  # as by a grammar that grows too large
    machine.router.abort(sequence, FinishReason.ERROR, 1, "Too many items")
    machine.service.close(request, 400 if is_refused else 500)
    totals = machine.frame["totals"]
    assert (totals["aborted"], totals["failed"]) == (is_refused, not is_refused)


def test_limits_change_while_requests_wait(machine):
    machine.submit("her", num_sequences=4)
    machine.service.deadlines.set_queue_limits(4, 1000, 0)
    with pytest.raises(QueueFull):
        machine.submit("him")
    machine.service.deadlines.set_queue_limits(20, 1000, 0)
    machine.submit("him")
    assert machine.frame["num_requests"] == 2
    assert machine.service.max_per_request == 15


def test_while_one_worker_serves_the_appliance_does_and_says_what_is_wrong(machine):
    machine.start_workers()
    service, decode = machine.service, machine.supervisor.workers["decode"]
    assert (service.not_ready_reason(), service.degraded_reason()) == (None, None)
    request = machine.submit()
    decode.state, decode.num_restarts, decode.num_short_lives, decode.pause_s = "loading", 4, 4, 5
    death = "worker decode (pid 7) died: killed by SIGSEGV"
    service.worker_died("decode", death)
    trouble = "worker decode died 4 times in a row and restarts within 5 s"
    degraded = f"{trouble}; new requests go to prefill"
    assert (service.not_ready_reason(), service.degraded_reason()) == (None, degraded)
    assert (machine.frame["state"], machine.frame["state_reason"]) == ("degraded", degraded)
    assert trouble in [alert["message"] for alert in machine.frame["alerts"]]
    assert machine.events()[-2] == ("worker.died", f"{death}; {trouble}")
    service.worker_lost("worker decode could not be restarted: exit code 1")
    machine.submit()
    assert not request.is_finished
    machine.supervisor.workers["prefill"].state = "restarting"
    assert service.degraded_reason() is None
    assert service.not_ready_reason().endswith(f"; {trouble}")


def test_nobody_waits_for_the_last_worker_that_cannot_come_back(machine):
    machine.start_workers()
    request = machine.submit()
    machine.supervisor.is_lost = True
    machine.service.worker_lost("worker decode could not be restarted: exit code 1")
    assert request.sequences[0].finish_reason is FinishReason.ERROR
    assert "could not be restarted" in request.sequences[0].error
    with pytest.raises(Unavailable) as refused:
        machine.submit()
    assert refused.value.code == "engine_dead"


class FakeMeasuring:
    words = "timed 3 steps"

    def __init__(self) -> None:
        self.calls: list[str] = []

    def serves(self) -> None:
        self.calls.append("serves")

    def stop(self) -> None:
        self.calls.append("stop")


def test_what_was_measured_is_in_frames_and_a_request_ends_it(machine):
    machine.start_workers()
    before, measuring = machine.frame["trials"], FakeMeasuring()
    machine.service.begin(measuring)
    machine.service.make_frame()
    assert machine.frame["trials"] == [*before, "timed 3 steps"]
    machine.submit()
    assert measuring.calls == ["serves", "stop"]


def test_what_came_lately_is_listed_again_after_a_restart(tiny_llama, tmp_path):
    for machine in make_machine(tiny_llama, tmp_path):
        for received_at in ("2026-01-01T00:00:00.000Z", utc_now(), utc_now()):
            request = machine.request()
            request.received_at = received_at
            machine.service.submit(request)
            machine.service.close(request, 200)
        told = machine.service.request_frames()
    assert len(told) == 3
    for machine in make_machine(tiny_llama, tmp_path):
        listed = machine.service.request_frames()
    stages = ("id", "phase", "received_at", "workers", "queue_ms", "prefill_ms", "decode_ms")
    facts = [[[one[name] for name in stages] for one in each] for each in (listed, told[:2])]
    assert facts[0] == facts[1]
