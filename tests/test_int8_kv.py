"""KV as codes of a byte: in every arm the tokens of a lone worker over such a pool."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from random import Random

import pytest
import torch

from engine.checkpoint.checkpoint import Checkpoint
from engine.wire.messages import PoolSpec
from engine.worker.copying import copy_blocks
from engine.worker.kv_pool import block_shape, map_pool
from engine.worker.model.attention import StepBatch
from engine.worker.model.transformer import Transformer
from engine.worker.model.weights import load_weights
from tests.checkpoints import make_checkpoint
from tests.daemons import ALONE, ARMS
from tests.engine.scheduler.offload.test_disk import Harness
from tests.test_exactness import prompts

OPTIONS = ["--dtype", "float32", "--kv-dtype", "int8"]
MARGIN = 1e-2
"""So far the likeliest token may be from the second where a code is rounded the other way: sums of
float32 are added in another order in another step, and a value in the middle of two codes turns."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("hf") / "tiny", max_position_embeddings=1024)


def lone_run(folder):
    """The model over an int8 pool, its own or another's, as a function of all its tokens."""
    checkpoint = Checkpoint.open(folder)
    config = checkpoint.config
    weights = load_weights(checkpoint, "float32", None, None, lambda *_: None)
    model = Transformer(config, weights, "float32")

    def logits(token_ids, kv=None, num_before=0):
        if kv is None:
            kv = torch.zeros((17, *block_shape(config, 64, "int8")), dtype=torch.int8)
        count = len(token_ids)
        places = torch.arange(num_before, num_before + count)
        table = list(range(1, len(kv)))
        batch = StepBatch(
            torch.tensor(token_ids), places, places + 64, [count], [num_before + count], [table],
            list(range(count)),
        )  # fmt: skip
        return model.forward(batch, kv).clone()

    return logits


@pytest.fixture(scope="module")
def alone(folder):
    return lone_run(folder)


def assert_greedy(prompt, output, alone):
    """Each token is the likeliest after those before it."""
    logits = alone([*prompt, *output])[len(prompt) - 1 : -1]
    behind = logits.max(-1).values - logits.gather(1, torch.tensor(output)[:, None])[:, 0]
    assert float(behind.max()) < MARGIN


def test_tokens_are_those_of_a_lone_int8_run_also_across_a_death(start_daemon, folder, alone):
    daemon = start_daemon(*OPTIONS, *ARMS["shm"], model=folder).wait_ready()
    state = daemon.state()
    assert "KV is int8" in state["kv"]
    assert "logits 0.0" in state["kv"]
    assert state["kv"] in daemon.stderr

    def ask(prompt):
        reply = daemon.complete(prompt, max_tokens=30, ignore_eos=True)
        return reply["choices"][0]["token_ids"]

    *cases, last = prompts([3, 64, 130, 600, 90], seed=5)
    pid, tokens, others = state["workers"][-1]["pid"], [], []
    with ThreadPoolExecutor(4) as pool:
        for event in daemon.stream(last, max_tokens=60, ignore_eos=True):
            tokens += event["choices"][0]["token_ids"] if event["choices"] else []
            if len(tokens) >= 10 and not others:
                others = [pool.submit(ask, prompt) for prompt in cases]
                os.kill(pid, signal.SIGKILL)
    assert len(tokens) == 60
    assert_greedy(last, tokens, alone)
    for prompt, other in zip(cases, others, strict=True):
        assert_greedy(prompt, other.result(), alone)
        assert_greedy(prompt, ask(prompt), alone)  # over what is cached of it
    assert daemon.stop() == 0


def test_codes_and_scales_walk_between_pool_arena_and_disk_bit_for_bit(folder, alone, tmp_path):
    """What the model has written into blocks is carried about, and read as if it had stayed."""
    config = Checkpoint.open(folder).config
    disk = Harness(tmp_path / "kv", config.kv_block_bytes(64, "int8"))
    pool = map_pool(PoolSpec("kv", disk.pool, 10), config, 64, "int8")
    arena = torch.zeros_like(pool)
    (prompt,) = prompts([5 * 64], seed=2)
    alone(prompt, pool)
    expected, as_written = alone([7], pool.clone(), len(prompt)), pool.clone()
    assert len({bytes(block.numpy()) for block in as_written[1:6].flatten(1)}) == 5
    disk.store(1, 2, 3, 4, 5)
    copy_blocks(pool, arena, [(number, number + 4) for number in range(1, 6)])
    random, holds = Random(3), {number: number for number in range(1, 6)}
    for _ in range(60):  # blocks of the pool are written by either, and a few go back to the arena
        block_id, number = random.randrange(1, 10), random.randrange(1, 6)
        if random.random() < 0.5:
            disk.load((number, block_id))
        else:
            copy_blocks(arena, pool, [(number + 4, block_id)])
        holds[block_id] = number
        if random.random() < 0.3:
            copy_blocks(pool, arena, [(block_id, number + 4)])
    for block_id, number in holds.items():
        assert pool[block_id].equal(as_written[number])
    disk.stop()
    pool.zero_()
    disk.start()
    assert not disk.load(*((number, number) for number in range(1, 6))).error
    disk.stop()
    assert pool[1:6].equal(as_written[1:6])
    assert alone([7], pool, len(prompt)).equal(expected)


TIERS = ("--ssd-cache", "64MiB", "--max-model-len", "760", *ALONE)


def test_blocks_come_from_disk_and_dram_and_a_pool_of_another_dtype_reads_none(
    start_daemon, tmp_path
):
    """A model of which a block takes longer to compute than a few to copy; a pool that is too
    small for what is asked, so that it leaves the pool again and again."""
    larger = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6}
    model = make_checkpoint(tmp_path / "larger", max_position_embeddings=1024, **larger)
    alone, asked = lone_run(model), prompts([700] * 4, seed=9)
    assert 40 * Checkpoint.open(model).config.kv_block_bytes(64, "int8") > 1 << 20
    options = (*OPTIONS, *TIERS, "--kv-memory", "1MiB")

    def started(*more):
        daemon = start_daemon(*more, folder=tmp_path / "d", model=model).wait_ready()
        daemon.wait_for(lambda: daemon.state()["ssd"]["state"] == "on")
        return daemon

    def ask(daemon):
        for prompt in asked:
            reply = daemon.complete(prompt, max_tokens=12, ignore_eos=True)
            assert_greedy(prompt, reply["choices"][0]["token_ids"], alone)

    def has_stored(daemon):
        ask(daemon)
        return daemon.fresh_state()["ssd"]["stored_blocks"] >= 40

    def has_come(daemon):
        """Asked until blocks have come: of some prompts computing is taken to be quicker."""
        ask(daemon)
        state = daemon.fresh_state()
        ssd, dram = state["ssd"], state["dram"]
        assert not ssd["damaged_blocks"] + dram["damaged_blocks"]
        tried = ssd["loaded_blocks"] or ssd["declined_loads"] or ssd["missed_deadlines"]
        return tried and dram["loaded_blocks"]  # what DRAM has is not sought on disk again

    daemon = started(*options)
    daemon.wait_for(lambda: has_stored(daemon), 240)
    daemon.kill()
    daemon = started(*options, "--dram-cache", "64MiB")
    assert daemon.state()["ssd"]["blocks"] >= 40
    daemon.wait_for(lambda: has_come(daemon), 240)
    assert daemon.stop() == 0
    daemon = started("--dtype", "float32", *TIERS)
    assert daemon.state()["ssd"]["blocks"] == 0
    assert "ssd.reclaimed" not in {event["code"] for event in daemon.fresh_state()["events"]}
    assert daemon.stop() == 0
