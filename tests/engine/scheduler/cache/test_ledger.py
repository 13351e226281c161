"""The ledger: every block has one state, and none is free too early."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.errors import InvariantViolated
from engine.scheduler.cache.block_pool import BlockPool, BlockState
from engine.scheduler.cache.hashes import PrefixHasher
from engine.scheduler.cache.ledger import Ledger

HASHER = PrefixHasher(bytes(32), b"", 4)


def make_ledger(num_blocks=9):
    return Ledger([BlockPool("kv", num_blocks, 4), BlockPool("ring", 5, 4)])


def test_block_zero_is_never_allocated():
    ledger = make_ledger()
    assert ledger.reserve(1, {"kv": 8})
    assert 0 not in ledger.table(1, "kv")
    assert not ledger.reserve(2, {"kv": 1})


def test_reserve_takes_from_all_pools_or_from_none():
    ledger = make_ledger()
    assert not ledger.reserve(1, {"kv": 2, "ring": 5})
    assert ledger.pools["kv"].num_free == 8
    assert ledger.table(1, "kv") == []


def test_released_block_named_by_a_command_drains_until_the_answer():
    ledger = make_ledger()
    ledger.reserve(1, {"kv": 2})
    table = list(ledger.table(1, "kv"))
    ledger.open_command(("admit", 1, 1), "prefill", {"kv": table})
    ledger.release_all(1)
    pool = ledger.pools["kv"]
    assert [pool.state(b) for b in table] == [BlockState.DRAINING] * 2
    ledger.check_invariants()
    assert ledger.close_command(("admit", 1, 1))
    assert pool.num_free == 8
    assert ledger.is_idle


def test_answering_twice_is_noticed_and_harmless():
    ledger = make_ledger()
    ledger.reserve(1, {"kv": 1})
    ledger.open_command(("copy", 7, 0), "decode", {"kv": list(ledger.table(1, "kv"))})
    assert ledger.close_command(("copy", 7, 0))
    assert not ledger.close_command(("copy", 7, 0))
    ledger.check_invariants()


def test_reaping_a_dead_worker_ends_only_its_commands():
    ledger = make_ledger()
    ledger.reserve(1, {"kv": 1})
    ledger.reserve(2, {"kv": 1})
    ledger.open_command(("admit", 1, 1), "prefill", {"kv": list(ledger.table(1, "kv"))})
    ledger.open_command(("admit", 2, 1), "decode", {"kv": list(ledger.table(2, "kv"))})
    ledger.release_all(1)
    ledger.release_all(2)
    assert ledger.reap("prefill") == [("admit", 1, 1)]
    assert ledger.pools["kv"].counts[BlockState.DRAINING] == 1
    ledger.check_invariants()


def test_opening_a_command_twice_is_a_bug():
    ledger = make_ledger()
    ledger.open_command(("admit", 1, 1), "prefill", {"kv": []})
    with pytest.raises(InvariantViolated):
        ledger.open_command(("admit", 1, 1), "prefill", {"kv": []})


def test_a_block_stays_while_somebody_refers_to_it():
    ledger = make_ledger()
    ledger.reserve(1, {"kv": 2})
    table = list(ledger.table(1, "kv"))
    ledger.refer(2, "kv", table[:1])
    ledger.check_invariants()
    ledger.release_all(1)
    pool = ledger.pools["kv"]
    assert [pool.state(b) for b in table] == [BlockState.RESERVED, BlockState.FREE]
    ledger.release(2, "kv", table[:1])
    assert pool.num_free == 8
    ledger.check_invariants()


def test_a_command_can_grow_and_be_answered_in_parts():
    ledger = make_ledger()
    ledger.reserve(1, {"kv": 3})
    first, *rest = ledger.table(1, "kv")
    ledger.open_command(("admit", 1, 1), "prefill", {"kv": [first]})
    ledger.extend_command(("admit", 1, 1), {"kv": rest})
    ledger.release_all(1)
    ledger.answer_part(("admit", 1, 1), {"kv": [first, rest[0]]})
    ledger.check_invariants()
    pool = ledger.pools["kv"]
    assert (pool.num_free, pool.state(rest[1])) == (7, BlockState.DRAINING)
    ledger.close_command(("admit", 1, 1))
    assert pool.num_free == 8
    ledger.check_invariants()


def published(ledger, owner, count, salt=""):
    """The owner's blocks of a chain of so many, full and computed."""
    chain = HASHER.chain(range(4 * count), HASHER.scope(salt))
    assert ledger.reserve(owner, {"kv": count + 1})
    ledger.publish(owner, "kv", chain, range(count), "ana")
    return chain


