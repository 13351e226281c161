import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine.scheduler.cache.block_pool import BlockState
from engine.scheduler.offload.copy_deadlines import CopyDeadlines
from engine.scheduler.offload.load_costs import DEADLINE_RATIO, OVERHEAD_MS, Costs
from engine.scheduler.offload.stores import LOOK_S, PAUSE_S, STORED_AT_ONCE
from engine.scheduler.offload.tier import MAX_DECLINED, MAX_MISSES, PROBE_INTERVAL_S
from tests.worlds.tiers import BLOCK_BYTES, CAPACITY, TierHarness

DEADLINE_S, MIN_DEADLINE_MS = CopyDeadlines().store_s, CopyDeadlines().load_ms
LATE_S = MIN_DEADLINE_MS / 1e3 + 0.01


@pytest.fixture
def tier():
    tier = TierHarness()
    yield tier
    tier.check()


def kept(tier, *tokens):
    """A chain that was used twice, is on disk, and in no pool any more."""
    chain = tier.chain(*tokens)
    tier.compute(chain)
    tier.compute(chain)
    tier.run()
    tier.forget_pool()
    tier.num_changes = 0
    return chain


def test_a_block_is_stored_when_it_is_used_a_second_time(tier):
    chain = tier.chain(1, 2, 3)
    tier.compute(chain)
    assert not tier.disk.jobs
    tier.compute(chain)
    tier.run()
    assert tier.ssd.index.num_leading(chain.hashes) == 3
    assert tier.ssd.counts.stored_blocks == 3
    tier.compute(chain)
    assert not tier.disk.jobs  # once is enough


def test_only_what_was_found_is_stored_and_not_what_follows_it(tier):
    tier.compute(tier.chain(1, 2))
    longer = tier.chain(1, 2, 3)
    tier.compute(longer)
    tier.run()
    assert tier.ssd.index.num_leading(longer.hashes) == 2


def test_a_block_that_is_computed_a_second_time_is_stored(tier):
    chain = tier.chain(1, 2, 3)
    tier.compute(chain)
    tier.forget_pool()
    tier.compute(tier.chain(1, 2))
    tier.run()
    assert tier.ssd.index.num_leading(chain.hashes) == 2


def test_what_is_told_to_be_computed_twice_by_one_prompt_is_used_once(tier):
    chain = tier.chain(1, 2)
    tier.compute(chain)
    tier.ssd.computed(chain.hashes)  # as at the worker that goes on with it
    tier.run()
    assert tier.ssd.counts.stored_blocks == 0


def test_a_block_that_is_being_stored_is_found_but_not_evicted(tier):
    chain = tier.chain(1, 2)
    tier.compute(chain)
    tier.compute(chain)
    tier.run(most=1)  # a slab was made, and the stores have begun
    assert tier.kv_pool.counts[BlockState.DRAINING] == 2
    assert tier.kv_pool.num_free == CAPACITY - 2
    assert tier.compute(chain) == 2
    tier.run()
    assert tier.kv_pool.num_free == CAPACITY


def test_a_disk_that_hangs_gives_back_what_it_has_not_begun_and_goes_off(tier):
    chain = tier.chain(1, 2, 3)
    tier.compute(chain)
    tier.compute(chain)
    tier.run(most=1)  # a slab was made, and the stores have begun
    tier.disk.begun = job = tier.disk.jobs[0]
    tier.pass_time(DEADLINE_S)
    assert tier.ssd.reason is not None
    assert "ssd.down" in tier.events
    assert (tier.kv_pool.counts[BlockState.DRAINING], tier.kv_pool.num_stuck) == (1, 1)
    assert tier.num_changes  # somebody may have waited for them
    tier.compute(tier.chain(4))
    tier.compute(tier.chain(4))
    assert len(tier.disk.jobs) == 3  # nothing new
    tier.disk.begun = None
    tier.disk.do(job)
    tier.disk.jobs.popleft()
    tier.ssd.done(job)
    tier.run()  # the cancelled ones come, and change nothing
    assert (tier.kv_pool.counts[BlockState.DRAINING], tier.kv_pool.num_stuck) == (0, 0)
    tier.pass_time(PROBE_INTERVAL_S)
    tier.run()
    assert tier.ssd.reason is None
    tier.compute(chain)
    tier.run()
    assert tier.ssd.index.num_leading(chain.hashes) >= 1


