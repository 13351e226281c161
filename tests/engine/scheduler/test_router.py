import random

import pytest

from engine.errors import InvariantViolated, QueueFull, RequestError
from engine.scheduler.recovery import MAX_SUSPICIONS
from engine.scheduler.routing.elastic import PairChoice
from engine.scheduler.routing.outcomes import Outcome
from engine.scheduler.routing.roles_in_force import ROLES
from engine.scheduler.routing.worker_routes import MAX_PREEMPTIONS, PORTION_TOKENS, Pair
from engine.scheduler.sequences.sequence import On, Phase, Waiting
from engine.wire.finish_reason import FinishReason
from engine.wire.messages import Copy, Release
from tests.worlds.fake_workers import BLOCK_SIZE
from tests.worlds.router_world import ARMS, COPYING, World, expected_tokens, walk


@pytest.fixture(params=ARMS)
def world(request):
    return World(request.param)


def test_sequences_come_out_whole_and_every_block_comes_back(world):
    sequences = [world.sequence(n, m) for n, m in [(1, 1), (4, 1), (3, 9), (17, 4), (40, 20)]]
    world.submit(*sequences)
    world.run()
    for sequence in sequences:
        assert world.emitted[sequence.seq_id] == expected_tokens(sequence)
        assert sequence.finish_reason is FinishReason.LENGTH
    world.assert_all_free()


def test_stamps_are_complete_and_in_order(world):
    sequence = world.sequence(10, 5)
    world.submit(sequence)
    world.run()
    s = sequence.stamps
    assert s.started_ns <= s.first_token_ns <= s.second_token_ns <= s.last_token_ns
    assert s.last_token_ns == s.finished_ns
    assert s.decode_started_ns is not None
    assert (s.attached_ns is None) == world.topology.is_colocated
    assert sequence.transport == world.topology.transport


def test_a_one_token_request_takes_nothing_on_the_decode_side():
    world = World("shm")
    sequence = world.sequence(8, 1)
    world.submit(sequence)
    assert world.ledger.table(sequence.seq_id, "decode") == []
    world.run()
    assert sequence.transport is None
    assert sequence.stamps.attached_ns is None


def test_blocks_come_as_they_are_needed_and_in_one_message_for_all():
    world = World("colocated", num_blocks=33)
    sequences = [world.sequence(5, 30), world.sequence(6, 30)]
    told = []
    send = world.router.allocator._send
    world.router.allocator._send = lambda name, command: (told.append(command), send(name, command))
    world.submit(*sequences)
    assert [len(world.ledger.table(s.seq_id, "kv")) for s in sequences] == [4, 4]
    world.run()
    for sequence in sequences:
        assert world.emitted[sequence.seq_id] == expected_tokens(sequence)
        assert sequence.num_preemptions == 0
    extensions = [[each.seq_id for each in extend.extensions] for extend in told]
    assert [1, 2] in extensions
    assert sum(map(len, extensions)) == 2 * (9 - 4)


def test_a_pool_that_is_too_small_for_all_gives_everybody_a_turn(world):
    for pool in world.ledger.pools.values():
        if pool.name != "ring":
            world.ledger.resize(pool.name, 17)
    sequences = [world.sequence(n, 40) for n in (10, 9, 12, 7, 11, 8)]
    world.submit(*sequences)
    ended = []
    while not world.is_quiet:
        before = set(world.ended)
        world.tick()
        ended += set(world.ended) - before
    assert world.router.counters.preemptions == sum(s.num_preemptions for s in sequences) > 0
    assert max(s.num_preemptions for s in sequences) <= MAX_PREEMPTIONS
    for sequence in sequences:
        assert world.emitted[sequence.seq_id] == expected_tokens(sequence)
        assert sequence.stamps.paused_at_ns is None
        if sequence.stamps.paused_ns is not None:
            assert sequence.num_preemptions
    assert sequences[0].num_preemptions == 0 or world.topology.names != ["colocated"]
    world.assert_all_free()


