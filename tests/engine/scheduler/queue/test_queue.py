"""Owners take turns, limits refuse in time, the old are not overtaken."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import QueueFull, RequestError
from engine.scheduler.queue.queue import FairQueue
from engine.scheduler.sequences.sequence import Sequence, Stamps
from engine.wire.prompt_order import prefill_key
from engine.wire.run_spec import RunSpec
from engine.wire.sampling import SamplingParams

SECOND_NS = 1_000_000_000
OWNERS = ("a", "b", "c", "d")
Sizes = st.lists(st.tuples(st.integers(1, 400), st.integers(1, 200)), min_size=1, max_size=12)


class Makes:
    """Sequences with ids of their own."""

    def __init__(self):
        self.last_id = 0

    def __call__(self, owner="", num_prompt_tokens=10, max_tokens=5, *, at_ns=0):
        self.last_id += 1
        return Sequence(
            seq_id=self.last_id,
            request_id=f"r{self.last_id}",
            index=0,
            prompt_token_ids=[1] * num_prompt_tokens,
            spec=RunSpec(SamplingParams(max_tokens=max_tokens, seed=0), owner=owner),
            stamps=Stamps(at_ns),
        )


@pytest.fixture
def make():
    return Makes()


def roomy():
    return FairQueue(100_000, 10**9)


def cost(sequence):
    return sequence.num_prompt_tokens


def take_next(queue, now_ns=0):
    sequence = next(queue.in_order(now_ns))
    queue.remove_placed(sequence, now_ns)
    queue.check_invariants()
    return sequence


@given(st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 20 * SECOND_NS)), max_size=30))
def test_one_owner_alone_is_served_shortest_first_with_ageing(sizes):
    make, queue, now_ns = Makes(), roomy(), 20 * SECOND_NS
    sequences = [make("a", size, at_ns=at_ns) for size, at_ns in sizes]
    for sequence in sequences:
        queue.push([sequence], now_ns)
    expected = sorted(
        sequences, key=lambda s: prefill_key(s.num_prompt_tokens, now_ns - s.stamps.arrived_ns)
    )
    assert list(queue.in_order(now_ns)) == expected
    assert [take_next(queue, now_ns) for _ in sequences] == expected


@pytest.mark.parametrize("limit", [1, 2, 4, 5, 512])
def test_one_request_may_bring_so_much_and_no_more(make, limit):
    queue = FairQueue(limit, 10**9)
    most = queue.max_per_request
    with pytest.raises(RequestError) as refused:
        queue.push([make() for _ in range(most + 1)], 0)
    assert refused.value.status == 400
    queue.push([make() for _ in range(most)], 0)
    assert len(queue) == most


@given(st.lists(Sizes, min_size=1, max_size=4), st.integers(0, 20))
def test_what_is_forecast_comes_true_if_nothing_else_comes(work, num_before):
    make, queue = Makes(), roomy()
    for owner, sizes in zip(OWNERS, work, strict=False):
        queue.push([make(owner, *size) for size in sizes], 0)
    for _ in range(min(num_before, len(queue))):
        take_next(queue)
    forecast = list(queue.forecast(0))
    assert len(forecast) == len(queue)
    assert [take_next(queue) for _ in forecast] == forecast


@given(st.lists(Sizes, min_size=2, max_size=4))
def test_owners_that_keep_waiting_stay_within_one_sequence_of_each_other(work):
    make, queue = Makes(), roomy()
    for owner, sizes in zip(OWNERS, work, strict=False):
        queue.push([make(owner, *size) for size in sizes], 0)
    served = dict.fromkeys(OWNERS[: len(work)], 0)
    left = {owner: len(sizes) for owner, sizes in zip(OWNERS, work, strict=False)}
    dearest = max(cost(sequence) for sequence in queue)
    while all(left.values()):
        sequence = take_next(queue)
        served[sequence.owner] += cost(sequence)
        left[sequence.owner] -= 1
        assert max(served.values()) - min(served.values()) <= dearest


@given(st.lists(Sizes, min_size=2, max_size=4), st.lists(st.sampled_from([0.5, 1, 4]), min_size=4))
def test_owners_that_keep_waiting_get_turns_by_their_weights(work, weights):
    make, queue = Makes(), roomy()
    queue.weights = dict(zip(OWNERS, weights, strict=False))
    for owner, sizes in zip(OWNERS, work, strict=False):
        queue.push([make(owner, *size) for size in sizes], 0)
    served = dict.fromkeys(OWNERS[: len(work)], 0.0)
    left = {owner: len(sizes) for owner, sizes in zip(OWNERS, work, strict=False)}
    dearest = max(cost(sequence) / queue.weights[sequence.owner] for sequence in queue)
    while all(left.values()):
        sequence = take_next(queue)
        served[sequence.owner] += cost(sequence) / queue.weights[sequence.owner]
        left[sequence.owner] -= 1
        assert max(served.values()) - min(served.values()) <= dearest + 1e-9


def test_an_owner_of_weight_three_gets_three_of_four_turns_and_waits_so_much_less(make):
    queue = roomy()
    queue.weights = {"key:app": 3.0}
    for owner in ("key:app", "batch"):
        queue.push([make(owner) for _ in range(40)], 0)
    assert queue._share("key:app") == 0.75
    assert queue._share("newcomer") == 0.2
    taken = [take_next(queue).owner for _ in range(40)]
    assert taken.count("key:app") == 30


def test_what_was_charged_by_one_weight_is_given_back_by_it(make):
    queue = roomy()
    queue.weights = {"a": 4.0}
    first, second = make("a", 100), make("b", 100)
    queue.push([first, make("a", 100)], 0)
    queue.push([second, make("b", 100)], 0)
    queue.remove_placed(first, 0)
    queue.remove_placed(second, 0)
    queue.weights = {}
    queue.remove(first)
    queue.remove(second)
    assert queue._charged == {"a": 0.0, "b": 0.0}


def test_output_tokens_are_charged_by_weight_too(make):
    queue = roomy()
    queue.weights = {"a": 4.0}
    first, second = make("a", 100), make("b", 100)
    queue.push([first, make("a", 100)], 0)
    queue.push([second, make("b", 100)], 0)
    for sequence in (first, second):
        queue.remove_placed(sequence, 0)
        queue.generated(sequence, 8)
    assert queue._charged == {"a": 27.0, "b": 108.0}


@given(st.lists(Sizes, min_size=1, max_size=3), st.integers(0, 20), st.integers(1, 5000))
def test_a_newcomer_waits_for_one_turn_of_each_other_owner_at_most(work, num_before, size):
    make, queue = Makes(), roomy()
    for owner, sizes in zip(OWNERS, work, strict=False):
        queue.push([make(owner, *size) for size in sizes], 0)
    for _ in range(min(num_before, len(queue))):
        take_next(queue)
    newcomer = make("newcomer", size)
    queue.push([newcomer], 5 * SECOND_NS)
    before = []
    while (taken := take_next(queue, 5 * SECOND_NS)) is not newcomer:
        before.append(taken.owner)
    assert len(before) == len(set(before))


def test_who_was_alone_owes_nothing(make):
    queue = roomy()
    for _ in range(50):
        queue.push([make("a", 1000)], 0)
        take_next(queue)
    queue.push([make("a", 20)], 0)
    queue.push([make("b", 20), make("b", 20)], 0)
    assert take_next(queue).owner == "a"


def test_who_waits_late_has_saved_up_nothing(make):
    queue = roomy()
    queue.push([make("a", 100) for _ in range(20)], 0)
    queue.push([make("b", 100)], 0)
    for _ in range(11):
        take_next(queue)
    queue.push([make("b", 100) for _ in range(5)], 0)
    owners = [take_next(queue).owner for _ in range(10)]
    assert 4 <= owners.count("a") <= 6


def test_an_owner_that_comes_late_has_no_credit_for_the_time_before(make):
    queue = roomy()
    for owner in ("a", "b"):
        queue.push([make(owner, 100) for _ in range(20)], 0)
    for _ in range(20):
        take_next(queue)
    queue.push([make("c", 100) for _ in range(20)], 0)
    owners = [take_next(queue).owner for _ in range(9)]
    assert [owners.count(owner) for owner in ("a", "b", "c")] == [3, 3, 3]


def test_an_owner_that_comes_back_still_owes_what_it_had_more_than_others(make):
    queue = roomy()
    queue.push([make("a", 1000)], 0)
    queue.push([make("b", 10) for _ in range(20)], 0)
    assert take_next(queue).owner == "a"
    queue.push([make("a", 10)], 0)
    assert [take_next(queue).owner for _ in range(20)] == ["b"] * 20


def test_what_was_not_computed_of_a_prompt_is_given_back(make):
    queue = roomy()
    long = make("a", 10_000)
    queue.push([long, *[make("a", 10) for _ in range(9)]], 0)
    queue.push([make("b", 10) for _ in range(90)], 0)
    queue.remove_placed(long, 0)
    assert [take_next(queue).owner for _ in range(20)] == ["b"] * 20
    long.num_computed_tokens = 15  # it was cancelled
    queue.remove(long)
    owners = [take_next(queue).owner for _ in range(10)]
    assert owners.count("a") == 9
    queue.check_invariants()


def test_outputs_are_charged_when_they_come_and_not_as_they_are_asked_for(make):
    queue = roomy()
    asks, gets = make("a", 10, max_tokens=10_000), make("b", 10, max_tokens=1_000)
    queue.push([asks, *[make("a", 10) for _ in range(40)]], 0)
    queue.push([gets, *[make("b", 10) for _ in range(40)]], 0)
    for sequence in (asks, gets):
        queue.remove_placed(sequence, 0)
    owners = [take_next(queue).owner for _ in range(20)]
    assert owners.count("a") == 10
    for _ in range(100):
        gets.output_token_ids.append(1)
        queue.generated(gets, 1)
    queue.remove(asks)
    queue.remove(gets)
    assert [take_next(queue).owner for _ in range(10)] == ["a"] * 10
    queue.check_invariants()


def test_a_sequence_that_leaves_the_queue_is_charged_nothing(make):
    queue = roomy()
    gone = make("a", 10)
    queue.push([gone, make("a", 10)], 0)
    queue.push([make("b", 10)], 0)
    queue.remove(gone)
    queue.remove(gone)
    assert len(queue) == 2
    assert {take_next(queue).owner for _ in range(2)} == {"a", "b"}
    assert not queue


def test_what_is_passed_over_costs_nothing_and_its_owner_stays_next(make):
    queue = roomy()
    heavy, light = make("a", 500), make("b", 10)
    queue.push([make("c", 1)], 0)
    queue.push([heavy], 0)
    queue.push([light], 0)
    for sequence in queue.in_order(0):
        if sequence is not heavy:
            queue.remove_placed(sequence, 0)
    queue.push([make("b", 10)], 0)
    assert next(queue.in_order(0)) is heavy


def test_a_request_is_queued_whole_or_not_at_all(make):
    queue = FairQueue(100, 50)
    with pytest.raises(RequestError) as refused:
        queue.push([make("a", 30), make("a", 30)], 0)
    assert refused.value.status == 400
    queue.push([make("a", 30)], 0)
    with pytest.raises(QueueFull):
        queue.push([make("b", 10), make("b", 11)], 0)
    assert (len(queue), queue.num_tokens, queue.num_owners) == (1, 30, 1)
    queue.check_invariants()


def test_limits_change_while_it_is_used(make):
    queue = FairQueue(100, 10**6)
    queue.push([make("a") for _ in range(50)], 0)
    queue.set_limits(40, 10**6)
    with pytest.raises(QueueFull, match="limit is 40"):
        queue.push([make("b")], 0)
    queue.set_limits(60, 10**6)
    queue.push([make("b")], 0)
    assert (queue.max_sequences, len(queue)) == (60, 51)


def test_when_to_come_back_is_learned_from_what_waited(make):
    queue = FairQueue(8, 10**6)
    now_ns = SECOND_NS
    queue.push([make("a")], now_ns)
    take_next(queue, now_ns)  # placed at once: says nothing
    queue.push([make("a") for _ in range(6)], now_ns)
    for _ in range(4):
        now_ns += 3 * SECOND_NS
        take_next(queue, now_ns)
    queue.push([make("a") for _ in range(4)], now_ns)
    with pytest.raises(QueueFull) as refused:
        queue.push([make("a")], now_ns)
    assert refused.value.code == "user_quota"
    assert 2000 <= refused.value.retry_after_ms <= 4000


def test_a_queue_from_which_nothing_leaves_refuses_before_the_longest_wait_has_passed(make):
    queue = FairQueue(1000, 100_000)
    queue.max_wait_ms = 60_000.0
    for _ in range(10):
        queue.push([make()], 0)
    queue.push([make()], 2 * 10**9)
    with pytest.raises(QueueFull):
        queue.push([make()], 10 * 10**9)


def test_a_prompt_is_not_refused_for_longer_ones_that_it_passes(make):
    queue, now_ns = roomy(), SECOND_NS
    queue.max_wait_ms = 60_000.0
    queue.push([make("a", 3000, at_ns=now_ns)], now_ns)
    for _ in range(3):
        queue.push([make("a", 15, at_ns=now_ns)], now_ns)
        now_ns += SECOND_NS
        assert take_next(queue, now_ns).num_prompt_tokens == 15
    queue.push([make("a", 15, at_ns=now_ns)], now_ns)  # 15 tokens a second, 3,000 behind it
    with pytest.raises(QueueFull):
        queue.push([make("a", 3000, at_ns=now_ns)], now_ns)


def test_of_a_flood_each_is_told_a_time_of_its_own(make):
    queue = FairQueue(8, 10**6)
    now_ns = SECOND_NS
    queue.push([make("a") for _ in range(6)], now_ns)
    for _ in range(3):  # one in two seconds
        now_ns += 2 * SECOND_NS
        take_next(queue, now_ns)
    queue.push([make("a") for _ in range(3)], now_ns)

    def told(owner="a"):
        with pytest.raises(QueueFull) as refused:
            queue.push([make(owner)], now_ns)
        return refused.value.retry_after_ms

    times = [told() for _ in range(4)]
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert all(1800 <= gap <= 2200 for gap in gaps)
    assert [told() for _ in range(100)][-1] == 120_000  # no client waits longer
    now_ns += 30 * SECOND_NS
    assert 80_000 < told() < 120_000
    while queue:
        take_next(queue, now_ns)
    queue.push([make("a") for _ in range(6)], now_ns)
    assert told() < 10_000  # what was promised is forgotten with the queue


def test_the_time_in_which_no_worker_is_there_says_nothing_of_the_pace(make):
    queue, now_ns = FairQueue(8, 10**6), SECOND_NS
    queue.push([make("a") for _ in range(6)], now_ns)
    for _ in range(4):  # one a second
        now_ns += SECOND_NS
        take_next(queue, now_ns)
    before_ms = queue._sequences.pace.wait_ms(2)
    queue.served(False, now_ns)
    queue.push([make("a")], now_ns + 20 * SECOND_NS)
    now_ns += 60 * SECOND_NS
    queue.served(True, now_ns)
    assert queue._sequences.pace.wait_ms(2) == pytest.approx(before_ms)
    now_ns += 60 * SECOND_NS
    queue.served(True, now_ns)  # now it is there, and takes nothing
    assert queue._sequences.pace.wait_ms(2) > 2 * before_ms


class Served:
    """A queue whose prompts get their first tokens one after the other."""

    def __init__(self, make, target_ms):
        self.make, self.queue, self.now_ns = make, FairQueue(1000, 10**9), SECOND_NS
        self.queue.max_first_ms = target_ms
        self.placed = []

    def ask(self, owner="a", num_prompt_tokens=10):
        """Place one at once, as a worker that has room does; False if it is refused."""
        sequence = self.make(owner, num_prompt_tokens)
        try:
            self.queue.push([sequence], self.now_ns)
        except QueueFull as full:
            return full
        self.queue.remove_placed(sequence, self.now_ns)
        self.placed.append(sequence)
        return None

    def answer(self, after_s):
        self.now_ns += int(after_s * SECOND_NS)
        if self.placed:
            self.queue.answered(self.placed.pop(0), self.now_ns)


def test_whose_first_token_would_come_too_late_is_refused_also_where_nothing_queues(make):
    served = Served(make, 4_000.0)
    for _ in range(40):  # one in half a second
        assert served.ask() is None
        served.answer(0.5)
    taken = 0
    while (full := served.ask()) is None:
        taken += 1
    assert 3 <= taken <= 6  # of 8 that four seconds would do
    assert len(served.queue) == 0
    assert full.code == "would_wait_too_long"

    assert 1000 <= full.retry_after_ms <= 2000
    served.answer(0.5)
    assert served.ask() is None


def test_a_pace_that_falls_is_believed_at_once_and_one_that_rises_after_a_while(make):
    served = Served(make, 4_000.0)

    def most():
        start = len(served.placed)
        while served.ask() is None:
            assert len(served.placed) < 200
        return len(served.placed) - start

    for _ in range(200):
        served.ask()
        served.answer(0.1)
    fast = most()
    for _ in range(4):
        served.answer(1.0)
    for sequence in served.placed:
        served.queue.remove(sequence)
    served.placed.clear()
    slow = most()
    assert slow <= 6 < 15 < fast


def test_before_a_first_token_was_seen_what_is_assumed_of_prompts_decides(make):
    served = Served(make, 4_000.0)
    served.queue.assume(10.0)
    taken = 0
    while served.ask(num_prompt_tokens=100) is None:
        taken += 1
    assert taken == 2  # a third would come after 3 s, too near to 4
    for _ in range(2):
        served.answer(0.1)
    assert served.ask(num_prompt_tokens=100) is None
    unlimited = FairQueue(1000, 10**6)
    unlimited.assume(10.0)
    unlimited.max_wait_ms = 5_000.0
    for _ in range(5):
        unlimited.push([make("a", 100)], 0)
    with pytest.raises(QueueFull, match="wait 6 s"):
        unlimited.push([make("a", 100)], 0)


def test_a_prompt_that_takes_longer_than_the_target_is_let_in_while_little_is_ahead(make):
    served = Served(make, 4_000.0)
    for _ in range(20):
        served.ask(num_prompt_tokens=100)
        served.answer(0.5)
    assert served.ask(num_prompt_tokens=100) is None
    assert served.ask(num_prompt_tokens=5000) is None
    assert served.ask(num_prompt_tokens=2000) is not None
    while served.ask(num_prompt_tokens=100) is None:  # shorter ones pass it
        assert len(served.placed) < 20
    assert len(served.placed) >= 4


def test_the_end_of_a_prompt_without_a_token_says_nothing_of_the_pace(make):
    served = Served(make, 4_000.0)
    served.ask()
    (sequence,) = served.placed
    served.queue.remove(sequence)
    served.answer(1.0)
    assert not served.queue._pending
    assert served.queue._tokens.first_ms(5) == 0.0


@given(st.data())
def test_nothing_is_lost_or_served_twice(data):
    make, queue, now_ns = Makes(), FairQueue(30, 3000), 0
    waiting, placed, gone = {}, {}, set()
    for _ in range(data.draw(st.integers(0, 40))):
        now_ns += data.draw(st.integers(0, SECOND_NS))
        action = data.draw(st.sampled_from(("push", "push", "take", "end")))
        if action == "push":
            owner = data.draw(st.sampled_from(OWNERS))
            batch = [make(owner, *size) for size in data.draw(Sizes)]
            try:
                queue.push(batch, now_ns)
            except RequestError:
                continue
            waiting |= {sequence.seq_id: sequence for sequence in batch}
        elif action == "take" and waiting:
            sequence = take_next(queue, now_ns)
            placed[sequence.seq_id] = waiting.pop(sequence.seq_id)
        elif action == "end" and (waiting or placed):
            seq_id = data.draw(st.sampled_from([*waiting, *placed]))
            queue.remove(waiting.pop(seq_id, None) or placed.pop(seq_id))
            gone.add(seq_id)
        queue.check_invariants()
        assert {sequence.seq_id for sequence in queue} == set(waiting)
        assert {sequence.seq_id for sequence in queue.in_order(now_ns)} == set(waiting)
