"""Whatever can wait is ended some time, with a reply, a row and a word to the operator."""

import msgspec
import pytest

from appliance.fleet.roles_change import RolesChange
from appliance.watch.deadlines import HANDOFF_S, STAGE_S
from engine.schedule.sequence import FinishReason, Leg, Moving, On
from engine.wire.messages import Rehearsed, RehearsedStep
from tests.appliance.machine import make_machine

S = 1_000_000_000


@pytest.fixture
def machine(tiny_llama, tmp_path):
    yield from make_machine(tiny_llama, tmp_path)


@pytest.fixture
def clock(monkeypatch):
    """The daemon's clock, in seconds."""
    now = [1000.0]
    monkeypatch.setattr("time.monotonic_ns", lambda: int(now[0] * S))
    return now


def keep(machine, clock, *, after_s):
    """Look, wait, and look again."""
    machine.service.deadlines.keep()
    clock[0] += after_s
    machine.service.deadlines.keep()


def test_who_waited_too_long_for_a_turn_is_told_when_to_come_back(machine, clock):
    request = machine.submit()
    machine.service.deadlines.set_queue_limits(8, 100, 60.0)
    keep(machine, clock, after_s=59)
    assert not request.is_finished
    keep(machine, clock, after_s=2)
    (sequence,) = request.sequences
    assert sequence.finish_reason is FinishReason.ERROR
    assert (request.failure.status, request.failure.code) == (503, "queue_timeout")
    assert request.failure.retry_after_ms == 60_000
    assert "longer than max_queue_wait" in sequence.error
    assert len(machine.router.queue) == 0
    assert machine.events()[-1][0] == "request.queue_timeout"
    machine.service.close(request, 503)
    (row,) = machine.log_rows()
    assert (row["finish_reason"], row["http_status"]) == ("error", 503)


def test_a_target_for_the_first_token_is_a_limit_of_its_own(machine, clock):
    queue, deadlines = machine.router.queue, machine.service.deadlines
    deadlines.set_queue_limits(8, 100, 60.0)
    deadlines.keep()
    assert (queue.max_wait_ms, queue.max_first_ms) == (60_000, 0)
    machine.service.set_roles(RolesChange(None, 4_000, None), None)
    deadlines.keep()
    assert (queue.max_wait_ms, queue.max_first_ms) == (60_000, 4_000)


def test_until_first_tokens_are_seen_the_rehearsal_says_what_a_prompt_takes(machine, clock):
    machine.start_workers()
    queue, roles = machine.router.queue, machine.router.roles
    machine.service.deadlines.keep()
    assert queue._tokens.assumed_ms == 0
    steps = [RehearsedStep(1, size, before, float(size)) for size in (8, 64) for before in (0, 64)]
    for worker, slower in (("prefill", 1), ("decode", 2)):
        slow = [msgspec.structs.replace(s, elapsed_ms=s.elapsed_ms * slower) for s in steps]
        roles.rehearsed(worker, Rehearsed(1, slow * 3))
    machine.service.deadlines.keep()
    assert queue._tokens.assumed_ms == pytest.approx(1.0, rel=0.2)


def test_without_a_limit_one_waits_for_ever(machine, clock):
    request = machine.submit()
    keep(machine, clock, after_s=1_000_000)
    assert not request.is_finished


@pytest.mark.parametrize(
    ("where", "limit_s"),
    [
        (On(Leg("prefill", 1)), STAGE_S),
        (On(Leg("decode", 4)), STAGE_S),
        (Moving(Leg("prefill", 1), Leg("decode", 4)), HANDOFF_S),
    ],
    ids=["prefilling", "decoding", "handing off"],
)
def test_a_stage_without_progress_ends_and_one_with_progress_goes_on(
    machine, clock, where, limit_s
):
    request = machine.submit()
    (sequence,) = request.sequences
    machine.router.queue.forget(sequence)
    sequence.where, sequence.generation = where, 1
    if isinstance(where, Moving) or where.leg.worker == "decode":
        sequence.output_token_ids.append(7)
        sequence.num_computed_tokens = sequence.num_prompt_tokens
    keep(machine, clock, after_s=limit_s - 1)
    sequence.num_computed_tokens += 1  # it moves, however slowly
    keep(machine, clock, after_s=limit_s - 1)
    assert not request.is_finished
    clock[0] += 2
    machine.service.deadlines.keep()
    assert sequence.finish_reason is FinishReason.ERROR
    assert (request.failure.status, request.failure.code) == (500, "stage_timeout")
    phase = {On: "prefilling", Moving: "handing off"}[type(where)]
    if isinstance(where, On) and where.leg.worker == "decode":
        phase = "decoding"
    assert request.failure.what == f"no progress for {limit_s + 1:.0f} s while {phase}"
    assert machine.events()[-1][0] == "request.stage_timeout"
