"""Waiting is limited in total and per owner, and owners take turns."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import QueueFull, RequestError
from engine.scheduler.queue.waiting_limit import (
    MAX_RETRY_MS,
    MIN_RETRY_MS,
    OWNER_SHARE,
    UNKNOWN_RETRY_MS,
    QueueRate,
    WaitingLimit,
)

SECOND_NS = 1_000_000_000


def refusal(room, owner, wanted, *, is_single=False):
    """The code that it is refused with; None if it was let in."""
    try:
        room.check(owner, wanted, is_single=is_single)
    except RequestError as error:
        return error.code
    room.enter(owner, wanted)
    return None


def fill(room, owner):
    while refusal(room, owner, 1, is_single=True) is None:
        pass


def test_one_owner_gets_three_quarters():
    room = WaitingLimit("sequences", 512)
    fill(room, "flood")
    assert room.held("flood") == 384
    assert refusal(room, "flood", 1) == "user_quota"
    assert refusal(room, "newcomer", 1) is None


def test_more_owners_get_less_each():
    room = WaitingLimit("sequences", 512)
    for name in ("a", "b", "c"):
        fill(room, name)
    for _ in range(600):  # those who came late catch up while the first one's leave
        room.leave("a", 1)
        for name in ("b", "c", "a"):
            refusal(room, name, 1, is_single=True)
    held = [room.held(name) for name in ("a", "b", "c")]
    assert max(held) - min(held) <= 2
    assert sum(held) < 512


def test_a_full_room_says_so_with_its_numbers():
    room = WaitingLimit("prompt tokens", 100)
    room.enter("a", 70)
    with pytest.raises(QueueFull, match=r"70 .* 100") as full:
        room.check("b", 40, is_single=True)
    assert (full.value.code, full.value.status) == ("queue_full", 429)
    with pytest.raises(QueueFull, match=r"70 .* 5 more") as over:
        room.check("a", 6, is_single=True)
    assert (over.value.code, over.value.status) == ("user_quota", 429)


def test_what_could_never_wait_is_a_bad_request():
    room = WaitingLimit("sequences", 4)
    with pytest.raises(RequestError, match="3 sequences; these are 4") as refused:
        room.check("a", 4, is_single=False)
    assert (refused.value.code, refused.value.status) == ("invalid_value", 400)


def test_a_single_sequence_of_any_size_waits_where_nothing_does():
    room = WaitingLimit("prompt tokens", 100)
    assert refusal(room, "a", 1000, is_single=True) is None
    assert refusal(room, "b", 1, is_single=True) == "queue_full"
    room.leave("a", 1000)
    assert refusal(room, "b", 1, is_single=True) is None


def test_the_smallest_room_still_serves():
    room = WaitingLimit("sequences", 1)
    assert refusal(room, "a", 1, is_single=True) is None
    assert refusal(room, "a", 1, is_single=True) == "queue_full"
    room.leave("a", 1)
    assert refusal(room, "b", 1, is_single=True) is None


def test_a_smaller_limit_keeps_what_waits():
    room = WaitingLimit("sequences", 10)
    fill(room, "a")
    room.limit = 2
    assert room.total == 7
    assert refusal(room, "a", 1) == "queue_full"
    room.check_invariants()


@given(
    st.integers(1, 40),
    st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 9), st.booleans())),
)
def test_no_owner_has_more_than_its_share_and_a_newcomer_is_let_in(limit, arrivals):
    room = WaitingLimit("sequences", limit)
    for owner, wanted, leaves in arrivals:
        if leaves and room.held(owner):
            room.leave(owner, min(wanted, room.held(owner)))
        had = room.held(owner)
        is_first = not had and wanted == 1
        if refusal(room, owner, wanted, is_single=wanted == 1) is None and not is_first:
            assert room.held(owner) <= OWNER_SHARE * (limit - room.total)
        assert room.total <= limit
        room.check_invariants()
    if room.total < limit:
        assert refusal(room, "newcomer", 1, is_single=True) is None


def test_nobody_knows_when_to_come_back_before_anything_has_left():
    pace = QueueRate()
    pace.advance(SECOND_NS, is_waited=False)
    pace.advance(9 * SECOND_NS, is_waited=True)
    assert pace.retry_ms(10) == UNKNOWN_RETRY_MS


def test_time_without_a_queue_does_not_count():
    pace = QueueRate()
    for second in range(10):
        pace.advance(second * SECOND_NS, is_waited=second > 0)
        pace.count(2)
    before = pace.retry_ms(100)
    pace.advance(10_000 * SECOND_NS, is_waited=False)
    assert pace.retry_ms(100) == before


@given(st.floats(0.05, 200), st.integers(5, 400), st.integers(1, 2000))
def test_the_time_to_come_back_is_what_a_steady_queue_needs(per_second, num_events, amount):
    pace, now_ns = QueueRate(), 5 * SECOND_NS
    pace.advance(now_ns, is_waited=False)
    for _ in range(num_events):
        now_ns += int(SECOND_NS / per_second)
        pace.advance(now_ns, is_waited=True)
        pace.count(1)
    true_ms = min(max(1000 * amount / per_second, MIN_RETRY_MS), MAX_RETRY_MS)
    # One event that falls on the window's edge makes the whole difference where few are in it.
    assert true_ms / 2 <= pace.retry_ms(amount) <= true_ms * 1.01 + 1


@given(st.lists(st.tuples(st.integers(0, 10**12), st.booleans(), st.integers(1, 10**6))))
def test_the_time_to_come_back_is_bounded_and_grows_with_what_must_leave(history):
    pace, now_ns = QueueRate(), 0
    for elapsed_ns, is_waited, amount in history:
        now_ns += elapsed_ns
        pace.advance(now_ns, is_waited=is_waited)
        pace.count(amount)
    times = [pace.retry_ms(amount) for amount in (0, 1, 10, 1000, 10**9)]
    assert times == sorted(times)
    assert times[0] >= MIN_RETRY_MS
    assert times[-1] <= MAX_RETRY_MS


def test_a_queue_that_stands_still_sends_clients_further_away():
    pace = QueueRate()
    pace.advance(0, is_waited=False)
    for second in range(1, 20):
        pace.advance(second * SECOND_NS, is_waited=True)
        pace.count(1)
    before = pace.retry_ms(20)
    pace.advance(60 * SECOND_NS, is_waited=True)
    assert pace.retry_ms(20) > 2 * before


def paced(held=None):
    """A room that two have been leaving each second, with what each owner has waiting."""
    room = WaitingLimit("sequences", 1000)
    room.pace.advance(0, is_waited=False)
    room.pace.advance(10_000_000_000, is_waited=True)
    room.pace.count(room.pace._waited_s * 2.0)
    for owner, amount in (held or {}).items():
        room.enter(owner, amount)
    return room


def test_who_would_wait_too_long_is_refused_with_the_time_after_which_he_would_not():
    room = paced(held={"a": 40})
    room.check_wait("a", 1, 20_500, 1.0)  # 40 before it, 2 a second
    with pytest.raises(QueueFull) as refused:
        room.check_wait("a", 1, 10_500, 1.0)
    assert refused.value.retry_after_ms == 10_000
    assert "wait 20 s" in refused.value.what


def test_a_newcomer_waits_for_one_turn_of_each_and_not_for_their_queues():
    room = paced(held={"a": 40, "b": 40})
    assert room.ahead_of("c", 1, 1 / 3) == 2
    room.check_wait("c", 1, 1_500, 1 / 3)
    assert room.ahead_of("a", 1, 1 / 2) == 80


def test_nobody_is_refused_where_nothing_waits_or_the_pace_is_unknown():
    paced().check_wait("a", 5, 1, 1.0)
    unknown = WaitingLimit("sequences", 100)
    unknown.enter("a", 50)
    unknown.check_wait("a", 1, 1, 1.0)
