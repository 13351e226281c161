"""Blocks for running sequences, and what admission leaves them."""

from engine.scheduler.routing.worker_routes import MAX_PREEMPTIONS, positions_needed
from tests.worlds.fake_workers import BLOCK_SIZE
from tests.worlds.router_world import World


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
