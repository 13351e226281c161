"""Paged attention is attention: whatever the blocks, the groups and the window."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # its name everywhere
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels.cpu import TILES, WIDENED, load_kernels
from engine.worker.model.attention import AttentionPlan, StepBatch, planes, torch_attention
from engine.worker.model.compiled import CompiledBackend, find_kernels
from engine.worker.model.torch_backend import TorchBackend
from tests.engine.references import reference_attention
from tests.engine.upstream import scaled_dot_product_attention
from tests.levels import PARAMS

NUM_LAYERS = 2


def backend_of(level, variant=WIDENED):
    """The backend of one level."""
    if level == "torch":
        return TorchBackend()
    return CompiledBackend(*load_kernels(level), attention_variant=variant)


COMPILED = [param for param in PARAMS if param.values != ("amx",)]
"""Without tiles, amx computes what avx512bf16 does."""
LEVELS = ["torch", *COMPILED]
TOLERANCES = {
    torch.float32: {"rtol": 1e-4, "atol": 1e-5},
    torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2},
}


@st.composite
def steps(draw, max_context=70, new_tokens=(1, 1, 1, 2, 5, 33)):
    """Sequences as (context, new tokens), and the shape of the pool."""
    pairs = st.tuples(st.integers(0, max_context), st.sampled_from(new_tokens))
    return {
        "sequences": draw(st.lists(pairs, min_size=1, max_size=6)),
        "block_size": draw(st.sampled_from([1, 4, 16, 64])),
        "heads": draw(st.sampled_from([(4, 4), (4, 2), (6, 1), (14, 1)])),
        "head_dim": draw(st.sampled_from([2, 8, 10, 16, 48, 80])),
        "dtype": draw(st.sampled_from([torch.float32, torch.bfloat16])),
        "num_threads": draw(st.sampled_from([1, 3])),
        "window": draw(st.sampled_from([None, 1, 7, 64])),
        "softcap": draw(st.sampled_from([None, 1.5])),
        "has_sinks": draw(st.booleans()),
        "seed": draw(st.integers(0, 1000)),
    }


def filled_pool(generator, tables, k, v, block_size):
    """A pool with every sequence's keys and values written position by position.

    The rest is noise, which sequences that ended have left: finite, as write_kv keeps it.
    """
    num_blocks = 1 + sum(len(table) for table in tables)
    kv = torch.randn(num_blocks, NUM_LAYERS, 2, block_size, *k[0].shape[1:], generator=generator)
    kv = kv.to(k[0].dtype)
    for table, keys, values in zip(tables, k, v, strict=True):
        for position in range(len(keys)):
            block, offset = table[position // block_size], position % block_size
            kv[block, 1, 0, offset] = keys[position]
            kv[block, 1, 1, offset] = values[position]
    return kv


def batch_of(sequences, tables, block_size):
    positions = [p for context, new in sequences for p in range(context, context + new)]
    slots = [
        table[p // block_size] * block_size + p % block_size
        for (context, new), table in zip(sequences, tables, strict=True)
        for p in range(context, context + new)
    ]
    return StepBatch(
        input_ids=torch.zeros(len(positions), dtype=torch.int64),
        positions=torch.tensor(positions),
        token_slots=torch.tensor(slots),
        query_lens=[new for _, new in sequences],
        seq_lens=[context + new for context, new in sequences],
        block_tables=tables,
        logit_rows=[],
    )


@pytest.mark.parametrize("level", LEVELS)
@settings(deadline=None, max_examples=25)
@given(step=steps())
def test_every_sequence_gets_what_it_would_get_alone(level, step):
    assert_right(level, step)


@pytest.mark.parametrize("level", COMPILED)
@settings(deadline=None, max_examples=25)
@given(step=steps(max_context=300, new_tokens=(1,)))
def test_keys_that_threads_share_are_joined_to_the_whole(level, step):
    assert_right(level, step)


@pytest.mark.parametrize("level", PARAMS)
@settings(deadline=None, max_examples=15)
@given(step=steps(max_context=140, new_tokens=(1, 5, 33, 70)))
def test_what_many_queries_meet_by_tiles_is_attention_too(level, step):
    assert_right(level, step | {"dtype": torch.bfloat16}, TILES)


def assert_right(level, step, variant=WIDENED):
    """A step through a pool is, sequence by sequence, what the reference computes."""
    backend = backend_of(level, variant)
    generator = torch.Generator().manual_seed(step["seed"])
    (num_heads, num_kv_heads), head_dim = step["heads"], step["head_dim"]
    sequences, block_size, dtype = step["sequences"], step["block_size"], step["dtype"]
    lengths = [context + new for context, new in sequences]
    counts = [-(-length // block_size) for length in lengths]
    shuffled = (torch.randperm(sum(counts), generator=generator) + 1).split(counts)
    tables = [table.tolist() for table in shuffled]
    q, k, v = (
        [torch.randn(n, heads, head_dim, generator=generator).to(dtype) for n in lengths]
        for heads in (num_heads, num_kv_heads, num_kv_heads)
    )
    kv = filled_pool(generator, tables, k, v, block_size)
    expected_pool = kv.clone()
    for table, (context, new) in zip(tables, sequences, strict=True):  # the step writes these
        for position in range(context, context + new):
            kv[table[position // block_size], 1, :, position % block_size] = 99.0
    qkv = torch.cat([torch.cat(heads, 1) for heads in zip(q, k, v, strict=True)])
    rows = torch.arange(sum(lengths)).split(lengths)
    new_rows = [own[context:] for own, (context, _) in zip(rows, sequences, strict=True)]
    qkv = qkv[torch.cat(new_rows)]

    plan = backend.plan(batch_of(sequences, tables, block_size), kv, [])
    if level != "torch":
        plan = dataclasses.replace(plan, num_threads=step["num_threads"])
    backend.place(qkv, num_heads, None, kv, 1, plan)
    assert torch.equal(kv, expected_pool)

    sinks = torch.randn(num_heads, generator=generator) * 2 if step["has_sinks"] else None
    how = (0.3, step["window"], step["softcap"], sinks)
    output = backend.attend(qkv, num_heads, kv, 1, plan, *how)
    expected = [
        reference_attention(queries[context:], keys, values, *how)
        for queries, keys, values, (context, _) in zip(q, k, v, sequences, strict=True)
    ]
    torch.testing.assert_close(output, torch.cat(expected), **TOLERANCES[dtype])


def int8_pool(num_blocks, block_size, num_kv_heads, head_dim, spare=0):
    """Zeros; other layers may have more bytes for a token."""
    num_bytes = num_kv_heads * (head_dim + 4) + spare
    return torch.zeros(num_blocks, NUM_LAYERS, 2, block_size, num_bytes, dtype=torch.int8)


def dequantised(kv, num_kv_heads, head_dim):
    codes, scales = planes(kv, num_kv_heads, head_dim)
    return codes * scales.transpose(3, 4)[..., None]


def quantised(new):
    """[num_tokens, num_kv_heads, head_dim] as a pool gives them back: the slow, plain reference."""
    scales = new.double().abs().amax(-1, keepdim=True) / 127
    return (new.double() / scales.clamp(min=1e-300)).round() * scales


@pytest.mark.parametrize("level", LEVELS)
@settings(deadline=None, max_examples=25)
@given(step=steps(), variant=st.sampled_from([WIDENED, TILES]))
def test_codes_of_a_byte_are_attended_to_as_the_values_that_they_stand_for(level, step, variant):
    backend = backend_of(level, variant)
    generator = torch.Generator().manual_seed(step["seed"])
    (num_heads, num_kv_heads), head_dim = step["heads"], step["head_dim"]
    block_size, dtype = max(step["block_size"], 4), step["dtype"]
    lengths = [context + new for context, new in step["sequences"]]
    counts = [-(-length // block_size) for length in lengths]
    ids = (torch.randperm(sum(counts), generator=generator) + 1).split(counts)
    tables = [table.tolist() for table in ids]
    kv = int8_pool(1 + sum(counts), block_size, num_kv_heads, head_dim, step["seed"] % 2 * 8)
    q, k, v = (
        [torch.randn(n, heads, head_dim, generator=generator).to(dtype) for n in lengths]
        for heads in (num_heads, num_kv_heads, num_kv_heads)
    )
    how = (0.3, step["window"], step["softcap"], None)
    qkv = [torch.cat(heads, 1) for heads in zip(q, k, v, strict=True)]
    before = [(0, context) for context, _ in step["sequences"] if context]
    steps_of = [(before, [i for i, (c, _) in enumerate(step["sequences"]) if c], False)]
    steps_of += [(step["sequences"], range(len(lengths)), True)]
    for sequences, members, is_last in steps_of:
        if not sequences:
            continue
        rows = torch.cat(
            [qkv[i][c : c + new] for i, (c, new) in zip(members, sequences, strict=True)]
        )
        batch = batch_of(sequences, [tables[i] for i in members], block_size)
        plan = backend.plan(batch, kv, [])
        if level != "torch":
            plan = dataclasses.replace(plan, num_threads=step["num_threads"])
        backend.place(rows, num_heads, None, kv, 1, plan)
        if is_last:
            output = backend.attend(rows, num_heads, kv, 1, plan, *how)
    kept = dequantised(kv, num_kv_heads, head_dim)[:, 1]
    for table, keys, values in zip(tables, k, v, strict=True):
        positions = torch.arange(len(keys))
        blocks = torch.tensor(table)[positions // block_size]
        for half, meant in enumerate((keys, values)):
            found = kept[blocks, half, positions % block_size]
            # a value in the middle between two codes may be rounded either way
            step_size = meant.float().abs().amax(-1, keepdim=True) / 127
            assert ((found - quantised(meant)).abs() <= step_size * 1.01).all()
            assert ((found - meant.float()).abs() <= step_size * 0.51).all()
    expected = []
    for i, (context, _) in enumerate(step["sequences"]):
        positions = torch.arange(lengths[i])
        blocks = torch.tensor(tables[i])[positions // block_size]
        keys, values = kept[blocks, :, positions % block_size].unbind(1)
        expected.append(reference_attention(q[i][context:].float(), keys, values, *how))
    torch.testing.assert_close(output, torch.cat(expected).to(dtype), **TOLERANCES[dtype])


@pytest.mark.parametrize("level", COMPILED)
@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 1000),
    head_dim=st.sampled_from([2, 8, 10, 64]),
    dtype=st.sampled_from(list(TOLERANCES)),
    magnitude=st.sampled_from([1.0, 1e-30, 1e-44, 1e30, 0.0]),
)
def test_every_level_writes_the_codes_that_torch_writes(level, seed, head_dim, dtype, magnitude):
    new = torch.randn(9, 6, head_dim, generator=torch.Generator().manual_seed(seed)) * magnitude
    new[3, 4, 0], new[4, 5, 1] = torch.nan, -torch.inf
    pools = []
    for backend in (backend_of(level), TorchBackend()):
        kv = int8_pool(4, 4, 2, head_dim)
        plan = backend.plan(batch_of([(2, 9)], [[3, 1, 2]], 4), kv, [])
        backend.place(new.to(dtype), 2, None, kv, 1, plan)
        pools.append(kv)
    if magnitude > 1e-40:
        assert torch.equal(*pools)
    assert all(dequantised(kv, 2, head_dim).isfinite().all() for kv in pools)


@pytest.mark.parametrize("level", COMPILED)
def test_a_layer_of_few_heads_keeps_codes_where_a_wider_one_has_room(level):
    backend = backend_of(level)
    kv = int8_pool(2, 16, 2, 32)
    kv[:, 0] = 99
    plan = backend.plan(batch_of([(0, 9)], [[1]], 16), kv, [])
    qkv = torch.randn(9, 4 + 2, 16, generator=torch.Generator().manual_seed(1))
    backend.place(qkv, 4, None, kv, 1, plan)
    output = backend.attend(qkv, 4, kv, 1, plan, 0.3, None, None)
    expected = reference_attention(qkv[:, :4], qkv[:, 4:5], qkv[:, 5:], 0.3, None, None)
    torch.testing.assert_close(output, expected, rtol=0.05, atol=0.05)
    assert (kv[:, 0] == 99).all()


@pytest.mark.parametrize("level", COMPILED)
@pytest.mark.parametrize("head_dim", [16, 20])
def test_nothing_beyond_a_sequence_is_read(level, head_dim):
    backend = backend_of(level)
    kv = torch.full((4, NUM_LAYERS, 2, 16, 2, head_dim), torch.nan)
    plan = backend.plan(batch_of([(0, 21), (0, 1)], [[2, 1], [3]], 16), kv, [])
    qkv = torch.randn(22, 8, head_dim)
    backend.place(qkv, 4, None, kv, 0, plan)
    assert backend.attend(qkv, 4, kv, 0, plan, 0.5, None, None).isfinite().all()


@pytest.mark.parametrize("num_tokens", [6, 7, 8, 9])
def test_a_first_chunk_near_the_windows_length_is_windowed(num_tokens):
    generator = torch.Generator().manual_seed(num_tokens)
    q, k, v = (torch.randn(num_tokens, 2, 4, generator=generator) for _ in range(3))
    kv = torch.zeros(2, NUM_LAYERS, 2, 16, 2, 4)
    plan = AttentionPlan(batch_of([(0, num_tokens)], [[1]], 16), kv)
    output = torch_attention(q, (k, v), k.shape[1:], kv, 1, plan, 0.5, 7, None)
    torch.testing.assert_close(output, reference_attention(q, k, v, 0.5, 7, None))


@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("context", [0, 5])
@pytest.mark.parametrize("num_tokens", [32, 33, 65, 97])
def test_a_chunks_last_token_is_right_where_torch_mistakes_a_stride_of_0(
    num_tokens, context, head_dim, monkeypatch
):
    monkeypatch.setattr(F, "scaled_dot_product_attention", scaled_dot_product_attention)
    generator = torch.Generator().manual_seed(num_tokens)
    length = context + num_tokens
    q = torch.randn(num_tokens, 4, head_dim, generator=generator)
    k, v = (torch.randn(length, 2, head_dim, generator=generator) for _ in range(2))
    table = [3, 1, 2, 4, 5, 6, 7]
    kv = filled_pool(generator, [table], [k], [v], 16)
    plan = AttentionPlan(batch_of([(context, num_tokens)], [table], 16), kv)
    own = k[context:], v[context:]
    for window in (None, 40):
        output = torch_attention(q, own, k.shape[1:], kv, 1, plan, 0.1, window, None)
        expected = reference_attention(q, k, v, 0.1, window, None)
        torch.testing.assert_close(output, expected, **TOLERANCES[torch.float32])


def test_a_window_reads_only_the_blocks_it_can_see():
    table = list(range(1, 65))
    batch = batch_of([(1000, 1)], [table], 16)
    plan = AttentionPlan(batch, torch.zeros(65, 1, 2, 16, 1, 4))
    (group,) = plan.groups(20)
    # positions 981..1000 lie in blocks 61 to 62 of the table, whose ids are one higher
    assert group.block_halves.tolist() == [
        [2 * b for b in (62, 63)] + [2 * b + 1 for b in (62, 63)]
    ]
    assert group.mask is None
    assert (group.keys.start, group.keys.stop) == (981 - 61 * 16, 1001 - 61 * 16)


def test_a_prompts_first_chunk_reads_no_block():
    plan = AttentionPlan(batch_of([(0, 9)], [[3]], 16), torch.zeros(4, 1, 2, 16, 1, 4))
    (group,) = plan.groups(None)
    assert group.block_halves is None


def test_a_short_sequence_is_not_padded_to_a_far_longer_one():
    sequences = [(2000, 1), (100, 1), (1900, 1), (30, 1)]
    tables = [[1] * 200] * 4
    plan = AttentionPlan(batch_of(sequences, tables, 16), torch.zeros(2, 1, 2, 16, 1, 4))
    assert [group.rows.tolist() for group in plan.groups(None)] == [[0, 2], [1, 3]]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_overflow_reaches_nobody_who_gets_the_block_next(level, dtype):
    backend = backend_of(level)
    kv = torch.zeros(2, NUM_LAYERS, 2, 4, 2, 8, dtype=dtype)
    plan = backend.plan(batch_of([(0, 4)], [[1]], 4), kv, [])
    bad = torch.tensor([torch.nan, torch.inf, -3e38, 1.0], dtype=dtype)
    backend.place(bad.view(4, 1, 1).repeat(1, 6, 8), 2, None, kv, 1, plan)
    assert kv.abs().max() < 1e5
    assert kv[1, 1, 0, :, 0, 0].tolist()[2:] == [-kv.max().item(), 1.0]  # what was sound is kept


def test_a_dtype_without_kernels_falls_back_and_says_so():
    kernels, why = find_kernels("cpu", torch.float16)
    assert kernels is None
    assert "for float16" in why


@pytest.mark.parametrize(("lens", "new"), [([40, 33, 9], [1, 1, 1]), ([40], [7])])
def test_keys_are_neither_copied_for_each_head_nor_asked_of_a_kernel_that_would(
    lens, new, monkeypatch
):
    """With enable_gqa and a mask torch's kernels for GPUs write down all scores."""
    asked = []

    def attention(query, key, value, **how):
        asked.append((query, key, value, how))
        return real(query, key, value, **how)

    real = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    generator = torch.Generator().manual_seed(1)
    k, v = (torch.randn(sum(lens), 2, 8, generator=generator) for _ in range(2))
    tables = [list(range(1 + 10 * i, 11 + 10 * i)) for i in range(len(lens))]
    kv = torch.randn(40, 3, 2, 4, 2, 8, generator=generator)
    batch = batch_of([(n - m, m) for n, m in zip(lens, new, strict=True)], tables, 4)
    q = torch.randn(sum(new), 6, 8, generator=generator)
    own = k[: sum(new)], v[: sum(new)]
    torch_attention(q, own, (2, 8), kv, 1, AttentionPlan(batch, kv), 0.3, None, None)
    assert asked
    for query, key, value, how in asked:
        assert not how.get("enable_gqa")
        assert query.shape[1] == key.shape[1] == value.shape[1]
        gathered = 2 * len(lens) * -(-max(lens) // 4) * 4 * 2 * 8 * 4
        assert key.untyped_storage().nbytes() == gathered
        assert key.stride(-1) == value.stride(-1) == 1
