"""A received reply becomes a sample: times from when it was due, and its outcome."""

from __future__ import annotations

import pytest

from appliance.bench.reply_events import Event, ReceivedReply
from appliance.bench.sample import Sample, sample_of

MS = 1_000_000


def reply(*events: Event, **known: object) -> ReceivedReply:
    given = {"sent_ns": 12 * MS, "status": 200, "events": list(events), "ended_ns": 60 * MS}
    return ReceivedReply(**(given | known))


def test_times_count_from_when_the_request_was_due() -> None:
    events = [Event(20 * MS, 1), Event(30 * MS, 1), Event(45 * MS, 1)]
    sample = sample_of(reply(*events, output_tokens=3), origin_ns=0, due_ns=10 * MS)
    assert (sample.offered_ms, sample.late_ms) == (10, 2)
    assert (sample.ttft_ms, sample.itl_ms, sample.e2e_ms) == (10, [10, 15], 50)
    assert (sample.tpot_ms, sample.merged_tokens) == (12.5, 0)
    assert sample.token_times_ms() == [20, 30, 45]
    assert sample.is_completed


def test_tokens_that_came_together_have_the_one_gap_that_was_seen_and_are_noted() -> None:
    events = [Event(20 * MS, 2), Event(40 * MS, 4), Event(50 * MS, 1)]
    sample = sample_of(reply(*events, output_tokens=7), origin_ns=0, due_ns=10 * MS)
    assert sample.itl_ms == [20, 10]  # none is invented for those in between
    assert sample.merged_tokens == 4
    assert sample.tpot_ms == 30 / 5
    assert sample.token_times_ms() == [20, 20, 40, 40, 40, 40, 50]


def test_tokens_that_only_the_usage_knows_are_noted() -> None:
    events = [Event(20 * MS, 1), Event(40 * MS, 1)]
    sample = sample_of(reply(*events, output_tokens=5), origin_ns=0, due_ns=10 * MS)
    assert sample.itl_ms == [20]
    assert sample.merged_tokens == 3
    assert sample.tpot_ms == 5


def test_what_was_not_observed_is_none() -> None:
    refused = sample_of(
        reply(status=429, ended_ns=None, problem="full"), origin_ns=0, due_ns=10 * MS
    )
    assert refused.is_refused
    assert not refused.is_completed
    assert (refused.ttft_ms, refused.e2e_ms, refused.tpot_ms) == (None, None, None)
    assert (refused.itl_ms, refused.token_times_ms(), refused.merged_tokens) == ([], [], 0)


def test_a_broken_reply_keeps_the_gaps_that_were_seen() -> None:
    events = [Event(20 * MS, 1), Event(30 * MS, 1)]
    broken = sample_of(
        reply(*events, problem="it broke", ended_ns=None), origin_ns=0, due_ns=10 * MS
    )
    assert broken.itl_ms == [10]
    assert not broken.is_completed
    assert broken.tpot_ms is None


@pytest.mark.parametrize("status", [None, 200, 400, 500])
def test_only_429_and_503_are_refusals(status: int | None) -> None:
    assert not Sample(0, 0, status=status).is_refused
    assert Sample(0, 0, status=503).is_refused
