"""When the daemon measures, what it says of that, and when facts are written."""

from types import SimpleNamespace

import pytest

from appliance.fleet import measuring
from appliance.fleet.measuring import OFF_VARIABLE, QUIET_S, Measuring
from appliance.fleet.profile_store import Known
from appliance.fleet.worker_counts import STARTED_TWO
from engine.profile.facts import Scope
from engine.scheduler.cache.ledger import Ledger
from engine.scheduler.cache.topology import make_topology
from engine.scheduler.queue.queue import FairQueue
from engine.scheduler.router import Router
from engine.wire.messages import (
    CoresUsed,
    MeasuredStep,
    MeasureSteps,
    StepsMeasured,
    StopMeasuring,
    UseCores,
)

SCOPE = Scope("a machine", "avx2", "tiny", "float32", "cores")
CORES = {"prefill": (0,), "decode": (1,)}


class Daemon:
    """A router with two workers that do at once what they are told, and the measuring of it."""

    def __init__(self, folder, clock):
        self.clock = clock
        self.told = []
        self.known = Known.of(folder, SCOPE)
        places = make_topology(["prefill"], ["decode"], "alias").with_pools({"kv": 100})
        self.router = Router(
            places,
            Ledger(places.new_block_pools(16)),
            FairQueue(8, 4096),
            send=lambda worker, command: self.told.append((worker, command)),
            emit=lambda *_: None,
            max_num_batched_tokens=256,
            roles="elastic",
            cores=CORES,
            profile=self.known.profile,
        )
        for name in places.names:
            self.router.worker_ready(name, 0)
        placement = SimpleNamespace(
            workers=[SimpleNamespace(gpu=None, cpus=())] * 2,
            max_num_batched_tokens=256,
            max_model_len=2048,
        )
        plan = SimpleNamespace(known=self.known, placement=placement, step_sizes=(256, 128))
        self.is_busy = False
        self.measuring = Measuring(plan, self.router, self.send, lambda: self.is_busy)

    def send(self, worker, command):
        self.told.append((worker, command))

    def deliver(self, *, answers=True):
        """Hand commands to the workers; those that were to be measured, unless they answer."""
        held = []
        while self.told:
            worker, command = self.told.pop(0)
            match command:
                case UseCores(cpus):
                    report = CoresUsed(cpus)
                    self.router.roles.answered(worker, report)
                    self.measuring.reported(worker, report)
                case MeasureSteps() if answers:
                    self.answer(worker, command)
                case MeasureSteps():
                    held.append((worker, command))
        return held

    def answer(self, worker, command):
        made = [
            MeasuredStep(s.num_sequences, s.num_tokens, s.num_before, 10.0)
            for s in command.steps[:4]
        ]
        self.clock.now_s += 0.1
        self.measuring.reported(worker, StepsMeasured(command.measurement_id, made))


class FakeClock:
    now_s = 1000.0

    def monotonic(self):
        return self.now_s

    def monotonic_ns(self):
        return int(self.now_s * 1e9)


@pytest.fixture
def daemon(tmp_path, monkeypatch):
    monkeypatch.delenv(OFF_VARIABLE, raising=False)
    clock = FakeClock()
    monkeypatch.setattr(measuring, "time", clock)
    return Daemon(tmp_path, clock)


def quiet(daemon):
    """Long enough for measuring to begin."""
    daemon.measuring.look(is_idle=True)
    daemon.clock.now_s += QUIET_S
    daemon.measuring.look(is_idle=True)


def test_after_a_quiet_second_everything_is_measured_slice_after_slice(daemon):
    assert "15 s" in daemon.measuring.announce()
    assert daemon.measuring.announce() is None, "the next start says it no more"
    daemon.deliver()
    daemon.measuring.look(is_idle=True)
    assert not daemon.deliver(), "not at once"
    quiet(daemon)
    daemon.deliver()
    assert daemon.measuring.frame()["num_unknown"] == 0
    assert daemon.measuring.announce() is None
    assert daemon.measuring.words.startswith("timed ")
    assert daemon.router.ledger.is_idle
    assert not daemon.router.roles.cores.used("prefill"), "cores are where the next prompt goes"


