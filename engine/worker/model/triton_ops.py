"""Compute norms, gates and KV writes on a GPU with Triton.

What the kernels compute is engine.worker.model.layers', cast for cast.

Invariant: each element is read before it is written by the same thread, so that all but `gated` may
work in place; nothing depends on a device value.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.checkpoint.model_config import ACTIVATIONS
from engine.worker.model.attention import next_power_of_2

_OVERFLOWN = tl.constexpr(6e4)
"""The largest key or value that is stored, as in engine.worker.model.attention."""
_TILE = 2048
"""Elements that a program works on where rows are short."""


def norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    added: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """rms_norm of x [num_tokens, dim], after x += scale * added, where something is."""
    out = torch.empty_like(x)
    _launch_norm(out[:, None], x[:, None], weight[None], eps, added, scale)
    return out


def norm_rows(rows: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """Norm each row of [num_tokens, num_rows, dim] in place; weight is [num_rows, dim]."""
    _launch_norm(rows, rows, weight, eps, None, 1.0)


def _launch_norm(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    added: torch.Tensor | None,
    scale: float,
) -> None:
    num_tokens, num_rows, dim = x.shape
    if not num_tokens:
        return
    width = next_power_of_2(dim)
    height = min(next_power_of_2(num_rows), max(1, _TILE // width))
    _norm_kernel[(num_tokens, triton.cdiv(num_rows, height))](
        out,
        x,
        x if added is None else added,
        weight,
        out.stride(0),
        x.stride(0),
        0 if added is None else added.stride(0),
        num_rows,
        eps,
        scale,
        DIM=dim,
        WIDTH=width,
        HEIGHT=height,
        HAS_ADDED=added is not None,
        num_warps=min(16, max(4, width // 1024)),
    )


def gated(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """Compute activation(gate) * up of the two halves of [num_tokens, 2 * width]."""
    num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_tokens, width)
    if num_tokens:
        tile = min(_TILE, next_power_of_2(width))
        _gated_kernel[(num_tokens, triton.cdiv(width, tile))](
            out,
            gate_up,
            gate_up.stride(0),
            width,
            ACTIVATION=ACTIVATIONS.index(activation),
            TILE=tile,
        )
    return out


def place(
    qkv: torch.Tensor,
    num_heads: int,
    angles: tuple[torch.Tensor, torch.Tensor] | None,
    kv: torch.Tensor,
    layer: int,
    positions: torch.Tensor,
    token_slots: torch.Tensor,
) -> None:
    """Rotate queries and keys in place, and write keys and values to the pool, finite.

    Args:
        qkv: [num_tokens, num_heads + 2 * num_kv_heads, head_dim], contiguous.
        num_heads: how many of them are queries.
        angles: cosine and signed sine, each [num_positions, 1, rotary_dim]; None: nothing turns.
        kv: the pool, [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim].
        layer: to write in the pool.
        positions: [num_tokens] of any integer type.
        token_slots: [num_tokens] of any integer type: block_id * block_size + offset.
    """
    num_tokens, num_rows, head_dim = qkv.shape
    if not num_tokens:
        return
    cosines, sines = (qkv, qkv) if angles is None else angles
    half = 0 if angles is None else cosines.shape[-1] // 2
    width = next_power_of_2(max(half, 1))
    passing = next_power_of_2(max(head_dim - 2 * half, 1))
    height = min(8, next_power_of_2(num_rows))
    keys = kv[:, layer, 0]
    _place_kernel[(num_tokens, triton.cdiv(num_rows, height))](
        qkv,
        keys,
        cosines,
        sines,
        positions,
        token_slots,
        keys.stride(0),
        kv.stride(2),
        num_heads,
        kv.shape[4],
        HEAD_DIM=head_dim,
        HALF=half,
        HALF_WIDTH=width,
        PASSING_WIDTH=passing,
        BLOCK_SIZE=kv.shape[3],
        HEIGHT=height,
        num_warps=4,
    )


@triton.jit
def _norm_kernel(
    out, x, added, weight, out_stride, x_stride, added_stride, num_rows, eps, scale,
    DIM: tl.constexpr, WIDTH: tl.constexpr, HEIGHT: tl.constexpr, HAS_ADDED: tl.constexpr,
):  # fmt: skip
    """Run a program for each token and HEIGHT of its rows."""
    token = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1) * HEIGHT + tl.arange(0, HEIGHT)
    dims = tl.arange(0, WIDTH)
    places = rows[:, None] * DIM + dims[None, :]
    is_there = (rows < num_rows)[:, None] & (dims < DIM)[None, :]
    stored = tl.load(x + token * x_stride + places, mask=is_there, other=0.0)
    wide = stored.to(tl.float32)
    if HAS_ADDED:
        more = tl.load(added + token * added_stride + places, mask=is_there, other=0.0)
        stored = (wide + scale * more.to(tl.float32)).to(stored.dtype)
        tl.store(x + token * x_stride + places, stored, mask=is_there)
        wide = stored.to(tl.float32)
    factors = tl.load(weight + places, mask=is_there, other=0.0)
    inverse = tl.rsqrt(tl.sum(wide * wide, 1) / DIM + eps)
    normed = (wide * inverse[:, None]).to(factors.dtype).to(tl.float32) * factors.to(tl.float32)
    tl.store(out + token * out_stride + places, normed.to(out.dtype.element_ty), mask=is_there)


@triton.jit
def _gated_kernel(out, gate_up, stride, width, ACTIVATION: tl.constexpr, TILE: tl.constexpr):
    """Run a program for each token and TILE of its columns."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_there = columns < width
    gate = tl.load(gate_up + token * stride + columns, mask=is_there, other=0.0)
    up = tl.load(gate_up + token * stride + width + columns, mask=is_there, other=0.0)
    x = gate.to(tl.float32)
    # all are x, or 1, times a sigmoid; gelu's tanh approximation is one of this
    slope = x
    if ACTIVATION == 1:
        slope = 1.5957691216057308 * (x + 0.044715 * x * x * x)
    if ACTIVATION == 2:  # as in layers.gated
        x = tl.minimum(x, 7.0)
        slope = 1.702 * x
        limited = tl.minimum(tl.maximum(up.to(tl.float32), -7.0), 7.0)
        up = (limited + 1.0).to(up.dtype)
    if ACTIVATION == 3:
        x = tl.full(x.shape, 1.0, tl.float32)
    shrunk = tl.exp(-tl.abs(slope))
    open_gate = x * tl.where(slope < 0, shrunk, 1.0) / (1.0 + shrunk)
    product = open_gate.to(gate.dtype).to(tl.float32) * up.to(tl.float32)
    tl.store(out + token * width + columns, product.to(out.dtype.element_ty), mask=is_there)


