"""Whatever can wait is ended some time, with a reply, a row and a word to the operator."""

import itertools
import mmap
import os
import re
import time

import msgspec
import pytest

from appliance.fleet.roles_change import RolesChange
from appliance.fleet.worker_state import WorkerState
from appliance.observe.telemetry import deadlines
from appliance.observe.telemetry.deadlines import HANDOFF_S, STAGE_S
from appliance.observe.telemetry.progress import (
    BEAT_PATIENCE_S,
    LOADING_PATIENCE_S,
    MIN_PATIENCE_S,
    STEP_PATIENCE,
    UNKNOWN_PATIENCE_S,
    Watchdog,
    WorkerReading,
)
from appliance.observe.telemetry.thread_times import ThreadTime
from engine.scheduler.routing.step_times import place_of
from engine.scheduler.sequences.sequence import Moving, On, RouteStage
from engine.wire.finish_reason import FinishReason
from engine.wire.messages import MeasuredStep
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
    machine.service.deadlines.enforce()
    clock[0] += after_s
    machine.service.deadlines.enforce()


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


def test_a_request_that_has_had_a_turn_is_not_ended_for_its_own_length(machine, clock):
    machine.service.deadlines.set_queue_limits(8, 100, 60.0)
    request, other = machine.submit(num_sequences=3), machine.submit()
    first, *others = request.sequences
    machine.router.queue.remove(first)
    first.where, first.generation = On(RouteStage("prefill", 1)), 1
    keep(machine, clock, after_s=61)
    assert other.failure.code == "queue_timeout"
    first.num_computed_tokens += 1  # it moves
    keep(machine, clock, after_s=61)
    machine.router.finish(first, FinishReason.LENGTH, time.monotonic_ns())
    keep(machine, clock, after_s=61)
    assert request.failure is None
    assert first.finish_reason is FinishReason.LENGTH
    assert not any(each.is_finished for each in others)
    assert len(machine.router.queue) == len(others)


def test_a_target_for_the_first_token_is_a_limit_of_its_own(machine, clock):
    queue, deadlines = machine.router.queue, machine.service.deadlines
    deadlines.set_queue_limits(8, 100, 60.0)
    deadlines.enforce()
    assert (queue.max_wait_ms, queue.max_first_ms) == (60_000, 0)
    machine.service.set_roles(RolesChange(None, 4_000, None), None)
    deadlines.enforce()
    assert (queue.max_wait_ms, queue.max_first_ms) == (60_000, 4_000)


def test_until_first_tokens_are_seen_the_profile_says_what_a_prompt_takes(machine, clock):
    machine.start_workers()
    queue, roles = machine.router.queue, machine.router.roles
    machine.service.deadlines.enforce()
    assert queue._tokens.assumed_ms == 0
    steps = [MeasuredStep(1, size, before, float(size)) for size in (8, 64) for before in (0, 64)]
    for worker, slower in (("prefill", 1), ("decode", 2)):
        slow = [msgspec.structs.replace(s, elapsed_ms=s.elapsed_ms * slower) for s in steps]
        roles.measured(place_of(worker, 1), slow * 3)
    machine.service.deadlines.enforce()
    assert queue._tokens.assumed_ms == pytest.approx(1.0, rel=0.3)


def test_without_a_limit_one_waits_for_ever(machine, clock):
    request = machine.submit()
    keep(machine, clock, after_s=1_000_000)
    assert not request.is_finished


@pytest.mark.parametrize(
    ("where", "limit_s"),
    [
        (On(RouteStage("prefill", 1)), STAGE_S),
        (On(RouteStage("decode", 4)), STAGE_S),
        (Moving(RouteStage("prefill", 1), RouteStage("decode", 4)), HANDOFF_S),
    ],
    ids=["prefilling", "decoding", "handing off"],
)
def test_a_stage_without_progress_ends_and_one_with_progress_goes_on(
    machine, clock, where, limit_s
):
    request = machine.submit()
    (sequence,) = request.sequences
    machine.router.queue.remove(sequence)
    sequence.where, sequence.generation = where, 1
    if isinstance(where, Moving) or where.stage.worker == "decode":
        sequence.output_token_ids.append(7)
        sequence.num_computed_tokens = sequence.num_prompt_tokens
    keep(machine, clock, after_s=limit_s - 1)
    sequence.num_computed_tokens += 1  # it moves, however slowly
    keep(machine, clock, after_s=limit_s - 1)
    assert not request.is_finished
    clock[0] += 2
    machine.service.deadlines.enforce()
    assert sequence.finish_reason is FinishReason.ERROR
    assert (request.failure.status, request.failure.code) == (500, "stage_timeout")
    phase = {On: "prefilling", Moving: "handing off"}[type(where)]
    if isinstance(where, On) and where.stage.worker == "decode":
        phase = "decoding"
    assert request.failure.what == f"no progress for {limit_s + 1:.0f} s while {phase}"
    assert machine.events()[-1][0] == "request.stage_timeout"


