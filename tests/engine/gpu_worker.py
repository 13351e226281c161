"""A worker's start on a GPU in a thread, with the test as its daemon: on a real GPU, or a fake."""

import contextlib
import random
import socket
import threading

import msgspec
import pytest
import torch

from engine.checkpoint.checkpoint import Checkpoint
from engine.errors import WorkerFailed
from engine.wire.channel import WorkerChannel
from engine.wire.messages import (
    Admit,
    GpuSpec,
    PoolMade,
    PoolSpec,
    Records,
    Setup,
    Stepped,
    WeightsComplete,
    WeightsLoaded,
)
from engine.wire.run_spec import RunSpec
from engine.wire.sampling import SamplingParams
from engine.worker.grammars import Grammars
from engine.worker.loop import StepLoop
from engine.worker.on_gpu import start
from tests.checkpoints import load_oracle, make_checkpoint
from tests.worlds.worker_loop import reports_in

BLOCK_SIZE = 4
SERVED = [("float32", BLOCK_SIZE), ("bfloat16", BLOCK_SIZE), ("bfloat16", 256)]
"""Dtypes and block sizes of tests on a real GPU: between them every backend that it may choose."""
DTYPES = ("float32", "bfloat16")
MAX_MARGIN = {"float32": 1e-4, "bfloat16": 0.15}
"""Of the reference's two likeliest, where rounding may turn them."""
PROMPT = [5, 80, 33, 7, 210, 9]


def on(device):
    """What has to be entered to compute on a device of the tests' own."""
    accelerator = getattr(device, "accelerator", None)
    return contextlib.nullcontext() if accelerator is None else accelerator.on()


def no_grammars():
    raise AssertionError("nothing here has a grammar")


class GpuWorker:
    """A worker's start in a thread, with this test as the daemon."""

    def __init__(
        self,
        checkpoint,
        name,
        device,
        gpu,
        num_blocks=64,
        dtype="float32",
        other=None,
        weights=None,
        block_size=BLOCK_SIZE,
        text_models=(),
    ):
        self.checkpoint, self.device, self.gpu = checkpoint, device, gpu
        self.setup = Setup(
            worker=name,
            model_dir=str(checkpoint.folder),
            dtype=dtype,
            block_size=block_size,
            pool=PoolSpec("kv", None, num_blocks),
            other_pools=[] if other is None else [other],
            weights=weights,
            cpus=[0],
            max_num_batched_tokens=32,
            max_model_len=48,
            gpu=gpu,
            text_models=list(text_models),
        )
        self.sockets = socket.socketpair()
        self.channel = WorkerChannel(self.sockets[1])
        self.failure = self.started = None
        self.copies = []
        self.told = []
        self.thread = threading.Thread(target=self._start)
        self.thread.start()

    def _start(self):
        with on(self.device):
            try:
                self.started = start(
                    self.channel,
                    self.setup,
                    self.gpu,
                    self.checkpoint,
                    self.device,
                    Grammars(no_grammars),
                    lambda *progress: self.told.append(progress),
                )
            except WorkerFailed as error:
                self.failure = error

    def send(self, command):
        WorkerChannel(self.sockets[0]).send(command)

    def report(self, kind):
        """The next report, which has to be of this kind."""
        self.sockets[0].settimeout(120)
        (report,) = reports_in(self.sockets[0], at_least=1)
        assert isinstance(report, kind)
        return report

    def loop(self, speculation=None):
        self.thread.join()
        self.worker = StepLoop(
            self.channel,
            self.started.runner,
            pools=self.started.pools,
            eos_token_ids=(),
            max_num_batched_tokens=self.started.ready.max_num_batched_tokens,
            device=self.device,
            map_pool=self.started.map_pool,
            speculation=speculation,
        )

    def run(self, *commands):
        """Take commands and step until nothing is left; the entries."""
        entries = []
        with on(self.device):
            for command in commands:
                self.worker._apply(command)
            while self.worker._running or self.worker._flight:
                self.worker.step()
                for report in reports_in(self.sockets[0]):
                    self.take(report, entries)
        return entries

    def take(self, report, entries):
        if isinstance(report, Stepped):
            entries += report.entries
        else:
            self.copies.append(report)

    def copied(self):
        """The number of a copy, and its pairs, when all of it has been done."""
        self.sockets[0].settimeout(120)
        while not self.copies or not self.copies[-1].is_last:
            self.copies += reports_in(self.sockets[0], at_least=1)
        done, self.copies = self.copies, []
        return done[-1].copy_id, sum(report.num_pairs for report in done)

    def close(self):
        for sock in self.sockets:
            sock.close()
        self.thread.join()


