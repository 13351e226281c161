"""Models whose layers differ say what transformers says, however their sequences are computed.

A real router and real workers' loops in one process, as in test_recurrent_modes.py.
"""

import pytest

from tests.checkpoints import GEMMA4_E, GEMMA4_MOE
from tests.levels import LEVELS
from tests.worlds.computing_world import (
    DramWorld,
    SsdWorld,
    finish,
    finish_across_a_death,
    forget_pools,
    load,
    prompts_of,
    world_of,
)
from tests.worlds.fake_workers import BLOCK_SIZE

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.2],
    "long_factor": [1.2, 2.0, 4.0, 8.0, 12.0, 16.0],
}
CASES = {
    ("qwen2", "colocated"): {"tie_word_embeddings": True},
    ("mistral", "shm"): {"sliding_window": 48, "num_key_value_heads": 1},
    ("qwen3", "peer"): {"head_dim": 32, "rope_parameters": {"rope_theta": 10000.0, **YARN}},
    ("phi3", "alias"): {"rope_parameters": {"rope_theta": 10000.0, **LONGROPE}},
    ("gemma2", "2x1 peer"): {},
    ("mixtral", "shm"): {},
    ("ministral3", "peer"): {},
    ("gpt_oss", "peer"): {},
    ("gemma4_text", "alias"): {},
    ("gemma4_text", "peer"): GEMMA4_E,
    ("gemma4_text", "1x2 shm"): GEMMA4_E | GEMMA4_MOE,
    ("muse_glimmer", "shm"): {},
    ("gemma4_unified_text", "peer"): {},
}
"""Options by family and arm: KV of many shapes, windows, experts, caps, layers without KV."""


@pytest.mark.parametrize(("family", "arm"), CASES)
def test_cold_cached_loaded_preempted_and_across_a_death(family, arm, tmp_path):
    transformer, oracle = load(tmp_path, family, **CASES[family, arm])
    world = world_of(arm, transformer, kind=DramWorld if arm == "peer" else SsdWorld)
    cold = [world.sequence(prompt=p, max_tokens=9) for p in prompts_of(1, 4, 5, 33, 130)]
    finish(world, oracle, *cold)
    again = world.sequence(prompt=cold[-1].prompt_token_ids, max_tokens=9)
    finish(world, oracle, again)
    assert again.num_cached_tokens == 129 // BLOCK_SIZE * BLOCK_SIZE
    forget_pools(world)
    loaded = world.sequence(prompt=again.prompt_token_ids, max_tokens=9)
    finish(world, oracle, loaded)
    assert loaded.num_restored_tokens == again.num_cached_tokens
    dying = [world.sequence(prompt=p, max_tokens=20) for p in prompts_of(60, 37, seed=4)]
    finish_across_a_death(world, oracle, *dying)
    tight = world_of(arm, transformer, num_blocks=1 + 44 * transformer.config.kv_groups.num_groups)
    many = [tight.sequence(prompt=p, max_tokens=60) for p in prompts_of(40, 41, 42, seed=3)]
    finish(tight, oracle, *many)
    assert tight.router.counters.preemptions


@pytest.mark.skipif(LEVELS[:1] in ((), ("amx",)), reason="rows' bits depend on their step")
def test_muse_glimmer_in_bfloat16_says_the_same_in_every_mode(tmp_path):
    transformer, _ = load(tmp_path, "muse_glimmer", "bfloat16")

    def tokens_of(world, prompts):
        sequences = [world.sequence(prompt=prompt, max_tokens=60) for prompt in prompts]
        world.submit(*sequences)
        world.run()
        return [world.emitted[each.seq_id] for each in sequences], sequences

    prompts = prompts_of(40, 41, 42, seed=3)
    cold = [tokens_of(world_of("colocated", transformer), [each])[0][0] for each in prompts]
    for arm in ("alias", "peer", "shm"):
        num_blocks = 1 + 44 * transformer.config.kv_groups.num_groups
        world = world_of(arm, transformer, num_blocks=num_blocks, kind=SsdWorld)
        assert tokens_of(world, prompts)[0] == cold
        assert world.router.counters.preemptions
        for _ in range(2):
            again, (cached,) = tokens_of(world, prompts[-1:])
            assert again == cold[-1:]
        assert cached.num_cached_tokens == 40
        forget_pools(world)
        again, (loaded,) = tokens_of(world, prompts[-1:])
        assert (again, loaded.num_restored_tokens) == (cold[-1:], 40)
