"""What is measured while no request is live: in which slices, on which cores, and for how long."""

from types import SimpleNamespace

import pytest

from engine.profile.facts import DECODE_MS, PROMPT_MS, FactKey, Profile
from engine.scheduler.cache.ledger import Ledger
from engine.scheduler.cache.topology import make_topology
from engine.scheduler.measurer import (
    ALONE,
    ENOUGH_SAMPLES,
    MAX_WORK_MS,
    Measurer,
    decode_shapes,
    key_of,
    prompt_shapes,
)
from engine.scheduler.routing.copies import Copies
from engine.scheduler.routing.roles_in_force import Roles
from engine.scheduler.routing.step_times import StepLoad
from engine.wire.messages import (
    CoresUsed,
    MeasuredStep,
    MeasureSteps,
    StepShape,
    StepsMeasured,
    StopMeasuring,
    UseCores,
)

SIZES = (256, 128, 512)
SLICE_NS = 250_000_000


class Machine:
    """Workers that answer when told to; a step takes a millisecond a token."""

    def __init__(self, *, cores=None, num_blocks=300, is_one_bus=True, profile=None, **options):
        cores = cores or {"prefill": (0,), "decode": (1,)}
        self.sent = []
        send = lambda name, command: self.sent.append((name, command))  # noqa: E731
        buses = None if is_one_bus else {name: name for name in cores}
        roles = [[name for name in cores if name.startswith(r)] for r in ("prefill", "decode")]
        transport = "alias" if is_one_bus else "peer"
        topology = make_topology(*roles, transport, buses=buses)
        topology = topology.with_pools({pool.name: num_blocks for pool in topology.pools})
        self.ledger = Ledger(topology.new_block_pools(16))
        copies = Copies(self.ledger, topology)
        self.profile = Profile() if profile is None else profile
        self.roles = Roles(topology, cores, "elastic", copies, 512, send, profile=self.profile)
        for name in cores:
            self.roles.worker_ready(name)
        router = SimpleNamespace(roles=self.roles, ledger=self.ledger)
        self.measurer = Measurer(router, send, SIZES, 8192, **options)
        self.now_ns = 0
        self.num_steps = 6
        """That a worker has time for in a slice."""
        self.too_long = frozenset()

    def deliver(self):
        """Hand everything to the workers; what each was told to measure, and on which cores."""
        told = {}
        while self.sent:
            name, command = self.sent.pop(0)
            match command:
                case UseCores(cpus):
                    self.roles.answered(name, CoresUsed(cpus))
                    self.measurer.go_on()
                case MeasureSteps():
                    told[name] = sorted(self.roles.cores.used(name)), command
        return told

    def answer(self, told):
        for name, (_, command) in told.items():
            steps = [s for s in command.steps if s.num_tokens not in self.too_long]
            left_out = [s for s in command.steps if s.num_tokens in self.too_long]
            made = [
                MeasuredStep(s.num_sequences, s.num_tokens, s.num_before, float(s.num_tokens))
                for s in steps[: self.num_steps]
            ]
            report = StepsMeasured(command.measurement_id, made, list(dict.fromkeys(left_out)))
            self.measurer.measured(name, report, self.now_ns)
        self.ledger.check_invariants()

    def slice(self):
        """One slice; what each worker was told, or nothing if none has begun."""
        if not self.measurer.begin(self.now_ns):
            return {}
        told = self.deliver()
        self.now_ns += SLICE_NS
        self.answer(told)
        assert not self.measurer.is_measuring
        self.deliver()
        return told

    def run(self):
        slices = []
        while told := self.slice():
            slices.append(told)
        return slices


def test_prompts_on_one_core_beside_decodes_on_the_other_and_both_on_all_cores():
    slices = Machine().run()
    cores = [{name: cpus for name, (cpus, _) in told.items()} for told in slices]
    assert {"prefill": [0], "decode": [1]} in cores
    assert {"decode": [0, 1]} in cores
    for told in slices:
        if "prefill" in told:
            for name, (_, command) in told.items():
                assert {s.num_tokens > 1 for s in command.steps} == {name == "prefill"}


def test_when_it_is_over_every_fact_has_enough_samples_and_is_predicted():
    machine = Machine()
    machine.run()
    assert machine.measurer.num_unknown == 0
    assert not machine.measurer.begin(machine.now_ns)
    for what, size, place in (
        (PROMPT_MS, 256, "decode on 2"),
        (PROMPT_MS, 512, "prefill on 1"),
        (DECODE_MS, 4, "decode on 1"),
    ):
        fact = machine.profile.facts[FactKey(what, size, 0, place)]
        assert len(fact.samples) >= ENOUGH_SAMPLES
    assert machine.roles.slowest_ms("prefill", StepLoad(300, 300 * 150.0)) is not None
    assert machine.ledger.pools["kv"].num_free == 299


def test_samples_of_different_facts_take_turns():
    machine = Machine()
    for _ in range(8):
        machine.slice()
    counts = [len(fact.samples) for key, fact in machine.profile.about(PROMPT_MS, "decode on 2")]
    assert max(counts) - min(counts) <= 2


