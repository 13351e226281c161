"""Roles in force, what routes they give, who has which cores; the rehearsal that times steps."""

import pytest

from engine.cache.blocks import Ledger
from engine.cache.places import make_places
from engine.schedule.copies import Copies
from engine.schedule.elastic import PairChoice
from engine.schedule.journeys import Pair
from engine.schedule.roles_in_force import BUDGET_MS, Cores, Rehearsal, Roles, steps
from engine.schedule.sequence import Leg, On, Phase, Sequence, Stamps
from engine.schedule.step_times import MIN_STEPS, StepLoad
from engine.wire.messages import (
    CoresUsed,
    RehearsalStep,
    Rehearse,
    Rehearsed,
    RehearsedStep,
    SamplingParams,
    SequenceStep,
    Stepped,
    UseCores,
)

PLACES = make_places(["prefill"], ["decode"], "alias")
MOVE = Pair("prefill", "decode")
DECODE = Pair("decode", "decode")
PREFILL = Pair("prefill", "prefill")
TWO_CORES = {"prefill": (0,), "decode": (1,)}


class Machine:
    """Roles over two workers that do at once what they are told."""

    def __init__(self, roles="elastic", cores=None, places=PLACES, **options):
        self.told = []
        cores = cores or TWO_CORES
        send = lambda name, command: self.told.append((name, command))  # noqa: E731
        self.now_s = 1000.0
        copies = Copies(Ledger(places.books(16)), places)
        self.roles = Roles(places, cores, roles, copies, 512, send, **options)
        for name in cores:
            self.roles.worker_ready(name)

    def settle(self, *running):
        self.roles.settle(running)
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
        entries = [entry(200, 1) for _ in range(batch)]
        if num_prefill_tokens:
            entries.append(entry(num_prefill_tokens, num_prefill_tokens))
        for _ in range(10):
            end_ns = int(self.now_s * 1e9)
            step = Stepped(end_ns - int(ms * 1e6), end_ns, num_prefill_tokens, batch, entries)
            self.roles.stepped(worker, step)


def entry(num_computed_tokens, num_scheduled_tokens):
    return SequenceStep(
        1,
        1,
        num_computed_tokens,
        [],
        [],
        None,
        None,
        num_scheduled_tokens,
        0,
        num_scheduled_tokens == 1,
    )


def sequence(worker=None, phase=Phase.DECODING, num_prompt_tokens=200):
    sampling = SamplingParams(max_tokens=50, seed=0)
    made = Sequence(1, "r", 0, [1] * num_prompt_tokens, sampling, Stamps(0))
    made.legs = (Leg(worker or "decode", 50),)
    if worker is not None:
        made.where = On(made.legs[0])
    made.num_computed_tokens = num_prompt_tokens if phase is Phase.DECODING else 0
    return made


DECODING = sequence("decode")
PREFILLING = sequence("prefill", Phase.PREFILLING)


def test_an_idle_worker_lends_its_cores_and_has_them_back_when_work_comes():
    machine = Machine()
    assert machine.settle(DECODING) == [[], [0, 1]]
    assert machine.settle(DECODING, PREFILLING) == [[0], [1]]
    assert machine.settle(PREFILLING) == [[0, 1], []]


def test_a_prompt_borrows_no_core_that_would_not_make_it_faster():
    machine = Machine(lends_for_prompts=False)
    assert machine.settle(PREFILLING) == [[0], [1]]
    assert machine.settle(DECODING) == [[], [0, 1]], "reading does gain by it"
    assert machine.settle(PREFILLING) == [[0], [1]]


def test_with_nothing_to_do_cores_stay_where_they_are():
    machine = Machine()
    machine.settle(DECODING)
    assert machine.settle() == [[], [0, 1]]


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
    assert machine.route(sequence()) == PairChoice(MOVE, "static", "both workers share one device")


def test_workers_that_share_cores_with_their_like_have_something_to_choose():
    cores = {"prefill0": (0,), "prefill1": (0,), "decode": (1,)}
    places = make_places(["prefill0", "prefill1"], ["decode"], "alias")
    machine = Machine("elastic", cores, places)
    assert not machine.roles.acts_static
    assert not machine.roles.cores.can_lend