def test_who_has_lost_its_blocks_comes_back_before_anybody_new():
    world = World("colocated", num_blocks=17)
    sequences = [world.sequence(10, 40), world.sequence(10, 40)]
    world.submit(*sequences)
    while not world.router.at.paused:
        world.tick()
    (paused,) = world.router.at.paused.values()
    assert (paused.phase, paused) == (Phase.PAUSED, sequences[1])
    newcomer = world.sequence(1, 1)
    world.submit(newcomer)
    world.tick()
    assert newcomer.phase is Phase.QUEUED
    world.router.abort(sequences[0], FinishReason.ABORT, world.now_ns)
    while paused.phase is Phase.PAUSED:
        assert newcomer.phase is Phase.QUEUED
        world.tick()
    world.run()
    assert world.emitted[paused.seq_id] == expected_tokens(paused)
    assert paused.stamps.paused_ns > 0
    assert paused.stamps.decode_started_ns is not None


def test_a_prompt_that_loses_its_blocks_is_in_the_queue_again():
    world = World("colocated", num_blocks=17)
    decoding, prompt = world.sequence(8, 50), world.sequence(33, 3)
    world.submit(decoding)
    for _ in range(3):
        world.tick()
    world.submit(prompt)
    world.workers["colocated"].max_num_batched_tokens = 1  # it takes long to compute
    while not prompt.num_preemptions:
        world.tick()
    assert (prompt.phase, prompt.stamps.started_ns) == (Phase.QUEUED, None)
    world.run()
    assert world.emitted[prompt.seq_id] == expected_tokens(prompt)
    assert prompt.stamps.paused_ns is None


def test_what_has_become_too_long_for_the_pool_where_it_began_is_computed_where_it_decodes():
    world = World("peer", num_blocks={"prefill": 9, "decode": 25})
    sequences = [world.sequence(20, 60), world.sequence(19, 60)]
    world.submit(*sequences)
    while not world.router.at.paused:
        world.tick()
    (paused,) = world.router.at.paused.values()
    assert paused.num_tokens > 32
    world.run()
    assert [stage.worker for stage in paused.stages] == ["decode"]
    for sequence in sequences:
        assert world.emitted[sequence.seq_id] == expected_tokens(sequence)


def test_who_was_preempted_often_enough_comes_back_with_blocks_for_its_whole_length():
    world = World("colocated", num_blocks=33)
    sequence = world.sequence(5, 60)
    sequence.num_preemptions = MAX_PREEMPTIONS
    world.submit(sequence)
    assert len(world.ledger.table(sequence.seq_id, "kv")) == 17


def test_who_was_preempted_often_enough_does_not_take_the_whole_pool_for_a_limit_of_the_context():
    world = World("colocated", num_blocks=8193)
    sequence, other = world.sequence(5, 32_000), world.sequence(5, 32_000)
    sequence.num_preemptions = MAX_PREEMPTIONS
    world.submit(sequence)
    world.submit(other)
    assert len(world.ledger.table(sequence.seq_id, "kv")) * BLOCK_SIZE == PORTION_TOKENS
    assert world.ledger.table(other.seq_id, "kv")


@pytest.mark.parametrize("arm", ["alias", "colocated", "peer"])
def test_those_who_were_all_preempted_often_enough_come_to_their_ends(arm, monkeypatch):
    monkeypatch.setattr("engine.scheduler.routing.worker_routes.PORTION_TOKENS", 8)
    world = World(arm, num_blocks=25)
    sequences = [world.sequence(10, 60) for _ in range(4)]
    for sequence in sequences:
        sequence.num_preemptions = MAX_PREEMPTIONS
    world.submit(*sequences)
    world.run()
    assert max(one.num_preemptions for one in sequences) > MAX_PREEMPTIONS
    assert sequences[0].num_preemptions == MAX_PREEMPTIONS
    for sequence in sequences:
        assert world.emitted[sequence.seq_id] == expected_tokens(sequence)
    world.assert_all_free()


