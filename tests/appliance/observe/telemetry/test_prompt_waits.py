"""The reason why a prompt waits is told in words."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance.fleet.placement import BLOCK_SIZE
from appliance.observe.frame.request_facts import phase_text
from engine.scheduler.cache.hashes import PrefixHasher
from engine.scheduler.prompt_waits import WaitsFor
from tests.appliance.machine import Machine, make_machine
from tests.worlds.router_world import World, next_turn


@pytest.fixture
def machine(tiny_llama: Path, tmp_path: Path) -> Iterator[Machine]:
    yield from make_machine(tiny_llama, tmp_path)


def told(machine: Machine) -> list[str | None]:
    found = [request["waits_for"] for request in machine.frame["requests"]]
    return [words and words.partition(";")[0] for words in found]


def test_before_a_worker_is_there_a_prompt_waits_for_one(machine: Machine) -> None:
    machine.submit()
    (request,) = machine.frame["requests"]
    assert request["waits_for"].startswith("a worker to be ready; ")
    assert request["waits_for"].endswith(" s so far")


def test_a_prompt_waits_behind_the_tokens_before_it(machine: Machine) -> None:
    machine.start_workers()
    for _ in range(3):  # two steps' worth are admitted, the third waits in the queue
        machine.submit(num_prompt_tokens=64)
    assert [request["phase"] for request in machine.frame["requests"]][2] == "queued"
    ahead = [(each["behind"], each["behind_tokens"]) for each in machine.frame["requests"]]
    assert ahead == [(None, None), ("cmpl-1", 64), ("cmpl-1", 128)]
    texts = [phase_text(request) for request in machine.frame["requests"]]
    assert texts == ["prefilling", "waiting", "queued"]
    first, *others = told(machine)
    assert first is None, "it may be in the step that is being computed"
    for words, num_tokens in zip(others, (64, 128), strict=True):
        assert words.endswith(f"prefill, behind 1 ({num_tokens} prompt tokens left)")


@pytest.mark.parametrize(("user", "who"), [("her", "cmpl-1"), ("him", "another request")])
def test_one_whose_beginning_is_being_computed_waits_for_that(
    machine: Machine, user: str, who: str
) -> None:
    machine.start_workers()
    hasher = PrefixHasher(bytes(32), b"", BLOCK_SIZE)
    for number, name in ((3 * BLOCK_SIZE, "her"), (BLOCK_SIZE + 9, user)):
        request = machine.request(name, num_prompt_tokens=number)
        (sequence,) = request.sequences
        sequence.prefix = hasher.chain(sequence.prompt_token_ids)
        machine.service.submit(request)
    assert told(machine)[1].endswith(f" computed by {who}")


def test_one_whose_blocks_another_pool_has_waits_for_these() -> None:
    world = World("peer")
    first = world.sequence(10, 30)
    world.finish(first)
    second = next_turn(world, first)
    world.submit(second)
    wait = world.router.snapshot(world.now_ns).waits[second.seq_id]
    assert wait.reason is WaitsFor.FETCH
    world.run()
    assert world.router.snapshot(world.now_ns).waits == {}


def test_one_that_has_begun_waits_for_nothing(machine: Machine) -> None:
    machine.start_workers()
    request = machine.submit()
    request.sequences[0].stamps.started_ns = 1
    assert phase_text(machine.frame["requests"][0]) == "prefilling"
    assert machine.frame["requests"][0]["waits_for"] is None


def test_one_that_somebody_cancelled_says_so(machine: Machine) -> None:
    request = machine.submit()
    machine.service.cancel(request.request_id, "ana")
    assert machine.service.request_frame(request.request_id)["cancelled_by"] == "ana"
