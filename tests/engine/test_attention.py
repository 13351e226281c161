"""Paged attention is attention: whatever the blocks, the groups and the window."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.model.attention import (
    AttentionPlan,
    StepBatch,
    choose_backend,
    reference_attention,
    write_kv,
)

NUM_LAYERS = 2


@st.composite
def steps(draw):
    """Sequences as (context, new tokens), and the shape of the pool."""
    pairs = st.tuples(st.integers(0, 70), st.sampled_from([1, 1, 1, 2, 5, 33]))
    return {
        "sequences": draw(st.lists(pairs, min_size=1, max_size=6)),
        "block_size": draw(st.sampled_from([1, 4, 16, 64])),
        "heads": draw(st.sampled_from([(4, 4), (4, 2), (6, 1)])),
        "head_dim": draw(st.sampled_from([2, 8, 10])),
        "window": draw(st.sampled_from([None, 1, 7, 64])),
        "softcap": draw(st.sampled_from([None, 1.5])),
        "seed": draw(st.integers(0, 1000)),
    }


def filled_pool(generator, tables, k, v, block_size):
    """A pool of noise with every sequence's keys and values written position by position."""
    num_blocks = 1 + sum(len(table) for table in tables)
    kv = torch.randn(num_blocks, NUM_LAYERS, 2, block_size, *k[0].shape[1:], generator=generator)
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


@settings(deadline=None, max_examples=150)
@given(steps())
def test_every_sequence_gets_what_it_would_get_alone(step):
    generator = torch.Generator().manual_seed(step["seed"])
    (num_heads, num_kv_heads), head_dim = step["heads"], step["head_dim"]
    sequences, block_size = step["sequences"], step["block_size"]
    lengths = [context + new for context, new in sequences]
    counts = [-(-length // block_size) for length in lengths]
    shuffled = (torch.randperm(sum(counts), generator=generator) + 1).split(counts)
    tables = [table.tolist() for table in shuffled]
    q = [torch.randn(n, num_heads, head_dim, generator=generator) for n in lengths]
    k = [torch.randn(n, num_kv_heads, head_dim, generator=generator) for n in lengths]
    v = [torch.randn(n, num_kv_heads, head_dim, generator=generator) for n in lengths]
    kv = filled_pool(generator, tables, k, v, block_size)
    expected_pool = kv.clone()

    def new_rows(parts):
        return torch.cat([p[c:] for p, (c, _) in zip(parts, sequences, strict=True)])

    for table, (context, new) in zip(tables, sequences, strict=True):  # the step writes these
        for position in range(context, context + new):
            kv[table[position // block_size], 1, :, position % block_size] = 99.0
    plan = AttentionPlan(batch_of(sequences, tables, block_size), kv)
    write_kv(kv, 1, new_rows(k), new_rows(v), plan)
    assert torch.equal(kv, expected_pool)

    backend = choose_backend("cpu", torch.float32)
    how = (0.3, step["window"], step["softcap"])
    output = backend.attend(new_rows(q), new_rows(k), new_rows(v), kv, 1, plan, *how)
    expected = [
        reference_attention(queries[context:], keys, values, *how)
        for queries, keys, values, (context, _) in zip(q, k, v, sequences, strict=True)
    ]
    torch.testing.assert_close(output, torch.cat(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("num_tokens", [6, 7, 8, 9])
def test_a_first_chunk_near_the_windows_length_is_windowed(num_tokens):
    generator = torch.Generator().manual_seed(num_tokens)
    q, k, v = (torch.randn(num_tokens, 2, 4, generator=generator) for _ in range(3))
    kv = torch.zeros(2, NUM_LAYERS, 2, 16, 2, 4)
    plan = AttentionPlan(batch_of([(0, num_tokens)], [[1]], 16), kv)
    output = choose_backend("cpu", torch.float32).attend(q, k, v, kv, 1, plan, 0.5, 7, None)
    torch.testing.assert_close(output, reference_attention(q, k, v, 0.5, 7, None))


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


def test_an_overflow_reaches_nobody_who_gets_the_block_next():
    kv = torch.zeros(2, NUM_LAYERS, 2, 4, 2, 8)
    plan = AttentionPlan(batch_of([(0, 4)], [[1]], 4), kv)
    bad = torch.tensor([torch.nan, torch.inf, -3e38, 1.0]).view(4, 1, 1).expand(4, 2, 8)
    write_kv(kv, 1, bad.clone(), bad.clone(), plan)
    assert kv.abs().max() < 1e5
    assert kv[1, 1, 0, 3].eq(1.0).all()  # and what was sound is as it was
