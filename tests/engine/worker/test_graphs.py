"""Graphs change nothing but the time: the same tokens as step by step, whoever comes and goes."""

import contextlib
import copy
import math
import random
from collections import Counter

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.checkpoint.checkpoint import Checkpoint
from engine.text.grammar_matcher import GrammarTokenizer
from engine.text.tokenizer import Tokenizer
from engine.wire.messages import Admit, Release
from engine.wire.run_spec import RunSpec
from engine.wire.sampling import SamplingParams
from engine.worker.grammars import Grammars
from engine.worker.graphs import BATCH_SIZES, DecodeGraphs, bucket_of
from engine.worker.model.transformer import Transformer
from engine.worker.model.weight import Weight
from engine.worker.model.weights import load_weights
from engine.worker.runner import Runner
from engine.worker.speculation import Speculation
from engine.worker.worker_request import WorkerRequest
from tests.checkpoints import make_checkpoint
from tests.speculated import BLOCK_SIZE as BLOCK_SIZE_OF_MODELS
from tests.speculated import Model, compare
from tests.worlds.accelerator import DEVICE, FakeDevice
from tests.worlds.worker_loop import Harness

BLOCK_SIZE = 4
MAX_MODEL_LEN = 48
BLOCKS_EACH = MAX_MODEL_LEN // BLOCK_SIZE
NUM_SEQUENCES = 12


@given(st.integers(1, 256))
def test_a_bucket_is_the_smallest_that_is_large_enough(size):
    found = bucket_of(size, BATCH_SIZES)
    assert found >= size
    assert all(other < size for other in BATCH_SIZES if other < found)


def test_there_is_no_bucket_for_what_is_larger_than_all():
    assert bucket_of(BATCH_SIZES[-1] + 1, BATCH_SIZES) is None


def no_grammars():
    raise AssertionError("nothing here has a grammar")


@pytest.fixture(scope="module")
def bare(folder):
    """Graphs whose tables alone matter."""
    machine = Machine(folder, has_graphs=True)
    yield machine.graphs
    machine.close()


class Machine:
    """A worker on the accelerator, with graphs or without."""

    def __init__(self, folder, *, has_graphs, max_batch=8):
        checkpoint = Checkpoint.open(folder)
        config = checkpoint.config
        weights = load_weights(checkpoint, "float32", None, None, lambda *_: None)
        self.device = FakeDevice()
        shape = (1 + NUM_SEQUENCES * BLOCKS_EACH, config.num_kv_layers, 2, BLOCK_SIZE)
        with self.device.accelerator.on():
            on_device = {name: Weight.plain(w.values.to(DEVICE)) for name, w in weights.items()}
            transformer = Transformer(config, on_device, "float32", MAX_MODEL_LEN)
            self.pool = torch.zeros(*shape, config.num_kv_heads, config.head_dim, device=DEVICE)
            self.graphs = None
            if has_graphs:
                self.graphs = DecodeGraphs(
                    transformer,
                    self.pool,
                    self.device,
                    block_size=BLOCK_SIZE,
                    max_model_len=MAX_MODEL_LEN,
                    max_batch=max_batch,
                )
                self.graphs.widths = [5, BLOCKS_EACH]
                self.graphs.capture()
        grammars = Grammars(no_grammars)
        runner = Runner(transformer, self.pool, BLOCK_SIZE, grammars, self.device, self.graphs)
        self.harness = Harness(runner, self.pool, eos_token_ids=(), max_num_batched_tokens=16)
        self.entries = []

    def tell(self, *commands):
        self.harness.tell(*copy.deepcopy(commands))  # a worker goes on with an admit's own lists

    def step(self):
        with self.device.accelerator.on():
            for report in self.harness.step():
                self.entries += report.entries

    def run(self):
        worker = self.harness.worker
        while worker._running or worker._flight or worker._ended:
            self.step()

    def tokens(self, seq_id):
        return [t for e in self.entries if e.seq_id == seq_id for t in e.token_ids]

    def close(self):
        self.harness.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "one-layer"
    return make_checkpoint(folder, num_hidden_layers=1)


@pytest.fixture(scope="module")
def both(folder):
    made = [Machine(folder, has_graphs=True), Machine(folder, has_graphs=False)]
    yield made
    for machine in made:
        machine.close()


@pytest.fixture
def machines(both):
    for machine in both:
        machine.entries.clear()
        machine.device.replayed.clear()
    return both


