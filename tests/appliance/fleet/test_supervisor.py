"""What the supervisor says of workers that load, and of those that die."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest

from appliance.devices.gpu_list import Gpu
from appliance.fleet import peer_memory
from appliance.fleet import supervisor as supervisor_file
from appliance.fleet.peer_memory import MemorySharing, PeerPools
from appliance.fleet.placement import WorkerPlan
from appliance.fleet.supervisor import (
    MAX_FAILED_STARTS,
    WORKER_PROGRAM,
    OnDied,
    OnReady,
    Supervisor,
)
from appliance.fleet.worker_state import WorkerState, weights_progress
from engine.errors import WorkerFailed, WorkerUnfit
from engine.wire.messages import (
    Command,
    GpuSpec,
    MapPool,
    MapShared,
    PoolSpec,
    Setup,
    SharedMemory,
    WeightsSpec,
)
from tests.daemons import is_alive
from tests.worlds.daemon_parts import until

T = TypeVar("T")


def loading(
    loaded_bytes: int,
    total_bytes: int,
    *,
    weights: WeightsSpec | None = None,
    gpu: GpuSpec | None = None,
) -> WorkerState:
    setup = Setup(
        worker="w",
        model_dir="",
        dtype="bfloat16",
        block_size=16,
        pool=PoolSpec("kv", None, 8),
        weights=weights,
        cpus=[0],
        max_num_batched_tokens=8,
        max_model_len=8,
        gpu=gpu,
    )
    plan = WorkerPlan("w", (0,), "kv")
    return WorkerState(plan, setup, loaded_bytes=loaded_bytes, total_bytes=total_bytes)


def unheard(
    workers: list[tuple[WorkerPlan, Setup]],
    program: Sequence[str] = WORKER_PROGRAM,
    *,
    on_ready: OnReady = lambda name: None,
    on_died: OnDied = lambda *died: None,
) -> Supervisor:
    """A supervisor to most of whose calls nobody listens, of workers that run a program."""
    return Supervisor(
        workers,
        [],
        on_report=lambda *report: None,
        on_ready=on_ready,
        on_died=on_died,
        on_lost=lambda *lost: None,
        program=program,
    )


async def next_of(queue: asyncio.Queue[T]) -> T:
    """Take what comes next; the bound only keeps a broken test from hanging."""
    return await asyncio.wait_for(queue.get(), 120)


@contextlib.contextmanager
def no_descriptor_left() -> Iterator[list[int]]:
    """Take every descriptor that is free; those in the list are closed at the end."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    in_use = max(int(fd) for fd in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (in_use + 1, before[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        yield taken
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_file_that_two_workers_map_counts_once() -> None:
    assert weights_progress([loading(269, 269), loading(269, 269)]) == (269, 269)
    assert weights_progress([loading(100, 269), loading(269, 269)]) == (100, 269)
    assert weights_progress([loading(269, 269)]) == (269, 269)


def test_shares_of_one_memory_and_copies_on_two_devices_add_up() -> None:
    share = WeightsSpec(3, 538, 0, 2, is_filled=False)
    assert weights_progress([loading(100, 269, weights=share)] * 2) == (200, 538)
    gpu = GpuSpec("GPU-1")
    assert weights_progress([loading(269, 269, gpu=gpu)] * 2) == (538, 538)


READY = """
import socket, sys, time
from engine.wire.channel import WorkerChannel
from engine.wire.messages import WeightsComplete, Ready, Setup, WeightsLoaded
sock = socket.socket(fileno=int(sys.argv[sys.argv.index("--channel-fd") + 1]))
channel = WorkerChannel(sock)
channel.expect(Setup)
channel.send(WeightsLoaded())
channel.expect(WeightsComplete)
channel.send(Ready("none"))
"""
SHORT_LIVED = f"{READY}time.sleep(0.01)"
DEAF = f"""{READY}
sock.shutdown(socket.SHUT_RDWR)
time.sleep(600)
"""
"""A worker that cannot be heard any more, and lives on."""


