"""Recurrent layers on a GPU: Triton's kernels within graphs, run ahead of what the host has read.

By Triton's interpreter, on a device that computes in the host's memory.
"""

import contextlib
import random

import msgspec
import pytest
import torch

from engine.checkpoint.checkpoint import Checkpoint
from engine.wire.messages import Admit, PoolMade, Records
from engine.wire.run_spec import RunSpec
from engine.wire.sampling import SamplingParams
from engine.worker.grammars import Grammars
from engine.worker.graphs import DecodeGraphs
from engine.worker.kv_pool import block_shape
from engine.worker.model import transformer as transformer_module
from engine.worker.model.cuda import CudaBackend, DeviceLimits, TritonAttention
from engine.worker.model.torch_backend import TorchBackend
from engine.worker.model.transformer import Transformer
from engine.worker.model.weights import load_weights
from engine.worker.runner import Runner
from engine.worker.speculation import Speculation
from tests.checkpoints import load_oracle, make_checkpoint
from tests.engine.gpu_worker import BLOCK_SIZE as GPU_BLOCK_SIZE
from tests.engine.gpu_worker import admit, start_alone
from tests.worlds.accelerator import FakeDevice
from tests.worlds.worker_loop import Harness

BLOCK_SIZE, MAX_MODEL_LEN, NUM_BLOCKS, NUM_TABLE_BLOCKS = 4, 32, 80, 6


class HostDevice:
    """Runs what was captured again, and counts it."""

    torch_device = torch.device("cpu")

    def __init__(self):
        self.num_replayed = 0

    def pinned(self, values, dtype):
        return torch.tensor(values, dtype=dtype)

    def mark(self):
        return lambda: None

    def fetch(self, tensor):
        values = tensor.tolist()
        return lambda: values

    def capture(self, step):
        def replay():
            self.num_replayed += 1
            step()

        return replay


def triton_backend(_device, dtype, config, *_):
    group_size, limits = config.num_heads // config.num_kv_heads, DeviceLimits(2, 1 << 17)
    attention = TritonAttention(group_size, config.head_dim, dtype.itemsize, limits)
    return CudaBackend("triton", attention, attention.queries_per_tile)


class Worker:
    """A worker's loop over one pool."""

    def __init__(self, checkpoint, monkeypatch, device, *, max_batch=2, most_guessed=0):
        config = checkpoint.config
        backend = triton_backend if device else lambda *_: TorchBackend()
        monkeypatch.setattr(transformer_module, "choose_backend", backend)
        weights = load_weights(checkpoint, "float32", None, None, lambda *_: None)
        model = Transformer(config, weights, "float32", MAX_MODEL_LEN, BLOCK_SIZE)
        self.pool = torch.zeros(NUM_BLOCKS, *block_shape(config, BLOCK_SIZE, "float32"))
        self.size, graphs = config.record_blocks(BLOCK_SIZE, "float32"), None
        assert NUM_TABLE_BLOCKS + 4 * self.size < NUM_BLOCKS / 2
        if device:
            sizes = {"block_size": BLOCK_SIZE, "max_model_len": MAX_MODEL_LEN}
            sizes["max_batch"] = max_batch
            graphs = DecodeGraphs(model, self.pool, device, **sizes)
            graphs.capture()
        runner = Runner(model, self.pool, BLOCK_SIZE, Grammars(None), device, graphs)
        guesses = Speculation(config.vocab_size, BLOCK_SIZE, most_guessed) if most_guessed else None
        how = {"eos_token_ids": (), "max_num_batched_tokens": 8, "speculation": guesses}
        self.harness = Harness(runner, self.pool, **how)

    def records(self, seq_id):
        first = 1 + seq_id * (NUM_TABLE_BLOCKS + 4 * self.size) + NUM_TABLE_BLOCKS
        return [list(range(first + i * self.size, first + (i + 1) * self.size)) for i in range(4)]

    def admit(self, seq_id, num_prompt, num_outputs, temperature, prediction=()):
        rng, first = random.Random(seq_id), 1 + seq_id * (NUM_TABLE_BLOCKS + 4 * self.size)
        self.harness.tell(
            Admit(
                seq_id=seq_id,
                generation=1,
                token_ids=[rng.randrange(250) for _ in range(num_prompt)],
                num_prompt_tokens=num_prompt,
                num_computed_tokens=0,
                block_table=list(range(first, first + NUM_TABLE_BLOCKS)),
                spec=RunSpec(
                    SamplingParams(num_outputs, seq_id, temperature), prediction=[*prediction]
                ),
                until_output=num_outputs,
                records=Records(self.records(seq_id), 0, [], [4], BLOCK_SIZE),
            )
        )

    def run(self):
        entries = []
        while self.harness.worker._running or self.harness.worker._flight:
            entries += [e for report in self.harness.step() for e in report.entries]
        self.harness.close()
        return entries

    def values(self, seq_id, place):
        return self.pool[self.records(seq_id)[place]].flatten()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "recurrent"
    return Checkpoint.open(make_checkpoint(folder, "qwen3_5_text"))


