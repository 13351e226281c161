"""A model with sliding windows says what transformers says while its old window blocks are reused.

A real router and real workers' loops in one process: cold and cached, over each transport, from
DRAM and SSD, with preemption, and across deaths of workers within prompts and replies.
"""

from functools import cache

import pytest

from tests.levels import needs_kernels
from tests.worlds.computing_world import (
    DramWorld,
    SsdWorld,
    finish,
    finish_across_a_death,
    load,
    predicted,
    prompts_of,
    restored_tokens,
    world_of,
)

FAMILY_OF = {
    "colocated": "gemma3_text",
    "alias": "gpt_oss",
    "peer": "gemma4_text",
    "shm": "gpt_oss",
    "2x1 peer": "gemma3_text",
}
"""The family that the tests of one arm take."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A model of each family, loaded once."""
    return cache(lambda family: load(tmp_path_factory.mktemp("model"), family))


def held(world, sequence):
    """Blocks that a sequence has in its pools."""
    return sum(sizes.get(sequence.seq_id, 0) for sizes in world.ledger.table_sizes().values())


@pytest.mark.parametrize("arm", FAMILY_OF)
def test_cold_and_cached_turns_over_every_transport(arm, models):
    transformer, oracle = models(FAMILY_OF[arm])
    world = world_of(arm, transformer, num_blocks=700)
    cold = [world.sequence(prompt=p, max_tokens=9) for p in prompts_of(1, 5, 70, 260)]
    finish(world, oracle, *cold)
    for first in cold[2:]:
        more = prompts_of(11, seed=first.seq_id)[0]
        prompt = [*first.prompt_token_ids, *world.emitted[first.seq_id], *more]
        second = world.sequence(prompt=prompt, max_tokens=9)
        finish(world, oracle, second)
        assert second.num_cached_tokens > first.num_prompt_tokens - 4


@pytest.mark.parametrize("arm", FAMILY_OF)
@pytest.mark.parametrize("when", ["prompt", "reply"])
def test_a_death_costs_nothing_but_time(arm, when, models):
    transformer, oracle = models(FAMILY_OF[arm])
    world = world_of(arm, transformer, num_blocks=500)
    prompts = prompts_of(250, 31)
    sequences = [world.sequence(prompt=p, max_tokens=20) for p in prompts]
    finish_across_a_death(world, oracle, *sequences, when=when)


@pytest.mark.parametrize("family", ["gemma3_text", "gemma4_text", "gpt_oss"])
def test_a_long_prompt_runs_in_a_pool_that_could_not_hold_all_of_its_layers(family, models):
    transformer, oracle = models(family)
    groups = transformer.config.kv_groups.num_groups
    num_tokens = 380
    num_blocks = 100 + (groups - 1) * 40
    assert num_blocks < groups * (num_tokens // 4)
    world = world_of("colocated", transformer, num_blocks=num_blocks)
    (prompt,) = prompts_of(num_tokens, seed=3)
    sequence = world.sequence(prompt=prompt, max_tokens=9)
    most, tick = [], world.tick

    def count():
        tick()
        most.append(held(world, sequence))

    world.tick = count
    finish(world, oracle, sequence)
    assert max(most) < num_blocks
    finish(world, oracle, *(world.sequence(prompt=p, max_tokens=30) for p in prompts_of(90, 90)))


@pytest.mark.parametrize("kind", [SsdWorld, DramWorld])
@pytest.mark.parametrize("arm", ["alias", "peer"])
def test_a_conversation_goes_on_from_a_tier(arm, kind, models):
    transformer, oracle = models(FAMILY_OF[arm])
    world = world_of(arm, transformer, kind=kind, num_blocks=1500)
    (prompt,) = prompts_of(170, seed=5)
    assert restored_tokens(world, oracle, prompt) == 168


@needs_kernels
@pytest.mark.parametrize("arm", ["colocated", "alias", "peer"])
def test_guesses_change_no_token(arm, models):
    transformer, oracle = models(FAMILY_OF[arm])
    world = world_of(arm, transformer, num_blocks=900, most_guessed=7)
    first = world.sequence(prompt=prompts_of(133)[0], max_tokens=60)
    finish(world, oracle, first)
    again = predicted(world, first, world.emitted[first.seq_id])
    finish(world, oracle, again)
    assert again.drafts.right
    assert again.num_cached_tokens


def test_a_pool_of_int8_is_divided_alike(models):
    transformer, _ = models("gemma4_text")
    whole = world_of("colocated", transformer, num_blocks=900, pool_dtype="int8")
    (prompt,) = prompts_of(300, seed=7)
    alone = whole.sequence(prompt=prompt, max_tokens=12)
    whole.submit(alone)
    whole.run()
    again = world_of("peer", transformer, num_blocks=300, pool_dtype="int8")
    moved = again.sequence(prompt=prompt, max_tokens=12)
    again.submit(moved)
    again.run()
    assert again.emitted[moved.seq_id] == whole.emitted[alone.seq_id]
