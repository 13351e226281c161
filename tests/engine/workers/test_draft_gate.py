"""Guesses are computed where they make tokens come sooner, and nowhere else."""

import pytest

from engine.workers.draft_gate import (
    MAX_ROWS,
    PLAIN_EVERY,
    Candidate,
    DraftGate,
    expected_accepted,
)


def gate_of(costs, num_sequences=1):
    """A gate that has timed steps: milliseconds by guessed tokens."""
    gate, seq_ids = DraftGate(), list(range(num_sequences))
    for _ in range(30):
        for num_drafted, elapsed_ms in costs.items():
            gate.observe_step(seq_ids, num_drafted, 2, elapsed_ms)
    gate.observe_step(seq_ids, 0, 2, costs[0])
    return gate


def widths(gate, *candidates, num_sequences=1):
    return gate.widths(candidates, range(num_sequences), 2)


LONG = Candidate(0, 7, 32)
CHEAP = {0: 10.0, 1: 10.5, 3: 12.0, 7: 15.0}
DEAR = {0: 10.0, 1: 20.0, 3: 40.0, 7: 80.0}


def test_cheap_rows_are_used_and_dear_ones_not():
    assert widths(gate_of(CHEAP), LONG) == [7]
    assert widths(gate_of(DEAR), LONG) == [0]


def test_guesses_that_turn_out_wrong_are_left_alone():
    gate = gate_of(CHEAP)
    for _ in range(40):
        gate.observe_guess(LONG, 7, 0)
    assert widths(gate, LONG) == [0]
    assert sum(widths(gate, Candidate(1, 7, 32))) < 7, "the next sequence begins with less"


def test_each_length_of_match_has_chances_of_its_own():
    gate = gate_of(CHEAP)
    for _ in range(20):
        gate.observe_guess(Candidate(0, 7, 3), 7, 0)
    assert widths(gate, Candidate(0, 7, 3)) == [0]
    assert widths(gate, LONG) == [7]


def test_a_step_without_guesses_is_timed_first_and_now_and_then():
    gate = DraftGate()
    assert widths(gate, LONG) == [0]
    gate.observe_step([0], 0, 2, 10.0)
    count = 0
    while widths(gate, LONG) != [0]:
        gate.observe_step([0], 7, 2, 12.0)
        count += 1
    assert count == PLAIN_EVERY
    gate.observe_step([0], 0, 2, 10.0)
    assert widths(gate, LONG) == [7]
    assert gate.widths([LONG], [0, 1], 2) == [0], "another step is timed anew"


def test_what_was_dear_once_is_tried_again():
    gate = gate_of(DEAR)
    steps = 0
    while widths(gate, LONG) == [0]:
        gate.observe_step([0], 0, 2, 10.0)
        steps += 1
        assert steps < 2000
    assert steps > 20


def test_a_batch_is_only_slowed_by_what_it_gains():
    costs = {each: 10.0 * (1 + each / 20) for each in (0, 1, 3, 7)}
    gate = gate_of(costs, num_sequences=8)
    sure, unsure = Candidate(0, 7, 32), Candidate(1, 7, 3)
    for _ in range(30):
        gate.observe_guess(sure, 7, 7)
        gate.observe_guess(unsure, 7, 0)
    chosen = widths(gate, unsure, sure, num_sequences=8)
    assert chosen == [0, 7]
    assert sum(chosen) + 8 <= MAX_ROWS


def test_a_number_is_taken_wherever_there_is_a_guess():
    gate = DraftGate(most=3)
    assert widths(gate, LONG, Candidate(1, 2, 3), num_sequences=2) == [3, 1]


@pytest.mark.parametrize(("chance", "expected"), [(0.0, 0.0), (1.0, 7.0), (0.5, 1 - 0.5**7)])
def test_expected_tokens(chance, expected):
    assert expected_accepted(chance, 7) == pytest.approx(expected)
