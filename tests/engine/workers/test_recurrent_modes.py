"""A model with recurrent layers says what transformers says, however a sequence is computed.

A real router and real workers' loops in one process: cold and cached, over each transport, from
DRAM and SSD, with preemption, and across deaths of workers within prompts and replies.
"""

import random
from collections import deque
from types import SimpleNamespace

import pytest
import torch

from engine.cache.topology import DRAM
from engine.checkpoint.checkpoint import Checkpoint
from engine.model import backend
from engine.model.transformer import Transformer
from engine.model.weights import load_weights
from engine.offload.cache_memory import CacheMemory
from engine.wire.messages import Stepped
from engine.workers.kv_pool import block_shape
from engine.workers.loop import StepLoop
from engine.workers.runner import Runner
from tests.checkpoints import GATED_DELTA_NETS, load_oracle, make_checkpoint
from tests.engine.fake_workers import BLOCK_SIZE
from tests.engine.offload.test_arena import ArenaWorld
from tests.engine.offload.tiered_world import TieredWorld
from tests.engine.schedule.harness import World
from tests.test_exactness import assert_same

ARMS = ("colocated", "alias", "peer", "shm", "2x1 peer")
CACHE_BLOCKS = 500


class LoopWorker:
    """A worker's own loop behind the interface of a fake worker."""

    is_parked = has_stepped = False
    cpus = running = ()

    def __init__(self, worker, transformer, pools):
        self.inbox, self.outbox = deque(), deque()
        self.name, self.pool = worker.name, worker.pool
        self._parts = worker.pool, transformer, pools
        self.restart()

    def restart(self):
        pool, transformer, pools = self._parts
        self.inbox.clear()
        self.outbox.clear()
        self.loop = StepLoop(
            SimpleNamespace(send=self.outbox.append, has_commands=lambda: False),
            Runner(transformer, pools[pool], BLOCK_SIZE, None),
            pools=pools,
            eos_token_ids=(),
            max_num_batched_tokens=16,
            use_cores=lambda cpus: None,
        )

    def receive(self, _now_ns):
        self.loop._apply(self.inbox.popleft())

    def step(self, _now_ns):
        self.loop.step()

    def copy(self, _now_ns):
        return False


def load(folder, family):
    """The model as it is served, and as transformers has it."""
    make_checkpoint(folder, family)
    checkpoint = Checkpoint.open(folder)
    weights = load_weights(checkpoint, "float32", None, None, lambda *_: None)
    return Transformer(checkpoint.config, weights, "float32"), load_oracle(folder)


