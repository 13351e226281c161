"""What the api may rely on: the daemon's own Service and the tests' stand-in do the same."""

import asyncio
import contextlib

import msgspec
import pytest

from appliance.api.core.appliance import Appliance
from appliance.fleet.roles_change import RolesChange
from appliance.observe.log.query import RowQuery
from engine.errors import QueueFull, Unavailable
from engine.text.tokenizer import Tokenizer
from engine.wire.finish_reason import FinishReason
from tests.appliance.machine import a_request, make_machine
from tests.worlds.daemon_parts import FakeAppliance, until

MOST = 8
"""Sequences that may wait."""


class Kept:
    """An appliance in which nothing runs until it is told to."""

    def __init__(self, appliance: Appliance, run):
        self.appliance = appliance
        self.run = run
        """Everything that was accepted, to its end."""

    def request(self, *args, **fields):
        return a_request(self.appliance, *args, **fields)

    def submit(self, *args, **fields):
        request = self.request(*args, **fields)
        self.appliance.submit(request)
        return request

    def frame(self):
        return msgspec.json.decode(self.appliance.frame_json())


def the_service(tiny_llama, tmp_path, monkeypatch):
    for machine in make_machine(tiny_llama, tmp_path):

        async def run(machine=machine):
            machine.run()

        yield Kept(machine.service, run)


def the_stand_in(tiny_llama, tmp_path, monkeypatch):
    fake = FakeAppliance(Tokenizer.from_folder(tiny_llama), max_queued=MOST)
    fake.gate.clear()

    async def run():
        fake.gate.set()
        await until(lambda: all(request.is_finished for request in fake.live.values()))

    yield Kept(fake, run)


@pytest.fixture(params=[the_service, the_stand_in], ids=["service", "fake"])
async def kept(request, tiny_llama, tmp_path, monkeypatch):
    for one in request.param(tiny_llama, tmp_path, monkeypatch):
        yield one


async def test_every_sequence_has_its_tokens_in_order_and_one_end(kept):
    request = kept.submit(num_sequences=3, num_prompt_tokens=5, max_tokens=4)
    assert not request.is_finished
    await kept.run()
    outputs, ends = {}, []
    for emitted in await request.inbox.next_batch():
        assert emitted.sequence.index not in ends, "tokens after the end"
        outputs.setdefault(emitted.sequence.index, []).extend(emitted.token_ids)
        if emitted.is_last:
            ends.append(emitted.sequence.index)
            assert emitted.sequence.finish_reason is FinishReason.LENGTH
            assert emitted.sequence.error is None
    assert sorted(ends) == [0, 1, 2]
    assert outputs == {one.index: one.output_token_ids for one in request.sequences}
    assert {len(output) for output in outputs.values()} == {4}
    assert request.is_finished


async def test_no_sequence_id_comes_twice(kept):
    ids = [kept.appliance.next_seq_id() for _ in range(5)]
    assert sorted(set(ids)) == ids


async def test_what_does_not_fit_is_refused_and_leaves_nothing_behind(kept):
    most = kept.appliance.max_per_request
    assert 1 <= most <= MOST
    kept.submit(num_sequences=most, num_prompt_tokens=1)
    refused = kept.request(num_sequences=3)
    with pytest.raises(QueueFull) as full:
        kept.appliance.submit(refused)
    assert full.value.status == 429
    assert full.value.retry_after_ms
    assert kept.appliance.owner_of(refused.request_id) is None
    assert kept.appliance.request_frame(refused.request_id) is None


async def test_what_has_room_by_its_body_is_taken_until_nothing_has(kept):
    num_taken = 0
    with contextlib.suppress(QueueFull):
        while num_taken <= MOST:
            kept.appliance.check_room("her", 8)
            kept.submit(num_prompt_tokens=1)
            num_taken += 1
    assert num_taken == kept.appliance.max_per_request
    with pytest.raises(QueueFull) as full:
        kept.submit(num_prompt_tokens=1)
    assert full.value.retry_after_ms


