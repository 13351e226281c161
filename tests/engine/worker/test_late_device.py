"""A device is done when somebody has waited for it, and the loop says nothing before that."""

import contextlib
import random

import pytest
import torch

from engine.checkpoint.checkpoint import Checkpoint
from engine.scheduler.cache.ledger import Ledger
from engine.scheduler.cache.topology import make_topology
from engine.scheduler.queue.queue import FairQueue
from engine.scheduler.router import Router
from engine.scheduler.sequences.sequence import Sequence, Stamps
from engine.wire.finish_reason import FinishReason
from engine.wire.messages import Begun, Copied
from engine.wire.run_spec import RunSpec
from engine.wire.sampling import SamplingParams
from engine.worker.grammars import Grammars
from engine.worker.graphs import DecodeGraphs
from engine.worker.model.transformer import Transformer
from engine.worker.model.weight import Weight
from engine.worker.model.weights import load_weights
from engine.worker.runner import Runner
from tests.checkpoints import make_checkpoint
from tests.worlds.accelerator import DEVICE, FakeDevice
from tests.worlds.worker_loop import Harness

BLOCK_SIZE, MAX_MODEL_LEN, STEP_TOKENS = 4, 44, 8
TRANSPORTS = {
    "alias": make_topology(["prefill"], ["decode"], "alias", home="decode"),
    "peer": make_topology(["prefill"], ["decode"], "peer", in_workers=("prefill", "decode")),
}


def no_grammars():
    raise AssertionError("nothing here has a grammar")


class Machine:
    """Two workers over one pool or two, each with a device that computes when it has to."""

    def __init__(self, folder, num_blocks, transport="alias"):
        topology = TRANSPORTS[transport]
        self.topology = topology.with_pools({pool.name: num_blocks for pool in topology.pools})
        checkpoint = Checkpoint.open(folder)
        config = checkpoint.config
        weights = load_weights(checkpoint, "float32", None, None, lambda *_: None)
        shape = (
            num_blocks,
            config.num_kv_layers,
            2,
            BLOCK_SIZE,
            config.num_kv_heads,
            config.head_dim,
        )
        self.devices = {name: FakeDevice() for name in self.topology.names}
        loading = FakeDevice()
        with loading.accelerator.on():
            on_device = {name: Weight.plain(w.values.to(DEVICE)) for name, w in weights.items()}
            self.transformer = Transformer(config, on_device, "float32", MAX_MODEL_LEN)
            self.pools = {p.name: torch.zeros(*shape, device=DEVICE) for p in topology.pools}
            loading.mark()()
        self.dead = []
        self.inbox = {name: [] for name in self.topology.names}
        self.harnesses = {name: self.harness(name) for name in self.topology.names}
        self.router = Router(
            self.topology,
            Ledger(self.topology.new_block_pools(BLOCK_SIZE)),
            FairQueue(64, 1 << 20),
            send=lambda name, command: self.inbox[name].append(command),
            emit=lambda *args: None,
            max_num_batched_tokens=STEP_TOKENS,
        )
        for name in self.topology.names:
            self.router.worker_ready(name, 0)

    def harness(self, name):
        device, graphs = self.devices[name], None
        pool = self.pools[self.topology.pool_of(name)]
        if name == "decode":
            with device.accelerator.on():
                graphs = DecodeGraphs(
                    self.transformer,
                    pool,
                    device,
                    block_size=BLOCK_SIZE,
                    max_model_len=MAX_MODEL_LEN,
                    max_batch=4,
                )
                graphs.capture()
        grammars = Grammars(no_grammars)
        runner = Runner(self.transformer, pool, BLOCK_SIZE, grammars, device, graphs)
        options = {"pools": self.pools, "device": device, "max_num_batched_tokens": STEP_TOKENS}
        return Harness(runner, pool, eos_token_ids=(), **options)

    def step(self, name, now_ns):
        harness, accelerator = self.harnesses[name], self.devices[name].accelerator
        commands, self.inbox[name] = self.inbox[name], []
        with accelerator.on():
            harness.tell(*commands)
            reports = harness.step()
        self.take(name, reports, now_ns)

    def take(self, name, reports, now_ns):
        for report in reports:
            if isinstance(report, Copied):
                assert report.error is None
                self.router.copied(name, report, now_ns)
            elif isinstance(report, Begun):
                self.router.begun(report)
            else:
                self.router.stepped(name, report, now_ns)
            self.router.check_invariants()

    def kill_prefill(self, now_ns):
        """It computes and copies nothing more; what it has sent is read, and another starts."""
        harness = self.harnesses["prefill"]
        harness.worker._copier._pools = {}
        with self.devices["prefill"].accelerator.lock:  # a copy that had begun is done
            reports = [r for r in harness.reported() if getattr(r, "error", None) is None]
        self.take("prefill", reports, now_ns)
        self.dead.append(harness)  # its thread may still report that it has nothing to copy
        self.inbox["prefill"].clear()
        self.router.worker_died("prefill", now_ns)
        self.devices["prefill"] = FakeDevice()
        self.harnesses["prefill"] = self.harness("prefill")
        self.router.worker_ready("prefill", now_ns)
        self.router.check_invariants()

    def finish(self, sequences, now_ns):
        while not all(s.is_finished for s in sequences):
            for name in self.topology.names:
                self.step(name, now_ns)

    def close(self):
        for harness in (*self.harnesses.values(), *self.dead):
            harness.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "one-layer"
    return make_checkpoint(folder, num_hidden_layers=1)


