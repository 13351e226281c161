"""A real router over real workers' loops in one process, on models that transformers has, too."""

import mmap
import random
from collections import deque
from types import SimpleNamespace

import torch
from msgspec import structs

from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.weights_layout import weights_layout
from engine.scheduler.cache.topology import DRAM
from engine.scheduler.cache.window_blocks import Windows
from engine.scheduler.offload.cache_memory import CacheMemory
from engine.worker.kv_pool import TORCH_DTYPES, block_shape
from engine.worker.loop import StepLoop
from engine.worker.model.transformer import Transformer
from engine.worker.model.weights import load_weights
from engine.worker.runner import Runner
from engine.worker.speculation import Speculation
from tests.checkpoints import load_oracle, make_checkpoint
from tests.engine.scheduler.offload.test_arena import ArenaWorld
from tests.test_exactness import assert_same
from tests.worlds.fake_workers import BLOCK_SIZE
from tests.worlds.router_world import World
from tests.worlds.tiered_world import TieredWorld

CACHE_BLOCKS = 500
MAX_STEP = 16
"""Prompt tokens of a step."""


class LoopWorker:
    """A worker's own loop behind the interface of a fake worker."""

    is_parked = has_stepped = False
    cpus = running = ()

    def __init__(self, worker, transformer, pools, most_guessed=0):
        self.inbox, self.outbox = deque(), deque()
        self.name, self.pool = worker.name, worker.pool
        self._parts = worker.pool, transformer, pools, most_guessed
        self.restart()

    def restart(self):
        pool, transformer, pools, most_guessed = self._parts
        size, num_groups = transformer.config.vocab_size, transformer.config.kv_groups.num_groups
        self.inbox.clear()
        self.outbox.clear()
        self.loop = StepLoop(
            SimpleNamespace(send=self.outbox.append, has_commands=lambda: False),
            Runner(transformer, pools[pool], BLOCK_SIZE, None, num_groups=num_groups),
            pools=pools,
            eos_token_ids=(),
            max_num_batched_tokens=MAX_STEP,
            use_cores=lambda cpus: None,
            speculation=Speculation(size, BLOCK_SIZE, most_guessed) if most_guessed else None,
        )

    def receive(self, _now_ns):
        self.loop._apply(self.inbox.popleft())

    def step(self, _now_ns):
        self.loop.step()

    def copy(self, _now_ns):
        return False


def load(folder, family, dtype="float32", **options):
    """The model as it is served, and as transformers has it."""
    make_checkpoint(folder, family, dtype, **options)
    return transformer_of(folder, dtype), load_oracle(folder)


def transformer_of(folder, dtype="float32"):
    """The model as a worker on cores loads it."""
    checkpoint = Checkpoint.open(folder)
    layout = weights_layout(checkpoint, dtype)
    arena = None if layout is None else mmap.mmap(-1, layout.num_bytes)
    weights = load_weights(checkpoint, dtype, arena, arena and (0, 1), lambda *_: None)
    return Transformer(checkpoint.config.in_groups(), weights, dtype)


def world_of(
    arm, transformer, num_blocks=500, kind=World, most_guessed=0, pool_dtype=None, **options
):
    """A router over loops that compute; pools begin with bytes that are no numbers."""
    config = transformer.config
    dtype = str(transformer.dtype).removeprefix("torch.")
    record_blocks = config.record_blocks(BLOCK_SIZE, pool_dtype or dtype)
    groups = config.kv_groups
    windows = Windows.of(groups.num_groups, groups.window)._replace(ahead_tokens=2 * MAX_STEP)
    world = kind(
        arm,
        num_blocks=num_blocks,
        num_slots=7 * groups.num_groups,
        record_blocks=record_blocks,
        windows=windows,
        **options,
    )
    world.check_hashes = world.check_owing = lambda: None  # workers keep nothing to look at
    shape = block_shape(config, BLOCK_SIZE, pool_dtype or dtype)
    sizes = {pool.name: pool.num_blocks for pool in world.topology.pools}
    sizes[DRAM] = CACHE_BLOCKS * groups.num_groups
    torch_dtype = TORCH_DTYPES[pool_dtype or dtype]
    unwritten = torch.nan if pool_dtype is None else 127
    pools = {
        name: torch.full((size, *shape), unwritten, dtype=torch_dtype)
        for name, size in sizes.items()
    }
    world.pools = pools
    for pool in pools.values():
        pool[0] = 0
    world.workers = {
        worker.name: LoopWorker(worker, transformer, pools, most_guessed)
        for worker in world.topology.workers
    }
    return world


class SsdWorld(TieredWorld):
    """Its disk keeps blocks of the workers' pools."""

    def __init__(self, arm, **options):
        super().__init__(arm, **options)
        self.disk.num_slabs = CACHE_BLOCKS // self.disk.slab_records
        self.disk.read = lambda pool, block_id: self.pools[pool][block_id].clone()
        self.disk.write = lambda pool, block_id, data: self.pools[pool][block_id].copy_(data)


class DramWorld(ArenaWorld):
    """Its workers copy blocks of their pools to host memory, and back."""

    def __init__(self, arm, **options):
        super().__init__(arm, cache=CacheMemory(CACHE_BLOCKS, is_shared=False), **options)


def forget_pools(world):
    """As after a restart: only the tiers below the pools have any bytes."""
    world.forget_pools()
    for name, pool in world.pools.items():
        if name != DRAM:
            pool[1:] = torch.nan


def prompts_of(*lengths, seed=1):
    rng = random.Random(seed)
    return [[rng.randrange(290) for _ in range(length)] for length in lengths]


def assert_right(world, oracle, *sequences):
    for sequence in sequences:
        tokens, count = world.emitted[sequence.seq_id], sequence.sampling.max_tokens
        assert_same(sequence.prompt_token_ids, tokens, oracle, count)


def finish(world, oracle, *sequences):
    world.submit(*sequences)
    world.run()
    assert_right(world, oracle, *sequences)


def restored_tokens(world, oracle, prompt):
    """Store a conversation in a tier, forget the pools, and go on; tokens that came back."""
    for _ in range(2):  # what is used twice is stored
        first = world.sequence(prompt=prompt, max_tokens=9)
        finish(world, oracle, first)
    forget_pools(world)
    tokens = [*prompt, *world.emitted[first.seq_id], *prompts_of(11, seed=6)[0]]
    second = world.sequence(prompt=tokens, max_tokens=9)
    finish(world, oracle, second)
    assert second.num_restored_tokens == second.num_cached_tokens
    return second.num_restored_tokens


def predicted(world, sequence, reply):
    """The sequence asked again, with its reply as a prediction that is wrong here and there."""
    again = world.sequence(prompt=sequence.prompt_token_ids, max_tokens=len(reply))
    guess = [token if index % 7 else 5 for index, token in enumerate(reply)]
    again.spec = structs.replace(again.spec, prediction=guess)
    return again


def finish_across_a_death(world, oracle, *sequences, when="reply"):
    """Kill the first sequence's worker, once, within its prompt or its reply."""
    world.submit(*sequences)
    first, num_killed = sequences[0], 0
    while not first.is_finished:
        world.tick()
        is_prompt = 0 < first.num_computed_tokens < first.num_prompt_tokens
        is_reply = first.num_output_tokens > 5
        if first.worker and num_killed == 0 and (is_prompt if when == "prompt" else is_reply):
            name, num_killed = first.worker, 1
            world.kill(name)
            world.tick()
            world.revive(name)
    world.run()
    assert num_killed
    assert first.num_recoveries
    assert_right(world, oracle, *sequences)
