"""Why prompts wait, in words, from a service whose workers take commands and do nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance.fleet.placement import BLOCK_SIZE
from appliance.watch.explain import waits
from engine.cache.prefix_index import PrefixHasher
from tests.appliance.machine import Machine, make_machine
from tests.engine.schedule.test_prefix_cache import next_turn
from tests.engine.schedule.test_router import World


@pytest.fixture
def machine(tiny_llama: Path, tmp_path: Path) -> Iterator[Machine]:
    yield from make_machine(tiny_llama, tmp_path)


def told(machine: Machine) -> list[str]:
    return [request["waits_for"].partition(";")[0] for request in machine.frame["requests"]]


def test_before_a_worker_is_there_a_prompt_waits_for_one(machine: Machine) -> None:
    machine.submit()
    (request,) = machine.frame["requests"]
    assert request["waits_for"].startswith("a worker to be ready; ")
    assert request["waits_for"].endswith(" s by now")


def test_a_prompt_waits_behind_the_tokens_before_it(machine: Machine) -> None:
    machine.start_workers()
    for _ in range(3):  # two steps' worth are admitted, the third waits in the queue
        machine.submit(num_prompt_tokens=64)
    assert [request["phase"] for request in machine.frame["requests"]][2] == "queued"
    assert told(machine) == [
        "its turn on worker prefill: it is the next",
        "its turn on worker prefill: 64 prompt tokens are before it",
        "its turn on worker prefill: 128 prompt tokens are before it",
    ]


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
    assert told(machine)[1] == f"the beginning of its prompt, which {who} computes"


def test_one_whose_blocks_another_pool_has_waits_for_these() -> None:
    world = World("peer")
    first = world.sequence(10, 30)
    world.finish(first)
    second = next_turn(world, first)
    world.submit(second)
    words = waits(world.router, world.now_ns)[second.seq_id]
    assert words.startswith("blocks of its prompt from another pool; ")
    world.run()
    assert waits(world.router, world.now_ns) == {}


def test_one_that_has_begun_waits_for_nothing(machine: Machine) -> None:
    machine.start_workers()
    request = machine.submit()
    request.sequences[0].stamps.started_ns = 1
    assert machine.frame["requests"][0]["waits_for"] is None


def test_one_that_somebody_cancelled_says_so(machine: Machine) -> None:
    request = machine.submit()
    machine.service.cancel(request.request_id, "ana")
    assert machine.service.request_frame(request.request_id)["cancelled_by"] == "ana"