@triton.jit
def _finite(x):
    x = tl.where(x != x, 0.0, x)
    return tl.minimum(tl.maximum(x, -_OVERFLOWN), _OVERFLOWN)


@triton.jit
def _turned(a, b, cosine, sine, dtype: tl.constexpr):
    """Rotate one half; each product is rounded, as separate operations round it."""
    return (a * cosine).to(dtype).to(tl.float32) + (b * sine).to(dtype).to(tl.float32)


@triton.jit
def _put(qkv, pool, x, places, pool_places, is_there, is_stored):
    """Write a head back, and to the pool if it is a key or a value."""
    x = tl.where(is_stored, _finite(x.to(qkv.dtype.element_ty).to(tl.float32)), x)
    x = x.to(qkv.dtype.element_ty)
    tl.store(qkv + places, x, mask=is_there)
    tl.store(pool + pool_places, x, mask=is_there & is_stored)


# views of a step's tensors begin anywhere, and no step may wait for a compiler
@triton.jit(do_not_specialize_on_alignment=["positions", "token_slots"])
def _place_kernel(
    qkv, pool, cosines, sines, positions, token_slots, block_stride, plane_stride,
    num_heads, num_kv_heads,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, HALF_WIDTH: tl.constexpr,
    PASSING_WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEIGHT: tl.constexpr,
):  # fmt: skip
    """Run a program for each token and HEIGHT of its heads: queries, keys, values."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEIGHT + tl.arange(0, HEIGHT)
    end_of_keys = num_heads + num_kv_heads
    slot = tl.load(token_slots + token).to(tl.int64)
    slot_place = slot // BLOCK_SIZE * block_stride
    slot_place += slot % BLOCK_SIZE * num_kv_heads * HEAD_DIM
    is_value, is_stored = (heads >= end_of_keys)[:, None], (heads >= num_heads)[:, None]
    is_head = (heads < end_of_keys + num_kv_heads)[:, None]
    planes = tl.where(heads >= end_of_keys, plane_stride - num_kv_heads * HEAD_DIM, 0)
    rows = (token * (end_of_keys + num_kv_heads) + heads)[:, None] * HEAD_DIM
    pool_rows = (slot_place + planes + (heads - num_heads) * HEAD_DIM)[:, None]
    if HALF > 0:
        dims = tl.arange(0, HALF_WIDTH)[None, :]
        angle = tl.load(positions + token).to(tl.int64) * (2 * HALF) + dims
        is_dim = dims < HALF
        is_there = is_head & is_dim
        dtype = qkv.dtype.element_ty
        a = tl.load(qkv + rows + dims, mask=is_there, other=0.0).to(tl.float32)
        b = tl.load(qkv + rows + HALF + dims, mask=is_there, other=0.0).to(tl.float32)
        cos_a = tl.load(cosines + angle, mask=is_dim, other=0.0).to(tl.float32)
        sin_a = tl.load(sines + angle, mask=is_dim, other=0.0).to(tl.float32)
        cos_b = tl.load(cosines + angle + HALF, mask=is_dim, other=0.0).to(tl.float32)
        sin_b = tl.load(sines + angle + HALF, mask=is_dim, other=0.0).to(tl.float32)
        turned_a = tl.where(is_value, a, _turned(a, b, cos_a, sin_a, dtype))
        turned_b = tl.where(is_value, b, _turned(b, a, cos_b, sin_b, dtype))
        _put(qkv, pool, turned_a, rows + dims, pool_rows + dims, is_there, is_stored)
        dims += HALF
        _put(qkv, pool, turned_b, rows + dims, pool_rows + dims, is_there, is_stored)
    if HEAD_DIM > 2 * HALF:
        dims = 2 * HALF + tl.arange(0, PASSING_WIDTH)[None, :]
        is_there = is_head & (dims < HEAD_DIM)
        x = tl.load(qkv + rows + dims, mask=is_there, other=0.0).to(tl.float32)
        _put(qkv, pool, x, rows + dims, pool_rows + dims, is_there, is_stored)
