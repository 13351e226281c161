"""Draw the next token on a GPU with Triton: engine.worker.model.sampler's distribution and draws.

Sorting a vocabulary costs more than finding each filter's border by bisection: the value above
which the tokens have the wanted number, or the wanted weight. A greedy row takes one pass over its
logits, a draw without filters two, a filter some tens.

Invariant: a row's token depends on its own logits and parameters alone; no value is read back.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.worker.model.sampler import (
    FIRST_FACTOR,
    LARGEST_UNIFORM,
    NO_TOKEN,
    NUM_DRAW_FIELDS,
    SECOND_FACTOR,
    UNIFORM_STEP,
)

_LARGEST = tl.constexpr(torch.finfo(torch.float32).max)
_BELOW_ALL = tl.constexpr(-(2**31))
_NO_TOKEN = tl.constexpr(NO_TOKEN)
_FIRST_FACTOR = tl.constexpr(FIRST_FACTOR)
_SECOND_FACTOR = tl.constexpr(SECOND_FACTOR & 0xFFFFFFFF)
_UNIFORM_STEP = tl.constexpr(UNIFORM_STEP)
_LARGEST_UNIFORM = tl.constexpr(LARGEST_UNIFORM)
_DRAW_TILE = 4096


def sample_rows(logits: torch.Tensor, draws: torch.Tensor | None = None) -> torch.Tensor:
    """Choose one token per row: [n] int64; NO_TOKEN where its logit is NaN or infinite.

    Args:
        logits: [n, vocab_size] float32, rows contiguous; not changed.
        draws: [n, NUM_DRAW_FIELDS] float64, each as draw_of() has it; None: all are greedy.
    """
    num_rows, vocab_size = logits.shape
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows:
        tile = min(_DRAW_TILE, triton.next_power_of_2(vocab_size))
        _sample_kernel[(num_rows,)](
            token_ids,
            logits,
            token_ids if draws is None else draws,  # not read, but a pointer
            logits.stride(0),
            vocab_size,
            IS_GREEDY=draws is None,
            NUM_FIELDS=NUM_DRAW_FIELDS,
            TILE=tile,
            num_warps=max(4, tile // 512),  # with more, fewer registers each: they are spilled
        )
    return token_ids


@triton.jit
def _key(x):
    """Map floats to integers in their order, and back; it is its own inverse on bits."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _load(row, start, vocab_size, TILE: tl.constexpr):
    """Load logits for sampling: infinity becomes the largest float, NaN impossible."""
    ids = start + tl.arange(0, TILE)
    x = tl.load(row + ids, mask=ids < vocab_size, other=-float("inf"))
    return ids, tl.minimum(tl.where(x != x, -float("inf"), x), _LARGEST)


@triton.jit
def _weight(x, best, sharpness, least):
    """Compute the probability relative to the likeliest token; 0 below the minimum."""
    weight = tl.exp((x - best) * sharpness)
    return tl.where(weight < least, 0.0, weight)


@triton.jit
def _mass(row, vocab_size, best, sharpness, least, TILE: tl.constexpr):
    sums = tl.zeros([TILE], tl.float32)
    for start in range(0, vocab_size, TILE):
        _, x = _load(row, start, vocab_size, TILE)
        sums += _weight(x, best, sharpness, least)
    return tl.sum(sums.to(tl.float64), 0)


@triton.jit
def _border(
    row, vocab_size, best, sharpness, least, target, COUNTS: tl.constexpr, TILE: tl.constexpr
):
    """Find the least key above which tokens weigh, or count, less than the target.

    Both ends are moved on to keys that tokens have, so that the search ends when it has found one.
    """
    low, high = tl.full([], _BELOW_ALL, tl.int32), _key(best)
    while low + 1 < high:
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        sums = tl.zeros([TILE], tl.float32)
        floors, ceilings = tl.full([TILE], low, tl.int32), tl.full([TILE], high, tl.int32)
        for start in range(0, vocab_size, TILE):
            _, x = _load(row, start, vocab_size, TILE)
            keys = _key(x)
            measure = 1.0 if COUNTS else _weight(x, best, sharpness, least)
            sums += tl.where(keys > middle, measure, 0.0)
            floors = tl.maximum(floors, tl.where(keys > middle, low, keys))
            ceilings = tl.minimum(ceilings, tl.where(keys > middle, keys, high))
        if tl.sum(sums.to(tl.float64), 0) < target:
            high = tl.maximum(tl.max(floors, 0), low + 1)
        else:
            low = tl.min(ceilings, 0) - 1
    return high


