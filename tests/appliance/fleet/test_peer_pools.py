"""Pools on other GPUs: who is told where each is, and who has let go before it is made anew."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from appliance.devices.inventory import Gpu
from appliance.fleet import supervisor
from appliance.fleet.placement import WorkerPlan
from appliance.fleet.supervisor import MemorySharing, PeerPools, Supervisor
from engine.wire.messages import Command, GpuSpec, MapPool, MapShared, PoolSpec, Setup, SharedMemory
from tests.fakes import until

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
        max_step_tokens=8,
        max_model_len=8,
        gpu=GpuSpec(worker),
        other_pools=list(others),
    )


class Machine:
    """Two that write into one's pool; a ring is mapped by its memfd."""

    def __init__(self) -> None:
        decode, ring = PoolSpec("decode", None, 9), PoolSpec("ring", 7, 9)
        setups = [setup("p0", decode, ring), setup("p1", decode), setup("decode", ring)]
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
        machine.pools.let_on(worker)
    machine.pools.made("p0", None)
    if not is_made_first:
        machine.pools.made("decode", MEMORY)
    assert machine.news() == [(p, MapPool("decode", MEMORY)) for p in ("p0", "p1")]


async def test_memory_of_the_dead_is_let_go_of_before_there_is_new_memory() -> None:
    machine = Machine()
    machine.pools.let_on("p0")
    machine.pools.made("decode", MEMORY)
    machine.pools.let_on("p1")
    machine.news()
    ending = asyncio.create_task(machine.pools.ended("decode"))
    await asyncio.sleep(0)
    assert sorted(machine.news(), key=str) == [(p, MapPool("decode", None)) for p in ("p0", "p1")]
    machine.pools.unmapped("p0", "decode")
    await asyncio.sleep(0)
    assert not ending.done()
    assert await machine.pools.ended("p1") == []  # whoever is dead holds nothing
    assert await ending == []
    machine.pools.let_on("p1")
    assert not machine.news()  # the memory is gone
    machine.pools.made("decode", NEW)
    assert machine.news() == [(p, MapPool("decode", NEW)) for p in ("p0", "p1")]


async def test_a_worker_that_does_not_let_go_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "LET_GO_S", 0.01)
    machine = Machine()
    machine.pools.let_on("p0")
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
    sharing.let_on("prefill")
    sharing.let_on("decode")
    if not is_exported_first:
        assert not told
        sharing.exported(MEMORY)
    assert told == [("prefill", MapShared(MEMORY))]
    assert sharing.ended("prefill") == []
    sharing.let_on("prefill")
    assert told == [("prefill", MapShared(MEMORY))] * 2


def test_memory_of_a_dead_exporter_is_never_told_of(sharing, told):
    sharing.exported(MEMORY)
    assert sharing.ended("decode") == ["prefill"]
    sharing.let_on("prefill")
    assert not told
    again = SharedMemory(b"w", b"p", 9, b"")
    sharing.exported(again)
    assert told == [("prefill", MapShared(again))]


class Daemon:
    """A supervisor over fake workers, and what it has called."""

    def __init__(self):
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
                max_step_tokens=8,
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
            program=PROGRAM,
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
        await until(self.is_whole, 30)
        return self

    async def __aexit__(self, *raised):
        await self.supervisor.stop()


async def test_a_killed_mapping_worker_starts_again_over_the_memory_that_is_still_there():
    async with Daemon() as daemon:
        mapper, exporter = daemon.prefill.pid, daemon.decode.pid
        os.kill(mapper, signal.SIGKILL)
        await until(lambda: daemon.died and daemon.is_whole(mapper), 30)
        assert daemon.decode.pid == exporter
        assert daemon.died == ["prefill"]


async def test_a_killed_exporting_worker_takes_the_other_along_and_both_start_again():
    async with Daemon() as daemon:
        mapper, exporter = daemon.prefill.pid, daemon.decode.pid
        assert daemon.blocks == [("decode", 40)]
        os.kill(exporter, signal.SIGKILL)
        await until(lambda: len(daemon.died) == 2 and daemon.is_whole(mapper, exporter), 30)
        assert daemon.died == ["decode", "prefill"]
        assert "its memory was that of worker decode" in daemon.about
        # the pool is what it was
        assert daemon.blocks == [("decode", 40)] * 2
        assert daemon.decode.setup.gpu.min_blocks == 40


async def test_both_killed_at_once_start_again():
    async with Daemon() as daemon:
        pids = daemon.prefill.pid, daemon.decode.pid
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        await until(lambda: len(daemon.died) == 2 and daemon.is_whole(*pids), 30)
        await asyncio.sleep(0)
        assert sorted(daemon.died) == ["decode", "prefill"]


async def test_a_worker_that_hangs_is_ended_and_starts_again():
    async with Daemon() as daemon:
        mapper = daemon.prefill.pid
        os.kill(mapper, signal.SIGSTOP)
        daemon.supervisor.end_hung("prefill", "it hangs")
        await until(lambda: daemon.died and daemon.is_whole(mapper), 30)
        assert daemon.died == ["prefill"]
        assert daemon.about.endswith("it hangs")