async def test_a_worker_is_dead_when_its_process_is_gone_and_nothing_waits_for_that() -> None:
    died: asyncio.Queue[bool] = asyncio.Queue()
    pids, turns, state = [], 0, loading(0, 0)
    supervisor = Supervisor(
        [(state.plan, state.setup)],
        [],
        on_report=lambda *report: None,
        on_ready=lambda name: pids.append(supervisor.workers[name].pid),
        on_died=lambda name, about: died.put_nowait(is_alive(pids[0])),
        on_lost=lambda *lost: None,
        program=(sys.executable, "-c", DEAF),
    )
    supervisor.spawn_all()
    await supervisor.run()
    worker = supervisor.workers["w"]
    while died.empty():
        await asyncio.sleep(0.005)
        turns += worker.channel is None and worker.state == "ready"
    assert died.get_nowait() is False
    assert turns  # the loop went round while a thread waited
    await supervisor.stop()


GARBLED = f"""{READY}
sock.sendall(b"\\xff" * 100)
time.sleep(600)
"""
"""A worker that writes over its own messages, and lives on."""


async def test_a_worker_that_sends_garbage_is_restarted() -> None:
    died: asyncio.Queue[str] = asyncio.Queue()
    state = loading(0, 0)
    supervisor = unheard(
        [(state.plan, state.setup)],
        (sys.executable, "-c", GARBLED),
        on_died=lambda name, about: died.put_nowait(about),
    )
    supervisor.spawn_all()
    await supervisor.run()
    for _ in range(2):
        assert "message" in await next_of(died)
    assert supervisor.workers["w"].num_restarts
    await supervisor.stop()


HANGING = READY.replace('channel.send(Ready("none"))', "time.sleep(600)")
"""A worker whose first step never ends."""


async def test_a_worker_that_hangs_in_its_first_start_ends_that_with_its_name() -> None:
    state = loading(0, 0)
    supervisor = unheard([(state.plan, state.setup)], program=(sys.executable, "-c", HANGING))
    supervisor.spawn_all()
    starting = asyncio.create_task(supervisor.run())
    worker = supervisor.workers["w"]
    await until(lambda: worker.has_loaded)
    supervisor.end_hung("w", "it hangs while it loads")
    with pytest.raises(WorkerFailed, match="w: it hangs"):
        await starting
    await supervisor.stop()
    assert worker.process is not None
    assert worker.process.poll() is not None


def two_workers() -> list[tuple[WorkerPlan, Setup]]:
    """Plans and setups of workers a and b."""
    state = loading(0, 0)
    return [
        (
            dataclasses.replace(state.plan, name=name),
            msgspec.structs.replace(state.setup, worker=name),
        )
        for name in ("a", "b")
    ]


async def test_a_ctrl_c_does_not_reach_a_worker_that_is_still_starting() -> None:
    script = "import os, signal; os.killpg(0, signal.SIGINT); raise SystemExit(3)"
    script = f"import os; os.setpgid(0, 0); {script}"  # a group without us
    supervisor = unheard(two_workers(), program=(sys.executable, "-c", script))
    supervisor.spawn_all()
    with pytest.raises(WorkerFailed, match="exit code 3"):
        await supervisor.run()
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    await until(lambda: all(each.is_reaped.is_set() for each in supervisor.workers.values()))
    await supervisor.stop()


async def test_a_first_start_that_fails_restarts_nobody(caplog: pytest.LogCaptureFixture) -> None:
    supervisor = unheard(two_workers(), program=(sys.executable, "-c", "raise SystemExit(3)"))
    supervisor.spawn_all()
    with pytest.raises(WorkerFailed, match="exit code 3"):
        await supervisor.run()
    await until(lambda: all(each.is_reaped.is_set() for each in supervisor.workers.values()))
    await supervisor.stop()
    assert not supervisor.is_started
    assert [each.num_restarts for each in supervisor.workers.values()] == [0, 0]
    assert "could not be restarted" not in caplog.text


