"""Workloads are drawn from a seed, written, and read again."""

from __future__ import annotations

import random
import statistics
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.bench.planned_conversations import (
    CONVERSATIONS,
    PlannedConversation,
    agents,
    chats,
    lines,
    read_conversations,
    trace,
)
from appliance.bench.workloads import (
    TICK_S,
    Lengths,
    PlannedArrival,
    drawn,
    read_trace,
    regular,
    reusable_tokens,
    scaled,
    spread,
)
from engine.errors import ConfigError, FileError


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
    with pytest.raises(FileError, match="cannot read"):
        read_conversations(tmp_path / "none")


# --------------------------------------------------------------------------------------------------
# Schedules: the same for the same seed, of the wanted rate, or as a trace says.

ANY = Lengths(10, 20)


def gaps(burstiness: float) -> list[float]:
    found = drawn(50, burstiness, 200, ANY, ANY, random.Random(1))
    return [after.at_s - before.at_s for before, after in pairwise(found)]


@settings(deadline=None, max_examples=30)
@given(
    st.floats(0.1, 20),
    st.floats(0.3, 20),
    st.floats(0.1, 20),
    st.integers(0, 9),
    st.integers(0, 9),
)
def test_a_schedule_is_in_order_within_its_time_and_depends_on_its_seed_alone(
    rate: float, burstiness: float, seconds: float, seed: int, more: int
) -> None:
    lengths = Lengths(3, 3 + more)
    found = drawn(rate, burstiness, seconds, lengths, ANY, random.Random(seed))
    assert found == drawn(rate, burstiness, seconds, lengths, ANY, random.Random(seed))
    assert found == sorted(found, key=lambda each: each.at_s)
    assert all(0 <= each.at_s < seconds for each in found)
    assert all(3 <= each.input_tokens <= 3 + more for each in found)
    assert all(10 <= each.output_tokens <= 20 for each in found)


@pytest.mark.parametrize("burstiness", [0.2, 1.0, 5.0])
def test_the_rate_holds_and_burstiness_is_the_shape_of_the_gaps(burstiness: float) -> None:
    found = gaps(burstiness)
    assert statistics.mean(found) == pytest.approx(1 / 50, rel=0.1)
    variation = statistics.pvariance(found) / statistics.mean(found) ** 2
    assert variation == pytest.approx(1 / burstiness, rel=0.2)


def test_regular_arrivals_leave_the_beginning_free() -> None:
    assert [each.at_s for each in regular(2, 7, 5, 8)] == [2, 4, 6]
    assert regular(2, 1, 5, 8) == [PlannedArrival(2, 5, 8)]


@pytest.mark.parametrize(("text", "lengths"), [("512", (512, 512)), ("1-9", (1, 9))])
def test_lengths_are_a_number_or_a_range(text: str, lengths: tuple[int, int]) -> None:
    assert Lengths.parse(text) == lengths


@pytest.mark.parametrize("text", ["", "0", "9-1", "a", "1-b", "-3", "1-2-3"])
def test_other_lengths_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        Lengths.parse(text)


def test_a_trace_begins_with_its_earliest_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"timestamp": 2500, "input_length": 7, "output_length": 2, "hash_ids": [1]}\n\n'
        '{"timestamp": 1000, "input_length": 5, "output_length": 1}\n'
    )
    assert read_trace(path) == [PlannedArrival(0, 5, 1), PlannedArrival(1.5, 7, 2, (1,))]


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("", "trace.jsonl"),
        ('{"timestamp": 1}', "trace.jsonl:1"),
        ('{"timestamp": 1, "input_length": 1, "output_length": 1}\nnot json', "trace.jsonl:2"),
        ('{"timestamp": 1, "input_length": 0, "output_length": 1}', "trace.jsonl:1"),
    ],
)
def test_a_wrong_trace_is_refused_with_its_line(tmp_path: Path, text: str, where: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError) as refusal:
        read_trace(path)
    assert refusal.value.where.endswith(where)
    with pytest.raises(FileError, match="cannot read"):
        read_trace(tmp_path / "none")


def test_a_trace_tells_which_prompts_begin_alike(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [5, 6]}\n'
        '{"timestamp": 3000, "input_length": 1500, "output_length": 1, "hash_ids": [5, 6, 7]}\n'
        '{"timestamp": 6000, "input_length": 700, "output_length": 1, "hash_ids": [9, 6]}\n'
        '{"timestamp": 6000, "input_length": 9, "output_length": 1}\n'
    )
    arrivals = read_trace(path)
    assert reusable_tokens(arrivals)[:2] == [0, 1024]
    assert sorted(map(str, reusable_tokens(arrivals)[2:])) == ["0", "None"]
    path.write_text('{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [5]}')
    with pytest.raises(ConfigError, match="1 hash_ids for 600 tokens"):
        read_trace(path)


def test_arrivals_are_spread_within_their_ticks_only() -> None:
    ticks = [PlannedArrival(3.0 * (n // 4), n + 1, 1) for n in range(40)]
    moved = spread(ticks, random.Random(0))
    assert moved == spread(ticks, random.Random(0)) == sorted(moved)
    assert len({each.at_s for each in moved}) == 40
    by_length = {each.input_tokens: each.at_s for each in moved}
    assert all(0 <= by_length[each.input_tokens] - each.at_s < 3 for each in ticks)
    exact = [*ticks, PlannedArrival(1.5, 1, 1)]
    assert spread(exact, random.Random(0)) == exact


def test_a_scaled_trace_shares_what_it_shared() -> None:
    trace = [PlannedArrival(0, 1024, 40, (1, 2)), PlannedArrival(8, 1500, 2, (1, 2, 3))]
    half = scaled(trace, speed=4, length_scale=0.5)
    assert [(e.at_s, e.input_tokens, e.output_tokens) for e in half] == [(0, 512, 20), (2, 750, 1)]
    assert reusable_tokens(half) == [0, 512]