def test_a_slow_disk_that_goes_on_is_not_taken_to_hang(tier):
    chain = tier.chain(*range(8))
    tier.compute(chain)
    tier.compute(chain)
    tier.run(most=1)
    for _ in range(8):
        tier.pass_time(DEADLINE_S * 0.9)
        tier.run(most=1)
    assert tier.ssd.reason is None
    tier.run()


def test_a_load_that_hangs_keeps_only_what_has_begun(tier):
    chain = kept(tier, 1, 2)
    assert tier.ask(chain)
    tier.disk.begun = tier.disk.jobs[0]
    tier.pass_time(100)
    assert not tier.ask(chain)
    assert tier.kv_pool.num_stuck == tier.kv_pool.counts[BlockState.DRAINING] > 0
    tier.disk.begun = None
    tier.run()
    assert tier.kv_pool.num_stuck == tier.kv_pool.counts[BlockState.DRAINING] == 0


def test_damage_says_nothing_of_the_rate_and_declined_loads_have_it_measured_again(tier):
    chain = kept(tier, 1, 2)
    before = tier.costs.bytes_per_s
    for place in tier.disk.places:
        tier.disk.places[place] = None
    assert tier.ask(chain)
    tier.run()
    assert tier.costs.bytes_per_s == before
    slow = kept(tier, 5, 6)
    tier.costs.bytes_per_s = 1.0
    for seq_id in range(MAX_DECLINED):
        assert not tier.ask(slow, 2000 + seq_id)
    tier.run()
    assert tier.costs.bytes_per_s == 1e6  # as the probe says
    assert tier.ask(slow, 3000)
    tier.run()


def test_few_blocks_at_a_time_are_on_their_way_to_the_disk(tier):
    chain = tier.chain(*range(20))
    tier.compute(chain)
    tier.compute(chain)
    tier.run(most=1)
    assert tier.kv_pool.counts[BlockState.DRAINING] == STORED_AT_ONCE


def test_a_prompt_waits_for_its_blocks_and_finds_them_cached(tier):
    chain = kept(tier, 1, 2, 3)
    assert tier.ask(chain)
    assert tier.ssd.is_loading(1000)
    tier.run()
    assert not tier.ask(chain)
    assert tier.num_changes == 1
    assert tier.compute(chain) == 3
    assert (tier.ssd.counts.loaded_blocks, tier.ssd.counts.loaded_tokens) == (3, 12)


def test_who_is_placed_is_told_what_it_has_waited_for(tier):
    chain = kept(tier, 1, 2, 3)
    tier.ask(chain)
    tier.now_ns += 7
    tier.run()
    tier.now_ns += 100  # it waits for its turn
    restored = tier.ssd.end_wait(1000)
    assert restored[:2] == (12, 7)
    predicted = "predicted 5.0 ms to load, recomputing 1000000.0 ms; lost 0.0 ms"
    assert (restored.words[:6], restored.words.endswith(predicted)) == ("3 of 3", True)
    assert tier.ssd.end_wait(1000) is None


def test_who_gives_up_is_told_what_it_has_waited_for(tier):
    tier.ask(kept(tier, 1, 2, 3))
    tier.now_ns += 5
    assert tier.ssd.end_wait(1000)[:2] == (0, 5)


def test_only_what_the_pool_lacks_is_loaded(tier):
    chain = kept(tier, 1, 2, 3)
    tier.compute(tier.chain(1))
    assert tier.ask(chain)
    tier.run()
    assert tier.ssd.counts.loaded_blocks == 2
    assert tier.compute(chain) == 3


def test_nothing_is_loaded_where_computing_takes_less(tier):
    chain = kept(tier, 1, 2, 3)
    tier.compute_ms = 0.5 * tier.costs.predict_ms(3 * BLOCK_BYTES)
    assert not tier.ask(chain)
    assert not tier.disk.jobs
    assert tier.costs.num_declined == 1
    restored = tier.ssd.end_wait(1000)
    assert restored[:2] == (0, 0)
    words = "3 blocks not loaded from the SSD: predicted 5.0 ms to load, recomputing 2.5 ms"
    assert restored.words == words