@pytest.mark.parametrize("after_ticks", range(0, 40, 3))
@pytest.mark.parametrize("arm", ["alias", "colocated", "gpu", "gpu peer", "shm", "2x2 peer"])
def test_a_death_while_blocks_are_short_changes_no_token(arm, after_ticks):
    world = World(arm, num_blocks=14)
    sequences = [world.sequence(n, 30) for n in (10, 9, 12, 7)]
    world.submit(*sequences)
    for _ in range(after_ticks):
        world.tick()
    victim = world.topology.playing("decode")[0]
    world.workers[victim].step(world.now_ns)
    world.workers[victim].outbox.clear()
    world.kill(victim)
    world.tick()
    world.revive_all()
    world.run()
    for sequence in sequences:
        assert world.emitted[sequence.seq_id] == expected_tokens(sequence)
    world.assert_all_free()


def test_alias_hands_over_without_moving_a_block():
    world = World("alias")
    sequence = world.sequence(20, 8)
    world.submit(sequence)
    table = list(world.ledger.table(sequence.seq_id, "kv"))
    while sequence.worker != "decode":
        world.tick()
    assert world.ledger.table(sequence.seq_id, "kv") == table
    assert sequence.handoff_bytes == 0
    assert sequence.handoff_blocks == 5


@pytest.mark.parametrize("arm", COPYING)
def test_what_moves_is_the_prompts_blocks_once(arm):
    world = World(arm.removeprefix("elastic "))
    sequence = world.sequence(18, 8)
    world.submit(sequence)
    while not sequence.num_output_tokens:
        world.tick()
    world.run()
    assert sequence.handoff_blocks == 5
    assert sequence.handoff_bytes == world.router.counters.handoff_bytes == 5 * BLOCK_SIZE
    assert world.router.counters.failed_handoffs == 0


def test_numbers_go_on_where_another_router_has_ended():
    numbers = []
    former = None
    for _ in range(2):
        world = World("shm")
        if former is not None:
            world.router.counters.go_on_from(former.router.counters)
        world.submit(world.sequence(18, 8))
        world.run()
        counters = world.router.counters
        numbers.append((counters.handoffs, counters.handoff_bytes, counters.prefix_cache_queries))
        former = world
    first, second = numbers
    assert first[0] == 1
    assert second == tuple(2 * number for number in first)


def test_blocks_go_while_their_prompt_is_computed():
    world = World("peer")
    sequence = world.sequence(40, 8)
    world.submit(sequence)
    for _ in range(3):
        world.tick()
    assert sequence.phase is Phase.PREFILLING
    assert world.router.copies.num_arrived(sequence, sequence.stages[1].worker) == 6


@pytest.mark.parametrize("arm", ["peer", "shm", "gpu peer"])
@pytest.mark.parametrize("after_ticks", range(1, 6))
def test_a_copy_that_fails_is_computed_again(arm, after_ticks):
    world = World(arm)
    sequence, other = world.sequence(22, 8), world.sequence(17, 5)
    world.submit(sequence, other)
    for _ in range(after_ticks - 1):
        world.tick()
    worker = world.workers["prefill"]
    while worker.inbox:
        worker.receive(world.now_ns)
    worker.step(world.now_ns)
    worker.break_copies()
    world.run()
    for each in (sequence, other):
        assert world.emitted[each.seq_id] == expected_tokens(each)
    world.assert_all_free()


def test_slots_are_first_for_what_is_computed_and_half_of_them_ahead():
    world = World("shm", num_slots=4)
    long, short = world.sequence(70, 3), world.sequence(3, 3)
    world.submit(long)
    staging = world.ledger.pools["ring"]
    assert staging.num_free == 2  # two blocks of the long prompt have a slot before they are there
    world.submit(short)
    world.tick()
    world.tick()
    assert short.num_output_tokens
    assert not long.num_output_tokens
    world.run()
    assert world.emitted[long.seq_id] == expected_tokens(long)


def test_a_sequence_in_the_wrong_container_is_found():
    world = World("alias")
    sequence = world.sequence()
    world.submit(sequence)
    sequence.where = Waiting(sequence.stages[0])
    with pytest.raises(InvariantViolated):
        world.router.check_invariants()


def test_a_prompt_that_can_never_fit_is_refused_and_nothing_is_kept(world):
    with pytest.raises(RequestError) as refused:
        world.submit(world.sequence(3, 2), world.sequence(1000, 5))
    assert refused.value.code == "context_length_exceeded"
    assert world.is_quiet


