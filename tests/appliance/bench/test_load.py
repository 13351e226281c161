"""Load on a server whose behaviour is scripted: what was due is a sample, whatever came of it."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.bench.exchange import Target
from appliance.bench.load import (
    InterferencePlan,
    InterferenceResult,
    Load,
    Measured,
    disturb,
    gaps_between,
    measure,
    offer,
)
from appliance.bench.sample import Sample
from appliance.bench.workloads import Lengths, PlannedArrival
from appliance.client.address import SshAddress, UnixAddress
from engine.errors import ConfigError, PenstockError
from tests.worlds.fake_openai import FakeOpenAI

FIVE, THREE = Lengths(5, 5), Lengths(3, 3)
BURST = tuple(PlannedArrival(i / 100, 5, 3) for i in range(20))
TRACE = Load(0.2, FIVE, THREE, trace=BURST)


def run(target: Target, load: Load) -> Measured:
    return asyncio.run(measure(target, load, "arm", 0, lambda share: None))


async def test_a_request_has_the_tokens_that_were_asked_for(
    server: FakeOpenAI, target: Target
) -> None:
    (sample,) = await offer(target, [PlannedArrival(0, 6, 4)], 10)
    assert (sample.prompt_tokens, sample.output_tokens, len(sample.itl_ms)) == (6, 4, 3)
    assert sample.is_completed
    (body,) = server.script.bodies
    assert set(body["prompt"]) <= {7, 8, 9}
    assert (body["model"], body["max_tokens"], body["ignore_eos"]) == ("fake", 4, True)


async def test_tcp_and_the_socket_read_the_same(server: FakeOpenAI) -> None:
    for address in (server.unix, server.tcp):
        target = Target("t", address, random.Random(0))
        target.meet()
        (sample,) = await offer(target, [PlannedArrival(0, 6, 4)], 10)
        assert (sample.is_completed, len(sample.itl_ms)) == (True, 3)


def test_an_open_loop_does_not_wait_for_replies(server: FakeOpenAI, target: Target) -> None:
    server.script.first_s = 1
    measured = run(target, TRACE)
    assert len(measured.samples) == 20
    assert server.script.most_open == 20
    assert all(sample.is_completed for sample in measured.samples)


def test_times_are_at_least_what_the_server_took(server: FakeOpenAI, target: Target) -> None:
    server.script.first_s, server.script.gap_s = 0.05, 0.02
    for sample in run(target, replace(TRACE, trace=BURST[:2])).samples:
        assert sample.ttft_ms is not None
        assert sample.e2e_ms is not None
        assert sample.ttft_ms >= 50
        assert sample.ttft_ms + sum(sample.itl_ms) >= 90  # however late the first was read
        assert sample.e2e_ms >= 90


def test_a_closed_loop_keeps_so_many_open_and_no_more(server: FakeOpenAI, target: Target) -> None:
    server.script.gap_s = 0.005
    measured = run(target, Load(0.4, FIVE, THREE, concurrency=3))
    assert server.script.most_open == 3
    assert len(measured.samples) >= 3
    assert all(sample.is_completed for sample in measured.samples)


def test_the_same_seed_and_round_give_the_same_load_and_never_the_same_prompt(
    server: FakeOpenAI, target: Target
) -> None:
    load = Load(0.5, Lengths(5, 50), THREE, rate_per_s=40, seed=3)
    assert load.schedule(1) == load.schedule(1) != load.schedule(2)
    run(target, load)
    run(target, load)
    lengths = [len(body["prompt"]) for body in server.script.bodies]
    half = len(lengths) // 2
    assert sorted(lengths[:half]) == sorted(lengths[half:])
    long = [tuple(b["prompt"]) for b in server.script.bodies if len(b["prompt"]) > 20]
    assert len(set(long)) == len(long)


def test_prompts_begin_alike_where_a_trace_says_so_and_only_within_a_turn(
    server: FakeOpenAI, target: Target
) -> None:
    trace = (
        PlannedArrival(0, 40, 2, (1, 2), 20),
        PlannedArrival(0.01, 50, 2, (1, 2, 3), 20),
        PlannedArrival(0.02, 30, 2, (4, 2), 20),
    )
    for _ in range(2):
        samples = run(target, Load(0.1, FIVE, THREE, trace=trace)).samples
        assert [sample.reusable_tokens for sample in samples] == [0, 40, 0]
    first, longer, other, again, *_ = [body["prompt"] for body in server.script.bodies]
    assert (len(first), len(longer), len(other)) == (40, 50, 30)
    assert longer[:40] == first
    assert other[20:] == first[20:30]
    assert other[:20] != first[:20]
    assert again[:20] != first[:20]


def test_refusals_are_samples_with_their_status(server: FakeOpenAI, target: Target) -> None:
    server.script.refuse = lambda index: index % 2 == 0
    samples = run(target, TRACE).samples
    assert sum(sample.is_refused for sample in samples) == 10
    assert {sample.error for sample in samples} == {None, "the queue is full"}


def test_a_reply_that_breaks_off_is_an_error(server: FakeOpenAI, target: Target) -> None:
    server.script.breaks_after = 1
    (sample,) = run(target, replace(TRACE, trace=BURST[:1])).samples
    assert "closed the connection" in sample.error
    assert sample.ttft_ms is not None


async def test_a_reply_that_never_ends_is_an_error_and_is_hung_up_on(
    server: FakeOpenAI, target: Target
) -> None:
    server.script.first_s = 30
    (sample,) = await offer(target, [PlannedArrival(0, 5, 3)], 0.1)
    assert "no end" in (sample.error or "")
    assert (sample.status, sample.e2e_ms) == (200, None)


async def test_a_server_that_is_gone_is_an_error_of_each_request(tmp_path: Path) -> None:
    nobody = Target("nobody", UnixAddress(tmp_path / "none"), random.Random(0))
    (sample,) = await offer(nobody, [PlannedArrival(0, 5, 3)], 1)
    assert "cannot connect" in sample.error
    assert sample.status is None


@pytest.mark.parametrize("has_ids", [True, False])
def test_events_with_several_tokens_are_noted(
    server: FakeOpenAI, target: Target, has_ids: bool
) -> None:
    server.script.per_event, server.script.has_ids = 2, has_ids
    (sample,) = run(target, Load(0.2, FIVE, THREE, trace=(PlannedArrival(0, 5, 6),))).samples
    assert len(sample.itl_ms) == 2  # three events of two tokens: two gaps that anyone saw
    assert (sample.output_tokens, sample.merged_tokens) == (6, 3)


def test_energy_is_power_over_the_window_where_frames_report_it(
    server: FakeOpenAI, target: Target
) -> None:
    assert target.reading() is None
    again = Target("fake", server.unix, random.Random(0))
    again.meet()
    server.script.power_w = 40.0
    assert again.reading() == (40, False)
    load = Load(1.1, FIVE, THREE, trace=BURST[:1])
    measured = run(again, load)
    assert (measured.energy_j, measured.starved_ratio) == (pytest.approx(44), 0)
    server.script.starved = "others use the cores"
    assert run(again, load).starved_ratio == 1
    assert run(target, replace(load, seconds=0.1)).energy_j is None


def test_words_are_sent_where_ids_are_not_known(server: FakeOpenAI) -> None:
    server.script.tokenizes = False
    with pytest.raises(PenstockError) as refusal:
        Target("t", server.unix, random.Random(0)).meet()
    assert "--prompt-text" in refusal.value.hint
    target = Target("t", server.unix, random.Random(0), is_text=True)
    target.meet()
    target.learn_length(5, 10)  # this server counts two tokens a word
    (sample,) = run(target, Load(0.1, FIVE, THREE, trace=(PlannedArrival(0, 100, 3),))).samples
    assert isinstance(server.script.bodies[0]["prompt"], str)
    assert sample.prompt_tokens == 100


def test_ssh_is_refused() -> None:
    target = Target("far", SshAddress("host"), random.Random(0))
    with pytest.raises(ConfigError, match="over ssh"):
        run(target, replace(TRACE, trace=BURST[:1]))


def test_progress_ends_with_everything(target: Target) -> None:
    shares: list[float] = []
    asyncio.run(measure(target, TRACE, "arm", 0, shares.append))
    assert shares == sorted(shares)
    assert shares[-1] == 1


def test_a_sample_survives_being_kept() -> None:
    import msgspec

    sample = Sample(1, 2, status=200, itl_ms=[1.5])
    assert msgspec.json.decode(msgspec.json.encode(sample), type=Sample) == sample


# Streams and prompts together: which gaps count, and what is computed from them.


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


def test_what_prompts_add_is_told_apart_from_what_the_machine_does_itself() -> None:
    figures = InterferenceResult(
        "a", 0, [10, 10, 12], [10, 10, 50], [stream(5)], [stream(20)]
    ).figures()
    assert figures["p99_loaded_over_p99_quiet"] == pytest.approx(50 / 12)
    assert figures["p99_over_p50_quiet"] == pytest.approx(1.2)
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
    with pytest.raises(PenstockError, match="the queue is full"):
        asyncio.run(
            disturb(target, InterferencePlan(1, 70, 0.1, 0.2), "arm", 0, lambda share: None)
        )