def test_what_nobody_needs_is_cached_and_taken_last():
    ledger = make_ledger()
    chain, pool = published(ledger, 1, 3), ledger.pools["kv"]
    table = list(ledger.table(1, "kv"))
    ledger.release_all(1)
    cached, free = BlockState.CACHED, BlockState.FREE
    assert [pool.state(b) for b in table] == [cached, cached, cached, free]
    assert pool.num_free == 8
    ledger.check_invariants()
    assert ledger.reserve(2, {"kv": 6})
    assert pool.index.blocks(chain.hashes) == table[:2]  # one was needed, the tail
    assert pool.index.num_evicted == 1
    ledger.check_invariants()


def test_what_is_found_is_shared_and_only_the_rest_is_new():
    ledger = make_ledger()
    chain, pool = published(ledger, 1, 3), ledger.pools["kv"]
    there = pool.index.blocks(chain.hashes)
    assert ledger.reserve(2, {"kv": 5}, {"kv": there})
    assert ledger.table(2, "kv")[:3] == ledger.table(1, "kv")[:3]
    assert pool.num_free == 8 - 4 - 2
    ledger.check_invariants()
    ledger.release_all(1)
    assert pool.index.blocks(chain.hashes) == there
    ledger.release_all(2)
    assert pool.counts[BlockState.CACHED] == 3


def test_a_hit_does_not_count_as_room_for_the_rest_of_its_sequence():
    ledger = make_ledger()
    chain, pool = published(ledger, 1, 3), ledger.pools["kv"]
    ledger.release_all(1)
    there = pool.index.blocks(chain.hashes)
    assert not ledger.reserve(2, {"kv": 9}, {"kv": there})
    assert pool.counts[BlockState.CACHED] == 3, "nothing is kept of what did not fit"
    assert ledger.reserve(2, {"kv": 8}, {"kv": there})
    assert ledger.table(2, "kv")[:3] == there
    ledger.check_invariants()


def test_a_hashed_block_that_a_worker_may_read_is_found_and_not_evicted():
    ledger = make_ledger()
    chain, pool = published(ledger, 1, 2), ledger.pools["kv"]
    there = pool.index.blocks(chain.hashes)
    ledger.open_command(("copy", 1, 0), "decode", {"kv": there})
    ledger.release_all(1)
    assert not ledger.reserve(2, {"kv": 7})
    assert ledger.reserve(2, {"kv": 8}, {"kv": there})
    ledger.check_invariants()


def test_a_twin_gets_no_hash():
    ledger = make_ledger()
    published(ledger, 1, 2)
    published(ledger, 2, 2)
    ledger.release_all(2)
    ledger.check_invariants()
    assert ledger.pools["kv"].counts[BlockState.CACHED] == 0
    ledger.release_all(1)
    assert ledger.pools["kv"].counts[BlockState.CACHED] == 2


def test_lost_memory_has_no_hashes():
    ledger = make_ledger()
    chain, pool = published(ledger, 1, 2), ledger.pools["kv"]
    other = published(ledger, 2, 1, "salt")
    ledger.release_all(1)
    pool.lose()
    ledger.check_invariants()
    assert pool.index.num_hit(chain.hashes) == pool.index.num_hit(other.hashes) == 0
    assert pool.counts[BlockState.FREE] == 6


def test_blocks_whose_memory_exists_are_taken_before_unused_ones():
    ledger = make_ledger()
    ledger.reserve(1, {"kv": 2})
    used = list(ledger.table(1, "kv"))
    ledger.release_all(1)
    ledger.reserve(2, {"kv": 2})
    assert sorted(ledger.table(2, "kv")) == used


@pytest.mark.parametrize("damage", ["references", "counts", "free", "commands"])
def test_check_invariants_finds_damage(damage):
    ledger = make_ledger()
    ledger.reserve(1, {"kv": 2})
    pool = ledger.pools["kv"]
    block_id = ledger.table(1, "kv")[0]
    match damage:
        case "references":
            pool.num_references[block_id] = 2
        case "counts":
            pool.counts[BlockState.FREE] += 1
        case "free":
            pool.free_block_ids.append(block_id)
        case "commands":
            pool.num_commands[block_id] += 1
    with pytest.raises(InvariantViolated):
        ledger.check_invariants()