def test_a_placed_sequence_carries_the_reason_of_its_route():
    world = World("elastic")
    choice = PairChoice(Pair("decode", "decode"), "kept", "ttft 5 ms", 64, spares_streams=True)
    world.router.roles.route = lambda *args, **options: choice
    sequence = world.sequence()
    world.submit(sequence)
    assert (sequence.route, sequence.route_reason) == ("decode", "kept: ttft 5 ms")
    assert sequence.max_chunk_tokens == 64


def test_a_full_queue_refuses_with_a_time_to_come_back():
    world = World("alias", num_blocks=9, max_queued=4)
    for owner in ("", "", "", "", "her"):  # the first is placed at once
        world.submit(world.sequence(20, 12, owner=owner))
    for owner in ("", "him"):
        with pytest.raises(QueueFull) as refused:
            world.submit(world.sequence(1, 1, owner=owner))
        assert refused.value.code == "queue_full"
        assert 1000 <= refused.value.retry_after_ms <= 120_000
    world.run()
    assert len(world.ended) == 5


def test_a_flood_of_one_owner_leaves_room_and_turns_to_others():
    world = World("alias", num_blocks=17, max_queued=50)
    flood = [world.sequence(20, 12) for _ in range(37)]
    for sequence in flood:
        world.submit(sequence)
    with pytest.raises(QueueFull) as refused:
        world.submit(world.sequence(20, 12), world.sequence(20, 12))
    assert refused.value.code == "user_quota"
    world.now_ns += 60_000_000_000  # all of the flood is old now, and starving
    others = [world.sequence(20, 12, owner=name) for name in ("her", "him")]
    for sequence in others:
        world.submit(sequence)
    while not all(sequence.is_finished for sequence in others):
        world.tick()
    assert sum(sequence.is_finished for sequence in flood) <= 4
    world.run()
    assert len(world.ended) == len(flood) + 2


def test_a_newcomer_does_not_wait_for_the_old_long_prompt_of_a_flood():
    world = World("alias", num_blocks=200)
    flood = [world.sequence(100, 2) for _ in range(5)]
    for sequence in flood:
        world.submit(sequence)
    world.now_ns += 60_000_000_000
    newcomer = world.sequence(3, 2, owner="her")
    world.submit(newcomer)
    assert newcomer.phase is Phase.PREFILLING
    world.tick()
    assert newcomer.num_output_tokens
    assert not any(sequence.num_output_tokens for sequence in flood)
    world.run()


def test_a_short_prompt_waits_for_one_chunk_of_its_owners_old_long_prompt():
    world = World("alias", num_blocks=200)
    long = world.sequence(100, 2)
    world.submit(long)
    world.tick()
    world.now_ns += 60_000_000_000
    short = world.sequence(3, 2)
    world.submit(short)
    assert short.phase is Phase.PREFILLING
    world.tick()
    world.tick()
    assert short.num_output_tokens
    assert not long.num_output_tokens
    world.run()


def test_shorts_without_end_leave_a_long_prompt_every_second_step():
    world = World("alias", num_blocks=200)
    long = world.sequence(100, 2)
    world.submit(long)
    world.tick()
    world.now_ns += 60_000_000_000
    for _ in range(40):
        world.submit(world.sequence(5, 1))
        world.tick()
    assert long.num_output_tokens
    world.run()


def test_a_flood_passes_what_does_not_fit_for_ten_seconds_only():
    world = World("alias", num_blocks=17)
    flood = [world.sequence(10, 6) for _ in range(30)]
    for sequence in flood:
        world.submit(sequence)
    heavy = world.sequence(30, 30, owner="her")
    world.submit(heavy)
    world.tick()
    world.now_ns += 11_000_000_000
    num_placed = sum(sequence.phase is not Phase.QUEUED for sequence in flood)
    while heavy.phase is Phase.QUEUED:
        world.tick()
    assert sum(sequence.phase is not Phase.QUEUED for sequence in flood) == num_placed
    world.run()