def test_cuda_is_told_of_all_whole_gpus_that_serve_or_of_one_instance(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    uuids = ["GPU-1", "MIG-a", "GPU-2"]
    plan, given = two_workers()[0]
    supervisor = unheard(
        [
            (
                dataclasses.replace(plan, name=uuid),
                msgspec.structs.replace(given, worker=uuid, gpu=GpuSpec(uuid)),
            )
            for uuid in uuids
        ]
    )
    told: list[str] = []

    def started(*_: object, env: dict[str, str], **__: object) -> subprocess.Popen[bytes]:
        told.append(env["CUDA_VISIBLE_DEVICES"])
        raise OSError

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(supervisor_file.subprocess, "Popen", started)
    for worker in supervisor.workers.values():
        with pytest.raises(OSError):  # noqa: PT011
            supervisor._spawn(worker)
    assert told == ["GPU-1,GPU-2", "MIG-a", "GPU-1,GPU-2"]


def test_who_has_loaded_waits_for_the_others_and_then_for_nobody() -> None:
    supervisor = unheard(two_workers())
    waits = [supervisor.waits_for_others(name) for name in ("a", "b")]
    supervisor.workers["a"].has_loaded = True
    waits += [supervisor.waits_for_others(name) for name in ("a", "b")]
    supervisor.workers["b"].has_loaded = True
    waits += [supervisor.waits_for_others(name) for name in ("a", "b")]
    assert waits == [False, False, True, False, False, False]


def test_who_is_awaited_is_said_with_how_far_it_is_unless_lines_say_so() -> None:
    supervisor = unheard(two_workers())
    a, b = supervisor.workers.values()
    assert all(" (loading PyTorch" in one for one in supervisor.awaited(0.0))
    a.loaded_bytes, a.total_bytes, b.loaded_bytes, b.total_bytes = 1, 2, 2, 2
    reading, preparing = supervisor.awaited(0.0)
    assert "1.0 of 2 B" in reading
    assert "preparing" in preparing
    supervisor._log_progress()
    assert supervisor.awaited(1e9) == []
    a.state = b.state = "ready"
    assert supervisor.awaited(0.0) == []


async def test_a_worker_that_keeps_dying_is_tried_less_and_less_often_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervisor_file, "RESTART_BACKOFF_S", (0.0, 0.0, 0.01, 0.02))
    died: asyncio.Queue[tuple[float, str | None]] = asyncio.Queue()
    troubles_when_ready: list[str | None] = []
    state = loading(0, 0)
    supervisor = unheard(
        [(state.plan, state.setup)],
        (sys.executable, "-c", SHORT_LIVED),
        on_ready=lambda name: troubles_when_ready.append(worker.trouble),
        on_died=lambda name, about: died.put_nowait((worker.pause_s, worker.trouble)),
    )
    worker = supervisor.workers["w"]
    assert worker.trouble == "worker w is starting"
    supervisor.spawn_all()
    await supervisor.run()
    told = [await next_of(died) for _ in range(5)]
    assert [pause for pause, _ in told] == [0.0, 0.0, 0.01, 0.02, 0.02]
    assert told[1][1] == "worker w is restarting"
    assert ("4 times" in told[3][1], "0.02 s" in told[3][1]) == (True, True)
    assert not supervisor.is_lost  # it comes back each time
    assert troubles_when_ready[:3] == [None] * 3
    assert "4 times" in (troubles_when_ready[4] or "")
    await supervisor.stop()


def test_a_restarted_worker_is_in_trouble_until_it_has_worked_or_lived_for_a_while() -> None:
    worker = loading(0, 0)
    worker.state, worker.num_short_lives, worker.ready_at_s = "ready", 4, time.monotonic()
    assert (worker.trouble or "").endswith("has just restarted")
    worker.has_stepped = True
    assert worker.trouble is None
    worker.has_stepped, worker.ready_at_s = False, 0.0
    assert worker.trouble is None


