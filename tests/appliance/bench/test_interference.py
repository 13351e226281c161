"""Streams and prompts together: which gaps count, and what is computed from them."""

from __future__ import annotations

import asyncio

import pytest

from appliance.bench.load import InterferencePlan, InterferenceResult, Target, disturb, gaps_between
from appliance.bench.statistics import Sample
from engine.errors import PenstockError
from tests.appliance.bench.fake_openai import FakeOpenAI


def stream(ttft_ms: float, *itl_ms: float, offered_ms: float = 0.0) -> Sample:
    return Sample(offered_ms, 0, status=200, ttft_ms=ttft_ms, itl_ms=list(itl_ms), e2e_ms=1)


def test_gaps_count_while_all_streams_run() -> None:
    early = stream(10, 5, 6, 7, 8)  # tokens at 10, 15, 21, 28, 36
    late = stream(20, 4, 4)  # tokens at 20, 24, 28
    assert gaps_between([[early], [late]], end_ms=30) == [7, 4, 4]


def test_the_time_between_two_requests_of_a_stream_is_no_gap() -> None:
    requests = [stream(10, 5), stream(30, 5, offered_ms=20)]
    assert gaps_between([requests], end_ms=100) == [5, 5]


def test_a_stream_that_never_began_leaves_nothing_to_say() -> None:
    assert gaps_between([[stream(1, 2)], [Sample(0, 0)]], end_ms=10) == []
    assert gaps_between([[stream(1, 2)], []], end_ms=10) == []


def test_figures_are_none_where_nothing_was_seen() -> None:
    figures = InterferenceResult("a", 0, [], [], [], [Sample(0, 0, error="full")]).figures()
    assert figures.pop("unanswered") == 1
    assert set(figures.values()) == {None}


def test_the_ratio_is_worst_loaded_over_usual_quiet() -> None:
    figures = InterferenceResult(
        "a", 0, [10, 10, 12], [10, 10, 50], [stream(5)], [stream(20)]
    ).figures()
    assert figures["p99_loaded_over_p50_quiet"] == 5
    assert (figures["alone_ttft_ms_p50"], figures["loaded_ttft_ms_p50"]) == (5, 20)


def test_streams_run_until_the_last_prompt_has_its_answer(
    server: FakeOpenAI, target: Target
) -> None:
    server.script.gap_s = 0.005
    shares: list[float] = []
    plan = InterferencePlan(num_streams=2, prompt_tokens=70, every_s=0.2, seconds=0.7)
    found = asyncio.run(disturb(target, plan, "arm", 4, shares.append))
    assert (found.arm, found.round_index, shares[-1]) == ("arm", 4, 1)
    assert len(found.loaded) == 3
    assert all(sample.is_completed for sample in (*found.alone, *found.loaded))
    assert found.quiet_itl_ms
    assert found.loaded_itl_ms
    assert server.script.most_open >= 3
    streams = [body for body in server.script.bodies if len(body["prompt"]) != 70]
    assert len(streams) == 4


def test_a_stream_that_fails_ends_the_measurement(server: FakeOpenAI, target: Target) -> None:
    server.script.refuse = lambda index: len(server.script.bodies[index]["prompt"]) != 70
    with pytest.raises(PenstockError, match="a stream failed: the queue is full"):
        asyncio.run(
            disturb(target, InterferencePlan(1, 70, 0.1, 0.2), "arm", 0, lambda share: None)
        )