def test_nothing_is_loaded_that_is_not_on_disk_from_the_first_block_on(tier):
    chain = kept(tier, 1, 2, 3)
    tier.ssd.index.drop(chain.hashes[0])
    assert not tier.ask(chain)


def test_a_block_that_two_prompts_wait_for_is_loaded_once(tier):
    chain = kept(tier, 1, 2, 3)
    assert tier.ask(chain, 1)
    assert tier.ask(tier.chain(1, 2, 9), 2)
    assert len(tier.disk.jobs) == 1
    tier.run()
    assert tier.num_changes == 2
    assert tier.ssd.counts.loaded_blocks == 3


def test_at_most_an_eighth_of_a_pool_waits_for_loads(tier):
    chain = kept(tier, *range(12))
    assert tier.ask(chain)
    assert tier.kv_pool.counts[BlockState.DRAINING] == CAPACITY // 8
    assert not tier.ask(kept_beside(tier), 2)
    tier.run()
    assert tier.compute(chain) == CAPACITY // 8


def kept_beside(tier):
    """Another chain on disk, made while a load is under way."""
    chain = tier.chain(50, 51)
    waiting = list(tier.disk.jobs)
    tier.disk.jobs.clear()
    tier.compute(chain)
    tier.compute(chain)
    tier.run()
    for block_hash in chain.hashes:
        tier.kv_pool._forget(tier.kv_pool.index.blocks([block_hash])[0])
    tier.disk.jobs.extend(waiting)
    return chain


def test_a_pool_of_a_few_blocks_has_one_of_them_waiting():
    tier = TierHarness(capacity=6)
    chain = kept(tier, 1, 2, 3)
    for num_there in (1, 2, 3):
        assert tier.ask(chain)
        assert len(tier.disk.jobs) == 1
        tier.run()
        assert len(tier.kv_pool.index.blocks(chain.hashes)) == num_there
    assert not tier.ask(chain)
    tier.check()


def test_what_a_load_needs_before_it_is_not_evicted_for_it():
    tier = TierHarness(capacity=16)
    chain = kept(tier, 1, 2, 3)
    tier.compute(tier.chain(1))  # the least recently used from now on
    tier.compute(tier.chain(*range(100, 115)))
    assert tier.kv_pool.num_free == 16
    assert tier.kv_pool.counts[BlockState.FREE] == 0
    assert tier.ask(chain)
    tier.run()
    assert tier.compute(chain) == 3


def test_a_prompt_waits_no_longer_than_a_deadline_and_then_does_not_ask_again(tier):
    chain = kept(tier, 1, 2, 3)
    assert tier.ask(chain)
    tier.disk.begun = tier.disk.jobs[0]
    tier.pass_time(LATE_S)
    assert not tier.ask(chain)
    assert tier.num_changes == 1
    assert tier.ssd.counts.missed_deadlines == 1
    assert tier.kv_pool.counts[BlockState.DRAINING] == 3  # a thread may be in the middle of it
    tier.run()
    assert tier.kv_pool.num_free == CAPACITY


def test_who_has_gone_is_not_waited_for(tier):
    chain = kept(tier, 1, 2, 3)
    tier.ask(chain)
    tier.ssd.end_wait(1000)
    tier.run()
    assert tier.ssd.counts.loaded_blocks == 0
    tier.pass_time(60)
    assert tier.ssd.counts.missed_deadlines == tier.num_changes == 0


def test_a_damaged_block_is_dropped_and_computed(tier):
    chain = kept(tier, 1, 2, 3)
    place = tier.ssd.index.begin_load(chain.hashes[1])
    tier.ssd.index.end_load(place)
    tier.disk.places[place.place] = [b"something else"]
    assert tier.ask(chain)
    tier.run()
    assert tier.events == ["ssd.damaged"]
    assert tier.compute(chain) == 1
    assert chain.hashes[1] not in tier.ssd.index
    assert tier.ssd.reason is None
    assert [b"something else"] not in tier.disk.places.values()  # nothing of it is left


def miss(tier, chain, seq_id):
    assert tier.ask(chain, seq_id)
    tier.pass_time(LATE_S + DEADLINE_RATIO * tier.costs.predict_ms(3 * BLOCK_BYTES) / 1e3)


