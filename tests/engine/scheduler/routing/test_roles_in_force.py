"""Roles in force, what routes they give, which worker has which cores."""

import re

import pytest

from engine.profile.facts import DECODE_MS, PROMPT_MS, FactKey, Profile
from engine.scheduler.cache.ledger import Ledger
from engine.scheduler.cache.topology import make_topology
from engine.scheduler.routing.copies import Copies
from engine.scheduler.routing.core_lending import Cores
from engine.scheduler.routing.elastic import PairChoice
from engine.scheduler.routing.roles_in_force import TRY_LENDING_EVERY_S, Roles
from engine.scheduler.routing.step_times import StepLoad
from engine.scheduler.routing.worker_routes import Pair
from engine.scheduler.sequences.sequence import On, Phase, RouteStage, Sequence, Stamps
from engine.wire.messages import CoresUsed, SequenceStep, Stepped
from engine.wire.run_spec import RunSpec
from engine.wire.sampling import SamplingParams
from tests.worlds.fake_workers import sequence_step

PLACES = make_topology(["prefill"], ["decode"], "alias")
MOVE = Pair("prefill", "decode")
DECODE = Pair("decode", "decode")
PREFILL = Pair("prefill", "prefill")
TWO_CORES = {"prefill": (0,), "decode": (1,)}


class Machine:
    """Roles over two workers that do at once what they are told."""

    def __init__(self, roles="elastic", cores=None, topology=PLACES, **options):
        self.told = []
        cores = cores or TWO_CORES
        send = lambda name, command: self.told.append((name, command))  # noqa: E731
        self.now_s = 1000.0
        copies = Copies(Ledger(topology.new_block_pools(16)), topology)
        self.roles = Roles(topology, cores, roles, copies, 512, send, **options)
        for name in cores:
            self.roles.worker_ready(name)

    def settle(self, *running):
        self.roles.move_cores(running)
        while self.told:
            name, command = self.told.pop(0)
            self.roles.answered(name, CoresUsed(command.cpus))
        cores: Cores = self.roles.cores
        return [sorted(cores.used(name)) for name in cores.own]

    def route(self, sequence, *running, candidates=(MOVE, DECODE)):
        return self.roles.route(sequence, list(candidates), running, int(self.now_s * 1e9), {})

    def learn(self, worker, *, num_prefill_tokens, ms, batch=0):
        """Steps that took so long; decodes alone and together, so that some more are known."""
        for size in (batch, 4 * batch) if batch else (0,):
            self.steps(worker, num_prefill_tokens=num_prefill_tokens, ms=ms, batch=size)

    def steps(self, worker, *, num_prefill_tokens, ms, batch):
        entries = [sequence_step(200, 1) for _ in range(batch)]
        if num_prefill_tokens:
            entries.append(sequence_step(num_prefill_tokens, num_prefill_tokens))
        for _ in range(10):
            end_ns = int(self.now_s * 1e9)
            step = Stepped(end_ns - int(ms * 1e6), end_ns, num_prefill_tokens, batch, entries)
            self.roles.stepped(worker, step)
        self.roles.learn()


def sequence(worker=None, phase=Phase.DECODING, num_prompt_tokens=200):
    sampling = SamplingParams(max_tokens=50, seed=0)
    made = Sequence(1, "r", 0, [1] * num_prompt_tokens, RunSpec(sampling), Stamps(0))
    made.stages = (RouteStage(worker or "decode", 50),)
    if worker is not None:
        made.where = On(made.stages[0])
    made.num_computed_tokens = num_prompt_tokens if phase is Phase.DECODING else 0
    return made


DECODING = sequence("decode")
PREFILLING = sequence("prefill", Phase.PREFILLING)


def test_an_idle_worker_lends_its_cores_and_has_them_back_when_work_comes():
    machine = Machine()
    assert machine.settle(DECODING) == [[], [0, 1]]
    assert machine.settle(DECODING, PREFILLING) == [[0], [1]]
    assert machine.settle(PREFILLING) == [[0, 1], []]


def test_a_worker_with_texts_has_its_cores_as_one_with_a_prompt_has():
    machine = Machine()
    machine.roles.text_workers = frozenset({"prefill"})
    assert machine.settle(DECODING) == [[0], [1]]
    assert machine.settle() == [[0, 1], []]
    machine.roles.text_workers = frozenset()
    assert machine.settle(DECODING) == [[], [0, 1]]


def known(what, size, depth, *, own_ms, lent_ms):
    """A profile of what a step takes on one core and on two."""
    profile = Profile()
    profile.put(FactKey(what, size, depth, "prefill on 1"), [own_ms] * 9)
    profile.put(FactKey(what, size, depth, "decode on 2"), [lent_ms] * 9)
    return profile