def test_one_worker_is_colocated_whatever_is_asked_for():
    places = make_places(["colocated"], ["colocated"], "alias")
    machine = Machine("elastic", {"colocated": (0, 1)}, places)
    assert machine.roles.roles == "colocated"
    assert machine.settle(sequence("colocated")) == [[0, 1]]


def test_step_times_are_learnt_from_either_worker_by_its_number_of_cores():
    machine = Machine()
    assert machine.route(sequence()).reason == "unknown"
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
    moving.legs = (Leg("prefill", 1), Leg("decode", 50))
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
    assert outcome.about.endswith("twice as bad or worse")
    assert learned.route(sequence()).reason == "wary"
    for _ in range(3):
        learned.steps("decode", num_prefill_tokens=200, ms=200, batch=0)
    assert learned.route(sequence()).reason != "wary"


PLAN = steps(512, 8192)


class RehearsingMachine:
    """Workers that answer when told to, each step in 10 ms, by as many as share its core."""

    def __init__(
        self, *, cores=None, transport="alias", num_blocks=300, is_one_bus=True, programme=()
    ):
        cores = cores or {"prefill": (0,), "decode": (1,)}
        self.sent = []
        send = lambda name, command: self.sent.append((name, command))  # noqa: E731
        buses = None if is_one_bus else {name: name for name in cores}
        roles = [[name for name in cores if name.startswith(r)] for r in ("prefill", "decode")]
        places = make_places(*roles, transport, buses=buses)
        places = places.with_pools({pool.name: num_blocks for pool in places.pools})
        self.ledger = Ledger(places.books(16))
        copies = Copies(self.ledger, places)
        self.roles = Roles(places, cores, "elastic", copies, 512, send)
        for name in cores:
            self.roles.worker_ready(name)
        self.rehearsal = Rehearsal(self.roles, self.ledger, send, PLAN, programme)

    def answer(self):
        """Each command once; who rehearsed in one go, on which cores and blocks."""
        turn = {}
        sent, self.sent[:] = list(self.sent), []
        for name, command in sent:
            if isinstance(command, UseCores):
                self.roles.answered(name, CoresUsed(command.cpus))
                self.rehearsal.go_on()
            else:
                turn[name] = sorted(self.roles.cores.used(name)), command
        for name, (own, command) in turn.items():
            num_there = sum(not set(own).isdisjoint(cpus) for cpus, _ in turn.values()) or 1
            made = [
                RehearsedStep(s.num_sequences, s.num_tokens, s.num_before, 10.0 * num_there)
                for s in PLAN
            ]
            self.rehearsal.rehearsed(name, Rehearsed(command.rehearsal_id, made))
        self.ledger.check_invariants()
        return turn

    def run(self):
        """All turns."""
        self.rehearsal.begin()
        turns = []
        while not self.rehearsal.is_over:
            assert self.sent, "somebody waits for nothing"
            if turn := self.answer():
                turns.append(turn)
        return turns


def test_first_all_on_their_own_cores_then_one_on_all_of_them():
    machine = RehearsingMachine()
    side_by_side, alone = machine.run()
    assert {name: cpus for name, (cpus, _) in side_by_side.items()} == {
        "prefill": [0],
        "decode": [1],
    }
    assert {name: cpus for name, (cpus, _) in alone.items()} == {"decode": [0, 1]}
    assert machine.rehearsal.made


@pytest.mark.parametrize("is_one_bus", [True, False])
def test_a_lone_prompt_is_forecast_as_alone_on_a_core_that_workers_share(is_one_bus):
    cores = {"prefill0": (0,), "prefill1": (0,), "decode": (1,)}
    machine = RehearsingMachine(cores=cores, is_one_bus=is_one_bus)
    first, *more = machine.run()
    assert sorted(first) == ["decode", "prefill0"]
    assert [sorted(turn) for turn in more] == ([] if is_one_bus else [["prefill1"]])
    for name in cores:
        assert machine.roles.prompt_ms(name, 512, 0) == pytest.approx(10, abs=0.5)
        assert machine.roles.slowest_ms(name, StepLoad(batch=2, context=130)) == pytest.approx(
            10, abs=0.5
        )