def test_three_missed_deadlines_take_the_tier_down_until_a_probe_passes(tier):
    chain = kept(tier, 1, 2, 3)
    for seq_id in range(MAX_MISSES):
        assert tier.ssd.reason is None
        miss(tier, chain, seq_id)
    assert "timed out" in tier.ssd.reason
    assert tier.events == ["ssd.down"]
    assert not tier.ask(chain, 99)
    tier.compute(tier.chain(7))
    tier.compute(tier.chain(7))
    tier.run()
    assert tier.ssd.counts.stored_blocks == 3  # those from before
    tier.disk.error = "input/output error"
    tier.pass_time(PROBE_INTERVAL_S)
    tier.run()
    assert tier.ssd.reason is not None
    tier.disk.error = None
    tier.pass_time(PROBE_INTERVAL_S)
    tier.run()
    assert tier.ssd.reason is None
    assert tier.events == ["ssd.down", "ssd.up"]
    assert tier.ask(chain, 100)


def test_a_load_in_time_makes_up_for_misses_before_it(tier):
    chain = kept(tier, 1, 2, 3)
    for seq_id in range(MAX_MISSES - 1):
        miss(tier, chain, seq_id)
        tier.run()
    assert tier.ask(chain, 50)
    tier.run()
    tier.forget_pool()
    miss(tier, chain, 51)
    assert tier.ssd.reason is None


def test_a_disk_that_cannot_be_read_is_found_out(tier):
    chain = kept(tier, 1, 2, 3)
    tier.disk.error = "input/output error"
    for seq_id in range(MAX_MISSES):
        assert tier.ask(chain, seq_id)
        tier.run()
    assert tier.ssd.reason == "reading fails: input/output error"
    assert tier.kv_pool.num_free == CAPACITY


def test_a_full_disk_is_said_once_and_tried_again_later(tier):
    tier.disk.error = "no space left on device"
    chain = tier.chain(1, 2)
    tier.compute(chain)
    tier.compute(chain)
    tier.run()
    assert tier.events == ["ssd.refused"]
    assert "no space left" in tier.ssd.limit
    assert tier.kv_pool.num_free == CAPACITY
    tier.ssd.sweep()  # which it can do says nothing of what it takes
    tier.disk.error = None
    tier.run()
    assert tier.ssd.limit is not None
    tier.disk.error = "no space left on device"
    tier.pass_time(PAUSE_S)
    tier.run()
    assert tier.events == ["ssd.refused"]
    tier.disk.error = None
    tier.pass_time(PAUSE_S)
    tier.run()
    assert tier.ssd.limit is None
    assert tier.ssd.index.num_leading(chain.hashes) == 2


def test_a_disk_that_others_fill_is_a_limit_until_there_is_room_again():
    tier, full = TierHarness(num_slabs=2), "its disk is full"
    tier.disk.num_slabs, tier.disk.limit = 1, full  # of two that the cap has room for
    for n in range(6):
        chain = tier.chain(*range(10 * n, 10 * n + 2))
        tier.compute(chain)
        tier.compute(chain)
        tier.run()
    assert (tier.ssd.limit, len(tier.ssd.index)) == (full, 4)
    tier.ssd.sweep()
    tier.run()
    assert tier.ssd.limit == full
    tier.disk.num_slabs, tier.disk.limit = 1, None
    tier.pass_time(LOOK_S)
    tier.run()
    assert tier.ssd.limit is None
    tier.compute(chain := tier.chain(90, 91))
    tier.compute(chain)
    tier.run()
    assert len(tier.ssd.index) == 6
    assert tier.events == []  # the alert says it


def test_beyond_the_cap_the_least_recently_used_goes():
    tier = TierHarness(num_slabs=5)
    for n in range(12):
        chain = tier.chain(*range(10 * n, 10 * n + 2))
        tier.compute(chain)
        tier.compute(chain)
        tier.run()
        tier.check()
    assert len(tier.ssd.index) <= 20
    assert tier.ssd.index.num_evicted > 0
    assert chain.hashes[0] in tier.ssd.index


def test_what_is_warm_is_stored_at_the_end(tier):
    chain = tier.chain(1, 2, 3)
    tier.compute(chain)
    assert tier.ssd.num_pending == 0
    tier.ssd.flush()
    assert tier.ssd.num_pending == 3
    assert tier.disk.write_share == 1
    tier.run()
    assert tier.ssd.num_pending == 0
    assert tier.ssd.index.num_leading(chain.hashes) == 3


