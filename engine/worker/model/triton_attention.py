"""Compute paged attention on a GPU with Triton, for one or several queries per sequence.

Both walk a sequence's keys in tiles through its block table and keep a running softmax in float32.
The rows of a tile are the queries of all heads that share a key head, so that a key is read once.
Where few programs would read many keys, those are cut among several, whose parts a third kernel
joins: of single queries, and of a short chunk after a long prompt.
Invariant: what is launched depends on shapes and the step's host numbers alone, never on a device
value, so that a launch can be captured; offsets into the pool are 64 bits wide.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from engine.worker.model.attention import MAX_PARTS, Tiling, padded_dim
from engine.worker.model.paged_step import PagedStep

_LOG2_E = math.log2(math.e)
_BASE_2 = tl.constexpr(_LOG2_E)
_NUM_STAGES = 5
"""Pipeline stages of a tile's loads.

Keys wait for their place in the block table; loads two steps ahead run only if the place is known
two tiles earlier."""
_MAX_PARTS = tl.constexpr(MAX_PARTS)
_JOINED_ROWS = 16
"""Rows of a tile whose parts one program joins."""
_HIDDEN = tl.constexpr(-1e30)
"""Score of a key that is not seen: finite, so that a row may begin with a tile of them."""
_kernel = triton.jit(
    # these differ from step to step, and no step may wait for a compiler
    do_not_specialize=["table_stride", "num_parts"],
    do_not_specialize_on_alignment=["block_tables", "query_starts", "seq_lens", "query_tiles"],
)


def attend_several(
    out: torch.Tensor,
    q: torch.Tensor,
    kv: torch.Tensor,
    layer: int,
    step: PagedStep,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    tiling: Tiling,
    parts: int = 1,
) -> None:
    """Attend from all sequences with several queries, tile by tile.

    Args:
        out: [num_tokens, num_heads, head_dim], contiguous in a token; other rows stay as they are.
        q: as out.
        kv: the pool, [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim].
        layer: to read in the pool.
        step: the sequences; query_tiles are for this tiling.
        window: how many keys a query sees, with its own; None: all.
        softcap: where scores are bent to; None: nowhere.
        sinks: float32 [num_heads], a learnt score of each head; None: the model has none.
        tiling: a program has num_rows // (num_heads // num_kv_heads) queries.
        parts: programs that share a tile's keys, MAX_PARTS at most.
    """
    num_tiles, num_kv_heads = len(step.query_tiles), kv.shape[4]
    if num_tiles:
        keys, values = kv[:, layer].unbind(1)
        mixed = sums = out  # not touched where there is nothing to join
        if parts > 1:
            shape = (num_tiles, num_kv_heads, parts, tiling.num_rows)
            mixed = torch.empty(*shape, q.shape[2], dtype=torch.float32, device=q.device)
            sums = torch.empty(*shape, 2, dtype=torch.float32, device=q.device)
        _several_queries_kernel[(num_tiles, num_kv_heads, parts)](
            out,
            mixed,
            sums,
            q,
            keys,
            values,
            step.block_tables,
            step.query_starts,
            step.seq_lens,
            step.query_tiles,
            *_strides(out, q, keys, step.block_tables),
            *_scales(scale, softcap),
            window or 0,
            q if sinks is None else sinks,
            HAS_SINKS=sinks is not None,
            IS_PART=parts > 1,
            **_constants(q, kv, window, softcap, tiling),
        )
    if num_tiles and parts > 1:
        _join_tiles(out, mixed, sums, step, num_kv_heads, tiling.num_rows)


def _join_tiles(
    out: torch.Tensor,
    mixed: torch.Tensor,
    sums: torch.Tensor,
    step: PagedStep,
    num_kv_heads: int,
    num_rows: int,
) -> None:
    """Join the parts of each tile, [num_tiles, num_kv_heads, parts, num_rows, ...]."""
    num_heads, head_dim = out.shape[1:]
    grid = (len(step.query_tiles), num_kv_heads, triton.cdiv(num_rows, _JOINED_ROWS))
    _join_tiles_kernel[grid](
        out,
        mixed,
        sums,
        step.query_starts,
        step.query_tiles,
        out.stride(0),
        mixed.shape[2],
        GROUP_SIZE=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        PADDED_DIM=padded_dim(head_dim),
        NUM_ROWS=num_rows,
        JOINED_ROWS=_JOINED_ROWS,
    )


def attend_single(
    out: torch.Tensor,
    q: torch.Tensor,
    kv: torch.Tensor,
    layer: int,
    step: PagedStep,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    tiling: Tiling,
    parts: int,
) -> None:
    """Attend from all sequences with one query; arguments are attend_several's.

    `parts` programs share a sequence's keys, MAX_PARTS at most.
    """
    num_sequences, (num_heads, head_dim) = len(step.seq_lens), q.shape[1:]
    keys, values = kv[:, layer].unbind(1)
    mixed = sums = out  # not touched where there is nothing to join
    if parts > 1:
        shape = (num_sequences, num_heads, parts)
        mixed = torch.empty(*shape, head_dim, dtype=torch.float32, device=q.device)
        sums = torch.empty(*shape, 2, dtype=torch.float32, device=q.device)
    _single_query_kernel[(num_sequences, kv.shape[4], parts)](
        out,
        mixed,
        sums,
        q,
        keys,
        values,
        step.block_tables,
        step.query_starts,
        step.seq_lens,
        *_strides(out, q, keys, step.block_tables),
        *_scales(scale, softcap),
        window or 0,
        q if sinks is None else sinks,
        HAS_SINKS=sinks is not None,
        IS_PART=parts > 1,
        **_constants(q, kv, window, softcap, tiling),
    )
    if parts > 1:
        _join_kernel[(num_sequences, num_heads)](
            out,
            mixed,
            sums,
            step.query_starts,
            out.stride(0),
            parts,
            HEAD_DIM=head_dim,
            PADDED_DIM=padded_dim(head_dim),
        )


def _strides(
    out: torch.Tensor, q: torch.Tensor, keys: torch.Tensor, tables: torch.Tensor
) -> tuple[int, ...]:
    return out.stride(0), q.stride(0), keys.stride(0), keys.stride(1), tables.stride(0)


def _scales(scale: float, softcap: float | None) -> tuple[float, float]:
    """Compute the factors of scores before and after softcap, for a softmax of base 2."""
    if softcap is None:
        return scale * _LOG2_E, 1.0
    return scale / softcap, softcap * _LOG2_E


def _constants(
    q: torch.Tensor, kv: torch.Tensor, window: int | None, softcap: float | None, tiling: Tiling
) -> dict[str, Any]:
    block_size, num_kv_heads, head_dim = kv.shape[3:]
    return {
        "GROUP_SIZE": q.shape[1] // num_kv_heads,
        "HEAD_DIM": head_dim,
        "PADDED_DIM": padded_dim(head_dim),
        "BLOCK_SIZE": block_size,
        "HAS_WINDOW": window is not None,
        "HAS_SOFTCAP": softcap is not None,
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        "NUM_ROWS": tiling.num_rows,
        "NUM_KEYS": tiling.num_keys,
        "num_warps": tiling.num_warps,
        "num_stages": _NUM_STAGES,
    }


@triton.jit
def _tanh(x):
    shrunk = tl.exp(-2.0 * tl.abs(x))
    bent = (1.0 - shrunk) / (1.0 + shrunk)
    return tl.where(x < 0, -bent, bent)


@triton.jit
def _add_tile(
    best, total, mixed, queries, query_positions, start, end, table, keys, values,
    block_stride, token_stride, inner_scale, outer_scale, window,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
    NUM_KEYS: tl.constexpr, IS_MASKED: tl.constexpr,
):  # fmt: skip
    """Take the keys from start on, and none from end on, into the running softmax.

    Keys and values point to the first one of a head; start is a multiple of NUM_KEYS.
    """
    dims = tl.arange(0, PADDED_DIM)
    positions = start + tl.arange(0, NUM_KEYS)
    if BLOCK_SIZE % NUM_KEYS == 0:  # the tile lies in one block
        blocks = tl.load(table + start // BLOCK_SIZE).to(tl.int64)
    else:
        blocks = tl.load(table + positions // BLOCK_SIZE, mask=positions < end, other=0)
        blocks = blocks.to(tl.int64)
    places = blocks * block_stride + positions % BLOCK_SIZE * token_stride
    key_places = keys + places[None, :] + dims[:, None]
    value_places = values + places[:, None] + dims[None, :]
    if IS_MASKED or HEAD_DIM != PADDED_DIM:
        is_there, is_dim = positions < end, dims < HEAD_DIM
        key_tile = tl.load(key_places, mask=is_there[None, :] & is_dim[:, None], other=0.0)
        value_tile = tl.load(value_places, mask=is_there[:, None] & is_dim[None, :], other=0.0)
    else:
        key_tile, value_tile = tl.load(key_places), tl.load(value_places)
    scores = tl.dot(queries, key_tile, input_precision=PRECISION) * inner_scale
    if HAS_SOFTCAP:
        scores = _tanh(scores) * outer_scale
    if IS_MASKED:
        ages = query_positions[:, None] - positions[None, :]
        is_seen = ages >= 0
        if HAS_WINDOW:
            is_seen = is_seen & (ages < window)
        scores = tl.where(is_seen, scores, _HIDDEN)
    new_best = tl.maximum(best, tl.max(scores, 1))
    weights = tl.exp2(scores - new_best[:, None])
    shrink = tl.exp2(best - new_best)
    total = total * shrink + tl.sum(weights, 1)
    mixed = mixed * shrink[:, None]
    mixed = tl.dot(weights.to(value_tile.dtype), value_tile, mixed, input_precision=PRECISION)
    return new_best, total, mixed


@triton.jit
def _add_tiles(
    best, total, mixed, queries, query_positions, first, last, end, table, keys, values,
    block_stride, token_stride, inner_scale, outer_scale, window,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
    NUM_KEYS: tl.constexpr, IS_MASKED: tl.constexpr,
):  # fmt: skip
    """Take the keys of [first, last) into the running softmax, tile by tile."""
    for start in range(first, last, NUM_KEYS):
        best, total, mixed = _add_tile(
            best, total, mixed, queries, query_positions, start, end, table, keys, values,
            block_stride, token_stride, inner_scale, outer_scale, window, HEAD_DIM, PADDED_DIM,
            BLOCK_SIZE, HAS_WINDOW, HAS_SOFTCAP, PRECISION, NUM_KEYS, IS_MASKED,
        )  # fmt: skip
    return best, total, mixed


@triton.jit
def _visible_keys(
    first, end, part, window,
    HAS_WINDOW: tl.constexpr, NUM_KEYS: tl.constexpr, IS_PART: tl.constexpr,
):  # fmt: skip
    """Find the keys of a tile's part: where they begin, [all_from, all_to) and where they end.

    All of the tile's queries see [all_from, all_to); before and after it masks are needed.
    """
    begin, all_from, all_to, stop = 0, 0, (first + 1) // NUM_KEYS * NUM_KEYS, end
    if HAS_WINDOW:
        begin = tl.maximum(first - window + 1, 0) // NUM_KEYS * NUM_KEYS
        all_from = (tl.maximum(end - window, 0) + NUM_KEYS - 1) // NUM_KEYS * NUM_KEYS
    if IS_PART:
        part_len = tl.cdiv(tl.cdiv(end - begin, NUM_KEYS), tl.num_programs(2)) * NUM_KEYS
        begin += part * part_len
        stop = tl.minimum(begin + part_len, end)
    return begin, all_from, all_to, stop


@triton.jit
def _softmax_start(
    sinks, head, rows, part,
    HAS_SINKS: tl.constexpr, GROUP_SIZE: tl.constexpr, NUM_ROWS: tl.constexpr,
):  # fmt: skip
    """Begin a running softmax; with its head's sink in the first part, so that it counts once."""
    best, total = tl.full([NUM_ROWS], _HIDDEN, tl.float32), tl.zeros([NUM_ROWS], tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks + head * GROUP_SIZE + rows % GROUP_SIZE) * _BASE_2
        best, total = tl.where(part == 0, sink, best), total + tl.where(part == 0, 1.0, 0.0)
    return best, total