def test_torch_computes_a_gpus_steps_where_triton_cannot(checkpoint):
    prompt = random.Random(0).choices(range(250), k=9)
    worker = start_alone(checkpoint, FakeDevice())
    with contextlib.closing(worker):
        worker.report(PoolMade)
        worker.loop()
        size = checkpoint.config.record_blocks(GPU_BLOCK_SIZE, "float32")
        blocks = [list(range(first, first + size)) for first in (20, 20 + size)]
        asked = admit(prompt=prompt, until=4)
        entries = worker.run(msgspec.structs.replace(asked, records=Records(blocks, 0, [], [])))
    drawn = [token for entry in entries for token in entry.token_ids]
    with torch.inference_mode():
        ids = torch.tensor([[*prompt, *drawn]])
        logits = load_oracle(checkpoint.folder)(ids).logits[0, len(prompt) - 1 : -1]
    assert logits.argmax(-1).tolist() == drawn


def test_steps_ahead_within_graphs_yield_torchs_tokens_and_records(checkpoint, monkeypatch):
    device = HostDevice()
    gpu, torchs = Worker(checkpoint, monkeypatch, device), Worker(checkpoint, monkeypatch, None)
    found = []
    for worker in (gpu, torchs):
        worker.admit(0, 6, 4, 0.0)
        worker.admit(1, 3, 3, 1.0)
        found.append(worker.run())
    assert device.num_replayed > 4
    ours, theirs = (
        [
            [(e.token_ids, e.num_computed_tokens, e.valid_record) for e in entries if e.seq_id == i]
            for i in (0, 1)
        ]
        for entries in found
    )
    # a release may be told on its own
    assert [[e for e in each if e[0]] for each in ours] == [
        [e for e in each if e[0]] for each in theirs
    ]
    used = checkpoint.config.delta.record_bytes // 4
    for seq_id in (0, 1):
        for place in range(4):  # frozen at 4, kept at the last border, the valid one
            values = (each.values(seq_id, place)[:used] for each in (gpu, torchs))
            torch.testing.assert_close(*values, rtol=1e-3, atol=1e-3)


def test_guesses_leave_the_tokens_and_record_of_steps_without(checkpoint, monkeypatch):
    guessing = Worker(checkpoint, monkeypatch, HostDevice(), max_batch=4, most_guessed=3)
    plain = Worker(checkpoint, monkeypatch, None)
    plain.admit(0, 3, 10, 1.0)
    expected, place = reply(plain.run())
    guess = [token if i != 7 else 7 for i, token in enumerate(expected)]
    guessing.admit(0, 3, 10, 1.0, prediction=guess)
    entries = guessing.run()
    num_right = sum(len(e.token_ids) - 1 for e in entries if e.num_drafted)
    assert 0 < num_right < sum(e.num_drafted for e in entries)
    found, now = reply(entries)
    assert found == expected
    used = checkpoint.config.delta.record_bytes // 4
    values = guessing.values(0, now)[:used], plain.values(0, place)[:used]
    torch.testing.assert_close(*values, rtol=1e-3, atol=1e-3)


def reply(entries):
    """Return a sequence's tokens, and the place of its last valid record."""
    said = [entry for entry in entries if entry.token_ids]
    return [token for entry in said for token in entry.token_ids], said[-1].valid_record