STEPPING = f"""{READY}
from engine.wire.messages import SequenceStep, Stepped
step = SequenceStep(1, 1, 1, [], [], None, None, 1, 0, is_fault=sys.argv[1] == "bad")
channel.send(Stepped(0, 1, 1, 0, [step]))
time.sleep(0.01)
"""
"""A worker that makes one step and dies."""


@pytest.mark.parametrize(("kind", "counted"), [("good", [0] * 4), ("bad", [1, 2, 3, 4])])
async def test_only_lives_without_a_good_step_count_for_the_back_off(
    monkeypatch: pytest.MonkeyPatch, kind: str, counted: list[int]
) -> None:
    monkeypatch.setattr(supervisor_file, "RESTART_BACKOFF_S", (0.0, 0.01))
    died: asyncio.Queue[int] = asyncio.Queue()
    state = loading(0, 0)
    supervisor = unheard(
        [(state.plan, state.setup)],
        program=(sys.executable, "-c", STEPPING, kind),
        on_died=lambda name, about: died.put_nowait(worker.num_short_lives),
    )
    worker = supervisor.workers["w"]
    supervisor.spawn_all()
    await supervisor.run()
    assert [await next_of(died) for _ in range(4)] == counted
    await supervisor.stop()


UNFIT = f"""
import os, sys
path = sys.argv[1]
is_first = not os.path.exists(path)
open(path, "a").write("x")
if is_first:
    exec({SHORT_LIVED!r})
else:
    import socket
    from engine.wire.channel import WorkerChannel
    from engine.wire.messages import Failed, Setup
    channel = WorkerChannel(socket.socket(fileno=int(sys.argv[3])))
    channel.expect(Setup)
    channel.send(Failed("attention is wrong", "gpu0", "another driver", True))
"""
"""A worker that serves once, and never again."""


async def test_a_fault_that_stays_is_not_tried_again_and_ends_requests_at_once(
    tmp_path: Path,
) -> None:
    lost: asyncio.Queue[str] = asyncio.Queue()
    state, lives = loading(0, 0), tmp_path / "lives"
    supervisor = Supervisor(
        [(state.plan, state.setup)],
        [],
        on_report=lambda *report: None,
        on_ready=lambda name: None,
        on_died=lambda *died: None,
        on_lost=lambda name, about: lost.put_nowait(about),
        program=(sys.executable, "-c", UNFIT, str(lives)),
    )
    supervisor.spawn_all()
    await supervisor.run()
    about = await next_of(lost)
    assert ("attention is wrong" in about, "another driver" in about) == (True, True)
    assert supervisor.is_lost
    await asyncio.wait_for(asyncio.gather(*supervisor._tasks), 30)  # nobody watches any more
    assert lives.read_text() == "xx"
    assert "attention is wrong" in (supervisor.workers["w"].trouble or "")
    await supervisor.stop()


async def test_a_first_start_that_cannot_succeed_ends_as_a_wrong_setting_does() -> None:
    script = UNFIT.replace("is_first = not os.path.exists(path)", "is_first = False")
    state = loading(0, 0)
    program = (sys.executable, "-c", script, os.devnull)
    supervisor = unheard([(state.plan, state.setup)], program=program)
    supervisor.spawn_all()
    with pytest.raises(WorkerUnfit) as raised:
        await supervisor.run()
    assert raised.value.exit_code == 78  # upon which systemd starts nothing again
    await supervisor.stop()


async def test_while_no_other_worker_is_ready_a_back_off_is_short() -> None:
    supervisor = unheard(two_workers())
    a, b = supervisor.workers.values()
    a.pause_s, b.state = 1000.0, "ready"
    pausing = asyncio.create_task(supervisor._pause(a))
    await asyncio.sleep(0.01)
    assert not pausing.done()
    b.state = "restarting"
    await asyncio.wait_for(pausing, 120)
    a.num_failed_starts = b.num_failed_starts = MAX_FAILED_STARTS
    lost = asyncio.create_task(supervisor._pause(a))
    await asyncio.sleep(supervisor_file.ALONE_BACKOFF_S / 100 + supervisor_file.BACKOFF_CHECK_S)
    assert not lost.done(), "all fail to start: nobody waits for them"
    lost.cancel()
    await supervisor.stop()