def test_clearing_leaves_nothing_on_disk(tier):
    chain = kept(tier, 1, 2, 3)
    assert tier.ssd.clear() == 3
    tier.run()
    assert tier.disk.places == {}
    assert not tier.ask(chain)


def test_old_blocks_expire_and_are_erased():
    tier = TierHarness(max_age_s=100)
    kept(tier, 1, 2, 3)
    tier.pass_time(101)
    tier.ssd.sweep()
    job = tier.disk.jobs[-1]
    assert job.oldest_s == tier.ssd.index.oldest_s(tier.ssd._context.now_s()), (
        "others' go with them"
    )
    tier.run()
    assert tier.disk.places == {}
    assert tier.ssd.index.num_expired == 3
    tier.check()


def test_slabs_that_somebody_deletes_are_forgotten_and_said(tier):
    chain = kept(tier, 1, 2, 3)
    entry = tier.ssd.index.begin_load(chain.hashes[0])
    tier.ssd.index.end_load(entry)
    tier.disk.lost = [entry.place.slab]
    tier.ssd.sweep()
    tier.run()
    assert tier.events == ["ssd.lost"]
    assert not tier.ask(chain)


def test_costs_follow_what_loads_take_and_add_up_excess_time():
    costs = Costs(bytes_per_s=1e6)
    assert costs.predict_ms(1000) == OVERHEAD_MS + 1
    assert costs.is_worth_it(1, None)
    costs.loaded(1000, elapsed_ms=5, compute_ms=2)
    assert costs.predict_ms(1000) > OVERHEAD_MS + 1
    assert costs.excess_load_ms == 3
    costs.loaded(0, elapsed_ms=10, compute_ms=4)  # given up: all of the wait was in vain
    assert costs.excess_load_ms == 13
    costs.loaded(1000, elapsed_ms=1, compute_ms=None)
    assert costs.excess_load_ms == 13
    assert costs.num_loads == 3


class Walk(RuleBasedStateMachine):
    """Prompts, a disk that does things in its own time and fails, time that passes."""

    @initialize(capacity=st.integers(8, 40), num_slabs=st.integers(0, 4))
    def begin(self, capacity, num_slabs):
        self.tier = TierHarness(capacity=capacity, num_slabs=num_slabs, max_age_s=50)
        self.seq_id = 5000
        self.waiting = {}

    @rule(tokens=st.lists(st.integers(0, 2), min_size=1, max_size=6))
    def arrive(self, tokens):
        self.seq_id += 1
        self.waiting[self.seq_id] = self.tier.chain(*tokens)

    @rule()
    def dispatch(self):
        for seq_id, chain in list(self.waiting.items()):
            if not self.tier.ask(chain, seq_id) and self.tier.kv_pool.num_free >= len(chain):
                del self.waiting[seq_id]
                self.tier.ssd.end_wait(seq_id)
                self.tier.compute(chain)

    @rule(data=st.data())
    def leave(self, data):
        if self.waiting:
            seq_id = data.draw(st.sampled_from(sorted(self.waiting)))
            del self.waiting[seq_id]
            self.tier.ssd.end_wait(seq_id)

    @rule(most=st.integers(1, 5), error=st.sampled_from([None, None, None, "it is broken"]))
    def work(self, most, error):
        self.tier.disk.error = error
        self.tier.run(most)

    @rule(data=st.data())
    def damage(self, data):
        places = self.tier.disk.places
        if places:
            places[data.draw(st.sampled_from(sorted(places)))] = b"damaged"

    @rule(seconds=st.sampled_from([0.1, 1.0, 30.0]))
    def wait(self, seconds):
        self.tier.pass_time(seconds)

    @rule()
    def sweep(self):
        self.tier.ssd.sweep()

    @rule()
    def restart(self):
        if all(count == 0 for count in self.tier.kv_pool.num_commands):
            self.tier.forget_pool()

    @invariant()
    def holds(self):
        if hasattr(self, "tier"):
            self.tier.check()

    def teardown(self):
        if hasattr(self, "tier"):
            self.tier.disk.error = None
            self.tier.run()
            assert self.tier.kv_pool.num_free == self.tier.kv_pool.capacity
            assert not any(map(self.tier.ssd.is_loading, self.waiting))


Walk.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestWalk = Walk.TestCase
