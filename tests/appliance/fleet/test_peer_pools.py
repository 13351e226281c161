"""Pools on other GPUs: who is told where each is, and who has let go before it is made anew."""

from __future__ import annotations

import asyncio

import pytest

from appliance.fleet import peer_pools
from appliance.fleet.peer_pools import PeerPools
from engine.wire.messages import Command, GpuSpec, MapPool, PoolSpec, Setup, SharedMemory

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
    monkeypatch.setattr(peer_pools, "LET_GO_S", 0.01)
    machine = Machine()
    machine.pools.let_on("p0")
    machine.pools.made("decode", MEMORY)
    assert await machine.pools.ended("decode") == ["p0"]
