import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.blocks import BlockPool, BlockState, Ledger
from engine.errors import InvariantViolated


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

    @rule(kv=st.integers(0, 6), ring=st.integers(0, 2))
    def reserve(self, kv, ring):
        owner, self.next_id = self.next_id, self.next_id + 1
        if self.ledger.reserve(owner, {"kv": kv, "ring": ring}):
            self.owners.add(owner)

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
