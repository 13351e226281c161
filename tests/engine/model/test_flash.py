"""Libraries are given the step as they read it: pages of the pool, int32, lengths and maxima."""

import pytest
import torch

from engine.model.attention import reference_attention
from engine.model.cuda import flash_attention, torch_varlen_attention
from engine.model.paged import paged_step
from tests.engine.kernel_cases import LAYER, MIXED, SINGLES, TOLERANCES, Step, filled

STEPS = [
    Step(MIXED, block_size=256, heads=(4, 2), dtype=torch.bfloat16),
    Step(MIXED, block_size=256, heads=(6, 1), window=17),
    Step(SINGLES, block_size=256, heads=(4, 4), head_dim=128),
    Step(SINGLES, block_size=512, heads=(4, 4), window=100),
]
SOFTCAPPED = Step(MIXED, block_size=256, softcap=3.0)


def paged_reference(q, keys, values, starts, lengths, tables, scale, window, softcap, is_causal):
    """Each sequence alone, from pages [num_pages, page_size, num_kv_heads, head_dim]."""
    assert keys.shape == values.shape
    assert q.stride()[1:] == (q.shape[2], 1)
    assert keys.stride()[1:] == (keys.shape[2] * keys.shape[3], keys.shape[3], 1)
    assert keys.shape[1] % 256 == 0
    assert all(x.dtype == torch.int32 and x.is_contiguous() for x in (starts, tables))
    outputs = []
    left, right = window
    # every query has to see what is before it, and nothing behind it
    assert right == 0 or is_causal or all(starts.diff() == 1)
    if all(starts.diff() == 1) and left < 0:  # then flash-attn may pack heads, and split keys
        assert right < 0
    for i, length in enumerate(lengths):
        pages = tables[i, : -(-length // keys.shape[1])].long()
        own_keys, own_values = (x[pages].flatten(0, 1)[:length] for x in (keys, values))
        queries = q[starts[i] : starts[i + 1]]
        assert len(queries) <= length
        own_window = None if left < 0 else left + 1
        outputs.append(
            reference_attention(
                queries.double(), own_keys, own_values, scale, own_window, softcap or None
            ).to(q.dtype)
        )
    return torch.cat(outputs)


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    """What flash-attn 2.8 promises of its function, by the reference."""
    assert causal
    assert dropout_p == 0.0
    assert cu_seqlens_k.dtype == torch.int32
    lengths = cu_seqlens_k.diff().tolist()
    assert (max_seqlen_q, max_seqlen_k) == (cu_seqlens_q.diff().max(), max(lengths))
    return paged_reference(
        q, k, v, cu_seqlens_q, lengths, block_table, softmax_scale, window_size, softcap, causal
    )


def varlen_attn(
    query,
    key,
    value,
    cu_seq_q,
    cu_seq_k,
    max_q,
    max_k,
    *,
    return_aux=None,
    scale=None,
    window_size=(-1, -1),
    enable_gqa=False,
    seqused_k=None,
    block_table=None,
    num_splits=None,
):
    """What torch 2.12 promises of its function, by the reference."""
    assert enable_gqa or query.shape[1] == key.shape[2]
    assert seqused_k.dtype == torch.int32
    assert torch.equal(seqused_k, cu_seq_k.diff())
    assert (max_q, max_k) == (cu_seq_q.diff().max(), seqused_k.max())
    assert num_splits is None  # torch: "requires FA3"
    return paged_reference(
        query,
        key,
        value,
        cu_seq_q,
        seqused_k.tolist(),
        block_table,
        scale,
        window_size,
        None,
        False,
    )


def check(attention, step):
    case = filled(step, "cpu")
    apart = torch.cat((case.q, case.q), 1)[:, : step.heads[0]]  # as queries lie beside keys
    paged = paged_step(case.batch, case.kv.device, 0)
    output = attention(apart, case.kv, LAYER, paged, step.scale, step.window, step.softcap)
    torch.testing.assert_close(output, case.expected, **TOLERANCES[step.dtype])


@pytest.mark.parametrize("step", [*STEPS, SOFTCAPPED], ids=str)
def test_flash_attn_is_given_the_pool_as_pages(step):
    check(flash_attention(flash_attn_varlen_func), step)


@pytest.mark.parametrize("step", STEPS, ids=str)
def test_torchs_varlen_attention_is_given_the_pool_as_pages(step):
    check(torch_varlen_attention(varlen_attn), step)


def test_torchs_own_function_takes_these_arguments():
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    if torch.__version__ < "2.12":
        pytest.skip("no paged attention before torch 2.12")
    import inspect

    theirs = inspect.signature(varlen.varlen_attn).parameters
    ours = inspect.signature(varlen_attn).parameters
    assert [(p.name, p.kind, p.default) for p in ours.values()] == [
        (p.name, p.kind, p.default) for p in theirs.values()
    ]
