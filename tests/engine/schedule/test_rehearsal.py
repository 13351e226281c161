import pytest

from engine.cache.blocks import Ledger
from engine.cache.places import make_places
from engine.schedule.copies import Copies
from engine.schedule.roles_in_force import BUDGET_MS, Rehearsal, Roles, steps
from engine.schedule.step_times import MIN_STEPS, StepLoad
from engine.wire.messages import (
    CoresUsed,
    RehearsalStep,
    Rehearse,
    Rehearsed,
    RehearsedStep,
    UseCores,
)

PLAN = steps(512, 8192)


class Machine:
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
    machine = Machine()
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
    machine = Machine(cores=cores, is_one_bus=is_one_bus)
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
    turns = Machine().run()
    budgets = [max(command.budget_ms for _, command in turn.values()) for turn in turns]
    assert sum(budgets) == BUDGET_MS


def test_workers_that_are_not_alike_each_rehearse_on_all_cores():
    turns = Machine(is_one_bus=False).run()
    assert [sorted(turn) for turn in turns] == [["decode", "prefill"], ["prefill"], ["decode"]]


def test_devices_that_lend_no_cores_rehearse_together_once():
    machine = Machine(cores={"prefill": (), "decode": ()}, transport="peer", is_one_bus=False)
    (turn,) = machine.run()
    assert sorted(turn) == ["decode", "prefill"]


def test_no_two_write_the_same_block_and_all_come_back():
    machine = Machine()
    (side_by_side, _) = machine.run()
    prefill, decode = (command.block_ids for _, command in side_by_side.values())
    assert prefill
    assert not set(prefill) & set(decode)
    assert machine.ledger.pools["kv"].num_free == 299
    assert machine.roles.cores.used("prefill") == frozenset({0}) or machine.sent


def test_a_death_ends_it_and_no_block_is_free_while_the_other_may_write_it():
    machine = Machine()
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
    machine = Machine(num_blocks=2)
    assert machine.run() == []


def test_roles_know_from_it_what_they_choose_between():
    machine = Machine()
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
    machine = Machine(cores={"prefill": (), "decode": ()}, programme=turns)
    alone, both = machine.run()
    assert {name: command.steps for name, (_, command) in alone.items()} == turns[0]
    assert {name: command.steps for name, (_, command) in both.items()} == turns[1]
    assert [set(turn) for turn in machine.rehearsal.by_turn] == [{"decode"}, {"prefill", "decode"}]
    machine.ledger.check_invariants()
