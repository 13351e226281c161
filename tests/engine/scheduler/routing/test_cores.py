import random

import pytest

from engine.errors import InvariantViolated
from engine.scheduler.routing.core_lending import Cores
from engine.wire.messages import CoresUsed
from tests.worlds.router_world import World

OWN = {"prefill": (0,), "decode": (1,)}
ALL = frozenset((0, 1))
NONE = frozenset()


class Machine:
    """Cores, and workers that answer when they are told to."""

    def __init__(self, own=OWN):
        self.told = {name: [] for name in own}
        self.cores = Cores(own, lambda name, command: self.told[name].append(command.cpus))
        for name in own:
            self.cores.worker_ready(name)

    def want(self, wanted, busy=("prefill", "decode")):
        self.cores.want(wanted, busy)

    def answer(self, name):
        self.cores.answered(name, CoresUsed(self.told[name].pop(0)))
        self.cores.check_invariants()

    def settle(self):
        while waiting := [name for name, told in self.told.items() if told]:
            self.answer(waiting[0])


def to_decode():
    return {"prefill": NONE, "decode": ALL}


def test_workers_start_on_their_own_cores():
    machine = Machine()
    assert machine.told == {"prefill": [], "decode": []}
    assert machine.cores.used("decode") == {1}


def test_a_core_is_lent_only_after_its_owner_says_that_it_is_parked():
    machine = Machine()
    machine.want(to_decode())
    assert machine.told == {"prefill": [[]], "decode": []}
    machine.answer("prefill")
    assert machine.told == {"prefill": [], "decode": [[0, 1]]}
    assert machine.cores.used("decode") == {1}
    machine.answer("decode")
    assert machine.cores.used("decode") == ALL


def test_an_owner_takes_its_core_back_at_once_and_the_borrower_is_told_to_let_go():
    machine = Machine()
    machine.want(to_decode())
    machine.settle()
    machine.want(machine.cores.own)
    assert machine.told == {"prefill": [[0]], "decode": [[1]]}
    machine.cores.check_invariants()
    machine.settle()
    assert machine.cores.used("decode") == {1}


def test_an_owner_whose_borrower_is_idle_begins_with_all_that_it_shall_have():
    machine = Machine()
    machine.want(to_decode())
    machine.settle()
    machine.want({"prefill": ALL, "decode": NONE}, busy=["prefill"])
    assert machine.told == {"prefill": [], "decode": [[]]}
    machine.answer("decode")
    assert machine.told == {"prefill": [[0, 1]], "decode": []}


def test_an_owner_that_waits_for_an_idle_borrower_does_not_wait_once_that_is_busy():
    machine = Machine()
    machine.want(to_decode())
    machine.settle()
    machine.want({"prefill": ALL, "decode": NONE}, busy=["prefill"])
    machine.want(machine.cores.own, busy=["prefill", "decode"])
    assert machine.told == {"prefill": [[0]], "decode": [[], [1]]}
    machine.settle()
    assert {name: machine.cores.used(name) for name in OWN} == {"prefill": {0}, "decode": {1}}


def test_an_owner_whose_idle_borrower_dies_has_its_core():
    machine = Machine()
    machine.want(to_decode())
    machine.settle()
    machine.want({"prefill": ALL, "decode": NONE}, busy=["prefill"])
    machine.told["decode"].clear()
    machine.cores.worker_died("decode")
    assert machine.told["prefill"] == [[0, 1]]


def test_a_core_that_a_borrower_was_not_told_to_give_back_has_one_user():
    machine = Machine()
    machine.want(to_decode())
    machine.settle()
    machine.cores._used["prefill"] = frozenset((0,))
    with pytest.raises(InvariantViolated):
        machine.cores.check_invariants()


def test_a_change_of_mind_does_not_wait_for_the_first_answer():
    machine = Machine()
    machine.want(to_decode())
    machine.want(machine.cores.own)
    assert machine.told["prefill"] == [[], [0]]
    machine.settle()
    assert machine.cores.used("prefill") == {0}
    assert machine.told == {"prefill": [], "decode": []}


def test_a_dead_borrower_holds_nothing():
    machine = Machine()
    machine.want(to_decode())
    machine.settle()
    machine.cores.worker_died("decode")
    machine.want(machine.cores.own)
    assert machine.told["prefill"] == [[0]]


def test_an_owner_that_comes_back_to_a_lent_core_is_parked_until_it_is_wanted():
    machine = Machine()
    machine.want(to_decode())
    machine.settle()
    machine.cores.worker_died("prefill")
    machine.cores.worker_ready("prefill")
    assert machine.told == {"prefill": [[]], "decode": []}
    machine.settle()
    machine.want(machine.cores.own)
    assert machine.told == {"prefill": [[0]], "decode": [[1]]}


@pytest.mark.parametrize(
    "own", [{"prefill": (0,), "decode": (0,)}, {"prefill": (), "decode": ()}, {"colocated": (0, 1)}]
)
def test_nothing_is_lent_where_there_is_nothing_to_lend(own):
    machine = Machine(own)
    machine.want(dict.fromkeys(own, NONE))
    assert not machine.cores.can_lend
    assert not any(machine.told.values())


def test_an_answer_that_nobody_asked_for_is_a_violation():
    with pytest.raises(InvariantViolated):
        Machine().cores.answered("decode", CoresUsed([0, 1]))


@pytest.mark.parametrize("seed", range(20))
def test_in_a_long_random_walk_no_core_is_lent_that_its_owner_uses(seed):
    rng = random.Random(seed)
    own = {"prefill": (0, 1, 2), "decode": (3, 4)}
    machine, down = Machine(own), set()
    cores = machine.cores
    targets = [cores.own, {"prefill": NONE, "decode": cores.all}]
    targets.append({"prefill": cores.all, "decode": NONE})
    for _ in range(2000):
        action, name = rng.random(), rng.choice(list(own))
        if action < 0.2:
            busy = [each for each in own if rng.random() < 0.5]
            cores.want(rng.choice(targets), busy)
        elif action < 0.25 and name not in down:
            down.add(name)
            machine.told[name].clear()
            cores.worker_died(name)
        elif action < 0.35 and name in down:
            down.discard(name)
            cores.worker_ready(name)
        elif machine.told[name]:
            machine.answer(name)
        cores.check_invariants()
    for name in down:
        cores.worker_ready(name)
    target = rng.choice(targets)
    cores.want(target, rng.sample(list(own), rng.randint(0, 2)))
    machine.settle()
    assert {name: cores.used(name) for name in own} == target


def test_a_lone_prompt_has_all_cores_from_its_first_step_on_also_before_steps_are_measured():
    world = World("elastic")
    world.tick()
    world.submit(sequence := world.sequence(30, 5))
    worker = world.workers[world.topology.playing("prefill")[0]]
    for _ in range(10):
        if worker.has_stepped:
            break
        world.tick()
    assert sequence.route_reason.startswith("alone")
    assert set(worker.cpus) == {0, 1}