def test_a_prompt_borrows_no_core_that_would_not_make_it_faster():
    machine = Machine(profile=known(PROMPT_MS, 512, 0, own_ms=100, lent_ms=95))
    assert machine.settle(PREFILLING) == [[0], [1]]
    assert machine.settle(DECODING) == [[], [0, 1]], "reading does gain by it"
    assert machine.settle(PREFILLING) == [[0], [1]]


def test_a_decode_step_borrows_no_core_that_would_not_make_it_faster():
    machine = Machine(profile=known(DECODE_MS, 1, 256, own_ms=7.0, lent_ms=7.5))
    machine.steps("decode", num_prefill_tokens=0, ms=7.0, batch=1)
    assert machine.settle(DECODING) == [[0], [1]]
    assert machine.settle(PREFILLING) == [[0, 1], []], "prompts may gain by it"
    machine.route(sequence(), DECODING)
    assert machine.settle(DECODING) == [[0], [1]]


def test_lending_that_brought_nothing_is_tried_again_now_and_then():
    machine = Machine(profile=known(DECODE_MS, 1, 256, own_ms=7.0, lent_ms=7.5))
    machine.steps("decode", num_prefill_tokens=0, ms=7.0, batch=1)
    cores = []
    for _ in range(2 * TRY_LENDING_EVERY_S):
        machine.roles.learn()
        cores.append(machine.settle(DECODING))
    assert cores.count([[], [0, 1]]) == 2
    assert cores.count([[0], [1]]) == len(cores) - 2


def test_with_nothing_to_do_all_cores_wait_where_the_next_prompt_goes():
    machine = Machine()
    assert machine.settle() == [[], [0, 1]]
    machine.settle(PREFILLING)
    assert machine.settle() == [[], [0, 1]]


def test_static_roles_with_nothing_to_do_have_their_own_cores():
    assert Machine("static").settle() == [[0], [1]]


def test_cores_are_held_for_what_is_measured_while_nothing_runs():
    machine = Machine()
    machine.roles.hold_cores({"prefill": frozenset({0}), "decode": frozenset({1})})
    assert machine.settle() == [[0], [1]]
    assert machine.settle(PREFILLING) == [[0, 1], []]
    assert machine.settle() == [[0], [1]]
    machine.roles.hold_cores(None)
    assert machine.settle() == [[], [0, 1]]


def test_steps_that_something_else_held_up_are_not_learnt_from():
    machine = Machine()
    load = StepLoad(batch=1, context=100)
    end_ns = int(machine.now_s * 1e9)
    for is_disturbed in (True, False):
        for _ in range(5):
            step = Stepped(end_ns - 10_000_000, end_ns, 0, 1, [sequence_step(100, 1)])
            machine.roles.stepped("decode", step)
        machine.roles.learn(is_disturbed=is_disturbed)
        assert (machine.roles.slowest_ms("decode", load) is None) == is_disturbed


def test_what_could_not_be_predicted_is_remembered_by_its_size():
    machine = Machine()
    machine.settle(DECODING)
    machine.route(sequence(num_prompt_tokens=300), DECODING)
    asked = {key.size for key in machine.roles.asked if key.what == DECODE_MS}
    assert asked
    assert asked <= {1, 2}


def test_static_roles_lend_nothing_and_take_back_what_is_lent():
    machine = Machine()
    machine.settle(DECODING)
    machine.roles.switch("static")
    assert machine.settle(DECODING) == [[0], [1]]
    assert machine.route(sequence()) == PairChoice(MOVE, "static")


def test_colocated_roles_give_all_work_and_all_cores_to_one_worker():
    machine = Machine()
    machine.roles.switch("colocated")
    assert machine.settle() == [[], [0, 1]]
    assert machine.route(sequence()).pair == DECODE
    assert machine.settle(PREFILLING) == [[0, 1], []], "what is there already is computed first"
    assert machine.settle(sequence("decode", Phase.PREFILLING)) == [[], [0, 1]]


def test_while_a_worker_is_down_nobody_uses_its_cores():
    machine = Machine()
    machine.settle(DECODING)
    machine.roles.worker_died("prefill")
    assert machine.settle(DECODING) == [[], [1]]
    choice = machine.route(sequence(), DECODING, candidates=[DECODE])
    assert (choice.pair, choice.reason) == (DECODE, "only")
    machine.roles.switch("static")
    assert machine.route(sequence(), candidates=[PREFILL]).reason == "only"


def test_one_core_makes_elastic_roles_act_as_static_and_says_so():
    machine = Machine(cores={"prefill": (0,), "decode": (0,)})
    assert machine.roles.acts_static
    assert machine.settle(DECODING) == [[0], [0]]
    choice = machine.route(sequence())
    assert (choice.pair, choice.reason) == (MOVE, "static")