def admit(outputs=(), computed=0, until=12, seq_id=1, prompt=PROMPT, **sampling):
    first = 1 + 10 * (seq_id - 1)
    return Admit(
        seq_id=seq_id,
        generation=1,
        token_ids=[*prompt, *outputs],
        num_prompt_tokens=len(prompt),
        num_computed_tokens=computed,
        block_table=list(range(first, first + 10)),
        spec=RunSpec(SamplingParams(12, seq_id, **{"temperature": 0.0} | sampling)),
        until_output=until,
    )


def start_alone(checkpoint, device, gpu=None, **options):
    worker = GpuWorker(checkpoint, "colocated", device, gpu or GpuSpec("GPU-0"), **options)
    worker.report(WeightsLoaded)
    worker.send(WeightsComplete())
    return worker


def tokens_by_id(entries):
    tokens = {}
    for entry in entries:
        tokens.setdefault(entry.seq_id, []).extend(entry.token_ids)
    return tokens


def prompts(vocab_size, count, longest=24):
    rng = random.Random(0)
    return {
        i: [rng.randrange(vocab_size) for _ in range(rng.randint(1, longest))]
        for i in range(1, count + 1)
    }


def assert_like_the_oracle(oracle, prompt, tokens, max_margin):
    """Each token is the reference's likeliest, or tied with it."""
    ids = torch.tensor([[*prompt, *tokens]])
    with torch.inference_mode():
        logits = oracle(ids).logits[0, len(prompt) - 1 : -1].float()
    for row, token in zip(logits, tokens, strict=True):
        assert row.max() - row[token] <= max_margin


def admits(config, asked, dtype, block_size):
    """Commands for prompts by sequence, with records behind all their blocks."""
    size = config.record_blocks(block_size, dtype)
    commands = [admit(seq_id=i, prompt=prompt) for i, prompt in asked.items()]
    if not size:
        return commands
    first_free = 1 + 10 * len(asked)
    for place, command in enumerate(commands):
        first = first_free + 2 * size * place
        blocks = [list(range(start, start + size)) for start in (first, first + size)]
        commands[place] = msgspec.structs.replace(command, records=Records(blocks, 0, [], []))
    return commands


def check_family(folder, family, dtype, device):
    """A worker's greedy tokens are transformers' likeliest, or tied with them."""
    checkpoint = Checkpoint.open(make_checkpoint(folder, family))
    asked = prompts(250, 3)
    commands = admits(checkpoint.config, asked, dtype, BLOCK_SIZE)
    size = checkpoint.config.record_blocks(BLOCK_SIZE, dtype)
    how = {"num_blocks": 1 + len(asked) * (10 + 2 * size), "dtype": dtype}
    gpu = GpuSpec("GPU-0", has_graphs=False)
    worker = start_alone(checkpoint, device, gpu, **how)
    with contextlib.closing(worker):
        worker.report(PoolMade)
        worker.loop()
        tokens = tokens_by_id(worker.run(*commands))
    assert all(len(tokens[seq_id]) == 12 for seq_id in asked)
    if checkpoint.config.experts is not None and dtype != "float32":
        pytest.skip("rounding sends tokens through other experts; the self-test proves mixtures")
    oracle = load_oracle(checkpoint.folder)
    for seq_id, prompt in asked.items():
        assert_like_the_oracle(oracle, prompt, tokens[seq_id], MAX_MARGIN[dtype])
