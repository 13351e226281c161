"""Guesses are computed where they make tokens come sooner, and nowhere else."""

import pytest

from engine.worker.draft_gate import (
    MAX_ROWS,
    MIN_STEPS,
    PLAIN_EVERY,
    RETRY_AFTER,
    Candidate,
    DraftGate,
    StepKind,
    expected_accepted,
)

CORES, CONTEXT = 2, 300
ALONE = StepKind.of([CONTEXT], CORES)
LONG = Candidate(0, 7, 32)
CHEAP = {0: 10.0, 1: 10.5, 3: 12.0, 7: 15.0}
DEAR = {0: 10.0, 1: 20.0, 3: 40.0, 7: 80.0}


def observe(gate, costs, kind=ALONE, count=32):
    for _ in range(count):
        for num_drafted, elapsed_ms in reversed(costs.items()):
            gate.observe_step(kind, num_drafted, elapsed_ms)


def gate_of(costs, kind=ALONE):
    """A gate that has timed steps: milliseconds by guessed tokens."""
    gate = DraftGate()
    observe(gate, costs, kind)
    return gate


def widths(gate, *candidates, kind=ALONE):
    return gate.widths(candidates, kind)


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


def test_steps_without_guesses_are_timed_first_and_now_and_then():
    gate = DraftGate()
    for _ in range(MIN_STEPS):
        assert widths(gate, LONG) == [0]
        gate.observe_step(ALONE, 0, 10.0)
    for _ in range(PLAIN_EVERY):
        assert widths(gate, LONG) == [7]
        gate.observe_step(ALONE, 7, 12.0)
    assert widths(gate, LONG) == [0]
    gate.observe_step(ALONE, 0, 10.0)
    assert widths(gate, LONG) == [7]


@pytest.mark.parametrize(
    "other",
    [
        StepKind.of([CONTEXT, CONTEXT], CORES),
        StepKind.of([CONTEXT], 1),
        StepKind.of([16 * CONTEXT], CORES),
    ],
)
def test_costs_are_those_of_this_batch_context_and_number_of_cores(other):
    gate = gate_of(CHEAP)
    assert widths(gate, LONG, kind=other) == [0], "not timed yet"
    observe(gate, DEAR, other)
    assert widths(gate, LONG, kind=other) == [0]
    assert widths(gate, LONG) == [7]


@pytest.mark.parametrize(("before", "after", "chosen"), [(CHEAP, DEAR, 0), (DEAR, CHEAP, 7)])
def test_the_newest_steps_count(before, after, chosen):
    gate = gate_of(before)
    observe(gate, after)
    assert widths(gate, LONG) == [chosen]


def test_single_slow_steps_change_nothing():
    gate = gate_of(CHEAP)
    for num_drafted, elapsed_ms in CHEAP.items():
        for _ in range(5):
            gate.observe_step(ALONE, num_drafted, 50 * elapsed_ms)
    gate.observe_step(ALONE, 0, CHEAP[0])
    assert widths(gate, LONG) == [7]


def test_what_was_dear_once_is_tried_again():
    gate = gate_of(DEAR)
    for _ in range(RETRY_AFTER):
        assert widths(gate, LONG) == [0]
        gate.observe_step(ALONE, 0, 10.0)
    for _ in range(MIN_STEPS):
        assert widths(gate, LONG) == [7]
        gate.observe_step(ALONE, 7, DEAR[7])
    assert widths(gate, LONG) != [7]


def test_a_batch_is_only_slowed_by_what_it_gains():
    kind = StepKind.of([CONTEXT] * 8, CORES)
    gate = gate_of({each: 10.0 * (1 + each / 20) for each in (0, 1, 3, 7)}, kind)
    sure, unsure = Candidate(0, 7, 32), Candidate(1, 7, 3)
    for _ in range(30):
        gate.observe_guess(sure, 7, 7)
        gate.observe_guess(unsure, 7, 0)
    chosen = widths(gate, unsure, sure, kind=kind)
    assert chosen == [0, 7]
    assert sum(chosen) + 8 <= MAX_ROWS


def test_a_number_is_taken_wherever_there_is_a_guess():
    gate = DraftGate(most=3)
    assert widths(gate, LONG, Candidate(1, 2, 3), kind=StepKind.of([9, 9], 1)) == [3, 1]


def test_a_number_is_taken_of_each_guess_while_the_step_has_rows():
    kind = StepKind.of([CONTEXT] * 8, CORES)
    guesses = [Candidate(seq_id, 7, 32) for seq_id in range(8)]
    found = DraftGate(most=3).widths(guesses, kind)
    assert found == [3, 3, 1, 1, 0, 0, 0, 0]
    assert sum(found) + 8 == MAX_ROWS


@pytest.mark.parametrize(("chance", "expected"), [(0.0, 0.0), (1.0, 7.0), (0.5, 1 - 0.5**7)])
def test_expected_tokens(chance, expected):
    assert expected_accepted(chance, 7) == pytest.approx(expected)


def test_guesses_behind_an_unknown_token_count_as_often_as_that_is_right():
    costs = {0: 10.0, 1: 11.0, 3: 12.0, 7: 14.0}
    gate = gate_of(costs)
    for _ in range(40):  # half of all guesses are right
        gate.observe_guess(LONG, 1, 1)
        gate.observe_guess(LONG, 1, 0)
    assert gate.widths([LONG], ALONE) != [0]
    assert gate.widths([LONG], ALONE, num_unknown=1) != [0]
    assert gate.widths([LONG], ALONE, num_unknown=4) == [0]