@triton.jit
def _noise(ids, first, second):
    """Make the numbers of engine.worker.model.sampler.noise: the same bits up to the logarithm."""
    bits = ids.to(tl.uint32) ^ first
    bits = (bits ^ (bits >> 16)) * _FIRST_FACTOR
    bits = (bits ^ (bits >> 15)) + second
    bits = bits * _SECOND_FACTOR
    bits = (bits ^ (bits >> 16)) & 0x7FFFFFFF
    uniform = tl.minimum((bits.to(tl.float32) + 0.5) * _UNIFORM_STEP, _LARGEST_UNIFORM)
    # log1p, which Triton lacks: what 1 - uniform is rounded by, its logarithm is scaled by
    rest = 1.0 - uniform
    taken = 1.0 - rest
    scale = uniform / tl.where(taken > 0, taken, 1.0)
    return tl.where(taken > 0, -tl.log(rest) * scale, uniform)


@triton.jit
def _drawn(row, vocab_size, best, draw, TILE: tl.constexpr):
    """Find the token with the largest ratio of weight to noise among those the filters keep."""
    sharpness = 1.0 / tl.load(draw).to(tl.float32)
    first = tl.load(draw + 1).to(tl.int32).to(tl.uint32, bitcast=True)
    second = tl.load(draw + 2).to(tl.int32).to(tl.uint32, bitcast=True)
    top_p, least = tl.load(draw + 3), tl.load(draw + 4).to(tl.float32)
    top_k = tl.load(draw + 5).to(tl.int32)
    if (top_k > 0) & (top_k < vocab_size):
        target = top_k.to(tl.float64)
        last = _border(row, vocab_size, best, sharpness, 0.0, target, True, TILE)
        least = tl.maximum(least, _weight(_value(last), best, sharpness, 0.0))
    if top_p < 1.0:
        target = top_p * _mass(row, vocab_size, best, sharpness, least, TILE)
        last = _border(row, vocab_size, best, sharpness, least, target, False, TILE)
        least = tl.maximum(least, _weight(_value(last), best, sharpness, 0.0))
    largest, places = tl.full([TILE], -1.0, tl.float32), tl.arange(0, TILE)
    for start in range(0, vocab_size, TILE):
        ids, x = _load(row, start, vocab_size, TILE)
        ratio = _weight(x, best, sharpness, least) / _noise(ids, first, second)
        ratio = tl.where(ids < vocab_size, ratio, -1.0)
        places = tl.where(ratio > largest, ids, places)
        largest = tl.maximum(ratio, largest)
    return tl.min(tl.where(largest == tl.max(largest, 0), places, vocab_size), 0)


# views of a step's tensors begin anywhere, and no step may wait for a compiler
@triton.jit(do_not_specialize_on_alignment=["token_ids", "draws"])
def _sample_kernel(
    token_ids, logits, draws, stride, vocab_size,
    IS_GREEDY: tl.constexpr, NUM_FIELDS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Run a program for each row."""
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * stride
    largest, places = tl.full([TILE], -float("inf"), tl.float32), tl.arange(0, TILE)
    for start in range(0, vocab_size, TILE):
        ids, x = _load(row, start, vocab_size, TILE)
        places = tl.where(x > largest, ids, places)
        largest = tl.maximum(x, largest)
    best = tl.max(largest, 0)
    token_id = tl.min(tl.where(largest == best, places, vocab_size), 0)
    if not IS_GREEDY:
        draw = draws + index * NUM_FIELDS
        if (tl.load(draw) > 0) & (best > -float("inf")):
            token_id = _drawn(row, vocab_size, best, draw, TILE)
    is_number = tl.abs(tl.load(row + token_id)) <= _LARGEST  # neither NaN nor infinite
    tl.store(token_ids + index, tl.where(is_number, token_id, _NO_TOKEN).to(tl.int64))
