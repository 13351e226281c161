"""Whatever the walk, a step that reads a moved block comes after the step that wrote it."""

import random

import pytest

from engine.blocks import BlockPool, Ledger
from engine.messages import UseEvents
from engine.queue import FairQueue
from engine.router import Router
from engine.sequence import SamplingParams, Sequence, Stamps
from engine.topology import Topology
from engine.workers.ordering import NUM_EVENTS, Ordering
from engine.workers.runner import Sampled
from tests.accelerator import FakeDevice
from tests.device_order import DeviceOrder
from tests.engine.worker_harness import Harness

BLOCK_SIZE = 4
TOPOLOGY = Topology("prefill", "decode", "kv", "kv", "alias", homes={"kv": "decode"})


class OrderedRunner:
    """Notes which operation wrote each place of the pool, and checks those that it reads."""

    block_size = BLOCK_SIZE
    grammars = None

    def __init__(self, stream, written):
        self.stream, self.written = stream, written
        self.num_foreign_reads = 0

    def launch(self, planned):
        operation = self.stream.launch()
        for running, count in planned:
            start = running.num_computed_tokens
            for position in range(start + count):
                place = (running.block_table[position // BLOCK_SIZE], position % BLOCK_SIZE)
                if position >= start:
                    self.written[place] = operation
                    continue
                writer = self.written[place]
                self.num_foreign_reads += writer[0] != self.stream.name
                assert self.stream.comes_after(writer), f"{place} read before it is written"
        return planned

    def follow(self, launched):
        return None

    def collect(self, planned):
        return [
            Sampled(7 if r.num_computed_tokens + n == r.num_tokens else None) for r, n in planned
        ]


class Machine:
    def __init__(self):
        self.order, self.written = DeviceOrder(), {}
        self.harnesses, self.inbox = {}, {"prefill": [], "decode": []}
        self.handles = {}
        self.num_lives = 0
        for name in TOPOLOGY.workers:
            self.start(name)
        self.router = Router(
            TOPOLOGY,
            Ledger([BlockPool("kv", 60, BLOCK_SIZE)]),
            None,
            FairQueue(64, 1 << 20),
            send=lambda name, command: self.inbox[name].append(command),
            emit=lambda *args: None,
            max_step_tokens=8,
        )
        for name in TOPOLOGY.workers:
            self.router.worker_ready(name, 0)

    def start(self, name):
        self.num_lives += 1
        stream = self.order.stream(f"{name}, life {self.num_lives}")
        device = FakeDevice(order=stream)
        ordering = Ordering(device)
        runner = OrderedRunner(stream, self.written)
        harness = Harness(runner, None, eos_token_ids=(), max_step_tokens=8, ordering=ordering)
        self.harnesses[name] = harness
        self.handles[name] = ordering.handles
        for other, handles in self.handles.items():
            if other != name:
                self.inbox[name].append(UseEvents(handles))
                self.inbox[other].append(UseEvents(ordering.handles))

    def step(self, name, now_ns):
        harness = self.harnesses[name]
        commands, self.inbox[name] = self.inbox[name], []
        harness.tell(*commands)
        for report in harness.step():
            self.router.stepped(name, report, now_ns)

    def kill_prefill(self, now_ns):
        self.harnesses["prefill"].close()
        self.order.dead.add(self.harnesses["prefill"].runner.stream.name)
        self.inbox["prefill"] = []
        self.router.worker_died("prefill", now_ns)
        self.start("prefill")
        self.router.worker_ready("prefill", now_ns)

    def close(self):
        for harness in self.harnesses.values():
            harness.close()


@pytest.mark.parametrize("seed", range(6))
def test_every_read_of_a_moved_block_comes_after_its_write_on_the_device(seed):
    rng, machine, sequences = random.Random(seed), Machine(), []
    for now_ns in range(400):
        if rng.random() < 0.15 and len(sequences) < 40:
            sequence = Sequence(
                seq_id=len(sequences) + 1,
                request_id="r",
                index=0,
                prompt_token_ids=[1] * rng.randrange(1, 20),
                sampling=SamplingParams(rng.randrange(1, 12), 0, ignore_eos=True),
                stamps=Stamps(arrived_ns=now_ns),
            )
            sequences.append(sequence)
            machine.router.submit([sequence], now_ns)
        if seed % 2 and rng.random() < 0.01:
            machine.kill_prefill(now_ns)
        machine.step(rng.choice(["prefill", "decode"]), now_ns)
        machine.router.check_invariants()
    while not all(s.is_finished for s in sequences):
        for name in ("prefill", "decode"):
            machine.step(name, 400)
    assert machine.harnesses["decode"].runner.num_foreign_reads > 10
    machine.close()


def test_without_the_wait_the_order_is_not_known():
    machine = Machine()
    machine.harnesses["decode"].worker._ordering = None
    sequence = Sequence(1, "r", 0, [1] * 3, SamplingParams(4, 0), Stamps(arrived_ns=0))
    machine.router.submit([sequence], 0)
    machine.step("prefill", 0)
    with pytest.raises(AssertionError, match="before it is written"):
        machine.step("decode", 0)
    machine.close()


def test_an_event_recorded_again_orders_at_least_as_much():
    order = DeviceOrder()
    ours, theirs = order.stream("a"), order.stream("b")
    recording, waiting = Ordering(FakeDevice(order=ours)), Ordering(FakeDevice(order=theirs))
    waiting.use(recording.handles)
    first = ours.launch()
    number = recording.after()
    for _ in range(NUM_EVENTS):
        last = ours.launch()
        recording.after()
    waiting._others[number].wait()
    assert theirs.comes_after(first)
    assert theirs.comes_after(last)