def test_more_prompts_than_may_ever_wait_are_a_bad_request():
    world = World("alias", max_queued=3)
    with pytest.raises(RequestError) as refused:
        world.submit(*[world.sequence(1, 1) for _ in range(4)])
    assert refused.value.status == 400


def test_a_light_sequence_passes_one_that_does_not_fit_yet():
    world = World("alias", num_blocks=17)
    running = world.sequence(10, 30)
    heavy, light = world.sequence(33, 30), world.sequence(34, 1)
    world.submit(running)
    world.submit(heavy)
    world.submit(light)
    assert heavy.phase is Phase.QUEUED
    assert light.phase is Phase.PREFILLING
    world.run()
    assert world.emitted[heavy.seq_id] == expected_tokens(heavy)


def test_a_starving_sequence_is_not_overtaken_any_more():
    world = World("alias", num_blocks=17)
    world.submit(world.sequence(10, 30))
    heavy = world.sequence(20, 30)
    world.submit(heavy)
    world.now_ns += 11_000_000_000
    light = world.sequence(21, 2)
    world.submit(light)
    assert light.phase is Phase.QUEUED
    world.run()
    assert len(world.ended) == 3


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("after_ticks", range(8))
def test_abort_frees_everything_in_every_phase(arm, after_ticks):
    world = World(arm)
    sequence, other = world.sequence(20, 10), world.sequence(9, 6)
    world.submit(sequence, other)
    for _ in range(after_ticks):
        world.tick()
    world.router.abort(sequence, FinishReason.ABORT, world.now_ns)
    world.check()
    assert world.ended[sequence.seq_id] is FinishReason.ABORT
    world.run()
    assert world.emitted[other.seq_id] == expected_tokens(other)
    world.assert_all_free()


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("after_ticks", range(10))
def test_a_death_in_any_phase_changes_no_token(arm, role, after_ticks):
    world = World(arm)
    sequences = [world.sequence(22, 8), world.sequence(5, 8)]
    world.submit(*sequences)
    for _ in range(after_ticks):
        world.tick()
    victim = world.topology.playing(role)[0]
    world.workers[victim].step(world.now_ns)  # work under way that is never reported
    world.workers[victim].outbox.clear()
    world.kill(victim)
    world.tick()
    world.revive_all()
    world.run()
    for sequence in sequences:
        assert world.emitted[sequence.seq_id] == expected_tokens(sequence)
    world.assert_all_free()


OTHERS_CAN = [arm for arm in ARMS if arm not in ("colocated", "gpu colocated", "gpu")]


@pytest.mark.parametrize("arm", OTHERS_CAN)
@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("after_ticks", range(8))
def test_a_worker_that_never_comes_back_is_done_without(arm, role, after_ticks, monkeypatch):
    monkeypatch.setattr(
        "engine.scheduler.routing.worker_routes.MIN_CHUNK_TOKENS", 4
    )  # prompts here are short
    world = World(arm)
    early = [world.sequence(22, 8), world.sequence(5, 8)]
    world.submit(*early)
    for _ in range(after_ticks):
        world.tick()
    victim = world.topology.playing(role)[0]
    world.kill(victim)
    late = [world.sequence(11, 6), world.sequence(3, 1)]
    world.submit(*late)
    world.run()
    for sequence in (*early, *late):
        assert world.emitted[sequence.seq_id] == expected_tokens(sequence)
    assert victim not in {stage.worker for sequence in late for stage in sequence.stages}
    world.assert_all_free()


def test_outputs_that_are_computed_again_stay_with_prompts_when_decode_comes_back(monkeypatch):
    monkeypatch.setattr("engine.scheduler.routing.worker_routes.MIN_CHUNK_TOKENS", 4)
    world = World("alias", num_blocks=17)
    world.kill("decode")
    sequences = [world.sequence(10, 40), world.sequence(10, 40)]
    world.submit(*sequences)
    while not world.router.at.paused:
        world.tick()
    (paused,) = world.router.at.paused.values()
    while paused.worker is None:
        world.tick()
    world.workers["prefill"].max_num_batched_tokens = 1
    while paused.num_computed_tokens <= paused.num_prompt_tokens:
        world.tick()
    assert (paused.worker, paused.phase) == ("prefill", Phase.PREFILLING)
    assert paused.num_prefill_tokens_left > 4
    world.revive("decode")
    while paused.num_prefill_tokens_left > 4:
        assert paused.worker in ("prefill", None)
        world.tick()
    world.run()
    assert [stage.worker for stage in paused.stages] == ["prefill", "decode"]
    assert world.emitted[paused.seq_id] == expected_tokens(paused)


