"""What attention libraries do, by the reference: the promises of their functions, and their faults.

Torch's two are those of 2.13 as its sources have them: flash_api.cpp cuts keys in parts and joins
them over the first sequence; the memory-efficient kernel mistakes keys read by a stride of 0.
"""

import torch
import torch.nn.functional as F  # noqa: N812  # its name everywhere

from tests.engine.references import reference_attention

NUM_PROCESSORS = 132


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
    """What flash-attn 2.8 promises of its function."""
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
    """What torch 2.13 does: parts of keys are joined over the first sequence, unless packed."""
    assert enable_gqa or query.shape[1] == key.shape[2]
    assert seqused_k.dtype == torch.int32
    assert torch.equal(seqused_k, cu_seq_k.diff())
    assert (max_q, max_k) == (cu_seq_q.diff().max(), seqused_k.max())
    out = paged_reference(
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
    shape = len(seqused_k), query.shape[1], query.shape[2], max_q, max_k
    is_packed = (
        max_q == 1 and query.shape[1] > key.shape[2] and max(window_size) < 0
    )  # before windows longer than the keys are dropped
    if is_packed:
        shape = len(seqused_k), key.shape[2], query.shape[2], query.shape[1] // key.shape[2], max_k
    if (num_splits or splits_of(*shape)) > 1 and not is_packed:
        out[cu_seq_q[1] :] = torch.nan  # what the memory held
    return out


def splits_of(num_sequences, num_heads, head_dim, max_query_len, max_seq_len):
    """Parts that FlashAttention 2 cuts keys into where nobody says how many."""
    slots = 2 * NUM_PROCESSORS
    programs = num_sequences * num_heads * -(-max_query_len // 64)
    num_blocks = -(-max_seq_len // (256 if head_dim <= 64 else 128 if head_dim <= 128 else 64))
    if programs >= 0.8 * slots:
        return 1
    most = min(128, slots, num_blocks)
    efficiencies = {}
    for splits in range(1, most + 1):
        if splits == 1 or -(-num_blocks // splits) != -(-num_blocks // (splits - 1)):
            waves = programs * splits / slots
            efficiencies[splits] = waves / -(-programs * splits // slots)
    best = max(efficiencies.values())
    return next(splits for splits, got in efficiencies.items() if got >= 0.85 * best)


_scaled_dot_product_attention = F.scaled_dot_product_attention


def scaled_dot_product_attention(query, key, value, **how):
    """What torch 2.13 does on a GPU: a lone last query of a block takes heads for queries.

    Only where keys have a stride of 0 between heads: then its strides are wrong.
    """
    out = _scaled_dot_product_attention(query, key, value, **how)
    block = 64 if query.shape[3] <= 128 else 32
    if query.shape[1] > 1 and query.shape[2] % block == 1 and key.stride(1) == value.stride(1) == 0:
        out[:, :, -1] = out[:, :, -1].roll(1, 1)
    return out