@pytest.fixture(scope="module", params=GATED_DELTA_NETS)
def each_family(request, tmp_path_factory):
    return load(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load(tmp_path_factory.mktemp("model"), "qwen3_5_text")


def world_of(arm, transformer, num_blocks=500, kind=World, **options):
    """A router over loops that compute; pools begin with bytes that are no numbers."""
    config = transformer.config
    record_blocks = config.record_blocks(BLOCK_SIZE, "float32")
    world = kind(arm, num_blocks=num_blocks, num_slots=7, record_blocks=record_blocks, **options)
    world.check_hashes = lambda: None
    shape = block_shape(config, BLOCK_SIZE, "float32")
    sizes = {pool.name: pool.num_blocks for pool in world.topology.pools} | {DRAM: CACHE_BLOCKS}
    pools = {name: torch.full((size, *shape), torch.nan) for name, size in sizes.items()}
    world.pools = pools
    for pool in pools.values():
        pool[0] = 0
    world.workers = {
        worker.name: LoopWorker(worker, transformer, pools) for worker in world.topology.workers
    }
    return world


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


@pytest.mark.parametrize("arm", ARMS)
def test_cold_and_cached_turns_over_every_transport(arm, each_family):
    transformer, oracle = each_family
    world = world_of(arm, transformer)
    cold = [world.sequence(prompt=p, max_tokens=9) for p in prompts_of(1, 4, 5, 33, 70)]
    finish(world, oracle, *cold)
    for first in cold[3:]:
        more = prompts_of(11, seed=first.seq_id)[0]
        prompt = [*first.prompt_token_ids, *world.emitted[first.seq_id], *more]
        second = world.sequence(prompt=prompt, max_tokens=9)
        finish(world, oracle, second)
        border = (first.num_prompt_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
        assert second.num_cached_tokens == border
    branch = world.sequence(prompt=[*prompt[:50], *prompts_of(20, seed=9)[0]], max_tokens=5)
    finish(world, oracle, branch)
    other = world.sequence(prompt=[*prompt[:50], *prompts_of(30, seed=10)[0]], max_tokens=5)
    finish(world, oracle, other)
    assert other.num_cached_tokens == 48


@pytest.mark.parametrize("arm", ["peer", "shm"])
def test_a_conversation_goes_on_from_another_pool(arm, model):
    transformer, oracle = model
    world = world_of(arm, transformer)
    world.kill("prefill")
    first = world.sequence(prompt=prompts_of(70, seed=7)[0], max_tokens=9)
    finish(world, oracle, first)
    world.revive("prefill")
    finish(world, oracle, world.sequence(prompt=[5, 6, 7], max_tokens=3))  # its handoff is timed
    tokens = [*first.prompt_token_ids, *world.emitted[first.seq_id], *prompts_of(11, seed=8)[0]]
    second = world.sequence(prompt=tokens, max_tokens=9)
    finish(world, oracle, second)
    assert second.num_cached_tokens == world.router.counters.prefix_cache_fetches == 68


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


@pytest.mark.parametrize("kind", [SsdWorld, DramWorld])
@pytest.mark.parametrize("arm", ["alias", "peer"])
def test_a_conversation_goes_on_from_a_tier(arm, kind, model):
    transformer, oracle = model
    world = world_of(arm, transformer, kind=kind)
    (prompt,) = prompts_of(70, seed=5)
    for _ in range(2):  # what is used twice is stored
        first = world.sequence(prompt=prompt, max_tokens=9)
        finish(world, oracle, first)
    world.forget_pools()
    for name, pool in world.pools.items():
        if name != DRAM:
            pool[1:] = torch.nan
    tokens = [*prompt, *world.emitted[first.seq_id], *prompts_of(11, seed=6)[0]]
    second = world.sequence(prompt=tokens, max_tokens=9)
    finish(world, oracle, second)
    assert second.num_restored_tokens == second.num_cached_tokens == 68


def test_attention_that_masks_unwritten_positions_meets_no_bytes_of_records(tmp_path, monkeypatch):
    """Without compiled kernels whole blocks are read: NaN beyond a mask would be NaN in the sum."""
    monkeypatch.setattr(backend, "find_kernels", lambda *_: (None, "torch"))
    transformer, oracle = load(tmp_path, "qwen3_5_text")
    world = world_of("alias", transformer)
    sequences = [world.sequence(prompt=p, max_tokens=9) for p in prompts_of(5, 6, 33, 70)]
    finish(world, oracle, *sequences)


@pytest.mark.parametrize("arm", ["colocated", "alias"])
def test_preempted_sequences(arm, model):
    transformer, oracle = model
    needed = 2 * transformer.config.record_blocks(BLOCK_SIZE, "float32")
    world = world_of(arm, transformer, num_blocks=3 * needed + 45)
    sequences = [world.sequence(prompt=p, max_tokens=60) for p in prompts_of(40, 41, 42, seed=3)]
    finish(world, oracle, *sequences)
    assert world.router.counters.preemptions


@pytest.mark.parametrize("arm", ["alias", "peer", "shm", "2x1 peer"])
@pytest.mark.parametrize("when", ["prompt", "reply"])
def test_deaths_within_prompts_and_replies(arm, when, model):
    transformer, oracle = model
    world = world_of(arm, transformer)
    sequences = [world.sequence(prompt=p, max_tokens=20) for p in prompts_of(60, 37, seed=4)]
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


@pytest.mark.parametrize("when", ["between steps", "within a step"])
def test_a_death_costs_no_computed_token_where_the_pool_outlives_it(when, model):
    """Records that an unreported step has written are overwritten; the others are untouched."""
    transformer, oracle = model
    world = world_of("alias", transformer)
    (sequence,) = (world.sequence(prompt=p, max_tokens=20) for p in prompts_of(60))
    world.submit(sequence)
    while sequence.num_output_tokens < 7:
        world.tick()
    if when == "within a step":
        decode = world.workers["decode"]
        decode.step(0)
        assert isinstance(decode.outbox.pop(), Stepped)  # it was never sent
    world.kill("decode")
    world.revive("decode")
    world.run()
    assert_right(world, oracle, sequence)
    assert world.scheduled[sequence.seq_id] == sequence.num_tokens - 1
