"""A model with recurrent layers says what transformers says, however a sequence is computed.

A real router and real workers' loops in one process: cold and cached, over each transport, from
DRAM and SSD, with preemption, and across deaths of workers within prompts and replies.
"""

import sys
from functools import cache

import pytest

from engine.wire.messages import Stepped
from engine.worker.model import backend
from tests.checkpoints import GATED_DELTA_NETS, load_oracle, make_checkpoint
from tests.gguf_files import write_gguf
from tests.levels import needs_kernels
from tests.worlds.computing_world import (
    DramWorld,
    SsdWorld,
    assert_right,
    finish,
    finish_across_a_death,
    load,
    predicted,
    prompts_of,
    restored_tokens,
    transformer_of,
    world_of,
)
from tests.worlds.fake_workers import BLOCK_SIZE

FAMILY_OF = {
    "colocated": "qwen3_5_text",
    "alias": "qwen3_next",
    "peer": "qwen3_5_moe_text",
    "shm": "qwen3_5_text",
    "2x1 peer": "qwen3_next",
}
"""The family that the tests of one arm take, where they do not take all."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A model of each family, loaded once."""
    return cache(lambda family: load(tmp_path_factory.mktemp("model"), family))


@pytest.mark.parametrize("arm", FAMILY_OF)
@pytest.mark.parametrize("family", GATED_DELTA_NETS)
def test_cold_and_cached_turns_over_every_transport(family, arm, models):
    transformer, oracle = models(family)
    world = world_of(arm, transformer, num_blocks=900)  # no snapshot is dropped
    cold = [world.sequence(prompt=p, max_tokens=9) for p in prompts_of(1, 4, 5, 33, 70)]
    cold[3].branches = (22,)
    finish(world, oracle, *cold)
    said = world.sequence(prompt=[*cold[3].prompt_token_ids[:22], *prompts_of(9, seed=11)[0]])
    finish(world, oracle, said)
    assert said.num_cached_tokens == 20
    for first in cold[3:]:
        more = prompts_of(11, seed=first.seq_id)[0]
        prompt = [*first.prompt_token_ids, *world.emitted[first.seq_id], *more]
        second = world.sequence(prompt=prompt, max_tokens=9)
        finish(world, oracle, second)
        border = (first.num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
        assert second.num_cached_tokens == border
    branch = world.sequence(prompt=[*prompt[:50], *prompts_of(20, seed=9)[0]], max_tokens=5)
    finish(world, oracle, branch)
    other = world.sequence(prompt=[*prompt[:50], *prompts_of(30, seed=10)[0]], max_tokens=5)
    finish(world, oracle, other)
    assert other.num_cached_tokens == 48


@pytest.mark.parametrize("arm", ["peer", "shm"])
def test_a_conversation_goes_on_from_another_pool(arm, models):
    transformer, oracle = models(FAMILY_OF[arm])
    world = world_of(arm, transformer)
    world.kill("prefill")
    first = world.sequence(prompt=prompts_of(70, seed=7)[0], max_tokens=9)
    finish(world, oracle, first)
    world.revive("prefill")
    finish(world, oracle, world.sequence(prompt=[5, 6, 7], max_tokens=3))  # its handoff is timed
    tokens = [*first.prompt_token_ids, *world.emitted[first.seq_id], *prompts_of(11, seed=8)[0]]
    second = world.sequence(prompt=tokens, max_tokens=9)
    finish(world, oracle, second)
    assert second.num_cached_tokens == world.router.counters.prefix_cache_fetches == 76


@pytest.mark.parametrize("kind", [SsdWorld, DramWorld])
@pytest.mark.parametrize("arm", ["alias", "peer"])
def test_a_conversation_goes_on_from_a_tier(arm, kind, models):
    transformer, oracle = models(FAMILY_OF[arm])
    world = world_of(arm, transformer, kind=kind)
    (prompt,) = prompts_of(70, seed=5)
    assert restored_tokens(world, oracle, prompt) == 68


def test_attention_that_masks_unwritten_positions_meets_no_bytes_of_records(tmp_path, monkeypatch):
    """Without compiled kernels whole blocks are read: NaN beyond a mask would be NaN in the sum."""
    monkeypatch.setattr(backend, "find_kernels", lambda *_: (None, "torch"))
    transformer, oracle = load(tmp_path, "qwen3_5_text")
    world = world_of("alias", transformer)
    sequences = [world.sequence(prompt=p, max_tokens=9) for p in prompts_of(5, 6, 33, 70)]
    finish(world, oracle, *sequences)


@pytest.mark.parametrize("arm", ["colocated", "alias"])
def test_preempted_sequences(arm, models):
    transformer, oracle = models(FAMILY_OF[arm])
    needed = 2 * transformer.config.record_blocks(BLOCK_SIZE, "float32")
    world = world_of(arm, transformer, num_blocks=3 * needed + 60)
    sequences = [world.sequence(prompt=p, max_tokens=60) for p in prompts_of(40, 41, 42, seed=3)]
    finish(world, oracle, *sequences)
    assert world.router.counters.preemptions


@pytest.mark.parametrize("arm", ["alias", "peer", "shm", "2x1 peer"])
@pytest.mark.parametrize("when", ["prompt", "reply"])
def test_deaths_within_prompts_and_replies(arm, when, models):
    transformer, oracle = models(FAMILY_OF[arm])
    world = world_of(arm, transformer)
    sequences = [world.sequence(prompt=p, max_tokens=20) for p in prompts_of(60, 37, seed=4)]
    finish_across_a_death(world, oracle, *sequences, when=when)


@pytest.mark.parametrize("when", ["between steps", "within a step"])
def test_a_death_costs_no_computed_token_where_the_pool_outlives_it(when, models):
    """Records that an unreported step has written are overwritten; the others are untouched."""
    transformer, oracle = models(FAMILY_OF["alias"])
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


@needs_kernels
@pytest.mark.parametrize("arm", FAMILY_OF)
def test_guesses_change_no_token_and_leave_each_border_as_a_turn_finds_it(arm, models):
    transformer, oracle = models(FAMILY_OF[arm])
    world = world_of(arm, transformer, num_blocks=900, most_guessed=7)
    first = world.sequence(prompt=prompts_of(33)[0], max_tokens=40)
    finish(world, oracle, first)
    again = predicted(world, first, world.emitted[first.seq_id])
    finish(world, oracle, again)
    assert again.drafts.right
    assert again.drafts.right.total() < again.drafts.guessed.total()
    assert again.num_cached_tokens
    tokens = [*again.prompt_token_ids, *world.emitted[again.seq_id], *prompts_of(11, seed=8)[0]]
    second = world.sequence(prompt=tokens, max_tokens=9)
    finish(world, oracle, second)
    assert second.num_cached_tokens == (again.num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE


@needs_kernels
def test_a_death_before_refused_guesses_are_taken_back_loses_nothing(models, monkeypatch):
    transformer, oracle = models(FAMILY_OF["alias"])
    world = world_of("alias", transformer, most_guessed=7)
    first = world.sequence(prompt=prompts_of(60)[0], max_tokens=20)
    finish(world, oracle, first)
    again = predicted(world, first, world.emitted[first.seq_id])
    world.submit(again)
    decode = world.workers["decode"]
    with monkeypatch.context() as patch:
        patch.setattr(transformer, "write_records", lambda *_: sys.exit())
        with pytest.raises(SystemExit):
            world.run()
    assert not decode.outbox
    world.kill("decode")
    world.revive("decode")
    world.run()
    assert_right(world, oracle, again)
    assert again.num_recoveries == 1


@pytest.mark.parametrize("kernels", ["compiled", "torch"])
@pytest.mark.parametrize("family", ["qwen3_5_moe_text", "qwen3_next", "qwen3_next, early"])
def test_a_gguf_file_says_what_its_folder_says(family, kernels, tmp_path, monkeypatch):
    """Rows of its projections lie in another order, in Qwen 3.5 columns of the output's, too."""
    if kernels == "torch":
        monkeypatch.setattr(backend, "find_kernels", lambda *_: (None, "torch"))
    family, _, early = family.partition(", ")
    options = {"mlp_only_layers": []} if family == "qwen3_next" else {}
    make_checkpoint(tmp_path / "hf", family, **options)
    file = write_gguf(tmp_path / "hf", tmp_path / "tiny.gguf", is_early=bool(early))
    transformer = transformer_of(file)
    world = world_of("alias", transformer)
    sequences = [world.sequence(prompt=p, max_tokens=9) for p in prompts_of(5, 33, 70)]
    finish(world, load_oracle(tmp_path / "hf"), *sequences)
