"""Owners share blocks: none locks out another, and all that is preempted comes to its end."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.scheduler.routing.worker_routes import MAX_PREEMPTIONS
from engine.scheduler.sequences.sequence import Paused, Phase
from tests.worlds.router_world import World, expected_tokens

OWNERS = ("a", "b", "c", "d")
ARMS = ("colocated", "alias", "peer", "2x1 peer")
ASKED = st.lists(
    st.tuples(st.integers(0, 60), st.sampled_from(OWNERS), st.integers(1, 60), st.integers(1, 40)),
    min_size=2,
    max_size=16,
).map(sorted)
WEIGHTS = st.dictionaries(st.sampled_from(OWNERS), st.sampled_from((0.5, 2.0, 4.0)))
RETURNS = 2 + math.ceil(math.log(101) / math.log(9 / 8))
"""How often an owner's oldest sequence of 100 tokens comes back, each time gaining an eighth."""


class Watched(World):
    """Looks at each sequence that comes back while others wait."""

    def __init__(self, arm, **options):
        super().__init__(arm, max_queued=500, max_queued_tokens=50_000, **options)
        take_again = self.router.queue.take_again
        self.router.queue.take_again = lambda one: (self.look(one), take_again(one))

    def check(self):
        if self.now_ns % 7_000_000 == 0:  # the walks of test_router look after each message
            super().check()

    def look(self, coming):
        router = self.router
        if coming.owner in (over := router.allocator._over):
            assert router.queue.owners() <= over
        own = [one for one in router.at.paused.values() if one.owner == coming.owner]
        assert coming is min(own, key=lambda one: (one.stamps.arrived_ns, one.seq_id))


def ticks_until_finished(world, sequence):
    for ticks in range(1000):
        if sequence.is_finished:
            return ticks
        world.tick()
    raise AssertionError("it waits for ever")


@settings(max_examples=40, deadline=None)
@given(ASKED, st.integers(26, 90), st.sampled_from(ARMS), WEIGHTS)
def test_all_come_to_their_ends_and_none_waits_behind_what_comes_back(
    asked, num_blocks, arm, weights
):
    world = Watched(arm, num_blocks=num_blocks)
    world.router.set_weights(weights)
    sequences = []
    for tick in itertools.count():
        while len(sequences) < len(asked) and asked[len(sequences)][0] <= tick:
            _, owner, *size = asked[len(sequences)]
            sequences.append(world.sequence(*size, owner=owner))
            world.submit(sequences[-1])
        if len(sequences) == len(asked):
            break
        world.tick()
    world.run(ticks=20_000)
    for sequence in sequences:
        assert world.emitted[sequence.seq_id] == expected_tokens(sequence)
    world.assert_all_free()
    for owner in OWNERS:
        own = [one for one in sequences if one.owner == owner]
        most = len(own) * MAX_PREEMPTIONS + (len(sequences) - len(own)) * len(own) + RETURNS
        assert sum(one.num_preemptions for one in own) <= most


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("after_ticks", [0, 15, 40, 70])
def test_a_newcomer_does_not_wait_for_the_long_streams_of_a_flood(arm, after_ticks):
    world = Watched(arm, num_blocks=65)
    flood = [world.sequence(20 + i % 7, 70, owner="flood") for i in range(12)]
    world.submit(*flood)
    for _ in range(after_ticks):
        world.tick()
    num_lost = world.router.counters.preemptions
    chat = world.sequence(9, 8, owner="chat")
    world.submit(chat)
    ticks = ticks_until_finished(world, chat)
    assert ticks <= 30
    assert world.emitted[chat.seq_id] == expected_tokens(chat)
    assert chat.num_preemptions == 0
    assert world.router.counters.preemptions - num_lost <= 4
    world.run(ticks=20_000)
    for sequence in flood:
        assert world.emitted[sequence.seq_id] == expected_tokens(sequence)


@pytest.mark.parametrize("arm", ["colocated", "alias"])
def test_a_stream_that_fills_the_pool_gives_way_to_chats_and_comes_to_its_end(arm):
    world = Watched(arm, num_blocks=41)
    stream = world.sequence(100, 58, owner="stream")
    world.submit(stream)
    for _ in range(20):
        world.tick()
    waits, chats = [], []
    while not stream.is_finished:
        chats.append(world.sequence(30, 4, owner="chat"))
        world.submit(chats[-1])
        waits.append(ticks_until_finished(world, chats[-1]))
        world.tick()
    assert 1 < stream.num_preemptions <= RETURNS
    assert len(chats) > 4
    assert max(waits) <= 60  # its prompt is computed again, and an eighth more
    assert world.emitted[stream.seq_id] == expected_tokens(stream)
    for chat in chats:
        assert (chat.num_preemptions, world.emitted[chat.seq_id]) == (0, expected_tokens(chat))


def test_who_needs_more_than_its_share_takes_no_owners_last_sequence():
    world = Watched("colocated", num_blocks=41)
    first, second = world.sequence(90, 20, owner="a"), world.sequence(91, 20, owner="b")
    world.submit(first)
    world.tick()
    world.submit(second)
    world.run()
    assert (first.num_preemptions, second.num_preemptions) == (0, 0)


def test_of_growing_sequences_those_above_their_owners_share_lose_their_blocks():
    world = Watched("colocated", num_blocks=41)
    chat = world.sequence(8, 40, owner="chat")
    flood = [world.sequence(8, 40, owner="flood") for _ in range(5)]
    world.submit(*flood)
    world.submit(chat)
    world.run()
    assert chat.num_preemptions == 0
    assert sum(one.num_preemptions for one in flood) > 0


def test_what_has_lost_its_blocks_passes_no_other_owner_below_its_share():
    world = Watched("colocated", num_blocks=33)
    flood = [world.sequence(20, 40, owner="flood") for _ in range(6)]
    world.submit(*flood)
    while not world.router.at.paused:
        world.tick()
    heavy = world.sequence(56, 4, owner="other")
    world.submit(heavy)
    while heavy.phase is Phase.QUEUED:
        before = {one.seq_id for one in flood if isinstance(one.where, Paused)}
        world.tick()
        after = {one.seq_id for one in flood if isinstance(one.where, Paused)}
        assert before <= after
    world.run()
    assert world.emitted[heavy.seq_id] == expected_tokens(heavy)


@pytest.mark.parametrize("arm", ["colocated", "alias"])
def test_an_owner_that_has_nothing_gets_a_place_where_workers_take_no_more(arm, monkeypatch):
    monkeypatch.setattr("engine.scheduler.dispatcher.MAX_RUNNING_SEQUENCES", 4)
    world = Watched(arm, num_blocks=400)
    flood = [world.sequence(4, 90, owner="flood") for _ in range(8)]
    world.submit(*flood)
    for _ in range(10):
        world.tick()
    chat = world.sequence(4, 4, owner="chat")
    world.submit(chat)
    for _ in range(15):
        world.tick()
    assert chat.is_finished
    assert world.router.counters.preemptions == 1
    world.run()
    for sequence in (*flood, chat):
        assert world.emitted[sequence.seq_id] == expected_tokens(sequence)