def test_a_prompt_that_waited_for_decode_is_computed_by_prefill_if_that_is_back_too(monkeypatch):
    monkeypatch.setattr("engine.scheduler.routing.worker_routes.MIN_CHUNK_TOKENS", 4)
    world = World("gpu peer", num_blocks={"prefill": 8, "decode": 25})
    sequence = world.sequence(20, 12)
    world.submit(sequence)
    while sequence.worker != "decode" or not isinstance(sequence.where, On):
        world.tick()
    for name in ("prefill", "decode"):
        world.kill(name)
    world.revive("decode")
    assert sequence.worker == "decode"
    world.kill("decode")
    world.revive("prefill")  # whose pool is too small for all of it
    assert sequence.worker is None
    world.revive("decode")
    assert sequence.worker == "prefill"
    world.run()
    assert [stage.worker for stage in sequence.stages] == ["prefill", "decode"]
    assert world.emitted[sequence.seq_id] == expected_tokens(sequence)
    world.assert_all_free()


@pytest.mark.parametrize("is_dead", [False, True])
def test_a_copy_that_fails_is_held_against_its_link_unless_the_pool_is_gone(is_dead):
    world = World("gpu peer")
    world.submit(world.sequence(22, 4))
    prefill = world.workers["prefill"]
    while not prefill.copies:
        while prefill.inbox:
            prefill.receive(world.now_ns)
        world.step(prefill)
    if is_dead:
        world.kill("decode")
    prefill.break_copies()
    while prefill.outbox:
        world.deliver(prefill)
    state = world.router.copies.links.states["prefill", "decode"]
    assert state.num_strikes == (0 if is_dead else 1)
    world.revive_all()
    world.run()
    world.assert_all_free()


def test_nothing_is_sent_into_the_memory_of_a_worker_that_is_dead():
    world = World("gpu peer")
    world.submit(*(world.sequence(22, 4) for _ in range(3)))
    world.tick()
    prefill = world.workers["prefill"]
    before = {id(command) for command in prefill.inbox}
    world.kill("decode")
    for _ in range(20):
        sent = [x for x in prefill.inbox if isinstance(x, Copy) and id(x) not in before]
        assert "decode" not in {copy.to_pool for copy in sent}
        world.tick()
    world.revive_all()
    world.run()
    world.assert_all_free()


@pytest.mark.parametrize("transport", ["alias", "peer", "shm"])
def test_where_a_sequence_has_run_and_how_its_blocks_came_there_is_kept(transport):
    world = World(transport)
    sequence = world.sequence(22, 4)
    world.submit(sequence)
    world.run()
    assert (sequence.workers, sequence.links) == (["prefill", "decode"], [transport])


def test_what_is_computed_in_a_pool_that_others_share_is_not_computed_again():
    world = World("alias")
    sequence = world.sequence(22, 8)
    world.submit(sequence)
    world.tick()
    world.tick()
    computed = sequence.num_computed_tokens
    assert 0 < computed < 22
    world.kill("prefill")
    assert (sequence.worker, sequence.route) == ("decode", "decode")
    assert sequence.num_computed_tokens == computed
    assert sequence.route_reason.endswith("went on at decode")
    assert (sequence.workers, sequence.links) == (["prefill", "decode"], ["none"])


def test_what_has_arrived_is_not_computed_again_where_it_goes():
    world = World("peer")
    sequence = world.sequence(60, 8)
    world.submit(sequence)
    for _ in range(4):
        world.tick()
    num_arrived = world.router.copies.num_arrived(sequence, "decode")
    assert num_arrived
    world.kill("prefill")
    world.tick()
    assert sequence.worker == "decode"
    assert sequence.num_computed_tokens >= num_arrived * BLOCK_SIZE
    world.run()
    assert world.emitted[sequence.seq_id] == expected_tokens(sequence)


