"""A request's inbox in the next daemon: its stages and figures are those of before."""

from __future__ import annotations

import asyncio
import os

import pytest

from appliance.daemon.survival import journal as journals
from appliance.daemon.survival.journal import Head, Journal
from appliance.daemon.survival.journaled_inbox import JournaledInbox
from tests.appliance.machine import make_machine
from tests.appliance.observe.telemetry.test_telemetry import step

HEAD = Head(journals.VERSION, b"", b"", "tiny", (0, 0, 7, (0, 4)))


@pytest.fixture
def machine(tiny_llama, tmp_path):
    yield from make_machine(tiny_llama, tmp_path)


def submit(machine, journal):
    request = machine.request("her")
    request.inbox = JournaledInbox(journal, request)
    machine.service.submit(request)
    return request


@pytest.mark.parametrize("num_tokens", [1, 2, 3])
async def test_a_continued_reply_keeps_its_stages_and_has_one_first_token(machine, num_tokens):
    machine.start_workers()
    journal = Journal()
    first = submit(machine, journal)
    journal.open(HEAD, [b"request"])
    for index in range(num_tokens):
        step(machine, "decode" if index else "prefill")
        await first.inbox.next_batch(1)
    journal.flush()
    histograms = machine.service.readings().histograms
    before = histograms.ttft_s.total, histograms.itl_s.total
    left = Journal(os.dup(journal.fd))
    second = submit(machine, left)
    (old,), (new,) = first.sequences, second.sequences
    assert new.output_token_ids == old.output_token_ids
    assert new.stamps.first_token_ns == old.stamps.first_token_ns
    assert new.stamps.second_token_ns == old.stamps.second_token_ns
    if num_tokens > 1:
        assert new.stamps.decode_started_ns == old.stamps.decode_started_ns
        assert new.stamps.last_token_ns == left.died_ns
    new.output_token_ids.append(9)
    machine.service.emit(new, [9], [], False)
    assert (histograms.ttft_s.total, histograms.itl_s.total) == before
    journal.close()
    left.close()


async def test_the_silence_between_two_daemons_counts_once_until_the_next_ping(machine):
    machine.start_workers()
    journal = Journal()
    request = submit(machine, journal)
    journal.silent_s = 600.0
    assert await asyncio.wait_for(request.inbox.next_batch(600), 60) == []
    assert journal.silent_s == 0
    journal.close()