def test_what_several_replies_take_is_rehearsed_before_long_prompts():
    before = PLAN[: next(i for i, step in enumerate(PLAN) if step.num_tokens > 16)]
    loads = [StepLoad.alike(step) for step in before if step.num_tokens == 1]
    assert len(loads) >= MIN_STEPS
    assert max(load.batch for load in loads) >= 4
    assert len({(step.num_sequences, step.num_tokens, step.num_before) for step in PLAN}) == 20


def test_the_budget_is_that_of_all_turns_together():
    turns = RehearsingMachine().run()
    budgets = [max(command.budget_ms for _, command in turn.values()) for turn in turns]
    assert sum(budgets) == BUDGET_MS


def test_workers_that_are_not_alike_each_rehearse_on_all_cores():
    turns = RehearsingMachine(is_one_bus=False).run()
    assert [sorted(turn) for turn in turns] == [["decode", "prefill"], ["prefill"], ["decode"]]


def test_devices_that_lend_no_cores_rehearse_together_once():
    machine = RehearsingMachine(
        cores={"prefill": (), "decode": ()}, transport="peer", is_one_bus=False
    )
    (turn,) = machine.run()
    assert sorted(turn) == ["decode", "prefill"]


def test_no_two_write_the_same_block_and_all_come_back():
    machine = RehearsingMachine()
    (side_by_side, _) = machine.run()
    prefill, decode = (command.block_ids for _, command in side_by_side.values())
    assert prefill
    assert not set(prefill) & set(decode)
    assert machine.ledger.pools["kv"].num_free == 299
    assert machine.roles.cores.used("prefill") == frozenset({0}) or machine.sent


def test_a_death_ends_it_and_no_block_is_free_while_the_other_may_write_it():
    machine = RehearsingMachine()
    machine.rehearsal.begin()
    (first, rehearse), (second, other) = machine.sent
    assert isinstance(rehearse, Rehearse)
    machine.roles.worker_died(first)
    machine.ledger.reap(first)
    machine.rehearsal.give_up()
    assert machine.rehearsal.is_over
    assert machine.ledger.pools["kv"].num_free == 299 - len(other.block_ids)
    machine.rehearsal.rehearsed(second, Rehearsed(other.rehearsal_id, []))
    assert machine.ledger.pools["kv"].num_free == 299
    machine.ledger.check_invariants()


def test_a_pool_without_room_is_not_rehearsed_in():
    machine = RehearsingMachine(num_blocks=2)
    assert machine.run() == []


def test_roles_know_from_it_what_they_choose_between():
    machine = RehearsingMachine()
    machine.run()
    times = machine.roles._times
    assert set(times) == {("prefill", 1), ("decode", 1), ("decode", 2)}


@pytest.mark.parametrize(("chunk", "length"), [(512, 8192), (8, 64), (2048, 2048), (512, 300)])
def test_no_step_is_longer_than_the_model_or_larger_than_a_step(chunk, length):
    plan = steps(chunk, length)
    assert len(set(plan)) == len(plan)
    for step in plan:
        assert 1 <= step.num_tokens <= chunk
        assert step.num_before + step.num_tokens <= length
    assert any(step.num_tokens == 1 for step in plan)
    assert any(step.num_tokens > 1 for step in plan)


def test_a_programme_says_who_makes_which_steps_in_which_turn():
    prompt, token = RehearsalStep(1, 256, 0), RehearsalStep(8, 1, 64)
    turns = [{"decode": [prompt, token]}, {"prefill": [prompt], "decode": [token]}]
    machine = RehearsingMachine(cores={"prefill": (), "decode": ()}, programme=turns)
    alone, both = machine.run()
    assert {name: command.steps for name, (_, command) in alone.items()} == turns[0]
    assert {name: command.steps for name, (_, command) in both.items()} == turns[1]
    assert [set(turn) for turn in machine.rehearsal.by_turn] == [{"decode"}, {"prefill", "decode"}]
    machine.ledger.check_invariants()
