"""Speculation changes when tokens come, never which."""

from collections import Counter

import pytest

from engine.wire.messages import Records
from engine.worker.draft_gate import MAX_ROWS
from engine.worker.speculation import Speculation
from engine.worker.worker_request import WorkerRequest
from tests.levels import needs_kernels
from tests.speculated import KINDS, Model, compare

BLOCK_SIZE = 4
TEXT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3]


@needs_kernels
@pytest.mark.parametrize("kind", ["dense", "experts, bfloat16", "int8 and KV in int8", "recurrent"])
def test_all_that_comes_of_a_sequence_is_bitwise_that_without_speculation(tmp_path, kind):
    model = Model(tmp_path, KINDS[kind])
    counts = sum((compare(model, number) for number in range(7, 13)), Counter())
    assert counts["accepted"] > 20
    assert counts["refused"] > 5
    assert counts["stop strings"]


def sequence(seq_id=1, num_blocks=9, until=99):
    running = WorkerRequest.dummy(len(TEXT), [*range(num_blocks)], len(TEXT) - 1, 0.0)
    running.seq_id, running.token_ids, running.until_output = seq_id, list(TEXT), until
    return running


def drafted(*planned, most=7):
    Speculation(300, BLOCK_SIZE, most).draft([(running, 1) for running in planned], 1)
    return [running.draft for running in planned]


def test_a_guess_is_what_followed_the_last_tokens():
    assert drafted(sequence()) == [[4, 5, 6, 7, 8, 9, 1]]
    assert drafted(sequence(), most=4) == [[4, 5, 6]]


def test_a_guess_ends_before_the_sequence_does():
    assert drafted(sequence(until=4)) == [[4, 5, 6]]
    assert drafted(sequence(until=1)) == [[]]
    assert drafted(sequence(num_blocks=4)) == [[4, 5, 6]]
    assert drafted(sequence(num_blocks=3)) == [[]]
    running = sequence()
    running.stop_token_ids = frozenset({6})
    assert drafted(running) == [[4]]


def test_a_guess_ends_where_a_record_is_kept():
    records = [[20], [21], [22]]
    for keeps_every, expected in ((0, [4, 5, 6, 7, 8, 9, 1]), (16, [4, 5, 6]), (12, [])):
        running = sequence()
        running.records = Records(records, 0, [], [], keeps_every)
        assert drafted(running) == [expected]
    running.records = Records(records, 0, [], [11, 13])
    assert drafted(running) == [[4]]


def test_a_step_has_no_more_rows_than_keep_their_bits():
    many = [sequence(seq_id) for seq_id in range(6)]
    rows = sum(1 + len(draft) for draft in drafted(*many))
    assert 6 < rows <= MAX_ROWS
    assert not any(drafted(*(sequence(seq_id) for seq_id in range(MAX_ROWS))))


def test_steps_with_prompts_have_no_guesses():
    prompt = WorkerRequest.dummy(5, [1, 2], 0, 0.0)
    speculation, running = Speculation(300, BLOCK_SIZE, 7), sequence()
    speculation.draft([(running, 1), (prompt, 5)], 1)
    assert running.draft == []


def test_a_step_is_waited_for_while_the_next_ones_guesses_are_expected():
    speculation, running = Speculation(300, BLOCK_SIZE, 7), sequence()
    assert speculation.waits([(running, 1)], 1)
    assert running.draft == []
    running.token_ids[-1] = 200
    assert not speculation.waits([(running, 1)], 1)
    # of what is left the launched step draws one, and the next one is another
    assert not speculation.waits([(sequence(until=2), 1)], 1)
    assert not speculation.waits([(sequence(num_blocks=3), 1)], 1)


@pytest.mark.parametrize(("drawn", "keeps_waiting"), [(40, True), (250, False)])
def test_waiting_ends_where_the_awaited_token_is_mostly_not_the_guessed_one(drawn, keeps_waiting):
    text, speculation, waits = [*range(1, 60), *range(1, 40)], Speculation(300, BLOCK_SIZE), 0
    for _ in range(40):
        running = WorkerRequest.dummy(len(text), [*range(99)], len(text) - 1, 0.0)
        running.token_ids, running.until_output = list(text), 99
        if speculation.waits([(running, 1)], 1):
            waits += 1
            running.token_ids.append(drawn)
            running.num_computed_tokens += 1
            speculation.draft([(running, 1)], 1)
        other = sequence(2)
        other.token_ids[-1] = 200
        speculation.draft([(other, 1)], 1)
        speculation.timed(10.0)
    assert waits > 30 if keeps_waiting else 0 < waits < 20