async def test_a_worker_is_restarted_where_no_descriptor_is_left() -> None:
    pids: asyncio.Queue[int | None] = asyncio.Queue()
    state = loading(0, 0)
    supervisor = unheard(
        [(state.plan, state.setup)],
        program=(sys.executable, "-c", f"{READY}time.sleep(600)"),
        on_ready=lambda name: pids.put_nowait(worker.pid),
    )
    worker = supervisor.workers["w"]
    supervisor.spawn_all()
    await supervisor.run()
    with no_descriptor_left() as taken:
        for _ in range(3):
            pid = await next_of(pids)
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(OSError):
                await until(lambda dead=pid: worker.pid != dead)
                taken.append(os.dup(0))  # whoever else wants one takes what the death freed
        assert await next_of(pids) is not None
    assert worker.num_failed_starts == 0
    await supervisor.stop()


async def test_a_machine_short_of_descriptors_is_no_failed_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervisor_file, "SHORTAGE_PAUSE_S", 0.01)
    state = loading(0, 0)
    supervisor = unheard([(state.plan, state.setup)])
    worker = supervisor.workers["w"]
    errors = [OSError(errno.EMFILE, "Too many open files")] * 5

    def spawn(_: object) -> None:
        if errors:
            raise errors.pop()

    monkeypatch.setattr(supervisor, "_spawn", spawn)
    await supervisor._respawn(worker)
    assert (worker.num_failed_starts, worker.num_restarts, worker.num_short_lives) == (0, 1, 0)
    assert caplog.text.count("waits to be restarted") == 1
    await supervisor.stop()


# Pools on other GPUs: who is told where each is, and who has let go before it is made anew.


MEMORY, NEW = (SharedMemory(b"", name, 9, b"") for name in (b"first", b"second"))


def setup(worker: str, *others: PoolSpec) -> Setup:
    return Setup(
        worker=worker,
        model_dir="",
        dtype="bfloat16",
        block_size=64,
        pool=PoolSpec(worker, None, 9),
        weights=None,
        cpus=[0],
        max_num_batched_tokens=8,
        max_model_len=8,
        gpu=GpuSpec(worker),
        other_pools=list(others),
    )


class Machine:
    """Two that write into one's pool; a ring is mapped by its memfd."""

    def __init__(self) -> None:
        decode, staging = PoolSpec("decode", None, 9), PoolSpec("ring", 7, 9)
        setups = [setup("p0", decode, staging), setup("p1", decode), setup("decode", staging)]
        self.told: list[tuple[str, Command]] = []
        self.pools = PeerPools(setups, lambda *told: self.told.append(told))

    def news(self) -> list[tuple[str, Command]]:
        told, self.told = self.told, []
        return told


@pytest.mark.parametrize("is_made_first", [True, False])
def test_writers_are_told_once_whatever_comes_first(is_made_first: bool) -> None:
    machine = Machine()
    if is_made_first:
        machine.pools.made("decode", MEMORY)
        assert not machine.news()
    for worker in ("p0", "decode", "p1"):
        machine.pools.on_weights_complete(worker)
    machine.pools.made("p0", None)
    if not is_made_first:
        machine.pools.made("decode", MEMORY)
    assert machine.news() == [(p, MapPool("decode", MEMORY)) for p in ("p0", "p1")]


async def test_memory_of_the_dead_is_let_go_of_before_there_is_new_memory() -> None:
    machine = Machine()
    machine.pools.on_weights_complete("p0")
    machine.pools.made("decode", MEMORY)
    machine.pools.on_weights_complete("p1")
    machine.news()
    ending = asyncio.create_task(machine.pools.ended("decode"))
    await asyncio.sleep(0)
    assert sorted(machine.news(), key=str) == [(p, MapPool("decode", None)) for p in ("p0", "p1")]
    machine.pools.unmapped("p0", "decode")
    await asyncio.sleep(0)
    assert not ending.done()
    assert await machine.pools.ended("p1") == []  # whoever is dead holds nothing
    assert await ending == []
    machine.pools.on_weights_complete("p1")
    assert not machine.news()  # the memory is gone
    machine.pools.made("decode", NEW)
    assert machine.news() == [(p, MapPool("decode", NEW)) for p in ("p0", "p1")]