def sequence_of(seq_id, now_ns):
    rng = random.Random(seq_id)
    length = rng.choice([rng.randrange(1, 6), rng.randrange(12, 22)])
    return Sequence(
        seq_id=seq_id,
        request_id="r",
        index=0,
        prompt_token_ids=[rng.randrange(250) for _ in range(length)],
        spec=RunSpec(
            SamplingParams(
                rng.choice([rng.randrange(1, 9), rng.randrange(12, 20)]),
                seq_id,
                temperature=rng.choice([0.0, 1.0]),
                presence_penalty=rng.choice([0.0, 0.0, 1.0]),  # then the host samples
                ignore_eos=True,
            )
        ),
        stamps=Stamps(arrived_ns=now_ns),
    )


@pytest.fixture(scope="module")
def expected(folder):
    """Every sequence's tokens, where it is alone."""
    with contextlib.closing(Machine(folder, 13)) as machine:
        tokens = {}
        for seq_id in range(1, 31):
            sequence = sequence_of(seq_id, 0)
            machine.router.submit([sequence], 0)
            machine.finish([sequence], 0)
            tokens[seq_id] = sequence.output_token_ids
        return tokens


@pytest.mark.parametrize("transport", list(TRANSPORTS))
@pytest.mark.parametrize("seed", range(2))
def test_blocks_that_pass_on_hold_what_was_computed_whatever_is_dropped(
    folder, expected, transport, seed
):
    rng, sequences = random.Random(seed), []
    # few blocks: whatever becomes free is somebody else's at once
    with contextlib.closing(Machine(folder, 13, transport)) as machine:
        for now_ns in range(240):
            if len(sequences) < 30 and rng.random() < 0.4:
                sequences.append(sequence_of(len(sequences) + 1, now_ns))
                machine.router.submit([sequences[-1]], now_ns)
            live = [s for s in sequences if not s.is_finished]
            if live and rng.random() < 0.06:
                machine.router.abort(rng.choice(live), FinishReason.ABORT, now_ns)
            if rng.random() < 0.1:
                machine.router.switch_roles(rng.choice(["static", "colocated"]), now_ns)
            if rng.random() < 0.02:
                machine.kill_prefill(now_ns)
            machine.step(rng.choice(machine.topology.names), now_ns)
        machine.finish(sequences, 240)
        assert any(s.finish_reason is FinishReason.ABORT for s in sequences)
        # a copy to a peer takes its own time: a rare run of it preempts nothing
        assert machine.router.counters.preemptions or transport == "peer"
        for sequence in sequences:
            tokens = sequence.output_token_ids
            assert tokens == expected[sequence.seq_id][: len(tokens)]


def test_a_step_that_samples_nothing_is_done_when_it_is_collected(folder):
    with contextlib.closing(Machine(folder, 9)) as machine:
        sequence = Sequence(
            2, "r", 0, [1] * 20, RunSpec(SamplingParams(2, 0)), Stamps(arrived_ns=0)
        )
        machine.router.submit([sequence], 0)
        accelerator = machine.devices["prefill"].accelerator
        reads = accelerator.num_reads
        machine.step("prefill", 0)
        assert sequence.num_computed_tokens == STEP_TOKENS
        assert accelerator.num_reads == reads  # nobody has read a value of it
        written = machine.pools["kv"].value[:, 0, 0].flatten(1).any(-1)
        assert written.sum() == STEP_TOKENS // BLOCK_SIZE