def test_a_suspect_goes_on_at_another_worker_only_if_nobody_else_is_there():
    world = World("alias")
    suspect, chat = world.sequence(22, 8), world.sequence(3, 30)
    world.submit(chat)
    for _ in range(3):
        world.tick()
    assert chat.worker == "decode"
    world.submit(suspect)
    suspect.num_suspicions, suspect.is_on_probation = 2, True
    world.kill("prefill")
    assert suspect.phase is Phase.QUEUED
    world.run()
    assert world.ended[chat.seq_id]
    assert world.emitted[suspect.seq_id] == expected_tokens(suspect)


def test_whoever_maps_the_memory_of_a_dead_worker_is_not_blamed_for_it():
    world = World("gpu")
    sequence, moved = world.sequence(30, 5), world.sequence(3, 20)
    world.submit(sequence, moved)
    for _ in range(3):
        world.tick()
    world.kill("decode")
    assert (sequence.num_suspicions, moved.num_suspicions) == (0, 1)
    world.revive_all()
    world.run()
    for each in (sequence, moved):
        assert world.emitted[each.seq_id] == expected_tokens(each)


def test_a_sequence_that_kills_workers_is_given_up():
    world = World("alias")
    sequence, later = world.sequence(30, 5), world.sequence(6, 3)
    world.submit(sequence)
    while not sequence.is_finished:
        name = sequence.worker
        world.receive(world.workers[name])
        world.kill(name)
        world.revive(name)
    assert sequence.finish_reason is FinishReason.ERROR
    assert sequence.num_suspicions == MAX_SUSPICIONS + 1
    assert "died" in sequence.error
    world.submit(later)
    world.run()
    assert world.emitted[later.seq_id] == expected_tokens(later)


def test_a_suspect_is_not_blamed_for_workers_that_were_dying_when_it_came():
    world = World("alias")
    sequence = world.sequence(30, 5)
    world.submit(sequence)
    for _ in range(2 * MAX_SUSPICIONS):
        name = sequence.worker
        world.kill(name)
        world.revive(name)
    assert sequence.num_suspicions == 1
    world.run()
    assert world.emitted[sequence.seq_id] == expected_tokens(sequence)


@pytest.mark.parametrize("arm", ARMS)
def test_a_sequence_that_kills_workers_takes_nobody_with_it(arm):
    world = World(arm)
    poison = world.sequence(7, 3)
    others = [world.sequence(n, 6) for n in (5, 6, 9)]
    world.submit(others[0], poison, *others[1:])
    for _ in range(200):
        if world.is_quiet:
            break
        for worker in world.workers.values():
            world.receive(worker)
        poisoned = [w.name for w in world.workers.values() if poison.seq_id in w.running]
        if poisoned:
            world.kill(poisoned[0])
            world.revive(poisoned[0])
        else:
            world.tick()
    assert poison.finish_reason is FinishReason.ERROR
    for sequence in others:
        assert world.emitted[sequence.seq_id] == expected_tokens(sequence)
    world.assert_all_free()


def test_holders_of_blocks_are_placed_before_the_queue():
    world = World("alias", num_blocks=33)
    holder = world.sequence(20, 10)
    world.submit(holder)
    world.kill("decode")
    world.kill("prefill")
    newcomer = world.sequence(2, 2)
    world.submit(newcomer)
    world.revive("prefill")
    assert world.workers["prefill"].inbox[0].seq_id == holder.seq_id


def test_stale_messages_are_counted_and_dropped(world):
    sequence = world.sequence(30, 5)
    world.submit(sequence)
    name = world.topology.playing("prefill")[0]
    worker = world.workers[name]
    for each in [*world.workers.values()] * 3:  # cores that it borrows come first
        while each.inbox:
            each.receive(world.now_ns)
        while each.outbox:
            world.deliver(each)
    worker.step(world.now_ns)
    late = worker.outbox[0]
    world.kill(name)
    world.revive(name)
    before = sequence.num_computed_tokens
    world.router.stepped(name, late, world.now_ns)
    assert world.router.counters.stale_messages >= 1
    assert sequence.num_computed_tokens == before
    world.run()
    assert world.emitted[sequence.seq_id] == expected_tokens(sequence)


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("seed", range(4))
def test_a_long_random_walk_loses_nothing(arm, seed):
    rng = random.Random(seed)
    world = World(arm, num_blocks=(26, 30)[seed % 2], num_slots=2)
    walk(world, rng)
    assert world.router.counters.preemptions