async def test_a_worker_that_does_not_let_go_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_memory, "LET_GO_S", 0.01)
    machine = Machine()
    machine.pools.on_weights_complete("p0")
    machine.pools.made("decode", MEMORY)
    assert await machine.pools.ended("decode") == ["p0"]


# --------------------------------------------------------------------------------------------------
# Two processes over one GPU's memory: who is told what, and who ends with whom.

GPU = Gpu("gpu0", "Test", "GPU-0", 1 << 34)
PLANS = [
    WorkerPlan("prefill", (0,), "kv", GPU, "maps"),
    WorkerPlan("decode", (0,), "kv", GPU, "exports"),
]
MEMORY = SharedMemory(b"weights", b"pool", 9, b"")
PROGRAM = (sys.executable, "-P", str(Path(__file__).parents[1] / "gpu_worker.py"))


@pytest.fixture
def told():
    return []


@pytest.fixture
def sharing(told):
    return MemorySharing(PLANS, lambda name, command: told.append((name, command)))


@pytest.mark.parametrize("is_exported_first", [True, False])
def test_a_mapping_worker_is_told_once_whatever_comes_first(sharing, told, is_exported_first):
    if is_exported_first:
        sharing.exported(MEMORY)
        assert not told
    sharing.on_weights_complete("prefill")
    sharing.on_weights_complete("decode")
    if not is_exported_first:
        assert not told
        sharing.exported(MEMORY)
    assert told == [("prefill", MapShared(MEMORY))]
    assert sharing.ended("prefill") == []
    sharing.on_weights_complete("prefill")
    assert told == [("prefill", MapShared(MEMORY))] * 2


def test_memory_of_a_dead_exporter_is_never_told_of(sharing, told):
    sharing.exported(MEMORY)
    assert sharing.ended("decode") == ["prefill"]
    sharing.on_weights_complete("prefill")
    assert not told
    again = SharedMemory(b"w", b"p", 9, b"")
    sharing.exported(again)
    assert told == [("prefill", MapShared(again))]


class Daemon:
    """A supervisor over fake workers, and what it has called."""

    def __init__(self, sharing="time-sliced", *options):
        self.died, self.blocks = [], []
        setups = [
            Setup(
                worker=plan.name,
                model_dir="",
                dtype="bfloat16",
                block_size=64,
                pool=PoolSpec("kv", None, 1000),
                weights=None,
                cpus=[0],
                max_num_batched_tokens=8,
                max_model_len=8,
                gpu=GpuSpec(GPU.uuid, plan.shares),
            )
            for plan in PLANS
        ]
        self.supervisor = Supervisor(
            list(zip(PLANS, setups, strict=True)),
            [],
            on_report=lambda name, report: self.blocks.append((name, report.num_blocks)),
            on_ready=lambda name: None,
            on_died=self.note_death,
            on_lost=lambda name, about: self.died.append(f"{name} for good"),
            program=(*PROGRAM, "--sharing", sharing, *options),
        )
        self.prefill, self.decode = self.supervisor.workers.values()

    def note_death(self, name, about):
        self.died.append(name)
        self.about = about

    def is_whole(self, *old_pids):
        """Both are ready and new, over one's memory."""
        pids = [worker.pid for worker in (self.prefill, self.decode)]
        return (
            all(w.state == "ready" and w.pid not in old_pids for w in (self.prefill, self.decode))
            and [w.attention for w in (self.prefill, self.decode)] == [str(pids[1])] * 2
        )

    async def __aenter__(self):
        self.supervisor.spawn_all()
        await self.supervisor.run()
        await until(self.is_whole)
        return self

    async def __aexit__(self, *raised):
        await self.supervisor.stop()


