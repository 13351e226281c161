"""One worker on a real GPU: transformers' tokens, with graphs and without, in memory that stays."""

import contextlib
import copy

import pytest
import torch

from appliance.hub.names import STARTER_FOLDER
from engine.checkpoint.checkpoint import Checkpoint
from engine.wire.messages import GpuSpec, PoolMade
from engine.worker.device import CudaDevice
from engine.worker.speculation import Speculation
from tests.checkpoints import load_oracle, make_checkpoint
from tests.engine.gpu_worker import (
    BLOCK_SIZE,
    MAX_MARGIN,
    SERVED,
    admit,
    admits,
    assert_like_the_oracle,
    prompts,
    start_alone,
    tokens_by_id,
)

NUM_BLOCKS = 1 + 10 * 64


@contextlib.contextmanager
def worker_on(checkpoint, uuid, served=SERVED[0], *, has_graphs=True, speculation=None):
    gpu, (dtype, block_size) = GpuSpec(uuid, has_graphs=has_graphs), served
    how = {"num_blocks": NUM_BLOCKS, "dtype": dtype, "block_size": block_size}
    worker = start_alone(checkpoint, CudaDevice(uuid), gpu, **how)
    with contextlib.closing(worker):
        assert worker.report(PoolMade).num_blocks == NUM_BLOCKS
        worker.loop(speculation)
        yield worker


@pytest.mark.parametrize("served", SERVED)
def test_greedy_tokens_are_transformers(checkpoint, uuid, served):
    asked = prompts(250, 8)
    with worker_on(checkpoint, uuid, served) as worker:
        commands = [admit(seq_id=i, prompt=prompt) for i, prompt in asked.items()]
        tokens = tokens_by_id(worker.run(*commands))
    oracle = load_oracle(checkpoint.folder)
    for seq_id, prompt in asked.items():
        assert len(tokens[seq_id]) == 12
        assert_like_the_oracle(oracle, prompt, tokens[seq_id], MAX_MARGIN[served[0]])


def test_greedy_tokens_of_the_starter_model_are_transformers(uuid):
    checkpoint = Checkpoint.open(STARTER_FOLDER)
    asked = prompts(checkpoint.config.vocab_size, 4)
    with worker_on(checkpoint, uuid) as worker:
        commands = [admit(seq_id=i, prompt=prompt) for i, prompt in asked.items()]
        tokens = tokens_by_id(worker.run(*commands))
    oracle = load_oracle(checkpoint.folder)
    for seq_id, prompt in asked.items():
        assert_like_the_oracle(oracle, prompt, tokens[seq_id], MAX_MARGIN["float32"])


KINDS = [{}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9}, {"logprobs": 1}]


@pytest.mark.parametrize("served", SERVED)
def test_graphs_change_no_token(checkpoint, uuid, served):
    asked = prompts(250, 20)
    tokens = []
    for has_graphs in (True, False):
        with worker_on(checkpoint, uuid, served, has_graphs=has_graphs) as worker:
            assert bool(worker.started.ready.num_graphs) == has_graphs
            commands = [
                admit(seq_id=i, prompt=prompt, **KINDS[i % len(KINDS)])
                for i, prompt in asked.items()
            ]
            tokens.append(tokens_by_id(worker.run(*commands)))
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("has_graphs", [True, False])
def test_recurrent_layers_yield_transformers_tokens(tmp_path, uuid, has_graphs):
    hybrid = Checkpoint.open(make_checkpoint(tmp_path / "hybrid", "qwen3_5_text"))
    asked = prompts(250, 4)
    with worker_on(hybrid, uuid, has_graphs=has_graphs) as worker:
        tokens = tokens_by_id(worker.run(*admits(hybrid.config, asked, "float32", BLOCK_SIZE)))
    oracle = load_oracle(hybrid.folder)
    for seq_id, prompt in asked.items():
        assert_like_the_oracle(oracle, prompt, tokens[seq_id], MAX_MARGIN["float32"])


@pytest.mark.parametrize("has_graphs", [True, False])
def test_guesses_change_no_token_and_save_steps(checkpoint, uuid, has_graphs):
    asked = prompts(250, 4)
    kinds = [*KINDS, {"frequency_penalty": 1.0}]
    commands = [admit(seq_id=i, prompt=p, **kinds[i % 5]) for i, p in asked.items()]
    with worker_on(checkpoint, uuid, has_graphs=has_graphs) as worker:
        plain = worker.run(*copy.deepcopy(commands))
    tokens = tokens_by_id(plain)
    for command in commands:
        command.spec.prediction.extend([*tokens[command.seq_id][:9], 0, 0])
    guessing = Speculation(checkpoint.config.vocab_size, BLOCK_SIZE, 7)
    with worker_on(checkpoint, uuid, has_graphs=has_graphs, speculation=guessing) as worker:
        guessed = worker.run(*commands)
    assert tokens_by_id(guessed) == tokens
    assert len(guessed) < len(plain) / 2
    assert any(entry.num_drafted >= len(entry.token_ids) > 0 for entry in guessed)


def test_memory_does_not_grow_while_sequences_come_and_go(checkpoint, uuid):
    with worker_on(checkpoint, uuid) as worker:
        for round_number in range(6):
            asked = prompts(250, 1 + 7 * (round_number % 3))
            worker.run(*(admit(seq_id=i, prompt=prompt) for i, prompt in asked.items()))
            torch.cuda.synchronize()
            if round_number == 2:
                settled = torch.cuda.memory_allocated()
        assert torch.cuda.memory_allocated() == settled
