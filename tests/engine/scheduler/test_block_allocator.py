"""Blocks for running sequences: what admission leaves them, and which sequence is preempted."""

from hypothesis import given
from hypothesis import strategies as st

from engine.scheduler.block_allocator import PreemptionCandidate, victim
from engine.scheduler.routing.worker_routes import MAX_PREEMPTIONS, positions_needed
from engine.scheduler.sequences.sequence import Sequence, Stamps
from engine.scheduler.sequences.sequence_table import age
from engine.wire.run_spec import RunSpec
from engine.wire.sampling import SamplingParams
from tests.worlds.fake_workers import BLOCK_SIZE
from tests.worlds.router_world import World


def holder(seq_id, arrived_ns, num_freed, num_lost, num_preemptions=0, is_short=False):
    sampling = SamplingParams(max_tokens=9, seed=0)
    sequence = Sequence(seq_id, "r", 0, [1], RunSpec(sampling), Stamps(arrived_ns))
    sequence.num_preemptions = num_preemptions
    return PreemptionCandidate(sequence, num_freed, num_lost, is_short)


HOLDERS = st.lists(
    st.tuples(
        st.integers(0, 5), st.integers(0, 4), st.integers(0, 40), st.integers(0, MAX_PREEMPTIONS)
    ),
    max_size=8,
).map(lambda rows: [holder(seq_id, *row) for seq_id, row in enumerate(rows)])


@given(HOLDERS)
def test_the_victim_costs_least_for_each_block_and_is_never_the_oldest(holders):
    found = victim(holders)
    oldest = min(holders, key=lambda each: age(each.sequence), default=None)
    open_to_it = [
        each
        for each in holders
        if each is not oldest and each.num_freed and each.sequence.num_preemptions < MAX_PREEMPTIONS
    ]
    if found is None:
        assert not open_to_it
        return
    assert found in open_to_it
    for other in open_to_it:
        # lost by freed, compared without dividing
        assert found.num_lost * other.num_freed <= other.num_lost * found.num_freed


def test_of_equals_the_youngest_loses_its_blocks():
    holders = [holder(1, 0, 2, 8), holder(2, 5, 2, 8), holder(3, 9, 2, 8), holder(4, 7, 2, 8)]
    assert victim(holders).sequence.seq_id == 3


def test_what_frees_nothing_or_was_preempted_too_often_is_left_alone():
    holders = [holder(1, 0, 2, 8), holder(2, 1, 0, 0), holder(3, 2, 2, 1, MAX_PREEMPTIONS)]
    assert victim(holders) is None


def test_who_was_preempted_too_often_goes_last_and_only_if_it_is_short_itself():
    short, fresh = holder(2, 1, 2, 1, MAX_PREEMPTIONS, True), holder(3, 2, 2, 8)
    assert victim([holder(1, 0, 2, 8), short]) is short
    assert victim([holder(1, 0, 2, 8), short, fresh]) is fresh
    assert victim([short]) is None


def growing_world(num_blocks=65):
    """Have one sequence decode that will need more blocks."""
    world = World("colocated", num_blocks=num_blocks)
    growing = world.sequence(4, 40)
    world.submit(growing)
    while len(world.emitted.get(growing.seq_id, [])) < 2:
        world.tick()
    return world, growing, world.ledger.pools["kv"]


def test_an_admission_leaves_the_block_that_a_growing_sequence_needs_next():
    world, _, pool = growing_world(num_blocks=13)
    newcomer = world.sequence(pool.num_free * BLOCK_SIZE - 1, 1)  # it would take all free blocks
    world.submit(newcomer)
    world.tick()
    assert newcomer in list(world.router.queue.in_order(world.now_ns))
    world.run()
    assert len(world.emitted[newcomer.seq_id]) == 1
    assert world.router.counters.preemptions == 0


def test_free_blocks_leave_out_what_growing_and_short_sequences_need():
    world, growing, pool = growing_world()
    allocator = world.router.allocator
    assert allocator.num_free() == {"kv": pool.num_free - 1}
    growing.num_preemptions = MAX_PREEMPTIONS  # it gets blocks for its whole length now
    allocator.note(growing)
    num_held = len(world.ledger.table(growing.seq_id, "kv"))
    num_lacking = pool.num_blocks_for(positions_needed(growing)) - num_held
    assert num_lacking > 1
    assert allocator.num_free() == {"kv": pool.num_free - 1 - num_lacking}
    assert allocator.grow() == []
    assert allocator.num_free() == {"kv": pool.num_free}