async def test_a_killed_mapping_worker_starts_again_over_the_memory_that_is_still_there():
    async with Daemon() as daemon:
        mapper, exporter = daemon.prefill.pid, daemon.decode.pid
        os.kill(mapper, signal.SIGKILL)
        await until(lambda: daemon.died and daemon.is_whole(mapper))
        assert daemon.decode.pid == exporter
        assert daemon.died == ["prefill"]


async def test_a_killed_exporting_worker_takes_the_other_along_and_both_start_again():
    async with Daemon() as daemon:
        mapper, exporter = daemon.prefill.pid, daemon.decode.pid
        assert daemon.blocks == [("decode", 40)]
        os.kill(exporter, signal.SIGKILL)
        await until(lambda: len(daemon.died) == 2 and daemon.is_whole(mapper, exporter))
        assert daemon.died == ["decode", "prefill"]
        assert "memory of worker decode" in daemon.about
        # the pool is what it was
        assert daemon.blocks == [("decode", 40)] * 2
        assert daemon.decode.setup.gpu.min_blocks == 40


async def test_nothing_is_left_of_what_killed_and_ended_workers_exported(tmp_path, monkeypatch):
    monkeypatch.setattr(peer_memory, "COUNTERS", tmp_path)
    async with Daemon("time-sliced", "--counters", str(tmp_path)) as daemon:
        for number in range(3):
            mapper, exporter = daemon.prefill.pid, daemon.decode.pid
            assert len(list(tmp_path.iterdir())) == 2
            os.kill(exporter, signal.SIGKILL)
            await until(
                lambda old=(mapper, exporter), died=2 * number + 2: (
                    len(daemon.died) == died and daemon.is_whole(*old)
                )
            )
        stranger = tmp_path / "torch_1_1_0"
        stranger.touch()
    assert list(tmp_path.iterdir()) == [stranger]


async def test_a_restarted_worker_times_no_steps_again():
    async with Daemon() as daemon:
        assert daemon.decode.setup.gpu.step_tokens == 8
        assert daemon.prefill.setup.gpu.step_tokens == 8


async def test_a_worker_killed_under_mps_takes_the_other_and_their_pool_along():
    async with Daemon(sharing="mps") as daemon:
        mapper, exporter = daemon.prefill.pid, daemon.decode.pid
        os.kill(mapper, signal.SIGKILL)
        await until(lambda: len(daemon.died) == 2 and daemon.is_whole(mapper, exporter))
        assert daemon.died == ["prefill", "decode"]
        assert daemon.blocks == [("decode", 40)] * 2  # the second is another memory


async def test_a_worker_that_exits_by_itself_under_mps_harms_no_other():
    async with Daemon(sharing="mps") as daemon:
        mapper, exporter = daemon.prefill.pid, daemon.decode.pid
        daemon.supervisor.send("prefill", MapShared(MEMORY))
        await until(lambda: daemon.died and daemon.is_whole(mapper))
        assert daemon.decode.pid == exporter
        assert daemon.died == ["prefill"]


@pytest.mark.parametrize("sharing", ["time-sliced", "mps"])
async def test_both_killed_at_once_start_again(sharing):
    async with Daemon(sharing) as daemon:
        pids = daemon.prefill.pid, daemon.decode.pid
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        await until(lambda: len(daemon.died) == 2 and daemon.is_whole(*pids))
        await asyncio.sleep(0)
        assert sorted(daemon.died) == ["decode", "prefill"]


async def test_a_worker_that_hangs_is_ended_and_starts_again():
    async with Daemon() as daemon:
        mapper = daemon.prefill.pid
        os.kill(mapper, signal.SIGSTOP)
        daemon.supervisor.end_hung("prefill", "it hangs")
        await until(lambda: daemon.died and daemon.is_whole(mapper))
        assert daemon.died == ["prefill"]
        assert daemon.about.endswith("it hangs")
