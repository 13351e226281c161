"""Which sequence loses its blocks: to its owner's others, and to other owners."""

from hypothesis import given
from hypothesis import strategies as st

from engine.scheduler.preemption import PoolShares, PreemptionCandidate, victim, victim_for
from engine.scheduler.routing.worker_routes import MAX_PREEMPTIONS
from engine.scheduler.sequences.sequence import On, RouteStage, Sequence, Stamps
from engine.scheduler.sequences.sequence_table import age
from engine.wire.run_spec import RunSpec
from engine.wire.sampling import SamplingParams

CAPACITY = 40


def holder(seq_id, arrived_ns, num_freed, num_lost, num_preemptions=0, is_short=False, owner=""):
    spec = RunSpec(SamplingParams(max_tokens=9, seed=0), owner=owner)
    sequence = Sequence(seq_id, "r", 0, [1], spec, Stamps(arrived_ns))
    sequence.where = On(RouteStage("w", 9))
    sequence.num_preemptions = num_preemptions
    return PreemptionCandidate(sequence, num_freed, num_lost, is_short)


def shares(holders, waiting=(), weights=None):
    sizes = [(one.owner, one.num_freed) for one in holders]
    return PoolShares(CAPACITY, sizes, waiting, weights or {})


def choose(holders):
    return victim(holders, shares(holders))


def rows(owners):
    return st.lists(
        st.tuples(
            st.integers(0, 5),
            st.integers(0, 9),
            st.integers(0, 40),
            st.integers(0, MAX_PREEMPTIONS),
            st.booleans(),
            st.sampled_from(owners),
        ),
        max_size=8,
    ).map(lambda rows: [holder(seq_id, *row) for seq_id, row in enumerate(rows)])


@given(rows([""]))
def test_one_owners_victim_costs_least_for_each_block_and_is_never_the_oldest(holders):
    found = choose(holders)
    oldest = min(holders, key=lambda each: age(each.sequence), default=None)
    open_to_it = [
        each
        for each in holders
        if each is not oldest and each.num_freed and each.sequence.num_preemptions < MAX_PREEMPTIONS
    ]
    if not any(one.is_short for one in holders):
        assert found is None
    elif open_to_it:
        assert found in open_to_it
        for other in open_to_it:
            # lost by freed, compared without dividing
            assert found.num_lost * other.num_freed <= other.num_lost * found.num_freed
    elif found is not None:
        assert found.is_short
        assert found is not oldest


@given(rows(["a", "b", "c"]), st.dictionaries(st.sampled_from("abc"), st.sampled_from([0.5, 3.0])))
def test_no_owner_loses_blocks_to_one_that_holds_more_for_its_weight(holders, weights):
    part = shares(holders, weights=weights)
    found = victim(holders, part)
    if found is None or all(one.is_short for one in holders):
        return
    asking = [one.owner for one in holders if one.is_short]
    assert part.load(found.owner) >= min(map(part.load, asking))
    assert found.owner in asking or part.is_over(found.owner)


@given(rows(["a", "b", "c"]), st.sampled_from("abcd"), st.integers(1, 30), st.integers(1, 30))
def test_who_waits_takes_blocks_of_those_above_their_shares_alone(holders, owner, size, missing):
    part = shares(holders, [owner])
    found = victim_for(owner, size, missing, holders, part)
    if found is None:
        return
    assert part.is_over(found.owner)
    assert found.owner != owner
    assert not part.held[owner] or not part.is_over(owner, size)
    own = [one for one in holders if one.owner == found.owner]
    if found is min(own, key=lambda one: age(one.sequence)):
        assert not part.held[owner]
        assert not part.is_over(owner, size)


def test_of_equals_the_youngest_loses_its_blocks():
    holders = [holder(1, 0, 2, 8, 0, True), *(holder(n, at, 2, 8) for n, at in ((2, 5), (3, 9)))]
    assert choose([*holders, holder(4, 7, 2, 8)]).sequence.seq_id == 3


def test_what_frees_nothing_or_was_preempted_too_often_is_left_alone():
    holders = [holder(1, 0, 2, 8, 0, True), holder(2, 1, 0, 0)]
    assert choose([*holders, holder(3, 2, 2, 1, MAX_PREEMPTIONS)]) is None


def test_who_was_preempted_too_often_goes_last_and_only_if_it_is_short_itself():
    oldest = holder(1, 0, 2, 8)
    short, fresh = holder(2, 1, 2, 1, MAX_PREEMPTIONS, True), holder(3, 2, 2, 8)
    assert choose([oldest, short]) is short
    assert choose([oldest, short, fresh]) is fresh
    assert choose([short]) is None


def test_a_waiting_one_takes_the_least_work_that_is_enough():
    holders = [
        holder(1, 0, 9, 90, owner="a"),
        holder(2, 1, 20, 80, owner="a"),
        holder(3, 2, 3, 9, owner="a"),
        holder(4, 3, 6, 24, owner="a"),
    ]
    part = shares(holders, ["b"])
    assert victim_for("b", 5, 5, holders, part).sequence.seq_id == 4
    assert victim_for("b", 2, 2, holders, part).sequence.seq_id == 3


def test_an_owners_last_sequence_gives_way_to_a_newcomer_unless_it_has_just_come_back():
    (only,) = holders = [holder(1, 0, 30, 99, owner="a")]
    assert victim_for("b", 5, 5, holders, shares(holders, ["b"])) is only
    only.sequence.come_back()
    assert victim_for("b", 5, 5, holders, shares(holders, ["b"])) is None
    only.sequence.output_token_ids += [1, 1]
    assert victim_for("b", 5, 5, holders, shares(holders, ["b"])) is only