def admit(seq_id, num_prompt_tokens, num_outputs, **sampling):
    rng = random.Random(seq_id)
    first = 1 + (seq_id - 1) * BLOCKS_EACH
    return Admit(
        seq_id=seq_id,
        generation=1,
        token_ids=[rng.randrange(250) for _ in range(num_prompt_tokens)],
        num_prompt_tokens=num_prompt_tokens,
        num_computed_tokens=0,
        block_table=list(range(first, first + BLOCKS_EACH)),
        spec=RunSpec(SamplingParams(num_outputs, seq_id, **{"temperature": 0.0} | sampling)),
        until_output=num_outputs,
    )


KINDS = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 20},
    {"temperature": 2.0, "min_p": 0.05},
    {"frequency_penalty": 1.0},
    {"logprobs": 2},
]


def script(seed):
    """What is admitted or dropped before each of some steps: arrivals in bursts, then quiet."""
    rng = random.Random(seed)
    waiting, live, commands = list(range(1, NUM_SEQUENCES + 1)), [], []
    for step in range(48):
        now = []
        if step % 12 == 0:
            for seq_id in waiting[:3]:
                kind = KINDS[0 if rng.random() < 0.5 else rng.randrange(len(KINDS))]
                now.append(admit(seq_id, rng.randrange(1, 20), rng.randrange(4, 25), **kind))
            live += waiting[:3]
            del waiting[:3]
        if live and rng.random() < 0.05:
            now.append(Release(live.pop(rng.randrange(len(live))), 1))
        commands.append(now)
    return commands


@pytest.mark.parametrize("seed", range(3))
def test_sequences_that_come_and_go_get_the_tokens_that_they_get_without_graphs(machines, seed):
    with_graphs, eager = machines
    dropped = set()
    for now in script(seed):
        dropped |= {c.seq_id for c in now if isinstance(c, Release)}
        for machine in machines:
            machine.tell(*now)
            machine.step()
    for machine in machines:
        machine.run()
    assert len(set(with_graphs.device.replayed)) > 4
    assert not eager.device.replayed
    for seq_id in range(1, NUM_SEQUENCES + 1):
        ours, theirs = (machine.tokens(seq_id) for machine in machines)
        shorter = min(len(ours), len(theirs))
        assert ours[:shorter] == theirs[:shorter]
        assert seq_id in dropped or len(ours) == len(theirs)
    for machine in machines:
        released = [e.seq_id for e in machine.entries if e.released]
        assert len(released) == len(set(released))
        assert set(released) == {e.seq_id for e in machine.entries}


def test_the_host_launches_the_next_step_before_it_reads_the_tokens_of_this_one(machines):
    machine, eager = machines
    for each in machines:
        each.tell(admit(1, 3, 12), admit(2, 5, 12, temperature=1.0))
        each.run()
    # all but the prompt's own step and the last, after which nothing can follow
    replays, steps = machine.device.replayed, len(machine.tokens(1)) - 1
    assert len(replays) == 2 * steps
    assert [machine.tokens(i) for i in (1, 2)] == [eager.tokens(i) for i in (1, 2)]


def test_a_sequence_that_ends_by_a_stop_id_is_released_after_the_step_too_many(folder):
    machine = Machine(folder, has_graphs=True)
    plain = admit(1, 4, 20)
    machine.tell(plain)
    machine.run()
    tokens = machine.tokens(1)
    stop = tokens[6]
    first = tokens.index(stop)
    machine.entries.clear()
    machine.tell(admit(1, 4, 20, stop_token_ids=(stop,)), admit(2, 6, 20))
    machine.run()
    mine = [e for e in machine.entries if e.seq_id == 1]
    assert machine.tokens(1) == tokens[: first + 1]
    ends = [i for i, e in enumerate(mine) if e.finish_reason]
    releases = [i for i, e in enumerate(mine) if e.released]
    assert (len(ends), len(releases)) == (1, 1)
    assert ends[0] < releases[0]
    assert mine[releases[0]].num_scheduled_tokens == 0
    assert len(machine.tokens(2)) == 20
    machine.close()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_step_without_numbers_ends_its_sequence_by_a_fault_and_no_other(machines, temperature):
    for machine in machines:
        machine.tell(admit(1, 4, 12, temperature=temperature), admit(2, 6, 12))
        machine.run()
    tokens, others = machines[0].tokens(1), machines[0].tokens(2)
    asked, other = admit(1, 4, 12, temperature=temperature), admit(2, 6, 12)
    # the step that reads this token yields no numbers: of those that come once and late the last
    read_by_others = {*asked.token_ids, *other.token_ids, *others}
    firsts = [t for i, t in enumerate(tokens[:-1]) if t not in tokens[:i]]
    bad = [t for t in firsts if t not in read_by_others][-1]
    alone = msgspec.structs.replace(admit(3, 1, 12, temperature=temperature), token_ids=[bad])
    for machine in machines:
        with nan_embedding(machine, bad):
            machine.entries.clear()
            machine.tell(alone)
            machine.run()
            machine.tell(asked, other)
            machine.run()
        assert machine.tokens(1) == tokens[: tokens.index(bad) + 1]
        assert machine.tokens(2) == others
        assert machine.tokens(3) == []
        faults = {e.seq_id: e for e in machine.entries if e.is_fault}
        assert set(faults) == {1, 3}
        assert {e.finish_reason for e in faults.values()} == {"error"}
        assert "NaN" in faults[3].error
        # what the token itself was computed to is nothing that others may find
        assert faults[1].num_computed_tokens == 4 + tokens.index(bad)
        assert faults[3].num_computed_tokens == 0


