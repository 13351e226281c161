"""Guessed tokens are counted by source and place."""

from engine.scheduler.sequences.draft_counts import DraftCounts
from engine.wire.messages import SequenceStep


def step(num_tokens, num_drafted=0, drafter=""):
    return SequenceStep(
        1, 1, 9, [7] * num_tokens, [], None, None, 1 + num_drafted, 0,
        is_decoding=True, num_drafted=num_drafted, drafter=drafter,
    )  # fmt: skip


def test_guesses_are_counted_by_drafter_and_place():
    counts = DraftCounts()
    for each in (step(1), step(3, 3, "own_text"), step(1, 1, "own_text"), step(2, 1, "prediction")):
        counts.add(each)
    assert (counts.num_steps, counts.num_tokens) == (4, 7)
    assert counts.guessed == {
        ("own_text", 0): 2, ("own_text", 1): 1, ("own_text", 2): 1, ("prediction", 0): 1,
    }  # fmt: skip
    assert counts.right == {("own_text", 0): 1, ("own_text", 1): 1, ("prediction", 0): 1}
    assert [counts.of(one) for one in ("own_text", "prediction", "other")] == [
        (4, 2),
        (1, 1),
        (0, 0),
    ]
    both = counts + counts
    assert (both.num_steps, both.of("own_text")) == (8, (8, 4))


def test_a_step_that_ended_in_an_error_has_no_right_guess():
    counts = DraftCounts()
    counts.add(step(0, 3, "own_text"))
    assert counts.of("own_text") == (3, 0)
