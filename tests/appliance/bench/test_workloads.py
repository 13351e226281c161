"""Workloads are drawn from a seed, written, and read again."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from appliance.bench.workloads import (
    CONVERSATIONS,
    TICK_S,
    PlannedConversation,
    agents,
    chats,
    lines,
    read_conversations,
    read_trace,
    reusable_tokens,
    trace,
)
from engine.errors import ConfigError


def tokens(each: PlannedConversation) -> tuple[int, int]:
    """Of all prompts together, and of all replies."""
    history, sent, written = each.shared_tokens, 0, 0
    for turn in each.turns:
        history += turn.input_tokens
        sent += history
        history += turn.output_tokens
        written += turn.output_tokens
    return sent, written


@pytest.mark.parametrize("kind", CONVERSATIONS)
def test_the_same_seed_gives_the_same_conversations_in_a_file(tmp_path: Path, kind: str) -> None:
    drawn = CONVERSATIONS[kind](random.Random(1), 5)
    assert drawn == CONVERSATIONS[kind](random.Random(1), 5)
    assert drawn != CONVERSATIONS[kind](random.Random(2), 5)
    path = tmp_path / "some.jsonl"
    path.write_text(lines(drawn))
    assert read_conversations(path) == drawn
    starts = [each.starts_at_s for each in drawn]
    assert starts == sorted(starts)
    assert starts[0] == 0


def test_agents_read_a_hundred_times_what_they_write() -> None:
    sent, written = map(sum, zip(*map(tokens, agents(random.Random(0), 50)), strict=True))
    assert 80 <= sent / written <= 125
    for each in agents(random.Random(0), 50):
        assert 20 <= len(each.turns) <= 40
        assert each.has_tools
        assert each.shared_tokens


def test_people_think_before_each_turn_but_the_first() -> None:
    for each in chats(random.Random(0), 20):
        assert 2 <= len(each.turns) <= 10
        first, *others = [turn.think_s for turn in each.turns]
        assert first == 0
        assert min(others) > 0


def test_a_trace_has_mooncakes_form_and_prefixes_that_come_again(tmp_path: Path) -> None:
    drawn = trace(random.Random(0), 300)
    assert drawn == trace(random.Random(0), 300)
    path = tmp_path / "trace.jsonl"
    path.write_text(lines(drawn))
    arrivals = read_trace(path)
    assert len(arrivals) == 300
    assert all(each.at_s % TICK_S == 0 for each in arrivals)
    known = sum(num or 0 for num in reusable_tokens(arrivals))
    assert 0.3 < known / sum(each.input_tokens for each in arrivals) < 0.95


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("", ""),
        ("{}", ":1"),
        ('{"turns": []}', ":1"),
        ('{"turns": [{"input_tokens": 1, "output_tokens": 1}]}\n{"turns": 3}', ":2"),
        ('{"turns": [{"input_tokens": 0, "output_tokens": 1}]}', ":1"),
    ],
)
def test_a_wrong_file_is_refused_with_its_line(tmp_path: Path, text: str, where: str) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        read_conversations(path)
    assert error.value.where == f"{path}{where}"
    with pytest.raises(ConfigError, match="cannot read"):
        read_conversations(tmp_path / "none")