@pytest.mark.parametrize("arm", ARMS)
def test_a_walk_of_steps_that_yield_several_tokens_loses_nothing(arm):
    world = World(arm, num_blocks=33, num_slots=2)
    for worker in world.workers.values():
        worker.tokens_per_step = 3
    walk(world, random.Random(7))


@pytest.mark.parametrize("arm", ["elastic", "elastic shm", "2x2 elastic"])
@pytest.mark.parametrize("seed", range(4))
def test_no_route_loses_anything_while_roles_are_switched(arm, seed):
    rng = random.Random(seed)
    world = World(arm, num_blocks=33, num_slots=2)

    def any_route(sequence, candidates, running, now_ns, hits):
        return PairChoice(rng.choice(candidates), "drawn", "", rng.choice([None, 3]))

    def switch():
        world.router.switch_roles(rng.choice(ROLES), world.now_ns)
        give_way(world)

    world.router.roles.route = any_route
    walk(world, rng, switch)
    assert {"move drawn", "decode drawn"} <= set(world.router.roles.counts)


def give_way(world):
    """Make all prompts leave that are computed where they will decode."""
    for sequence in list(world.router.at.running.values()):
        if sequence.route == "decode" and sequence.phase is Phase.PREFILLING:
            release = Release(sequence.seq_id, sequence.generation)
            world.workers[sequence.worker].inbox.append(release)


@pytest.mark.parametrize("arm", ["elastic", "elastic shm"])
@pytest.mark.parametrize("ticks", [1, 2, 3, 4, 5])
def test_a_prompt_that_gives_way_goes_on_where_it_disturbs_nobody(arm, ticks):
    world = World(arm)
    world.router.roles.route = lambda *_, **__: PairChoice(Pair("decode", "decode"), "drawn")
    chat, prompt = world.sequence(3, 20), world.sequence(30, 6)
    world.submit(chat, prompt)
    for _ in range(ticks):
        world.tick()
    computed = prompt.num_computed_tokens
    give_way(world)
    world.tick()
    if computed and computed < 24:  # in the middle of it
        goes_on_at_prefill = "shm" not in arm
        assert (prompt.route == "move") == goes_on_at_prefill
        assert prompt.worker == ("prefill" if goes_on_at_prefill else "decode")
        assert prompt.num_computed_tokens >= computed, "nothing is computed twice"
        assert prompt.max_chunk_tokens is None
    world.run()
    for sequence in (chat, prompt):
        assert world.emitted[sequence.seq_id] == expected_tokens(sequence)
    world.assert_all_free()


def test_what_came_of_a_forecast_is_said_and_who_breaks_it_gives_way():
    world = World("elastic")
    world.router.roles.route = lambda *_, **__: PairChoice(
        Pair("decode", "decode"), "drawn", "fast", spares_streams=True
    )
    prompt = world.sequence(30, 3)
    world.submit(prompt)
    outcomes = [Outcome(prompt.seq_id, "; it was not", yields=True), Outcome(99, "; no such")]
    stepped = world.router.roles.stepped
    world.router.roles.stepped = lambda *args: (stepped(*args), [outcomes.pop()])[1]
    world.tick()
    world.tick()
    world.router.roles.stepped = stepped
    assert prompt.route_reason == "drawn: fast; it was not"
    world.tick()
    assert prompt.worker == "prefill"
    world.run()
    assert world.emitted[prompt.seq_id] == expected_tokens(prompt)


@pytest.fixture(autouse=True)
def short_prompts_are_worth_a_detour(request, monkeypatch):
    if "walk" in request.node.name or "route_loses" in request.node.name:
        monkeypatch.setattr("engine.scheduler.routing.worker_routes.MIN_CHUNK_TOKENS", 4)
