"""Guesses come from the longest match, within one owner's texts and a bounded memory."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.configuration import settings
from engine.wire.cache_scope import CacheScope
from engine.worker import drafts
from engine.worker.drafts import DRAFTERS, MIN_MATCH, OWN_TEXT, PREDICTION, RECENT_TEXT, Drafts
from engine.worker.worker_request import WorkerRequest

SCOPE = CacheScope(b"scope")


def sequence(seq_id, token_ids, prediction=(), owner="ann", scope=SCOPE):
    running = WorkerRequest.dummy(len(token_ids), [], 0, 0.0)
    running.seq_id, running.token_ids = seq_id, list(token_ids)
    running.owner, running.scope, running.prediction = owner, scope, list(prediction)
    return running


def guess(of, running, most=4):
    found = of.guess(running, most)
    return None if found is None else (found.token_ids, found.drafter)


def test_the_longest_match_wins_and_of_equals_the_newest():
    text = [9, 1, 2, 3, 50, 8, 1, 2, 3, 60, 9, 1, 2, 3]
    assert guess(Drafts(300), sequence(1, text), 1) == ([50], OWN_TEXT)
    text = [1, 2, 3, 50, 8, 1, 2, 3, 60, 9, 1, 2, 3]
    assert guess(Drafts(300), sequence(1, text), 1) == ([60], OWN_TEXT)


def test_a_repetition_goes_on_beyond_the_end_of_the_text():
    assert guess(Drafts(300), sequence(1, [7, 8] * 3), 5) == ([7, 8, 7, 8, 7], OWN_TEXT)


def test_a_prediction_is_followed_from_its_beginning_and_found_again_after_a_difference():
    running = sequence(1, [5, 6], prediction=[1, 2, 3, 4, 5, 9])
    of = Drafts(300)
    assert guess(of, running) == ([1, 2, 3, 4], PREDICTION)
    running.token_ids += [1, 2]
    assert guess(of, running) == ([3, 4, 5, 9], PREDICTION)
    running.token_ids += [99, 2, 3, 4]
    assert guess(of, running) == ([5, 9, 5, 9], PREDICTION)


def test_what_other_texts_say_too_is_guessed_from_the_prediction():
    of, text = Drafts(300), [1, 2, 3, 4, 5, 6]
    running = sequence(1, [*text, 1, 2], prediction=[1, 2, 3, 4])
    running.num_prompt_tokens = 6
    assert guess(of, running, 2) == ([3, 4], PREDICTION)
    running.prediction[2] = 9
    assert guess(Drafts(300), running, 2) == ([9, 4], PREDICTION)


def test_texts_that_have_ended_are_read_by_the_same_owner_and_scope_alone():
    of = Drafts(300)
    first = sequence(1, [1, 2, 3, 4, 5])
    of.guess(first, 4)
    of.end(first)
    assert guess(of, sequence(2, [8, 1, 2, 3]), 2) == ([4, 5], RECENT_TEXT)
    assert guess(of, sequence(3, [8, 1, 2, 3], owner="bob"), 2) is None
    assert guess(of, sequence(4, [8, 1, 2, 3], scope=CacheScope(b"other")), 2) is None
    assert guess(of, sequence(5, [8, 1, 2, 3], scope=None), 2) is None


def test_memory_is_bounded_whatever_ends_or_runs(monkeypatch):
    monkeypatch.setattr(drafts, "MAX_TOKENS", 2000)
    of = Drafts(10_000)
    for number in range(40):
        text = [number, *range(300)]
        running = sequence(number, text, prediction=text, owner=f"user {number % 7}")
        for _ in range(3):
            of.guess(running, 4)
        if number % 3:
            of.end(running)
    held = [index for texts in of._live.values() for index in texts if index is not None]
    held += [index for texts in of._recent.values() for index in texts]
    assert sum(map(len, held)) == of._num_tokens <= 2000


def test_a_long_prompt_is_indexed_over_several_steps(monkeypatch):
    monkeypatch.setattr(drafts, "_TOKENS_PER_STEP", 10)
    of, running = Drafts(300), sequence(1, [*range(40), 30, 31, 32])
    assert guess(of, running) is None
    for _ in range(4):
        found = guess(of, running)
    assert found == ([33, 34, 35, 36], OWN_TEXT)


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 7))
def test_a_guess_is_never_worse_than_any_match(text, most):
    found = Drafts(300).guess(sequence(1, text), most)
    places = [
        end
        for end in range(MIN_MATCH, len(text))
        if text[end - MIN_MATCH : end] == text[-MIN_MATCH:]
    ]
    assert (found is None) == (not places)
    if found is not None:
        assert found.drafter in DRAFTERS
        assert len(found.token_ids) == most
        start = next(
            end
            for end in places
            if text[max(end - found.num_matched, 0) : end] == text[len(text) - found.num_matched :]
        )
        assert start


@pytest.mark.parametrize("token_id", [5, 300])
def test_a_guess_ends_before_an_end_and_before_what_the_model_does_not_have(token_id):
    running = sequence(1, [1, 2, 3, 4, token_id, 6, 1, 2, 3])
    running.stop_token_ids = frozenset({5})
    assert guess(Drafts(300), running) == ([4], OWN_TEXT)


def test_the_setting_has_the_same_limit():
    assert settings.MAX_DRAFT == drafts.MAX_DRAFT
