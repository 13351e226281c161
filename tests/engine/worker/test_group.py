"""A group computes what transformers computes, with the same bits in any number of processes."""

import signal
import time

import pytest
import torch

from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.shards import why_no_shards
from engine.errors import WorkerFailed
from engine.kernels.cpu import WIDENED, ProductVariants, load_kernels
from tests.checkpoints import load_oracle, make_checkpoint
from tests.engine.worker.model.test_transformer import (
    Pool,
    assert_same_predictions,
    oracle_logits,
    random_ids,
)
from tests.gguf_files import write_gguf
from tests.groups import BLOCK_SIZE, NUM_BLOCKS, Group
from tests.quantised_checkpoints import write_quantised
from tests.worlds.computing_world import transformer_of

try:
    load_kernels()
except ImportError:
    pytest.skip("no compiled kernels", allow_module_level=True)

FOUR_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8}


def pool_of(group, seed=1):
    """Sequences in the pool that the group's processes share, which begins as noise."""
    pool = Pool(group.model, BLOCK_SIZE, torch.Generator().manual_seed(seed), NUM_BLOCKS)
    group.kv.copy_(pool.kv)
    pool.kv = group.kv
    return pool


def logits_of_everything(group):
    """Logits of a long prompt in two chunks, of several that decode, and of both in one step."""
    generator = torch.Generator().manual_seed(2)
    pool = pool_of(group)
    prompts = [random_ids(generator, length) for length in (150, 3, 40)]
    tables = [pool.table(len(prompt) + 20) for prompt in prompts]
    made = [pool.step([(prompts[0][:70], 0, tables[0])])]
    made.append(pool.step([(p, 0, t) for p, t in zip(prompts[1:], tables[1:], strict=True)]))
    for step in range(6):
        parts = [([5 + step], len(p) + step, t)
                 for p, t in zip(prompts[1:], tables[1:], strict=True)]  # fmt: skip
        if step == 3:
            parts.append((prompts[0][70:], 70, tables[0]))
        made.append(pool.step(parts))
    return torch.cat(made), prompts


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"head_dim": 32}),
        ("gemma2", {}),
        ("gemma3_text", {"num_hidden_layers": 4}),
        ("phi3", {"sliding_window": 20}),
        ("granite", {}),
        ("exaone4", {}),
        ("mixtral", {}),
        ("qwen3_moe", {}),
        ("gpt_oss", {}),
        ("ministral3", {}),
        ("qwen3_next", {}),
        ("qwen3_5_text", {}),
        ("qwen3_5_moe_text", {}),
    ],
)
def test_sums_of_shards_are_the_oracles_logits(family, overrides, tmp_path):
    """In one process, which has all shards."""
    folder = make_checkpoint(tmp_path, family, **overrides)
    group = Group(folder, 1)
    logits, prompts = logits_of_everything(group)
    oracle = load_oracle(folder)
    whole = oracle_logits(oracle, prompts[0])
    assert_same_predictions(logits[:70], whole[:70])
    assert_same_predictions(logits[70:73], oracle_logits(oracle, prompts[1]))
    assert_same_predictions(logits[-4 - 80 : -4], whole[70:])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model"), **FOUR_HEADS)


@pytest.fixture(scope="module")
def bfloat16_folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen2", "bfloat16", **FOUR_HEADS)


@pytest.fixture(scope="module")
def of_two(folder):
    group = Group(folder, 2)
    yield group
    group.stop()


def test_bits_do_not_depend_on_the_number_of_processes(folder, of_two):
    expected, _ = logits_of_everything(Group(folder, 1))
    of_four = Group(folder, 4)
    try:
        assert torch.equal(logits_of_everything(of_two)[0], expected)
        assert torch.equal(logits_of_everything(of_four)[0], expected)
        assert torch.equal(of_two.kv, of_four.kv)
    finally:
        of_four.stop()


@pytest.mark.parametrize("variants", [None, ProductVariants(WIDENED)], ids=["stored", "packed"])
def test_nor_do_they_in_bfloat16(bfloat16_folder, variants):
    expected, _ = logits_of_everything(Group(bfloat16_folder, 1, "bfloat16", variants))
    group = Group(bfloat16_folder, 2, "bfloat16", variants)
    try:
        assert torch.equal(logits_of_everything(group)[0], expected)
    finally:
        group.stop()


WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 64, "num_hidden_layers": 2}  # fmt: skip
HYBRID = {
    **WIDE,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_value_head_dim": 32,
}
QUANTISED = ("Q8_0", "Q4_0", "fp8-blocks", "fp8-rows", "int4-32", "int4-128-zeros", "int4-rows",
             "int8-packed", "gptq-32", "gptq-order", "nvfp4", "awq")  # fmt: skip


@pytest.fixture(scope="module")
def wide_folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model") / "wide", **WIDE)


def quantised_as(kind, folder, into):
    if kind in ("hybrid", "tiled"):
        family = {"hybrid": "qwen3_next", "tiled": "qwen3_5_text"}[kind]
        folder = make_checkpoint(into / "hybrid", family, **HYBRID)
        return folder if kind == "hybrid" else write_gguf(folder, into / "model.gguf", "Q8_0")
    if kind[0].isupper():
        return write_gguf(folder, into / "model.gguf", kind)
    return write_quantised(folder, kind, into)[0]


@pytest.mark.parametrize("kind", [*QUANTISED, "tiled"])
def test_shards_of_codes_are_the_whole_matrices(kind, wide_folder, tmp_path):
    """Against a worker of one process, which widens what it reads."""
    path = quantised_as(kind, wide_folder, tmp_path)
    assert why_no_shards(Checkpoint.open(path)) is None
    group, whole = Group(path, 1), transformer_of(path)
    assert (group.model.config.num_layers, group.reduction.shape.num_shards) == (2, 4)
    ids = random_ids(torch.Generator().manual_seed(3), 70)
    pools = pool_of(group), Pool(whole, BLOCK_SIZE, torch.Generator().manual_seed(1))
    made = [pool.step([(ids, 0, pool.table(len(ids)))]) for pool in pools]
    assert_same_predictions(*made, tolerance=5e-4)


@pytest.mark.parametrize(
    ("kind", "width"),
    [("gptq-32", 2), ("hybrid", 2), ("Q4_0", 4), ("nvfp4", 4), ("hybrid", 4), ("tiled", 4)],
)
def test_nor_do_they_where_codes_or_states_are_divided(kind, width, wide_folder, tmp_path):
    path = quantised_as(kind, wide_folder, tmp_path)
    expected, _ = logits_of_everything(Group(path, 1))
    group = Group(path, width)
    try:
        assert torch.equal(logits_of_everything(group)[0], expected)
    finally:
        group.stop()


def test_each_process_says_how_long_it_has_waited(of_two):
    before = of_two.reduction.waited_ns
    logits_of_everything(of_two)
    after = of_two.reduction.waited_ns
    assert len(before) == 2
    assert all(then < now for then, now in zip(before, after, strict=True))


def test_a_step_that_is_only_timed_ends_for_all_where_the_first_says(of_two):
    pool = pool_of(of_two)
    before, _ = logits_of_everything(of_two)
    asked = []

    def stops(done, total):
        asked.append((done, total))
        return done == 3

    hidden = of_two.model.hidden

    def timed(batch, kv):
        return hidden(batch, kv, stops)

    of_two.model.hidden = timed
    try:
        with torch.inference_mode():
            pool.step([(list(range(30)), 0, pool.table(30))])
    finally:
        del of_two.model.hidden
    assert asked == [(1, 6), (2, 6), (3, 6)]
    assert torch.equal(logits_of_everything(of_two)[0], before)


def test_the_first_process_learns_that_another_has_ended(folder):
    group = Group(folder, 2)
    group.others[0].send_signal(signal.SIGKILL)
    group.others[0].wait()
    pool = pool_of(group)
    with pytest.raises(WorkerFailed, match="1 of the group"):
        pool.step([([1], 0, pool.table(1))])


def test_the_others_end_with_the_first(folder):
    group = Group(folder, 2)
    for link in group.followers._links:
        link._connection.close()
    deadline = time.monotonic() + 30
    while group.others[0].poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert group.others[0].returncode == 0


def test_what_keeps_a_process_from_loading_is_told(folder, tmp_path):
    with pytest.raises(WorkerFailed, match="no model here"):
        Group(folder, 2, others_folder=tmp_path / "missing")