def test_workers_that_share_cores_with_their_like_have_something_to_choose():
    cores = {"prefill0": (0,), "prefill1": (0,), "decode": (1,)}
    topology = make_topology(["prefill0", "prefill1"], ["decode"], "alias")
    machine = Machine("elastic", cores, topology)
    assert not machine.roles.acts_static
    assert not machine.roles.cores.can_lend


def test_one_worker_is_colocated_whatever_is_asked_for():
    topology = make_topology(["colocated"], ["colocated"], "alias")
    machine = Machine("elastic", {"colocated": (0, 1)}, topology)
    assert machine.roles.roles == "colocated"
    assert machine.settle(sequence("colocated")) == [[0, 1]]


def test_step_times_are_learnt_from_either_worker_by_its_number_of_cores():
    machine = Machine()
    assert machine.route(sequence()).reason == "alone"
    machine.settle(PREFILLING)
    machine.learn("prefill", num_prefill_tokens=200, ms=100)
    machine.settle(DECODING)
    machine.learn("decode", num_prefill_tokens=0, batch=2, ms=10)
    machine.settle(DECODING, PREFILLING)
    assert machine.route(sequence(), DECODING).reason == "unknown", "nothing on one core so far"
    machine.learn("prefill", num_prefill_tokens=200, ms=200)
    machine.learn("decode", num_prefill_tokens=0, batch=2, ms=12)
    assert machine.route(sequence(), DECODING).pair == MOVE
    machine.now_s += 60
    assert machine.route(sequence()).pair == DECODE


@pytest.fixture
def learned():
    machine = Machine()
    for busy in ((PREFILLING,), (DECODING, PREFILLING)):
        machine.settle(*busy)
        machine.learn("prefill", num_prefill_tokens=200, ms=200)
    for busy in ((DECODING,), (DECODING, PREFILLING)):
        machine.settle(*busy)
        machine.learn("decode", num_prefill_tokens=0, batch=2, ms=10)
    machine.settle()
    return machine


def test_who_decoded_a_moment_ago_is_expected_back_and_then_no_more(learned):
    assert learned.route(sequence()).pair == MOVE
    learned.now_s += 0.5
    assert learned.route(sequence()).pair == MOVE
    learned.now_s += 10
    assert learned.route(sequence()).pair == DECODE


def test_who_will_decode_after_its_prompt_counts_with_those_who_do(learned):
    learned.now_s += 60
    moving = sequence("prefill", Phase.PREFILLING)
    moving.stages = (RouteStage("prefill", 1), RouteStage("decode", 50))
    assert learned.route(sequence(), moving).pair == MOVE


@pytest.mark.parametrize("reason", ["cheapest", "kept"])
def test_what_is_placed_is_counted(reason):
    machine = Machine()
    machine.roles.placed(sequence(), PairChoice(DECODE, reason, "ttft 5 ms", 64), 0)
    assert machine.roles.counts == {f"decode {reason}": 1}


def test_a_forecast_that_is_far_off_closes_its_way_until_steps_of_its_size_are_made_again(learned):
    learned.now_s += 60
    first = sequence()
    choice = learned.route(first)
    assert choice.pair == DECODE
    learned.roles.placed(first, choice, int(learned.now_s * 1e9))
    learned.settle(sequence("decode", Phase.PREFILLING))
    for computed in (50, 100, 150, 200):
        end_ns = int(learned.now_s * 1e9)
        token_ids = [7] if computed == 200 else []
        done = SequenceStep(1, 1, computed, token_ids, [], None, None, 50, 0)
        slow = Stepped(end_ns - 2_000_000_000, end_ns, 50, 0, [done])
        outcomes = learned.roles.stepped("decode", slow)
    (outcome,) = outcomes
    assert "far slower" in outcome.about
    learned.roles.learn()
    assert learned.route(sequence()).reason == "alone", "that way is closed"
    for _ in range(3):
        learned.steps("decode", num_prefill_tokens=200, ms=200, batch=0)
    assert not learned.roles.outcomes.closed()


def test_a_predicted_ttft_has_the_wait_that_is_over_until_there_is_a_token(learned):
    now_ns = int(learned.now_s * 1e9)
    prompts = [sequence() for _ in range(3)]
    prompts[0].stamps = Stamps(now_ns)
    prompts[1].stamps = Stamps(now_ns - 2_000_000_000)
    prompts[2].stamps = Stamps(0, first_token_ns=1)
    told = [learned.route(each, DECODING).about for each in prompts]
    new_ms, late_ms, back_ms = (int(re.search(r"TTFT (\d+) ms", each)[1]) for each in told)
    assert new_ms > 0
    assert (late_ms, back_ms) == (new_ms + 2000, new_ms)