@_kernel
def _several_queries_kernel(
    out, part_mixed, part_sums, q, keys, values, block_tables, query_starts, seq_lens, query_tiles,
    out_stride, q_stride, block_stride, token_stride, table_stride,
    inner_scale, outer_scale, window, sinks,
    HAS_SINKS: tl.constexpr, GROUP_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, NUM_ROWS: tl.constexpr,
    NUM_KEYS: tl.constexpr, IS_PART: tl.constexpr,
):  # fmt: skip
    """Run a program for each tile of queries, key head and part of the keys."""
    tile, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence, first_query = tl.load(query_tiles + 2 * tile), tl.load(query_tiles + 2 * tile + 1)
    first_row = tl.load(query_starts + sequence)
    query_len = tl.load(query_starts + sequence + 1) - first_row
    seq_len = tl.load(seq_lens + sequence)
    rows, dims = tl.arange(0, NUM_ROWS), tl.arange(0, PADDED_DIM)
    queries_per_tile: tl.constexpr = NUM_ROWS // GROUP_SIZE
    own_queries = first_query + rows // GROUP_SIZE
    is_query = (own_queries < query_len) & (rows < queries_per_tile * GROUP_SIZE)
    is_query = is_query[:, None] & (dims < HEAD_DIM)[None, :]
    tokens = (first_row + own_queries).to(tl.int64)
    own = (head * GROUP_SIZE + rows % GROUP_SIZE) * HEAD_DIM
    query_places = q + (tokens * q_stride + own)[:, None] + dims[None, :]
    queries = tl.load(query_places, mask=is_query, other=0.0)
    positions, first = seq_len - query_len + own_queries, seq_len - query_len + first_query
    end = tl.minimum(first + queries_per_tile, seq_len)
    begin, all_from, all_to, stop = _visible_keys(
        first, end, part, window, HAS_WINDOW, NUM_KEYS, IS_PART
    )
    best, total = _softmax_start(sinks, head, rows, part, HAS_SINKS, GROUP_SIZE, NUM_ROWS)
    mixed = tl.zeros([NUM_ROWS, PADDED_DIM], tl.float32)
    table = block_tables + sequence.to(tl.int64) * table_stride
    keys, values = keys + head * HEAD_DIM, values + head * HEAD_DIM
    if HAS_WINDOW:
        best, total, mixed = _add_tiles(
            best, total, mixed, queries, positions, begin, tl.minimum(all_from, stop), end, table,
            keys, values, block_stride, token_stride, inner_scale, outer_scale, window, HEAD_DIM,
            PADDED_DIM, BLOCK_SIZE, HAS_WINDOW, HAS_SOFTCAP, PRECISION, NUM_KEYS, True,
        )  # fmt: skip
    best, total, mixed = _add_tiles(
        best, total, mixed, queries, positions, tl.maximum(all_from, begin),
        tl.minimum(all_to, stop), end, table, keys, values, block_stride, token_stride,
        inner_scale, outer_scale, window, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, HAS_WINDOW,
        HAS_SOFTCAP, PRECISION, NUM_KEYS, False,
    )  # fmt: skip
    best, total, mixed = _add_tiles(
        best, total, mixed, queries, positions, tl.maximum(tl.maximum(all_from, all_to), begin),
        stop, end, table, keys, values, block_stride, token_stride, inner_scale, outer_scale,
        window, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, HAS_WINDOW, HAS_SOFTCAP, PRECISION, NUM_KEYS,
        True,
    )  # fmt: skip
    if IS_PART:
        parts = (tile * tl.num_programs(1) + head).to(tl.int64) * tl.num_programs(2) + part
        places = parts * NUM_ROWS + rows
        tl.store(part_mixed + places[:, None] * HEAD_DIM + dims[None, :], mixed, mask=is_query)
        _store_sums(part_sums, places, best, total)
    else:
        places = out + (tokens * out_stride + own)[:, None] + dims[None, :]
        tl.store(places, (mixed / total[:, None]).to(out.dtype.element_ty), mask=is_query)


