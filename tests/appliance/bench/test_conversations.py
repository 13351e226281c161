"""Conversations with the real API over a fake appliance: histories grow, and nothing is lost."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from appliance.bench.conversations import TurnPace, converse
from appliance.bench.exchange import Target
from appliance.bench.load import Measured
from appliance.bench.planned_conversations import PlannedConversation, PlannedTurn
from appliance.bench.statistics import GoodputTargets, by_turn, summarize
from appliance.bench.talks import APIS
from appliance.configuration.address import UnixAddress
from engine.text.tokenizer import Tokenizer
from tests.appliance.api_server import says, serving
from tests.fakes import FakeAppliance
from tests.family_templates import FAMILIES
from tests.tiny_tokenizers import byte_level

CHAT = PlannedConversation(
    [PlannedTurn(9, 4), PlannedTurn(5, 3, 0.01), PlannedTurn(7, 2, 0.01)], shared_tokens=20
)
AGENT = PlannedConversation(
    [PlannedTurn(9, 4), PlannedTurn(5, 3), PlannedTurn(7, 2)], shared_tokens=20, has_tools=True
)


@pytest.fixture
def appliance() -> FakeAppliance:
    tokenizer = Tokenizer(byte_level(), chat_template=FAMILIES["qwen"])
    return FakeAppliance(tokenizer, max_queued=64, max_model_len=1 << 15)


@pytest.fixture
async def target(appliance: FakeAppliance, tmp_path: Path) -> AsyncIterator[Target]:
    path = tmp_path / "api.sock"
    async with serving(appliance, path):
        target = Target("one", UnixAddress(path), random.Random(0))
        await asyncio.to_thread(target.meet)
        yield target


async def have(target: Target, *conversations: PlannedConversation, api: str = "chat") -> Measured:
    return await converse(target, conversations, TurnPace(api), "one", 0, lambda share: None)


def test_the_least_that_a_workload_takes_is_its_longest_wait() -> None:
    late = PlannedConversation([PlannedTurn(1, 1, 50.0), PlannedTurn(1, 1, 6.0)], starts_at_s=4.0)
    assert TurnPace("chat").least_s([CHAT, late]) == 10.0  # nobody waits before a first turn
    assert TurnPace("chat", speed=5.0).least_s([CHAT, late]) == 2.0


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("conversation", [CHAT, AGENT], ids=["chat", "agent"])
async def test_each_prompt_begins_as_the_one_before_it(
    target: Target, appliance: FakeAppliance, api: str, conversation: PlannedConversation
) -> None:
    says(appliance, "abc")
    measured = await have(target, conversation, api=api)
    assert [(s.error, s.turn) for s in measured.samples] == [(None, n) for n in (1, 2, 3)]
    prompts = [request.sequences[0].prompt_token_ids for request in appliance.submitted]
    assert [sample.prompt_tokens for sample in measured.samples] == list(map(len, prompts))
    assert [sample.output_tokens for sample in measured.samples] == [3, 3, 2]
    for before, after in itertools.pairwise(prompts):
        # what a template puts behind the last message, for the answer to begin, may be gone
        kept = max(0, len(before) - 40)
        assert after[:kept] == before[:kept]
    if api == "completions":
        assert prompts[1][: len(prompts[0])] == prompts[0]
        output = appliance.submitted[0].sequences[0].output_token_ids
        assert prompts[1][len(prompts[0]) :][: len(output)] == output
    assert [sample.reusable_tokens for sample in measured.samples[:2]] == [
        0,
        measured.samples[0].prompt_tokens + measured.samples[0].output_tokens,
    ]


async def test_conversations_share_their_system_prompt_and_nothing_else(
    target: Target, appliance: FakeAppliance
) -> None:
    measured = await have(target, CHAT, later(CHAT, 0.05), api="completions")
    first, second = [
        request.sequences[0].prompt_token_ids
        for request in appliance.submitted
        if request.sequences[0].num_prompt_tokens == 29
    ]
    assert first[:20] == second[:20]
    assert first[20:] != second[20:]
    firsts = [sample.reusable_tokens for sample in measured.samples if sample.turn == 1]
    assert firsts == [0, 20]
    await have(target, CHAT, api="completions")
    assert appliance.submitted[6].sequences[0].prompt_token_ids[:20] != first[:20]


async def test_a_conversation_ends_where_the_context_does(
    target: Target, appliance: FakeAppliance
) -> None:
    target.max_model_len = 45
    measured = await have(target, CHAT, api="completions")
    assert [sample.turn for sample in measured.samples] == [1, 2]


async def test_a_conversation_ends_with_a_turn_that_fails(
    target: Target, appliance: FakeAppliance
) -> None:
    appliance.fail_after = 1
    measured = await have(target, CHAT, CHAT)
    assert [(sample.turn, sample.is_completed) for sample in measured.samples] == [(1, False)] * 2


async def test_speed_and_lengths_are_scaled(target: Target, appliance: FakeAppliance) -> None:
    slow = later(PlannedConversation([PlannedTurn(40, 8), PlannedTurn(40, 8, 600.0)]), 600.0)
    pace = TurnPace("completions", speed=60_000, length_scale=0.25)
    measured = await converse(target, [slow], pace, "one", 0, lambda share: None)
    assert [(s.prompt_tokens, s.output_tokens) for s in measured.samples] == [(10, 2), (22, 2)]


async def test_figures_are_by_turn_and_over_all(target: Target) -> None:
    measured = await have(target, CHAT, CHAT, api="completions")
    for sample in measured.samples:
        sample.cached_tokens = (sample.prompt_tokens or 0) // 2
    figures = by_turn(measured.samples) | summarize(
        measured.samples, measured.window_ms, GoodputTargets()
    )
    assert figures["turn_01_ttft_ms"] > 0
    assert figures["turn_03_hit_ratio"] == pytest.approx(0.5, abs=0.05)
    assert figures["hit_ratio"] == pytest.approx(0.5, abs=0.05)
    assert 0.5 < figures["infinite_hit_ratio"] < 1


def later(conversation: PlannedConversation, starts_at_s: float) -> PlannedConversation:
    return msgspec.structs.replace(conversation, starts_at_s=starts_at_s)
