"""The parts of a frame, from a router that really places and workers that only say they step."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from appliance.observe.frame.protocol import WorkerFrame
from appliance.observe.telemetry.telemetry import Telemetry
from engine.scheduler.sequences.sequence import Phase
from engine.wire.finish_reason import FinishReason
from engine.wire.messages import SequenceStep, Stepped
from tests.appliance.machine import Machine, make_machine
from tests.worlds.router_world import World


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
    assert machine.frame["limit"].startswith("queue: 1 sequence waits ")
    machine.start_workers()
    assert machine.frame["limit"] == ""


def test_a_full_pool_is_what_limits(machine):
    machine.start_workers()
    pool = machine.router.ledger.pools["kv"]
    assert machine.router.ledger.reserve(0, {"kv": pool.num_free - 1})
    machine.service.submit(machine.request("her", num_sequences=3))
    assert machine.frame["limit"].endswith(" wait for KV blocks")


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
            loaded_bytes=0, total_bytes=0, num_refused=0, pids=[], cpus_used=list,
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
