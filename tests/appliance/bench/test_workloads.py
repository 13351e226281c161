"""Workloads are drawn from a seed, written, and read again."""

from __future__ import annotations

import random
import statistics
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.bench.workloads import (
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