@triton.jit
def _store_sums(part_sums, places, best, total):
    tl.store(part_sums + places * 2, best)
    tl.store(part_sums + places * 2 + 1, total)


@_kernel
def _single_query_kernel(
    out, part_mixed, part_sums, q, keys, values, block_tables, query_starts, seq_lens,
    out_stride, q_stride, block_stride, token_stride, table_stride,
    inner_scale, outer_scale, window, sinks,
    HAS_SINKS: tl.constexpr, GROUP_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, NUM_ROWS: tl.constexpr,
    NUM_KEYS: tl.constexpr,
    IS_PART: tl.constexpr,
):  # fmt: skip
    """Run a program for each sequence, key head and part of the keys."""
    sequence, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_parts = tl.num_programs(2)
    row = tl.load(query_starts + sequence)
    if tl.load(query_starts + sequence + 1) - row != 1:
        return
    seq_len = tl.load(seq_lens + sequence)
    rows, dims = tl.arange(0, NUM_ROWS), tl.arange(0, PADDED_DIM)
    own_heads = head * GROUP_SIZE + rows
    own = own_heads[:, None] * HEAD_DIM + dims[None, :]
    is_own = (rows < GROUP_SIZE)[:, None] & (dims < HEAD_DIM)[None, :]
    queries = tl.load(q + row.to(tl.int64) * q_stride + own, mask=is_own, other=0.0)
    positions = tl.zeros([NUM_ROWS], tl.int32) + (seq_len - 1)
    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(seq_len - window, 0) // NUM_KEYS * NUM_KEYS
    part_len = tl.cdiv(tl.cdiv(seq_len - begin, NUM_KEYS), num_parts) * NUM_KEYS
    begin += part * part_len
    best, total = _softmax_start(sinks, head, rows, part, HAS_SINKS, GROUP_SIZE, NUM_ROWS)
    mixed = tl.zeros([NUM_ROWS, PADDED_DIM], tl.float32)
    table = block_tables + sequence.to(tl.int64) * table_stride
    keys, values = keys + head * HEAD_DIM, values + head * HEAD_DIM
    for start in range(begin, tl.minimum(begin + part_len, seq_len), NUM_KEYS):
        best, total, mixed = _add_tile(
            best, total, mixed, queries, positions, start, seq_len, table, keys, values,
            block_stride, token_stride, inner_scale, outer_scale, window, HEAD_DIM, PADDED_DIM,
            BLOCK_SIZE, HAS_WINDOW, HAS_SOFTCAP, PRECISION, NUM_KEYS, True,
        )  # fmt: skip
    if IS_PART:
        num_heads = tl.num_programs(1) * GROUP_SIZE
        parts = (sequence * num_heads + own_heads).to(tl.int64) * num_parts + part
        tl.store(part_mixed + parts[:, None] * HEAD_DIM + dims[None, :], mixed, mask=is_own)
        tl.store(part_sums + parts * 2, best, mask=rows < GROUP_SIZE)
        tl.store(part_sums + parts * 2 + 1, total, mask=rows < GROUP_SIZE)
    else:
        result = mixed / tl.where(total > 0, total, 1.0)[:, None]
        places = out + row.to(tl.int64) * out_stride + own
        tl.store(places, result.to(out.dtype.element_ty), mask=is_own)