def test_a_request_stops_it_and_the_quiet_second_begins_anew(daemon):
    daemon.deliver()
    quiet(daemon)
    held = daemon.deliver(answers=False)
    daemon.measuring.stop()
    assert [type(command) for _, command in daemon.told] == [StopMeasuring] * len(held)
    daemon.told.clear()
    for worker, command in held:
        daemon.answer(worker, command)
    assert not daemon.deliver(answers=False), "no slice follows"
    daemon.measuring.look(is_idle=True)
    assert not daemon.deliver(answers=False)


def test_nothing_begins_on_a_busy_machine_but_what_somebody_asked_for(daemon):
    daemon.deliver()
    daemon.is_busy = True
    for _ in range(4):
        quiet(daemon)
    assert not daemon.deliver(answers=False)
    assert "paused" in daemon.measuring.words
    daemon.measuring.allow_again()
    daemon.measuring.look(is_idle=True)
    quiet(daemon)
    daemon.deliver()
    assert daemon.measuring.frame()["num_unknown"] == 0
    assert "paused" not in daemon.measuring.words


def test_a_slice_beside_other_programs_is_not_learnt_and_the_next_waits_for_quiet(daemon):
    daemon.deliver()
    quiet(daemon)
    held = daemon.deliver(answers=False)
    before = daemon.measuring.frame()["num_unknown"]
    daemon.is_busy = True
    daemon.answer(*held[0])
    daemon.is_busy = False
    for worker, command in held[1:]:
        daemon.answer(worker, command)
    assert not daemon.deliver(answers=False)
    assert daemon.measuring.frame()["num_unknown"] == before
    assert daemon.measuring.words is None
    quiet(daemon)
    daemon.deliver()
    assert daemon.measuring.frame()["num_unknown"] == 0


def test_who_has_it_switched_off_can_still_ask_for_it(daemon, tmp_path, monkeypatch):
    monkeypatch.setenv(OFF_VARIABLE, "0")
    off = Daemon(tmp_path, daemon.clock)
    off.deliver()
    quiet(off)
    assert not off.deliver(answers=False)
    assert off.measuring.announce() is None
    off.measuring.allow_again()
    off.measuring.look(is_idle=True)
    assert off.deliver(answers=False)


async def test_facts_are_written_and_the_next_start_has_them(daemon, tmp_path):
    daemon.deliver()
    quiet(daemon)
    daemon.deliver()
    await daemon.measuring.save()
    again = Daemon(tmp_path, daemon.clock)
    assert again.measuring.announce() is None
    assert again.router.roles.prompt_ms("prefill", 200, 0) is not None


async def test_a_start_that_is_killed_soon_has_announced_it_for_the_next_ones(daemon, tmp_path):
    assert daemon.measuring.announce()
    await daemon.measuring.save_when_due()
    assert Daemon(tmp_path, daemon.clock).measuring.announce() is None


async def test_a_file_that_cannot_be_written_is_said_and_nothing_else_happens(
    daemon, tmp_path, caplog
):
    daemon.known.profile.put(STARTED_TWO, [1.0])
    daemon.known.store.path.mkdir()
    await daemon.measuring.save()
    assert str(daemon.known.store.path) in caplog.text


async def test_of_a_file_that_cannot_be_read_one_warning_says_how_to_mend_it(
    daemon, tmp_path, caplog
):
    path = daemon.known.store.path
    path.write_bytes(b"no database" * 1000)
    again = Daemon(tmp_path, daemon.clock)
    assert again.measuring.announce() is None
    again.known.profile.put(STARTED_TWO, [1.0])
    await again.measuring.save()
    assert [str(path) in each.message for each in caplog.records] == [True]
    assert "penstock profile clear" in caplog.text


def test_two_processes_that_are_ready_have_not_failed(daemon):
    daemon.known.profile.put(STARTED_TWO, [1.0])
    daemon.measuring.serves()
    assert daemon.known.profile.value(*STARTED_TWO) == 0