@given(st.integers(0, 1000), st.integers(1, 64))
def test_num_blocks_for_is_just_enough(num_tokens, block_size):
    pool = BlockPool("kv", 2, block_size)
    count = pool.num_blocks_for(num_tokens)
    assert count * block_size >= num_tokens > (count - 1) * block_size or num_tokens == count == 0


class LedgerWalk(RuleBasedStateMachine):
    """Any legal order of operations keeps the books."""

    def __init__(self):
        super().__init__()
        self.ledger = make_ledger(17)
        self.owners = set()
        self.commands = []
        self.next_id = 1

    @rule(
        kv=st.integers(0, 6),
        staging=st.integers(0, 2),
        salt=st.sampled_from("abc"),
        user=st.sampled_from(["ana", "ben"]),
    )
    def reserve(self, kv, staging, salt, user):
        """With what is found of a chain; the rest of it is computed, but for the last block."""
        owner, self.next_id = self.next_id, self.next_id + 1
        chain = HASHER.chain(range(4 * max(kv - 1, 0)), HASHER.scope(salt))
        pool = self.ledger.pools["kv"]
        found = pool.index.blocks(chain.hashes)
        assert len(found) <= pool.index.num_hit(chain.hashes)
        if self.ledger.reserve(owner, {"kv": kv, "ring": staging}, {"kv": found}):
            self.owners.add(owner)
            assert self.ledger.table(owner, "kv")[: len(found)] == found
            new = self.ledger.table(owner, "kv")[len(found) :]
            assert not any(block_id in pool.index for block_id in new)
            self.ledger.publish(owner, "kv", chain, range(len(found), len(chain)), user)

    @rule()
    def lose(self):
        """The memory of a pool is lost with what was in it."""
        self.ledger.pools["kv"].lose()

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), worker=st.sampled_from(["prefill", "decode"]))
    def command(self, data, worker):
        owner = data.draw(st.sampled_from(sorted(self.owners)))
        key, self.next_id = ("copy", self.next_id, 0), self.next_id + 1
        tables = {pool: list(self.ledger.table(owner, pool)) for pool in ("kv", "ring")}
        self.ledger.open_command(key, worker, tables)
        self.commands.append(key)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def share(self, data):
        owner = data.draw(st.sampled_from(sorted(self.owners)))
        other, self.next_id = self.next_id, self.next_id + 1
        self.ledger.refer(other, "kv", list(self.ledger.table(owner, "kv")))
        self.owners.add(other)

    @precondition(lambda self: self.commands)
    @rule(data=st.data())
    def answer_in_part(self, data):
        key = data.draw(st.sampled_from(self.commands))
        if self.ledger.is_open(key):
            named = self.ledger._commands[key].blocks.get("kv", [])
            count = data.draw(st.integers(0, len(named)))
            self.ledger.answer_part(key, {"kv": named[:count]})

    @precondition(lambda self: self.commands)
    @rule(data=st.data())
    def answer(self, data):
        key = data.draw(st.sampled_from(self.commands))
        self.commands.remove(key)
        self.ledger.close_command(key)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def release(self, data):
        owner = data.draw(st.sampled_from(sorted(self.owners)))
        self.owners.remove(owner)
        self.ledger.release_all(owner)

    @rule(worker=st.sampled_from(["prefill", "decode"]))
    def reap(self, worker):
        self.ledger.reap(worker)

    @invariant()
    def books_add_up(self):
        self.ledger.check_invariants()
        for pool in self.ledger.pools.values():
            assert sum(pool.counts.values()) == pool.capacity

    def teardown(self):
        for owner in self.owners:
            self.ledger.release_all(owner)
        for key in self.commands:
            self.ledger.close_command(key)
        assert all(p.num_free == p.capacity for p in self.ledger.pools.values())


TestLedgerWalk = LedgerWalk.TestCase
TestLedgerWalk.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


def test_a_pool_learns_its_size_while_nobody_has_any_of_it():
    ledger = Ledger([BlockPool("kv", 100, 4)])
    assert ledger.resize("kv", 9) == 8 * 4
    assert ledger.pools["kv"].num_free == 8
    ledger.check_invariants()
    assert ledger.reserve(1, {"kv": 1})
    assert ledger.resize("kv", 9) == 8 * 4
    with pytest.raises(InvariantViolated):
        ledger.resize("kv", 10)
