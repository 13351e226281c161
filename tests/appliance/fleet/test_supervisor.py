"""What the supervisor says of workers that load, and of those that die."""

from __future__ import annotations

import asyncio
import dataclasses
import sys

import msgspec
import pytest

from appliance.fleet import supervisor as supervisor_file
from appliance.fleet.placement import WorkerPlan
from appliance.fleet.supervisor import Supervisor, WorkerState, weights_progress
from engine.errors import WorkerFailed
from engine.wire.messages import GpuSpec, PoolSpec, Setup, WeightsSpec
from tests.daemons import is_alive
from tests.fakes import until


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
        max_step_tokens=8,
        max_model_len=8,
        gpu=gpu,
    )
    plan = WorkerPlan("w", (0,), "kv")
    return WorkerState(plan, setup, loaded_bytes=loaded_bytes, total_bytes=total_bytes)


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
from engine.wire.messages import Go, Ready, Setup, WeightsLoaded
sock = socket.socket(fileno=int(sys.argv[sys.argv.index("--channel-fd") + 1]))
channel = WorkerChannel(sock)
channel.expect(Setup)
channel.send(WeightsLoaded())
channel.expect(Go)
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
    assert turns > 1  # the loop went round while a thread waited
    await supervisor.stop()


HANGING = READY.replace('channel.send(Ready("none"))', "time.sleep(600)")
"""A worker whose first step never ends."""


async def test_a_worker_that_hangs_in_its_first_start_ends_that_with_its_name() -> None:
    state = loading(0, 0)
    supervisor = Supervisor(
        [(state.plan, state.setup)],
        [],
        on_report=lambda *report: None,
        on_ready=lambda name: None,
        on_died=lambda *died: None,
        on_lost=lambda *lost: None,
        program=(sys.executable, "-c", HANGING),
    )
    supervisor.spawn_all()
    starting = asyncio.create_task(supervisor.run())
    worker = supervisor.workers["w"]
    await until(lambda: worker.has_loaded)
    supervisor.end_hung("w", "it hangs while it loads")
    with pytest.raises(WorkerFailed, match="w: it hangs while it loads"):
        await starting
    await supervisor.stop()
    assert worker.process is not None
    assert worker.process.poll() is not None


def test_who_has_loaded_waits_for_the_others_and_then_for_nobody() -> None:
    workers = []
    for name in ("a", "b"):
        state = loading(0, 0)
        plan = dataclasses.replace(state.plan, name=name)
        workers.append((plan, msgspec.structs.replace(state.setup, worker=name)))
    supervisor = Supervisor(
        workers,
        [],
        on_report=lambda *report: None,
        on_ready=lambda name: None,
        on_died=lambda *died: None,
        on_lost=lambda *lost: None,
    )
    waits = [supervisor.waits_for_others(name) for name in ("a", "b")]
    supervisor.workers["a"].has_loaded = True
    waits += [supervisor.waits_for_others(name) for name in ("a", "b")]
    supervisor.workers["b"].has_loaded = True
    waits += [supervisor.waits_for_others(name) for name in ("a", "b")]
    assert waits == [False, False, True, False, False, False]


async def test_a_worker_that_keeps_dying_is_tried_less_and_less_often_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervisor_file, "RESTART_BACKOFF_S", (0.0, 0.0, 0.01, 0.02))
    died: asyncio.Queue[tuple[float, str | None]] = asyncio.Queue()
    is_back = asyncio.Event()
    state = loading(0, 0)
    supervisor = Supervisor(
        [(state.plan, state.setup)],
        [],
        on_report=lambda *report: None,
        on_ready=lambda name: is_back.set(),
        on_died=lambda name, about: died.put_nowait((worker.pause_s, worker.trouble)),
        on_lost=lambda *lost: None,
        program=(sys.executable, "-c", SHORT_LIVED),
    )
    worker = supervisor.workers["w"]
    assert worker.trouble == "worker w is starting"
    supervisor.spawn_all()
    await supervisor.run()
    told = [await died.get() for _ in range(5)]
    assert [pause for pause, _ in told] == [0.0, 0.0, 0.01, 0.02, 0.02]
    assert told[1][1] == "worker w is restarting"
    assert told[3][1] == (
        "worker w has died 4 times in a row, and is tried again 0.02 s after its last end"
    )
    assert not supervisor.is_lost  # it comes back each time
    is_back.clear()
    await is_back.wait()
    assert worker.trouble is not None
    assert worker.trouble.endswith("times in a row and has just come back")
    worker.ready_at_s = 0.0
    assert worker.trouble is None
    await supervisor.stop()
