from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import QueueFull
from engine.scheduler.text_queue import MAX_TEXTS, MAX_WAITING, TextQueue, WaitingText


def text(owner="a", length=4, model="m"):
    return WaitingText(model, owner, [7] * length)


def batches(queue, max_tokens=16):
    while batch := queue.next_batch(max_tokens):
        yield batch


texts = st.builds(text, st.sampled_from("abc"), st.integers(1, 40), st.sampled_from(("m", "n")))


@given(st.lists(texts, max_size=40), st.integers(1, 64))
def test_each_text_is_taken_once_in_its_owners_order_and_no_batch_is_too_large(waiting, most):
    queue = TextQueue()
    for each in waiting:
        queue.push([each])
    found = list(batches(queue, most))
    for batch in found:
        assert len({each.model for each in batch}) == 1
        assert len(batch) == 1 or sum(len(each.token_ids) for each in batch) <= most
    taken = [each for batch in found for each in batch]
    for owner in "abc":
        wanted = [each for each in waiting if each.owner == owner]
        assert [each for each in taken if each.owner == owner] == wanted
    assert not queue


def test_owners_take_turns_by_tokens_and_weights():
    queue = TextQueue()
    queue.weights = {"b": 2.0}
    queue.push([text("a") for _ in range(60)])
    queue.push([text("b") for _ in range(60)])
    first = [each.owner for batch in (queue.next_batch(16) for _ in range(9)) for each in batch]
    assert 22 <= first.count("b") <= 26


def test_a_newcomer_begins_level_with_those_that_wait():
    queue = TextQueue()
    queue.push([text("a") for _ in range(40)])
    for _ in range(5):
        queue.next_batch(16)
    queue.push([text("b") for _ in range(40)])
    found = [each.owner for _ in range(4) for each in queue.next_batch(16)]
    assert found.count("a") == found.count("b")


def test_a_lost_batch_comes_first_and_a_suspect_is_alone():
    queue = TextQueue()
    queue.push([text(length=1) for _ in range(3)])
    lost = queue.next_batch(2)
    lost[1].num_deaths = 1
    queue.put_back(lost)
    found = list(batches(queue))
    assert found[0] == lost[:1]
    assert found[1] == lost[1:]


def test_what_nobody_waits_for_is_left_out():
    queue = TextQueue()
    given_up, kept = text(), text()
    queue.push([given_up, kept])
    queue.drop(given_up)
    assert queue.next_batch(16) == [kept]
    assert not queue.next_batch(16)


def test_a_batch_has_a_number_of_texts_at_most():
    queue = TextQueue()
    queue.push([text(length=1) for _ in range(MAX_TEXTS + 1)])
    assert [len(batch) for batch in batches(queue, 1 << 20)] == [MAX_TEXTS, 1]


def test_too_much_is_refused_but_one_call_alone_is_not():
    queue = TextQueue()
    queue.max_tokens = 10
    queue.push([text(length=20)])
    with pytest.raises(QueueFull):
        queue.push([text(length=1)])
    queue.next_batch(16)
    queue.push([text(length=8)])
    queue.push([text("b", length=2)])


def test_one_owner_leaves_room_for_another():
    queue = TextQueue()
    queue.max_tokens = 100
    queue.push([text("a", 40)])
    for _ in range(100):
        with suppress(QueueFull):
            queue.push([text("a", 1)])
    with pytest.raises(QueueFull) as refused:
        queue.push([text("a", 1)])
    assert refused.value.code == "user_quota"
    queue.push([text("b", 25)])


def test_what_nobody_waits_for_is_kept_nowhere_though_others_are_before_it():
    queue = TextQueue()
    first, given_up = text(), [text() for _ in range(100)]
    queue.push([first, *given_up])
    for each in given_up:
        queue.drop(each)
    assert sum(map(len, queue._waiting.values())) == 1
    queue.put_back(queue.next_batch(16))
    queue.drop(first)
    assert not queue
    queue.drop(first)
    assert queue.next_batch(16) == []


def test_short_texts_are_refused_by_their_number():
    queue = TextQueue()
    num_taken = 0
    with suppress(QueueFull):
        for owner in map(str, range(100)):
            queue.push([text(owner, 1) for _ in range(2048)])
            num_taken += 2048
    assert 0.8 * MAX_WAITING < num_taken <= MAX_WAITING


def test_a_push_looks_at_no_text_that_waits_already():
    class Ids(list):
        num_looks = 0

        def __len__(self):
            self.num_looks += 1
            return super().__len__()

    queue, ids = TextQueue(), Ids([7])
    queue.push([WaitingText("m", "a", ids)])
    before = ids.num_looks
    for owner in "abc":
        queue.push([text(owner)])
    assert ids.num_looks == before