@contextlib.contextmanager
def nan_embedding(machine, token_id):
    """While it lasts, a step that reads the token yields no numbers."""
    model = machine.harness.worker._runner._transformer
    with machine.device.accelerator.on():
        row = model._embedding.data[token_id]
        kept = row.clone()
        row.fill_(math.nan)
    yield
    with machine.device.accelerator.on():
        row.copy_(kept)


def test_a_step_of_more_sequences_than_the_largest_graph_goes_without_one(folder):
    machine = Machine(folder, has_graphs=True, max_batch=2)
    with contextlib.closing(machine):
        machine.tell(*(admit(i, 2, 6) for i in (1, 2, 3)))
        machine.run()
        assert not machine.device.replayed
        assert all(len(machine.tokens(i)) == 6 for i in (1, 2, 3))


class OnDevice(Model):
    """A model on the accelerator, whose decode steps are graphs if there are guesses."""

    def __init__(self, folder):
        checkpoint = Checkpoint.open(folder)
        self.config, self.tokenizer = checkpoint.config, Tokenizer.from_folder(folder)
        self.kv_dtype, self.devices, self.record_blocks = "float32", [], 0
        weights = load_weights(checkpoint, "float32", None, None, lambda *_: None)
        self.weights = {name: weight.values for name, weight in weights.items()}
        size, ends = self.config.vocab_size, self.config.eos_token_ids
        self.grammars = Grammars(lambda: GrammarTokenizer(self.tokenizer, size, ends))

    def pool(self):
        self.devices.append(FakeDevice())
        with self.devices[-1].accelerator.on():
            return super().pool().to(DEVICE)

    def values(self, pool):
        with self.devices[-1].accelerator.on():
            return pool.cpu()

    def check(self, ours, theirs):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)

    def worker(self, pool, most, *, speculates):
        device, length = self.devices[-1], BLOCK_SIZE_OF_MODELS * 8
        with device.accelerator.on():
            on_device = {n: Weight.plain(w.to(DEVICE)) for n, w in self.weights.items()}
            transformer = Transformer(self.config, on_device, "float32", length)
            graphs = None
            if speculates:
                sizes = {"block_size": BLOCK_SIZE_OF_MODELS, "max_model_len": length}
                graphs = DecodeGraphs(transformer, pool, device, max_batch=16, **sizes)
                graphs.capture()
        runner = Runner(transformer, pool, BLOCK_SIZE_OF_MODELS, self.grammars, device, graphs)
        speculation = Speculation(self.config.vocab_size, BLOCK_SIZE_OF_MODELS, most)
        harness = Harness(
            runner,
            pool,
            eos_token_ids=self.config.eos_token_ids,
            max_num_batched_tokens=64,
            speculation=speculation if speculates else None,
        )
        step = harness.step

        def step_on_device():
            with device.accelerator.on():
                return step()

        harness.step = step_on_device
        return harness


@pytest.fixture(scope="module")
def on_device(folder):
    return OnDevice(folder)


def test_guesses_within_graphs_change_no_token(on_device):
    counts = sum((compare(on_device, number) for number in (7, 8, 9, 11)), Counter())
    assert counts["accepted"] > 20
    assert counts["refused"] > 5
    assert any(device.replayed for device in on_device.devices)


def guessing(machine, most=7):
    machine.harness.worker._speculation = Speculation(300, BLOCK_SIZE, most)
    return machine