def test_a_profile_that_knows_all_leaves_nothing_to_measure():
    first = Machine()
    first.run()
    second = Machine(profile=Profile(first.profile.facts))
    assert second.measurer.num_unknown == 0
    assert not second.run()
    assert second.roles.prompt_ms("prefill", 300, 0) is not None


def test_a_model_costs_no_more_than_its_share():
    machine = Machine()
    machine.num_steps = 1
    slices = machine.run()
    assert len(slices) * SLICE_NS / 1e6 <= MAX_WORK_MS
    assert machine.measurer.num_unknown, "it is slow: the rest stays unknown"
    again = Machine(profile=machine.profile)
    assert again.measurer.num_unknown
    assert not again.run(), "also after the next start"
    again.measurer.work_ms = 0.0
    assert again.run()


def test_a_request_ends_the_slice_and_what_was_timed_by_then_counts():
    machine = Machine()
    machine.measurer.begin(0)
    told = machine.deliver()
    machine.measurer.stop(1)
    assert {type(command) for _, command in machine.sent} == {StopMeasuring}
    assert machine.measurer.is_measuring, "blocks are still written"
    machine.num_steps = 1
    machine.answer(told)
    assert not machine.measurer.is_measuring
    assert machine.measurer.num_done == 2
    assert machine.ledger.pools["kv"].num_free == 299


def test_a_request_before_cores_have_changed_hands_ends_it_at_once():
    machine = Machine()
    machine.roles.move_cores(())
    machine.deliver()
    machine.measurer.begin(0)
    machine.measurer.stop(1)
    assert not machine.measurer.is_measuring
    assert machine.ledger.is_idle


def test_a_death_ends_it_and_no_block_is_free_while_the_other_may_write_it():
    machine = Machine()
    machine.measurer.begin(0)
    told = machine.deliver()
    first, second = told
    machine.roles.worker_died(first)
    machine.ledger.reap(first)
    machine.measurer.worker_died(first, 1)
    assert machine.measurer.is_measuring
    assert machine.ledger.pools["kv"].num_free < 299
    machine.answer({second: told[second]})
    assert machine.ledger.pools["kv"].num_free == 299


def test_no_two_write_the_same_block_and_cached_ones_are_left_alone():
    machine = Machine()
    machine.measurer.begin(0)
    prefill, decode = (command.block_ids for _, command in machine.deliver().values())
    assert prefill
    assert not set(prefill) & set(decode)
    assert Machine(num_blocks=3).run() == [], "no room"


def test_what_would_keep_a_request_waiting_is_left_out_for_good():
    machine = Machine()
    machine.too_long = {256, 512}
    machine.run()
    assert machine.measurer.num_unknown == 0
    sizes = {key.size for key, _ in machine.profile.about(PROMPT_MS)}
    assert not sizes & machine.too_long


def test_what_a_chooser_asked_for_is_measured_too():
    machine = Machine()
    machine.run()
    before = set(machine.profile.facts)
    machine.roles.asked[FactKey(DECODE_MS, 8, 512)] += 1
    machine.roles.asked[FactKey(DECODE_MS, 64, 4096)] += 1
    assert machine.measurer.num_unknown
    machine.run()
    new = set(machine.profile.facts) - before
    assert {(key.size, key.depth) for key in new} == {(8, 512), (16, 4096)}


def test_processes_that_share_a_gpu_are_timed_beside_each_other_and_alone():
    machine = Machine(cores={"prefill": (), "decode": ()}, is_one_bus=False, shares_gpu=True)
    machine.run()
    places = {key.place for key in machine.profile.facts if key.place}
    assert places == {"prefill on 1", "decode on 1", ALONE}


def test_devices_of_their_own_are_timed_at_the_same_time():
    machine = Machine(cores={"prefill": (), "decode": ()}, is_one_bus=False)
    assert {frozenset(told) for told in machine.run()} == {frozenset(("prefill", "decode"))}


@pytest.mark.parametrize(("sizes", "length"), [(SIZES, 8192), ((8,), 64), ((4096,), 300)])
def test_no_step_is_longer_than_the_model(sizes, length):
    shapes = prompt_shapes(sizes, length) + decode_shapes(length)
    assert len(set(shapes)) == len(shapes)
    for shape in shapes:
        assert shape.num_tokens >= 1
        assert shape.num_before + shape.num_tokens <= length
        key_of(shape, "anywhere")


def test_a_shape_is_a_sample_of_the_fact_that_its_step_is_entered_under():
    machine = Machine()
    for shape in prompt_shapes(SIZES, 8192) + decode_shapes(8192) + [StepShape(3, 1, 700)]:
        size = shape.num_sequences, shape.num_tokens, shape.num_before
        machine.roles.measured("x on 1", [MeasuredStep(*size, 10.0)])
        assert machine.profile.facts.pop(key_of(shape, "x on 1"), None) is not None
        assert not machine.profile.facts
