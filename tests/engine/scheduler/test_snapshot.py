"""A snapshot is of one moment, whatever the router does next."""

from __future__ import annotations

import copy

import pytest

from engine.scheduler.sequences.sequence import Phase
from engine.wire.finish_reason import FinishReason
from tests.worlds.router_world import ARMS, World, expected_tokens


@pytest.mark.parametrize("arm", ARMS)
def test_a_snapshot_stays_as_it_was(arm):
    world = World(arm)
    first, second = world.sequence(20, 6), world.sequence(30, 4)
    world.submit(first, second)
    world.tick()
    before = world.router.snapshot(world.now_ns)
    kept = copy.deepcopy(before)
    world.run()
    assert before == kept
    assert before != world.router.snapshot(world.now_ns)


@pytest.mark.parametrize("arm", ARMS)
def test_its_parts_agree_with_each_other(arm):
    world = World(arm)
    sequences = [world.sequence(12 + 9 * index, 5) for index in range(4)]
    world.submit(*sequences)
    while not all(one.is_finished for one in sequences):
        now = world.router.snapshot(world.now_ns)
        num_open = sum(not one.is_finished for one in sequences)
        assert sum(now.phases.values()) == num_open
        on_workers = sum(worker.num_sequences for worker in now.workers.values())
        assert on_workers == now.phases.get(Phase.PREFILLING, 0) + now.phases.get(Phase.DECODING, 0)
        for pool in now.pools:
            assert sum(pool.counts.values()) == pool.capacity
        for one in sequences:
            assert bool(now.num_blocks(one.seq_id)) == bool(
                world.router.ledger.owners() & {one.seq_id}
            )
        world.tick()


def test_a_worker_owes_until_it_has_let_go():
    world = World("alias")
    sequence = world.sequence(20, 30)
    world.submit(sequence)
    world.router.abort(sequence, FinishReason.ABORT, world.now_ns)
    assert world.router.workers_now()["prefill"].owes
    world.run()
    assert not world.router.workers_now()["prefill"].owes


def test_a_worker_owes_nothing_while_it_waits_for_blocks_that_another_has_to_free():
    world = World("alias", num_blocks=17)
    growing, long = world.sequence(4, 50), world.sequence(40, 2)
    world.submit(growing)
    while growing.worker != "decode":
        world.tick()
    world.submit(long)
    assert long.worker == "prefill"
    decode, owed, stepped = world.workers["decode"], [], []
    for _ in range(30):  # prefill gets no core
        world.receive(decode)
        owed.append(world.router.workers_now()["decode"].owes)
        world.step(decode)
        stepped.append(decode.has_stepped)
        while decode.outbox:
            world.deliver(decode)
    assert owed == stepped
    assert (owed[0], owed[-1]) == (True, False)
    assert world.router.workers_now()["prefill"].owes
    world.run()
    for sequence in (growing, long):
        assert world.emitted[sequence.seq_id] == expected_tokens(sequence)
