"""Why a request was slow, and what limits the appliance, each in one sentence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.fleet.placement import BLOCK_SIZE
from appliance.frame.protocol import LatencyFrame
from appliance.frame.request_facts import phase_text
from appliance.telemetry.explain import QueueWaits, limit, slow_because
from appliance.telemetry.windows import UsualTimes
from engine.cache.hashes import PrefixHasher
from engine.schedule.prompt_waits import WaitsFor
from tests.appliance.machine import Machine, make_machine
from tests.engine.schedule.harness import World, next_turn
from tests.tui.frames import request, worker

USUAL = UsualTimes(20.0, 0.2, 1.0, 1.0, 10.0)
QUICK = {"tokenize_ms": 1.0, "queue_ms": 20.0, "prefill_ms": 100.0, "ttft_ms": 121.0}
DONE = {**QUICK, "handoff_ms": 1.0, "decode_wait_ms": 1.0, "decode_ms": 290.0, "tpot_ms": 10.0}


def finished(**changes):
    frame = {**DONE, "output_tokens": 30, "e2e_ms": 413.0, "age_ms": 413.0, **changes}
    return request(1, "finished", prompt_tokens=500, **frame)


def live(phase, **changes):
    stages = dict.fromkeys(("queue_ms", "prefill_ms", "ttft_ms", "handoff_ms"), None)
    stages |= dict.fromkeys(("decode_wait_ms", "tpot_ms"), None)
    return request(1, phase, **{**stages, "tokenize_ms": 1.0, **changes})


@pytest.mark.parametrize(
    ("changes", "because"),
    [
        ({}, None),
        ({"queue_ms": 99.0}, None),
        ({"queue_ms": 1500.0}, "queue: 1.5s, usually 20ms"),
        (
            {"prefill_ms": 2100.0},
            "prefill: 2.1s, usually 100ms",
        ),
        ({"prefill_ms": 199.0}, None),
        ({"handoff_ms": 300.0}, "handoff: 300ms, usually 1ms"),
        ({"decode_wait_ms": 400.0}, "decode wait: 400ms, usually 1ms"),
        ({"tpot_ms": 60.0}, "decode: 60ms/token, usually 10ms"),
        (
            {"tpot_ms": 60.0, "queue_ms": 2000.0},
            "queue: 2.0s, usually 20ms",
        ),
        ({"queue_ms": 150.0, "e2e_ms": 9000.0}, None),
    ],
)
def test_the_stage_that_took_most_too_much_is_named(changes, because):
    assert slow_because(finished(**changes), USUAL) == because


def test_a_wait_shorter_than_is_usual_is_told_without_what_is_usual():
    usual = replace(USUAL, queue_ms=2000.0)
    because = "queue: 1.8s"
    assert slow_because(finished(queue_ms=1800.0), usual) == because
    assert slow_because(finished(queue_ms=2500.0), usual) == ("queue: 2.5s, usually 2.0s")


def test_a_wait_for_another_model_is_told_from_a_wait_for_a_turn():
    frame = finished(queue_ms=6000.0, e2e_ms=6400.0, age_ms=6400.0)
    assert slow_because(frame, USUAL, 5900.0) == "swap: 5.9s for its model"
    assert slow_because(frame, USUAL, 500.0).startswith("queue: 5.5s")


def test_a_long_prompt_is_compared_with_what_its_tokens_usually_take():
    long = finished(prefill_ms=900.0)
    long.prompt_tokens = 4100
    assert slow_because(long, USUAL) is None
    long.prefill_ms = 3000.0
    assert slow_because(long, USUAL) == "prefill: 3.0s, usually 820ms"


def test_waiting_needs_no_comparison_and_computing_does():
    assert slow_because(finished(queue_ms=1500.0), UsualTimes()) == "queue: 1.5s"
    assert slow_because(finished(prefill_ms=9000.0, tpot_ms=900.0), UsualTimes()) is None


@pytest.mark.parametrize(
    ("frame", "because"),
    [
        (live("queued", age_ms=50.0), None),
        (live("queued", age_ms=801.0), "queue: 800ms, usually 20ms"),
        (
            live("prefilling", age_ms=1021.0, queue_ms=20.0, prompt_tokens=700),
            "prefill: 1.0s, usually 140ms",
        ),
        (
            live("handing_off", age_ms=621.0, queue_ms=20.0, prefill_ms=100.0, ttft_ms=121.0),
            "handoff: 500ms, usually 1ms",
        ),
    ],
)
def test_a_live_request_is_explained_by_the_stage_it_is_in(frame, because):
    assert slow_because(frame, USUAL) == because


IDLE = LatencyFrame(60.0, 0, *[None] * 8)
LATE = LatencyFrame(60.0, 9, *[None] * 8, ttft_slo_ratio=0.4, itl_slo_ratio=0.2)
RESTS = worker("decode", num_sequences=0)
WORKS = worker("prefill", num_sequences=1, busy_ratio=0.99, prefill_tokens_per_s=400.0)


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (("ready", "", QueueWaits(), [RESTS], IDLE), ""),
        (("ready", "", QueueWaits(), [RESTS], LATE), ""),
        (
            ("ready", "", QueueWaits(12, 3), [WORKS], LATE),
            "queue: 12 sequences wait for KV blocks, 3 for prefill",
        ),
        (
            ("ready", "", QueueWaits(for_prefill=1), [WORKS], LATE),
            "queue: 1 sequence waits for prefill",
        ),
        (
            ("ready", "", QueueWaits(for_prefill=1, for_swap=2), [WORKS], IDLE),
            "queue: 1 sequence waits for prefill, 2 for a swap of models",
        ),
        (
            ("loading", "x", QueueWaits(for_workers=2), [RESTS], IDLE),
            "queue: 2 sequences wait for a worker to be ready",
        ),
        (
            ("ready", "", QueueWaits(), [WORKS], LATE),
            "prefill: 60% of the first tokens miss their target",
        ),
        (
            ("ready", "", QueueWaits(), [WORKS], IDLE),
            "prefill worker saturated, 1 sequence",
        ),
        (("ready", "", QueueWaits(), [worker("decode")], IDLE), ""),
        (
            ("degraded", "worker decode is restarting", QueueWaits(3), [WORKS], LATE),
            "degraded: worker decode is restarting",
        ),
        (
            ("draining", "draining", QueueWaits(), [], IDLE),
            "draining: no new requests are accepted",
        ),
    ],
)
def test_the_limit_is_the_first_thing_to_be_cured(asked, sentence):
    assert limit(*asked) == sentence


# --------------------------------------------------------------------------------------------------
# Why prompts wait, in words, from a service whose workers take commands and do nothing.


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
    assert told(machine) == [
        None,  # it may be in the step that is being computed
        "its turn on worker prefill, behind 1 (64 prompt tokens)",
        "its turn on worker prefill, behind 1 (128 prompt tokens)",
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
    assert told(machine)[1] == f"its prompt's prefix, being computed by {who}"


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
