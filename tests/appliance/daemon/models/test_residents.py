"""Loaded models that are not served: how many, in how much memory, for how long."""

import asyncio
import math
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from appliance.configuration.settings import ServeConfig
from appliance.daemon.models import residents as module
from appliance.daemon.models.residents import MemoryNeed, Residents, _time_in
from engine.errors import ConfigError
from engine.units import size_text

GIB = 1 << 30


class Machine:
    """A machine of 16 GiB, models of it, and what was told."""

    def __init__(self, monkeypatch, tmp_path):
        self.config = ServeConfig(socket=tmp_path, state_dir=tmp_path, keep_resident=2)
        self.ended, self.told = [], []
        self.free_bytes = 16 * GIB
        monkeypatch.setattr(module, "available_memory_bytes", lambda: self.free_bytes)
        memory = SimpleNamespace(cap_bytes=GIB, num_bytes=0)
        self.residents = Residents(
            "first", lambda: self.config, memory, self.end, lambda *event: self.told.append(event)
        )

    async def end(self, model):
        self.ended.append(model.plan.model_id)
        self.free_bytes += model.held_bytes

    def model(self, name, held_gib=4, unclaimed_gib=0, *, is_on_cores=True):
        self.free_bytes -= held_gib * GIB
        return SimpleNamespace(
            plan=SimpleNamespace(model_id=name),
            held_bytes=held_gib * GIB,
            unclaimed_bytes=unclaimed_gib * GIB,
            is_on_cores=is_on_cores,
            size_bytes=held_gib * GIB,
            used_s=0.0,
            fault="",
        )


@pytest.fixture
def machine(monkeypatch, tmp_path):
    return Machine(monkeypatch, tmp_path)


async def test_a_model_stays_beside_the_next_one_where_both_fit(machine):
    served = machine.model("first")
    assert await machine.residents.make_room(served, "b", MemoryNeed(8 * GIB, 3 * GIB))
    assert not await machine.residents.make_room(served, "b", MemoryNeed(8 * GIB, 4 * GIB))
    claiming = machine.model("c", 0, unclaimed_gib=4)
    assert not await machine.residents.make_room(claiming, "b", MemoryNeed(8 * GIB, 0))
    assert machine.ended == []


async def test_the_one_unused_longest_makes_room_and_only_as_many_as_needed(machine):
    machine.config = replace(machine.config, keep_resident=4)
    for name in ("first", "b"):
        machine.residents.park(machine.model(name))
    served = machine.model("c", 1)
    assert await machine.residents.make_room(served, "d", MemoryNeed(GIB, 0))
    assert machine.ended == []
    assert await machine.residents.make_room(served, "d", MemoryNeed(8 * GIB, 0))
    assert (machine.ended, list(machine.residents.parked)) == (["first"], ["b"])
    machine.config = replace(machine.config, keep_resident=2)
    assert await machine.residents.make_room(served, "d", MemoryNeed(GIB, 0))
    assert (machine.ended, list(machine.residents.parked)) == (["first", "b"], [])


async def test_by_default_and_on_gpus_nothing_stays(machine):
    need = MemoryNeed(0, 0)
    on_gpu = machine.model("first", is_on_cores=False)
    assert not await machine.residents.make_room(on_gpu, "b", need)
    machine.config = replace(machine.config, keep_resident=1)
    assert not await machine.residents.make_room(machine.model("first"), "b", need)


async def test_a_model_too_large_for_the_machine_is_refused_and_nothing_is_unloaded(machine):
    served = machine.model("first")
    machine.residents.park(machine.model("b"))
    machine.residents.check(served, "c", MemoryNeed(16 * GIB, 99 * GIB))
    with pytest.raises(ConfigError, match=size_text(17 * GIB)):
        machine.residents.check(served, "c", MemoryNeed(17 * GIB, 0))
    assert machine.ended == []


async def test_all_but_the_first_go_when_their_time_is_over(machine):
    for name in ("first", "b", "c"):
        machine.residents.park(machine.model(name, 1))
    machine.residents.keep_loaded("c", math.inf)
    for model in machine.residents.parked.values():
        model.used_s = time.monotonic() - 299
    expiries = {frame.model: frame.expires_at for frame in machine.residents.frames()}
    assert (expiries["first"], expiries["c"]) == (None, None)
    assert expiries["b"] is not None
    await machine.residents.expire()
    assert machine.ended == []
    for model in machine.residents.parked.values():
        model.used_s -= 10
    await machine.residents.expire()
    assert machine.ended == ["b"]
    machine.residents.keep_loaded("first", 0.0)
    machine.residents.parked["c"].fault = "its worker died"
    await machine.residents.expire()
    assert machine.ended == ["b", "c", "first"]
    assert {code for _, code, _ in machine.told} == {"model.unloaded"}


async def test_a_model_that_is_loaded_again_stays_by_the_settings_alone(machine):
    machine.residents.park(machine.model("b"))
    machine.residents.keep_loaded("b", math.inf)
    usual_s = machine.config.keep_alive_s
    assert machine.residents.keep_s("b") == math.inf
    assert await machine.residents.unload("b", "it is asked")
    assert machine.residents.keep_s("b") == usual_s


async def test_a_model_whose_end_is_interrupted_is_ended_with_the_daemon(machine):
    async def stop(model):
        machine.residents._end = machine.end
        raise asyncio.CancelledError

    machine.residents.park(machine.model("b"))
    machine.residents._end = stop
    with pytest.raises(asyncio.CancelledError):
        await machine.residents.unload("b", "it is asked")
    assert machine.ended == []
    await machine.residents.close()
    assert machine.ended == ["b"]


def test_a_model_that_was_loaded_by_another_plan_is_not_that_plans(machine):
    before, now = machine.model("b"), machine.model("b")
    machine.residents.park(now)
    assert machine.residents.of_plan(now.plan) is now
    assert machine.residents.of_plan(before.plan) is None


async def test_the_served_model_goes_only_if_a_request_limited_its_time(machine):
    residents = machine.residents
    residents.served_used_s = time.monotonic() - 1000
    assert (residents.has_expired("b"), residents.served_expires_at("b")) == (False, None)
    residents.keep_loaded("b", 60)
    assert residents.has_expired("b")
    assert residents.served_expires_at("b") is not None
    residents.served_used_s = time.monotonic()
    assert not residents.has_expired("b")


def test_a_time_behind_the_calendar_is_never():
    assert [_time_in(time.monotonic() + seconds) for seconds in (1e12, math.inf)] == [None, None]
    assert _time_in(time.monotonic() + 60) is not None
