"""A step by the GPU's kernels is the step that every other backend computes; by interpretation."""

from dataclasses import replace

import pytest
import torch

from engine.checkpoint.checkpoint import Checkpoint
from engine.kernels.costs import AttentionShape, Cost, attention_cost, product_cost
from engine.worker.kernel_cases import KernelFixture
from engine.worker.model import cuda, transformer
from engine.worker.model.attention import (
    StepBatch,
    num_parts,
    several_queries_tiling,
    single_query_tiling,
)
from engine.worker.model.cuda import CudaBackend, DeviceLimits, TritonAttention
from engine.worker.model.library_attention import flash_attention, torch_varlen_attention
from engine.worker.model.paged_step import paged_step
from tests.checkpoints import make_checkpoint
from tests.engine.kernel_cases import LAYER, MIXED, SINGLES, TOLERANCES, Step, filled
from tests.engine.upstream import flash_attn_varlen_func, varlen_attn
from tests.engine.worker.model.test_transformer import load

CPU = torch.device("cpu")
LIMITS = DeviceLimits(num_processors=132, shared_bytes=232_448)


def interpreted(_device, dtype, config, _block_size, *_):
    group_size = config.num_heads // config.num_kv_heads
    attention = TritonAttention(group_size, config.head_dim, dtype.itemsize, LIMITS)
    return CudaBackend("triton", attention, attention.queries_per_tile)


