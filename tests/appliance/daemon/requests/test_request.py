from __future__ import annotations

import asyncio

import pytest

from appliance.daemon.requests.request import Inbox, TokensEmitted
from appliance.daemon.requests.row import LogRow
from engine.scheduler.cache.hashes import PrefixHasher
from engine.scheduler.sequences.sequence import RouteStage, Sequence, Stamps
from engine.wire.run_spec import RunSpec
from engine.wire.sampling import SamplingParams
from tests.appliance.machine import make_machine


@pytest.fixture
def machine(tiny_llama, tmp_path):
    yield from make_machine(tiny_llama, tmp_path)


def emitted(token_id: int) -> TokensEmitted:
    sequence = Sequence(
        1, "cmpl-1", 0, [1], RunSpec(SamplingParams(9, seed=0)), Stamps(arrived_ns=0)
    )
    return TokensEmitted(sequence, [token_id], [], False)


async def test_all_that_has_come_is_taken_at_once_and_in_order():
    inbox, sent = Inbox(), [emitted(token_id) for token_id in range(3)]
    for one in sent:
        inbox.put_nowait(one)
    assert await inbox.next_batch() == sent


async def test_who_waits_is_woken_once_for_what_comes_together():
    inbox, sent = Inbox(), [emitted(token_id) for token_id in range(3)]
    taken = asyncio.create_task(inbox.next_batch())
    await asyncio.sleep(0)
    for one in sent:
        inbox.put_nowait(one)
    assert await taken == sent


async def test_patience_ends_with_nothing_each_time_it_runs_out():
    inbox = Inbox()
    assert await inbox.next_batch(0.01) == []
    assert await inbox.next_batch(0.01) == []
    inbox.put_nowait(emitted(7))
    assert len(await inbox.next_batch(0.01)) == 1


async def test_patience_begins_anew_with_each_wait(monkeypatch):
    inbox, loop = Inbox(), asyncio.get_running_loop()
    clock, calls = [0.0], []
    monkeypatch.setattr(loop, "time", lambda: clock[0])
    monkeypatch.setattr(loop, "call_later", lambda *call: calls.append(call) or asyncio.Event())
    waits = asyncio.ensure_future(inbox.next_batch(10.0))
    await asyncio.sleep(0)
    clock[0] = 6.0
    inbox.put_nowait(emitted(1))
    await waits
    waits = asyncio.ensure_future(inbox.next_batch(10.0))
    await asyncio.sleep(0)
    (_, look, patience_s) = calls.pop()
    clock[0] = 10.0
    look(patience_s)
    await asyncio.sleep(0)
    assert not waits.done(), "of the second wait only four seconds are over"
    assert calls.pop()[0] == 6.0
    clock[0] = 16.0
    look(patience_s)
    assert await waits == []


async def test_a_cancelled_wait_loses_nothing():
    inbox = Inbox()
    waits = asyncio.create_task(inbox.next_batch())
    await asyncio.sleep(0)
    waits.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waits
    inbox.put_nowait(emitted(1))
    assert len(await inbox.next_batch()) == 1


async def test_nothing_fires_once_it_is_closed():
    inbox = Inbox()
    waits = asyncio.create_task(inbox.next_batch(0.01))
    await asyncio.sleep(0)
    inbox.close()
    await asyncio.sleep(0.05)
    assert not waits.done()
    waits.cancel()


def test_a_prompt_counts_once_however_many_answers_it_has(machine):
    request = machine.request(num_sequences=3, num_prompt_tokens=200)
    assert request.prompt_tokens == 3 * 200, "three prompts, one each"
    for one in request.sequences:
        one.prompt_token_ids = request.sequences[0].prompt_token_ids
        one.prefix = PrefixHasher(bytes(32), b"", 64).chain(one.prompt_token_ids)
        one.stages, one.num_cached_tokens = (RouteStage("decode", 4),), 192 * min(one.index, 1)
        one.num_computed_tokens, one.output_token_ids = 202, [1, 2, 3]
    assert (request.prompt_tokens, request.cached_tokens) == (200, 0)
    assert request.computed_tokens == 200 + 3 * 2
    row = LogRow.from_request(request)
    assert (row.prompt_tokens, row.cached_tokens, row.completion_tokens) == (200, 0, 9)
