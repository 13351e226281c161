"""The next token on the device: the distribution and the draws of engine.model.sampler, by Triton.

Sorting a vocabulary costs more than looking for the one place in it that is wanted. Every filter
keeps a prefix of the tokens in order of their logits, and a draw is a place in that prefix: each is
the border above which tokens are so many, or weigh so much, and is found by bisection. A row takes
one pass over its logits if it is greedy, and some tens if it draws. Of tokens with equal logits the
smaller id comes first.
Owns: the kernel and its launch.
Invariant: a row's token depends on its own logits and parameters alone; no value is read back.
Never: looks at grammars, penalties or log-probabilities, keeps random state.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.model.sampler import NUM_DRAW_FIELDS

_LARGEST = tl.constexpr(torch.finfo(torch.float32).max)
_BELOW_ALL = tl.constexpr(-(2**31))
_TILE = 8192


def sample_rows(logits: torch.Tensor, draws: torch.Tensor | None = None) -> torch.Tensor:
    """Choose one token per row: [n] int64.

    Args:
        logits: [n, vocab_size] float32, rows contiguous; not changed.
        draws: [n, NUM_DRAW_FIELDS] float64, each as draw_of() has it; None: all are greedy.
    """
    num_rows, vocab_size = logits.shape
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows:
        tile = min(_TILE, triton.next_power_of_2(vocab_size))
        _sample_kernel[(num_rows,)](
            token_ids,
            logits,
            token_ids if draws is None else draws,  # not read, but a pointer
            logits.stride(0),
            vocab_size,
            IS_GREEDY=draws is None,
            NUM_FIELDS=NUM_DRAW_FIELDS,
            TILE=tile,
            num_warps=max(4, tile // 256),
        )
    return token_ids


@triton.jit
def _key(x):
    """Integers in the order of floats, and floats of such integers; its own inverse on bits."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _load(row, start, vocab_size, TILE: tl.constexpr):
    """Logits as they count: NaN is impossible, infinity the largest float."""
    ids = start + tl.arange(0, TILE)
    x = tl.load(row + ids, mask=ids < vocab_size, other=-float("inf"))
    return ids, tl.minimum(tl.where(x != x, -float("inf"), x), _LARGEST)


@triton.jit
def _weight(x, best, sharpness, least):
    """Probability relative to the likeliest token, 0 if it is less than the least that counts."""
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
    """The least key above which tokens weigh, or count, no more than the target; and how much.

    Both ends are moved on to keys that tokens have, so that the search ends when it has found one.
    """
    low, high = tl.full([], _BELOW_ALL, tl.int32), _key(best)
    above = tl.full([], 0.0, tl.float64)
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
        total = tl.sum(sums.to(tl.float64), 0)
        if total <= target:
            high, above = tl.maximum(tl.max(floors, 0), low + 1), total
        else:
            low = tl.min(ceilings, 0) - 1
    return high, above


@triton.jit
def _drawn(row, vocab_size, best, draw, TILE: tl.constexpr):
    """The token where the distribution that is left reaches the draw's uniform number."""
    sharpness = 1.0 / tl.load(draw).to(tl.float32)
    least, top_k = tl.load(draw + 3).to(tl.float32), tl.load(draw + 4).to(tl.int32)
    if (top_k > 0) & (top_k < vocab_size):
        target = (top_k - 1).to(tl.float64)
        last, _ = _border(row, vocab_size, best, sharpness, 0.0, target, True, TILE)
        least = tl.maximum(least, _weight(_value(last), best, sharpness, 0.0))
    kept = _mass(row, vocab_size, best, sharpness, least, TILE)
    top_p = tl.load(draw + 2)
    if top_p < 1.0:
        target = top_p * kept
        last, above = _border(row, vocab_size, best, sharpness, least, target, False, TILE)
        weight = _weight(_value(last), best, sharpness, 0.0).to(tl.float64)
        kept = tl.minimum(kept, above + tl.ceil((target - above) / weight) * weight)
    # never rounded up to the very end
    target = tl.minimum(tl.load(draw + 1), 1.0 - 2.0**-50) * kept
    last, above = _border(row, vocab_size, best, sharpness, least, target, False, TILE)
    weight = _weight(_value(last), best, sharpness, 0.0).to(tl.float64)
    rank = tl.floor((target - above) / weight).to(tl.int32) + 1
    count, token_id = 0, 0
    for start in range(0, vocab_size, TILE):
        ids, x = _load(row, start, vocab_size, TILE)
        is_last = (_key(x) == last).to(tl.int32)
        ranks = count + tl.cumsum(is_last, 0)
        token_id = tl.maximum(token_id, tl.max(tl.where(ranks <= rank, ids * is_last, 0), 0))
        count += tl.sum(is_last, 0)
    return token_id


# views of a step's tensors begin anywhere, and no step may wait for a compiler
@triton.jit(do_not_specialize_on_alignment=["token_ids", "draws"])
def _sample_kernel(
    token_ids, logits, draws, stride, vocab_size,
    IS_GREEDY: tl.constexpr, NUM_FIELDS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A program for each row."""
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
    tl.store(token_ids + index, token_id.to(tl.int64))