@pytest.mark.parametrize("sampling", KINDS)
def test_a_step_keeps_the_guesses_that_are_drawn_and_follows_none_with_guesses(folder, sampling):
    machine = Machine(folder, has_graphs=True)
    asked = admit(1, 6, 24, **sampling)
    with contextlib.closing(machine):
        machine.tell(asked)
        machine.run()
        tokens, num_steps = machine.tokens(1), len(machine.device.replayed)
        machine.entries.clear()
        machine.device.replayed.clear()
        wrong = [*tokens[:9], 251, *tokens[10:]]
        asked.spec.prediction.extend(wrong)
        guessing(machine).tell(asked)
        machine.run()
        assert machine.tokens(1) == tokens
        assert len(machine.device.replayed) < num_steps / 2
        counts = [(e.num_drafted, len(e.token_ids)) for e in machine.entries if e.num_drafted]
        assert (7, 8) in counts
        assert any(taken <= drafted for drafted, taken in counts)


def test_a_step_without_numbers_behind_a_right_guess_is_left_to_the_next_step(folder):
    machine = Machine(folder, has_graphs=True)
    asked = admit(1, 4, 12)
    with contextlib.closing(machine):
        machine.tell(asked)
        machine.run()
        tokens = machine.tokens(1)
        bad = next(t for t in tokens[2:] if t not in asked.token_ids and t not in tokens[:2])
        machine.entries.clear()
        asked.spec.prediction.extend(tokens)
        guessing(machine).tell(asked)
        with nan_embedding(machine, bad):
            machine.run()
        assert machine.tokens(1) == tokens[: tokens.index(bad) + 1]
        (fault,) = [e for e in machine.entries if e.is_fault]
        assert fault.token_ids == []
        assert fault.num_computed_tokens == 4 + tokens.index(bad)


def dummy(seq_id, length):
    return WorkerRequest(
        seq_id=seq_id,
        generation=1,
        token_ids=[0],
        num_prompt_tokens=1,
        num_computed_tokens=0,
        block_table=[seq_id * 100 + column for column in range(length)],
        sampling=SamplingParams(1, 0),
        until_output=1,
        admitted_ns=0,
    )


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.lists(st.integers(0, 7), max_size=3)),
        min_size=1,
        max_size=8,
    )
)
def test_sequences_keep_their_rows_while_others_come_and_go(bare, changes):
    graphs, stepping, before, next_id = bare, [], [], 1
    for arrivals, departures in changes:
        for place in departures:
            if place < len(stepping):
                del stepping[place]
        for _ in range(min(arrivals, 8 - len(stepping))):
            stepping.append(dummy(next_id, 1 + next_id % BLOCKS_EACH))
            next_id += 1
        if not stepping:
            continue
        with graphs._device.accelerator.on():
            owners = graphs.in_rows(stepping)
            tables = graphs._tables.cpu()
        assert sorted(map(id, owners)) == sorted(map(id, stepping))
        stayed = [r for r in before[: len(owners)] if any(r is s for s in stepping)]
        assert all(owners[before.index(r)] is r for r in stayed)
        for row, running in enumerate(owners):
            length = len(running.block_table)
            assert tables[row, :length].tolist() == running.block_table
        assert not tables[len(owners) :, 0].any()
        before = owners


def test_one_departure_of_many_writes_two_rows_in_one_copy(bare):
    device, staying = bare._device, [dummy(i, 9) for i in range(1, 9)]
    with device.accelerator.on():
        bare.in_rows(staying)
        writes = device.accelerator.num_writes
        del staying[2]
        bare.in_rows(staying)
        assert device.accelerator.num_writes == writes + 1
        assert [r.seq_id for r in bare._owners] == [1, 2, 8, 4, 5, 6, 7]
        bare.in_rows(staying)
        assert device.accelerator.num_writes == writes + 1  # nothing has changed


def test_rows_without_a_sequence_read_and_write_nothing_but_block_0(folder):
    machine = Machine(folder, has_graphs=True)
    with contextlib.closing(machine), machine.device.accelerator.on():
        machine.tell(*(admit(i, 3, 5) for i in (1, 2, 3)))
        machine.run()
        owned = set(range(1, 1 + 3 * BLOCKS_EACH))
        others = [b for b in range(1, len(machine.pool)) if b not in owned]
        assert not machine.pool.cpu()[others].any()
        assert not machine.graphs._tables.cpu()[3:].any()