async def test_a_drain_takes_nothing_new_and_ends_nothing(kept):
    request = kept.submit()
    for _ in range(2):
        kept.appliance.drain("her")
        for refuses in (kept.appliance.check_available, kept.submit):
            with pytest.raises(Unavailable) as draining:
                refuses()
            assert (draining.value.status, draining.value.code) == (503, "draining")
        assert kept.appliance.not_ready_reason() is not None
    await kept.run()
    assert request.sequences[0].finish_reason is FinishReason.LENGTH
    for _ in range(2):
        kept.appliance.resume("him")
        kept.appliance.check_available()
        assert kept.appliance.not_ready_reason() is None
    assert not kept.submit().is_finished


async def test_a_cancel_ends_each_sequence_once_and_names_who_asked_first(kept):
    request = kept.submit(num_sequences=2)
    assert kept.appliance.cancel(request.request_id, "him")
    assert not kept.appliance.cancel(request.request_id, "her"), "nothing of it is live"
    assert not kept.appliance.cancel("cmpl-none", "him")
    assert request.cancelled_by == "him"
    emitted = await request.inbox.next_batch()
    assert sorted(one.sequence.index for one in emitted) == [0, 1]
    assert {one.sequence.finish_reason for one in emitted} == {FinishReason.ABORT}
    assert all(one.is_last and not one.token_ids for one in emitted)
    await kept.run()
    assert not await request.inbox.next_batch(patience_s=0.0), "nothing follows"


async def test_a_sequence_that_is_stopped_keeps_what_counts_and_says_no_more(kept):
    request = kept.submit()
    (sequence,) = request.sequences
    kept.appliance.stop_sequence(sequence, 0)
    assert sequence.finish_reason is FinishReason.STOP
    assert sequence.output_token_ids == []
    await kept.run()
    assert not await request.inbox.next_batch(patience_s=0.0)
    assert request.is_finished


async def test_each_that_waits_has_a_place_of_its_own(kept):
    requests = [kept.submit(peer) for peer in ("her", "him", "her")]
    places = [kept.appliance.queue_place(request) for request in requests]
    assert sorted(places) == [1, 2, 3]
    await kept.run()
    assert [kept.appliance.queue_place(request) for request in requests] == [None] * 3


async def test_a_request_is_its_owners_while_it_is_live_and_is_logged_when_it_is_closed(kept):
    first, second = kept.submit("her"), kept.submit("him")
    assert kept.appliance.owner_of(first.request_id) == "her"
    assert {one["id"] for one in kept.appliance.request_frames()} >= {first.request_id}
    await kept.run()
    kept.appliance.close(first, 200)
    kept.appliance.close(second, 499)
    assert kept.appliance.owner_of(first.request_id) is None
    assert kept.appliance.request_frame(first.request_id)["id"] == first.request_id
    assert kept.appliance.request_frame("cmpl-none") is None
    rows = kept.appliance.log_rows(RowQuery(limit=10))
    shown = [(row["id"], row["http_status"]) for row in rows]
    assert shown == [(second.request_id, 499), (first.request_id, 200)]
    assert len(kept.appliance.log_rows(RowQuery(limit=1))) == 1


async def test_frames_are_numbered(kept):
    seq = kept.frame()["seq"]
    waits = asyncio.create_task(kept.appliance.next_frame_json(seq))
    await asyncio.sleep(0)
    if hasattr(kept.appliance, "make_frame"):  # which the daemon calls once a second
        kept.appliance.make_frame()
    newer, body = await waits
    assert newer > seq
    assert msgspec.json.decode(body)["seq"] == newer
    assert kept.appliance.readings().frame.seq >= newer


async def test_a_change_of_targets_is_answered_with_what_holds_then(kept):
    told = kept.appliance.set_roles(RolesChange(slo_itl_ms=50.0), "her")
    assert told["slo_itl_ms"] == 50.0
    assert {"roles", "slo_ttft_ms"} <= told.keys()


async def test_without_a_prefix_cache_prompts_have_no_hashes(kept):
    assert kept.appliance.hasher is None