def test_workers_that_come_and_go_do_not_put_the_deadline_off(machine, clock):
    request = machine.submit()
    (sequence,) = request.sequences
    machine.router.queue.remove(sequence)
    sequence.where, sequence.generation, sequence.num_computed_tokens = (
        On(RouteStage("decode", 4)),
        1,
        9,
    )
    for num_computed_tokens in (0, 4, 9):  # computed again after each death, never further
        keep(machine, clock, after_s=STAGE_S / 4)
        sequence.generation += 1
        sequence.num_computed_tokens = num_computed_tokens
    keep(machine, clock, after_s=STAGE_S / 4 - 1)
    assert not request.is_finished
    keep(machine, clock, after_s=STAGE_S / 4)
    assert request.failure.code == "stage_timeout"


# --------------------------------------------------------------------------------------------------
# Workers without progress are avoided, then ended; those that are slow, idle or gone are not.

STILL = WorkerReading(pid=1, num_signs=7, has_work=True, step_ms=40.0)


IDLE = STILL._replace(has_work=False)


def one_thread(is_runnable, cpu_s, waited_s=0.0):
    return {1: ThreadTime(is_runnable, cpu_s, waited_s)}


def silent_for(reading, seconds, watchdog=None):
    """A watchdog that has read the same of one worker, twice a second, for so long."""
    watchdog = watchdog or Watchdog()
    for _ in range(int(2 * seconds) + 1):
        watchdog.look({"a": reading, "b": IDLE}, 0.5)
    return watchdog


def test_a_silent_worker_is_first_stalled_then_hung_with_what_is_wrong():
    assert not silent_for(STILL, MIN_PATIENCE_S / 2 - 1).stalled
    stalled = silent_for(STILL, MIN_PATIENCE_S / 2)
    assert list(stalled.stalled) == ["a"]
    assert not stalled.hung
    hung = silent_for(STILL, MIN_PATIENCE_S).hung
    assert {name: re.findall(r"\d+ s", why) for name, why in hung.items()} == {"a": ["10 s"] * 2}


def test_a_long_step_has_its_time_also_when_it_is_read_about_once():
    slow = STILL._replace(step_ms=9_000.0)
    patience_s = STEP_PATIENCE * 9.0
    assert not silent_for(slow, patience_s - 1).hung
    assert silent_for(slow, patience_s).hung
    # what it was given shrinks (requests are aborted) while it is in a step with all of it
    assert not silent_for(STILL, patience_s - 3, silent_for(slow, 1)).hung


@pytest.mark.parametrize(
    "sign_of_life", [{"num_signs": 8}, {"has_work": False}, {"pid": 2}, {"pid": None}]
)
def test_any_sign_of_life_begins_the_wait_again(sign_of_life):
    watchdog = silent_for(STILL, MIN_PATIENCE_S - 1)
    watchdog.look({"a": STILL._replace(**sign_of_life)}, 0.5)
    watchdog.look({"a": STILL}, 0.5)
    assert not silent_for(STILL, MIN_PATIENCE_S - 2, watchdog).hung


def test_a_busy_process_is_trusted_for_a_while_only_where_no_step_was_ever_seen():
    def computing(step_ms, seconds, *, has_beats=False):
        watchdog = Watchdog()
        for tick in range(int(2 * seconds) + 1):
            threads = one_thread(True, tick / 2)
            reading = STILL._replace(step_ms=step_ms, threads=threads, has_beats=has_beats)
            watchdog.look({"a": reading}, 0.5)
        return watchdog

    assert computing(40.0, MIN_PATIENCE_S).hung  # a device hangs while its process spins
    assert not computing(None, UNKNOWN_PATIENCE_S - 2).hung
    assert not computing(None, BEAT_PATIENCE_S - 2, has_beats=True).hung
    assert computing(None, BEAT_PATIENCE_S, has_beats=True).hung
    assert computing(None, UNKNOWN_PATIENCE_S).hung
    # it computed at first, and stands still since: CPU time of before proves nothing
    stopped = silent_for(
        STILL._replace(step_ms=None, threads=one_thread(False, 9e9)),
        MIN_PATIENCE_S,
        computing(None, 9),
    )
    assert stopped.hung
    asleep = one_thread(False, 3.0)
    assert silent_for(STILL._replace(step_ms=None, threads=asleep), MIN_PATIENCE_S).hung


@pytest.mark.parametrize("waited_s", [0.0, None], ids=["", "waits are not reported"])
@pytest.mark.parametrize("step_ms", [40.0, None], ids=["", "unpredictable"])
def test_a_worker_that_waits_for_a_core_is_not_stuck_however_long(step_ms, waited_s):
    starved = STILL._replace(step_ms=step_ms, threads=one_thread(True, 3.0, waited_s))
    assert not silent_for(starved, 3600).stalled