@_kernel
def _join_kernel(
    out, part_mixed, part_sums, query_starts, out_stride, num_parts,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
):  # fmt: skip
    """Run a program for each sequence and head."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    row = tl.load(query_starts + sequence)
    if tl.load(query_starts + sequence + 1) - row != 1:
        return
    dims, part = tl.arange(0, PADDED_DIM), tl.arange(0, _MAX_PARTS)
    parts = (sequence * tl.num_programs(1) + head).to(tl.int64) * num_parts + part
    is_part = part < num_parts
    best = tl.load(part_sums + parts * 2, mask=is_part, other=_HIDDEN)
    total = tl.load(part_sums + parts * 2 + 1, mask=is_part, other=0.0)
    mixed = tl.load(
        part_mixed + parts[:, None] * HEAD_DIM + dims[None, :],
        mask=is_part[:, None] & (dims < HEAD_DIM)[None, :],
        other=0.0,
    )
    weights = tl.exp2(best - tl.max(best, 0))
    total = tl.sum(weights * total, 0)
    result = tl.sum(weights[:, None] * mixed, 0) / tl.where(total > 0, total, 1.0)
    places = out + row.to(tl.int64) * out_stride + head * HEAD_DIM + dims
    tl.store(places, result.to(out.dtype.element_ty), mask=dims < HEAD_DIM)


@_kernel
def _join_tiles_kernel(
    out, part_mixed, part_sums, query_starts, query_tiles, out_stride, num_parts,
    GROUP_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    NUM_ROWS: tl.constexpr, JOINED_ROWS: tl.constexpr,
):  # fmt: skip
    """Run a program for some rows of each tile and key head."""
    tile, head = tl.program_id(0), tl.program_id(1)
    sequence, first_query = tl.load(query_tiles + 2 * tile), tl.load(query_tiles + 2 * tile + 1)
    first_row = tl.load(query_starts + sequence)
    query_len = tl.load(query_starts + sequence + 1) - first_row
    rows = tl.program_id(2) * JOINED_ROWS + tl.arange(0, JOINED_ROWS)
    own_queries, dims = first_query + rows // GROUP_SIZE, tl.arange(0, PADDED_DIM)
    is_query = (own_queries < query_len) & (rows < NUM_ROWS // GROUP_SIZE * GROUP_SIZE)
    is_query = is_query[:, None] & (dims < HEAD_DIM)[None, :]
    best, total = tl.full([JOINED_ROWS], _HIDDEN, tl.float32), tl.zeros([JOINED_ROWS], tl.float32)
    mixed = tl.zeros([JOINED_ROWS, PADDED_DIM], tl.float32)
    first_part = (tile * tl.num_programs(1) + head).to(tl.int64) * num_parts
    for part in range(num_parts):
        places = (first_part + part) * NUM_ROWS + rows
        part_best, part_total = tl.load(part_sums + places * 2), tl.load(part_sums + places * 2 + 1)
        own = part_mixed + places[:, None] * HEAD_DIM + dims[None, :]
        new_best = tl.maximum(best, part_best)
        shrink, weight = tl.exp2(best - new_best), tl.exp2(part_best - new_best)
        total = total * shrink + part_total * weight
        own_mixed = tl.load(own, mask=is_query, other=0.0)
        mixed = mixed * shrink[:, None] + own_mixed * weight[:, None]
        best = new_best
    tokens = (first_row + own_queries).to(tl.int64)
    own_heads = head * GROUP_SIZE + rows % GROUP_SIZE
    places = out + (tokens * out_stride + own_heads * HEAD_DIM)[:, None] + dims[None, :]
    result = mixed / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(places, result.to(out.dtype.element_ty), mask=is_query)