def batch(sequences, tables, block_size):
    """Sequences as (tokens before, new tokens)."""
    places = [
        (position, table[position // block_size] * block_size + position % block_size)
        for (start, new), table in zip(sequences, tables, strict=True)
        for position in range(start, start + new)
    ]
    positions, slots = (torch.tensor(column) for column in zip(*places, strict=True))
    query_lens = [new for _, new in sequences]
    return StepBatch(
        input_ids=(positions * 37 + 11) % 290,
        positions=positions,
        token_slots=slots,
        query_lens=query_lens,
        seq_lens=[start + new for start, new in sequences],
        block_tables=tables,
        logit_rows=[sum(query_lens[: i + 1]) - 1 for i in range(len(sequences))],
    )


@pytest.mark.parametrize("family", ["gemma2", "qwen3", "phi3", "olmo2"])
def test_a_model_computes_what_it_computes_on_a_cpu(family, tmp_path, monkeypatch):
    folder = make_checkpoint(tmp_path, family, num_hidden_layers=2)
    expected_model = load(folder)
    monkeypatch.setattr(transformer, "choose_backend", interpreted)
    model = load(folder)
    assert model.attention_backend == "triton"
    config, tables = model.config, [[3, 1], [2, 5], [4, 6]]
    shape = (config.num_layers, 2, 16, config.num_kv_heads, config.head_dim)
    pools = [torch.zeros(7, *shape) for _ in range(2)]
    for sequences in ([(0, 14), (0, 3), (0, 1)], [(14, 3), (3, 1), (1, 1)], [(17, 1)]):
        step = batch(sequences, tables[: len(sequences)], 16)
        logits, expected = (
            m.forward(step, kv) for m, kv in zip((model, expected_model), pools, strict=True)
        )
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(*pools, rtol=1e-3, atol=1e-4)


def test_a_steps_longest_work_comes_first_and_single_queries_have_no_tile():
    sequences = [(0, 70), (500, 1), (100, 33), (0, 1)]
    tables = [[1, 2], [3] * 8, [4, 5, 6], [7]]
    step = paged_step(batch(sequences, tables, 64), torch.device("cpu"), 32)
    assert step.query_tiles.tolist() == [[2, 32], [2, 0], [0, 64], [0, 32], [0, 0]]
    assert step.block_tables.tolist() == [[*t, *[0] * (8 - len(t))] for t in tables]
    assert step.query_starts.tolist() == [0, 70, 71, 104, 105]
    assert step.key_starts.tolist() == [0, 70, 571, 704, 705]
    assert (step.max_query_len, step.max_seq_len, step.has_single_queries) == (70, 501, True)
    assert {x.dtype for x in (step.block_tables, step.seq_lens, step.query_tiles)} == {torch.int32}


@pytest.mark.parametrize(
    ("num_sequences", "num_keys", "expected"),
    [(1, 1024, 8), (1, 130, 1), (64, 1024, 1), (16, 4096, 3), (1, 131_072, 33), (1000, 10**6, 1)],
)
def test_keys_are_cut_in_parts_until_all_processors_are_busy(num_sequences, num_keys, expected):
    assert num_parts(num_sequences, 8, num_keys, LIMITS.num_processors) == expected


def test_a_short_chunk_after_a_long_prefix_keeps_every_processor_busy(monkeypatch):
    launched = []
    monkeypatch.setattr(
        cuda, "attend_several", lambda *args: launched.append((len(args[4].query_tiles), args[-1]))
    )
    attention = TritonAttention(4, 128, 2, LIMITS)
    kv = torch.empty(1, 1, 2, 256, 8, 128, device="meta", dtype=torch.bfloat16)
    for sequences in ([(31_000, 20)], [(0, 20)], [(31_000, 20), (900, 300)], [(0, 8192)]):
        tables = [[0] * -(-(start + new) // 256) for start, new in sequences]
        step = paged_step(batch(sequences, tables, 256), CPU, attention.queries_per_tile)
        q = torch.empty(sum(new for _, new in sequences), 32, 128, device="meta")
        attention(q, kv, 0, step, 1.0, None, None)
    programs = [tiles * 8 * parts for tiles, parts in launched]
    assert [count >= LIMITS.num_processors for count in programs] == [True, False, True, True]
    assert [parts for _, parts in launched] == [33, 1, 3, 1]


@pytest.mark.parametrize("shared_bytes", [101_376, 166_912, 232_448])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("group_size", [1, 3, 16])
def test_tiles_hold_a_group_and_what_is_staged_fits(group_size, head_dim, itemsize, shared_bytes):
    shape = (group_size, head_dim, itemsize, shared_bytes)
    row_bytes = 1 << (head_dim * itemsize - 1).bit_length()
    for tiling in (several_queries_tiling(*shape), single_query_tiling(*shape)):
        assert tiling.num_rows >= max(16, group_size)
        assert tiling.num_keys >= 16
        assert (tiling.num_rows + 4 * tiling.num_keys) * row_bytes <= shared_bytes


def test_every_kernel_has_a_case_that_can_be_measured(tmp_path):
    config = Checkpoint.open(make_checkpoint(tmp_path, "llama", num_hidden_layers=2)).config
    backend = interpreted(None, torch.float32, config, 16)
    bed = KernelFixture(
        config, backend, torch.float32, torch.device("cpu"), num_layers=2, block_size=16
    )
    sequences = {"prefill": [(0, 20), (9, 3)], "decode": [(30, 1), (5, 1)]}
    measured = list(bed.cases(sequences, [3]))
    for case in measured:
        case.call(1)
        assert case.cost.num_bytes > 0
    whats = "attention, attention, norm after residual, rope and KV write, product up"
    whats += ", gated activation, product down, product head, sample greedy, sample drawn"
    assert [case.what for case in measured] == [*whats.split(", "), "sample drawn top_p"]


def test_attention_costs_what_it_sees():
    heads = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=8, itemsize=2)
    assert attention_cost(heads, [(9, 1)]) == Cost((20 * 2 + 2 * 4) * 16, 4 * 10 * 4 * 8)
    assert attention_cost(heads, [(0, 3)]) == Cost((6 * 2 + 6 * 4) * 16, 4 * 6 * 4 * 8)
    windowed = replace(heads, window=2)
    assert attention_cost(windowed, [(9, 2)]) == Cost((6 * 2 + 4 * 4) * 16, 4 * 4 * 4 * 8)
    assert Cost(10, 40).is_bound_by_bytes(bytes_per_s=5.0, flops_per_s=100.0)
    assert not Cost(10, 40).is_bound_by_bytes(bytes_per_s=5.0, flops_per_s=10.0)
    assert product_cost(2, 3, 5, itemsize=4) == Cost((15 + 2 * 8) * 4, 2 * 2 * 15)
    assert product_cost(2, 4, 5, 2, num_outputs=2) == Cost((20 + 2 * 7) * 2, 2 * 2 * 20)


# --------------------------------------------------------------------------------------------------
# Libraries are given the step as they read it: pages of the pool, int32, lengths and maxima.

STEPS = [
    Step(MIXED, block_size=256, heads=(4, 2), dtype=torch.bfloat16),
    Step(MIXED, block_size=256, heads=(6, 1), window=17),
    Step(SINGLES, block_size=256, heads=(4, 4), head_dim=128),
    Step(SINGLES, block_size=512, heads=(4, 4), window=100),
]
SOFTCAPPED = Step(MIXED, block_size=256, softcap=3.0)


def check(attention, step):
    case = filled(step, "cpu")
    apart = torch.cat((case.q, case.q), 1)[:, : step.heads[0]]  # as queries lie beside keys
    paged = paged_step(case.batch, case.kv.device, 0)
    output = attention(apart, case.kv, LAYER, paged, step.scale, step.window, step.softcap)
    torch.testing.assert_close(output, case.expected, **TOLERANCES[step.dtype])


@pytest.mark.parametrize("step", [*STEPS, SOFTCAPPED], ids=str)
def test_flash_attn_is_given_the_pool_as_pages(step):
    check(flash_attention(flash_attn_varlen_func), step)


SPLIT = [
    Step(((900, 100), (500, 1)), block_size=256, heads=(32, 8), head_dim=128),
    Step(((900, 1), (300, 1)), block_size=256, heads=(32, 32)),
    Step(((900, 1), (300, 1)), block_size=256, heads=(8, 2), window=100),
    Step(((900, 1), (300, 1), (3, 1)), block_size=256, heads=(32, 8), head_dim=128),
    Step(((1900, 40),), block_size=256, heads=(8, 8)),
]
"""Steps whose keys FlashAttention cuts into parts where nobody says how many."""


@pytest.mark.parametrize("step", [*STEPS, *SPLIT], ids=str)
def test_torchs_varlen_attention_is_given_the_pool_as_pages(step):
    check(torch_varlen_attention(varlen_attn), step)


def test_torchs_own_function_takes_these_arguments():
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    if torch.__version__ < "2.13":
        pytest.skip("not used before torch 2.13")
    import inspect

    theirs = inspect.signature(varlen.varlen_attn).parameters
    ours = inspect.signature(varlen_attn).parameters
    assert [(p.name, p.kind, p.default) for p in ours.values()] == [
        (p.name, p.kind, p.default) for p in theirs.values()
    ]