def test_a_worker_that_hangs_beside_other_programs_is_judged_by_the_time_that_it_had():
    watchdog = Watchdog()
    for tick in range(int(8 * MIN_PATIENCE_S) - 4):  # an endless loop on a quarter of a core
        threads = one_thread(True, tick / 8, 3 * tick / 8)
        watchdog.look({"a": STILL._replace(threads=threads)}, 0.5)
    assert watchdog.stalled
    assert not watchdog.hung
    assert silent_for(STILL._replace(threads=threads), 1, watchdog).stalled
    for tick in range(tick, tick + 12):  # noqa: B020
        threads = one_thread(True, tick / 8, 3 * tick / 8)
        watchdog.look({"a": STILL._replace(threads=threads)}, 0.5)
    assert watchdog.hung


@pytest.mark.parametrize("threads", [{}, {1: ThreadTime(False, 0.0, 0.0)}], ids=["", "with times"])
def test_where_waits_are_not_reported_the_reason_says_so(threads):
    about = silent_for(STILL._replace(threads=threads), MIN_PATIENCE_S).hung["a"]
    without = {thread: each._replace(waited_s=None) for thread, each in threads.items()}
    other = silent_for(STILL._replace(threads=without), MIN_PATIENCE_S).hung["a"]
    assert (other != about) == bool(threads)


def test_a_daemon_that_was_stopped_itself_accuses_nobody():
    watchdog = silent_for(STILL, 1)
    watchdog.look({"a": STILL}, 3600.0)
    assert not watchdog.stalled


def test_a_worker_that_loads_is_trusted_as_long_as_it_computes_or_says_something():
    loading = STILL._replace(is_loading=True, step_ms=None, threads=one_thread(False, 1.0))
    assert not silent_for(loading, LOADING_PATIENCE_S - 1).hung
    assert silent_for(loading, LOADING_PATIENCE_S).hung

    def busy(seconds, **sign_of_life):
        watchdog = silent_for(loading, LOADING_PATIENCE_S - 1)
        watchdog.look({"a": loading._replace(**sign_of_life)}, 0.5)
        last = watchdog._silences["a"].last
        for tick in range(int(2 * seconds)):
            watchdog.look({"a": last._replace(threads=one_thread(True, 2.0 + tick))}, 0.5)
        return watchdog

    begun = one_thread(True, 1.5)
    assert not busy(UNKNOWN_PATIENCE_S - LOADING_PATIENCE_S - 2, threads=begun).hung
    assert busy(UNKNOWN_PATIENCE_S, threads=begun).hung  # it turns in circles
    assert not busy(UNKNOWN_PATIENCE_S - 2, num_signs=8).hung


@pytest.mark.parametrize("is_slow", [True, False], ids=["a slow disk", "circles"])
def test_a_worker_whose_weights_come_slowly_is_left_alone(clock, machine, monkeypatch, is_slow):
    ticks, cpu_s, ended = itertools.count(), itertools.count(), []
    plan, setup = machine.plan.workers[0]
    supervisor = machine.supervisor
    supervisor.workers[plan.name] = WorkerState(plan, setup, "loading", pid=0)
    supervisor.end_hung = lambda *told: ended.append(told)

    def num_file_pages(pid):
        return next(ticks) // 50 if is_slow else 0  # a page in 25 seconds

    monkeypatch.setattr(deadlines, "_num_file_pages", num_file_pages)
    monkeypatch.setattr(deadlines, "times_of", lambda _: one_thread(True, next(cpu_s) / 2))
    for _ in range(2 * int(UNKNOWN_PATIENCE_S) + 100):
        clock[0] += 0.5
        machine.service.deadlines.enforce()
    assert bool(ended) != is_slow


def test_a_load_is_seen_by_its_pages_of_files(tmp_path):
    num_pages = deadlines._num_file_pages(os.getpid())
    file = tmp_path / "weights"
    with file.open("wb") as opened:
        opened.truncate(64 << 20)
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert sum(mapped[:: mmap.PAGESIZE]) == 0
        # whose count may be behind by some on each core
        assert deadlines._num_file_pages(os.getpid()) > num_pages + 1000
    assert deadlines._num_file_pages(None) == 0


@pytest.mark.parametrize("is_started", [False, True], ids=["at the first start", "again"])
def test_a_worker_that_hangs_while_it_loads_is_ended_but_nobody_who_waits_for_it(
    clock, machine, is_started
):
    ended = []
    (plan, setup), (other, _) = machine.plan.workers
    supervisor = machine.supervisor
    supervisor.is_started = is_started
    for each in (plan, other):
        supervisor.workers[each.name] = WorkerState(each, setup, "loading", pid=0)
    supervisor.waits_for_others = lambda name: name == other.name
    supervisor.end_hung = lambda *told: ended.append(told)
    for _ in range(2 * int(LOADING_PATIENCE_S) + 2):
        clock[0] += 0.5
        machine.service.deadlines.enforce()
    assert {told[0] for told in ended} == {plan.name}
    assert "loads" in ended[0][1]
    assert re.findall(r"\d+ s", ended[0][1]) == ["30 s", "30 s"]
