"""A wait counts from the arrival, whatever the request waits for."""

from __future__ import annotations

from types import SimpleNamespace

from appliance.daemon.requests.request import Peer, Request
from appliance.observe.telemetry.late import (
    DEFAULT_TTFT_MS,
    MIN_GAP_MS,
    UNKNOWN_GAP_MS,
    late_first,
    late_next,
    waiting_prompts,
)
from appliance.observe.telemetry.windows import UsualPace
from engine.scheduler.sequences.sequence import Sequence, Stamps
from engine.wire.finish_reason import FinishReason
from engine.wire.run_spec import RunSpec
from engine.wire.sampling import SamplingParams

SECOND = 1_000_000_000
NOTHING_USUAL = UsualPace()


def live(name: str, arrived_s: float, last_s: float | None = None, tokens: int = 10) -> Request:
    """A request that arrived then, and whose last token came then."""
    stamps = Stamps(int(arrived_s * SECOND), int(arrived_s * SECOND))
    if last_s is not None:
        stamps.first_token_ns = stamps.last_token_ns = int(last_s * SECOND)
    spec = RunSpec(SamplingParams(max_tokens=8, seed=0))
    sequence = Sequence(1, name, 0, [1] * tokens, spec, stamps)
    peer = Peer(user="ana", pid=9495, program="python")
    return Request(name, "/v1/completions", "m", peer, True, "T", [sequence])


def test_the_longest_wait_is_found_by_its_limit_and_counted():
    requests = [live("old", 1), live("long", 0, tokens=10_000), live("new", 60)]
    usual = UsualPace(prefill_ms_per_token=5.0)
    late = late_first(requests, [], None, usual, 62 * SECOND)
    assert late is not None
    assert (late.id, late.waited_ms, late.number) == ("old", 61_000.0, 1)
    assert late.limit_ms == DEFAULT_TTFT_MS + 100
    assert late.client == "python 9495"
    late = late_first(requests, [], 1000, usual, 62 * SECOND)
    assert late is not None
    assert (late.id, late.limit_ms, late.number) == ("long", 1000, 3)


def test_a_request_that_waits_for_another_model_counts():
    asked = SimpleNamespace(id="swap", user="bo", prompt_tokens=0, age_ms=30_000.0)
    late = late_first([], [asked], None, NOTHING_USUAL, 0)
    assert late is not None
    assert (late.id, late.client, late.waited_ms) == ("swap", "bo", 30_000.0)


def test_a_first_token_ends_the_wait_and_begins_the_next():
    request = live("a", 0, last_s=3)
    assert late_first([request], [], None, NOTHING_USUAL, 9 * SECOND) is None
    assert waiting_prompts([request]) == []
    late = late_next([request], NOTHING_USUAL, 9 * SECOND)
    assert late is not None
    assert (late.waited_ms, late.limit_ms) == (6000.0, UNKNOWN_GAP_MS)
    assert late_next([live("b", 0)], NOTHING_USUAL, 9 * SECOND) is None


def test_a_stall_is_long_for_a_person_and_against_the_usual_time():
    request = live("a", 0, last_s=3)
    limits = [late_next([request], UsualPace(itl_ms=ms), 0) for ms in (10.0, 400.0)]
    assert [each and each.limit_ms for each in limits] == [MIN_GAP_MS, 8000.0]


def test_what_has_ended_waits_for_nothing():
    request = live("a", 0)
    request.sequences[0].finish_reason = FinishReason.ABORT
    assert waiting_prompts([request]) == []
    assert late_first([request], [], None, NOTHING_USUAL, SECOND) is None
