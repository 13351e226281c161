"""Random steps for kernels on any device, and what they have to compute."""

from dataclasses import dataclass, replace

import torch

from engine.wire.sampling import SamplingParams
from engine.worker.model import triton_ops
from engine.worker.model.attention import StepBatch, Tiling
from engine.worker.model.paged_step import paged_step
from engine.worker.model.sampler import NO_DRAW, draw_of
from engine.worker.model.torch_backend import TorchBackend
from engine.worker.model.triton_attention import attend_several, attend_single
from engine.worker.model.triton_sampling import sample_rows
from tests.engine.draws import drawn
from tests.engine.references import reference_attention

NUM_LAYERS, LAYER = 3, 1
TOLERANCES = {
    torch.float32: {"rtol": 1e-4, "atol": 1e-5},
    torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2},
    torch.float16: {"rtol": 5e-3, "atol": 5e-3},
}


@dataclass(frozen=True)
class Step:
    """Sequences as (tokens before, new tokens), and the shape of heads and pool."""

    sequences: tuple[tuple[int, int], ...]
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    scale: float = 0.15
    seed: int = 0

    def __str__(self):
        return "-".join(
            str(part)
            for part in (
                "+".join(f"{context}.{new}" for context, new in self.sequences),
                f"h{self.heads[0]}.{self.heads[1]}",
                f"d{self.head_dim}",
                f"b{self.block_size}",
                str(self.dtype).removeprefix("torch."),
                self.window and f"w{self.window}",
                self.softcap and f"c{self.softcap}",
                self.has_sinks and "s",
            )
            if part
        )


@dataclass(frozen=True)
class Filled:
    """A step on a device, its keys and values in their blocks, and what attention has to yield."""

    batch: StepBatch
    q: torch.Tensor
    kv: torch.Tensor
    expected: torch.Tensor
    sinks: torch.Tensor | None


MIXED = ((0, 1), (37, 1), (0, 19), (44, 6), (3, 24))
SINGLES = ((0, 1), (170, 1), (64, 1))
PENDING = ((90, 8), (0, 2), (37, 1), (61, 4))
"""Sequences of a step with guesses."""
STEPS = [
    Step(MIXED),
    Step(MIXED, heads=(6, 1), head_dim=80, block_size=7, dtype=torch.bfloat16),
    Step(MIXED, heads=(4, 4), head_dim=128, block_size=64),
    Step(MIXED, heads=(6, 2), head_dim=96, block_size=256, window=16),
    Step(MIXED, heads=(8, 2), block_size=64, window=33, softcap=2.0, dtype=torch.bfloat16),
    Step(MIXED, head_dim=256, block_size=16, softcap=20.0),
    Step(MIXED, heads=(2, 1), head_dim=10, block_size=1, window=1),
    Step(SINGLES),
    Step(SINGLES, heads=(14, 2), head_dim=128, block_size=64, dtype=torch.bfloat16),
    Step(SINGLES, heads=(20, 1), head_dim=80, block_size=33, window=100, softcap=3.0),
    Step(SINGLES, block_size=256, window=10),
    Step(MIXED, heads=(6, 2), block_size=64, window=20, has_sinks=True),
    Step(SINGLES, heads=(6, 2), window=40, has_sinks=True),
    Step(SINGLES, dtype=torch.bfloat16, softcap=2.0, has_sinks=True),
]


def filled(step: Step, device: str) -> Filled:
    """Shuffled blocks in which everything that nobody may read is NaN."""
    generator = torch.Generator().manual_seed(step.seed)
    num_heads, num_kv_heads = step.heads
    lengths = [context + new for context, new in step.sequences]
    counts = [-(-length // step.block_size) for length in lengths]
    order = torch.randperm(sum(counts), generator=generator) + 1
    tables = [table.tolist() for table in order.split(counts)]

    def noise(*shape):
        return torch.randn(shape, generator=generator).to(step.dtype)

    shape = (sum(counts) + 1, NUM_LAYERS, 2, step.block_size, num_kv_heads, step.head_dim)
    kv = torch.full(shape, torch.nan, dtype=step.dtype)
    queries, expected = [], []
    sinks = torch.randn(num_heads, generator=generator) * 2 if step.has_sinks else None
    for table, length, (_, new) in zip(tables, lengths, step.sequences, strict=True):
        q = noise(new, num_heads, step.head_dim)
        both = noise(2, length, num_kv_heads, step.head_dim)
        for position in range(length):
            block, offset = table[position // step.block_size], position % step.block_size
            kv[block, LAYER, :, offset] = both[:, position]
        queries.append(q)
        expected.append(
            reference_attention(
                q.double(), *both.double(), step.scale, step.window, step.softcap, sinks
            ).to(step.dtype)
        )
    return Filled(
        batch_of(step, tables, device),
        torch.cat(queries).to(device),
        kv.to(device),
        torch.cat(expected).to(device),
        None if sinks is None else sinks.to(device),
    )


def batch_of(step: Step, tables: list[list[int]], device: str) -> StepBatch:
    positions = [p for context, new in step.sequences for p in range(context, context + new)]
    slots = [
        table[p // step.block_size] * step.block_size + p % step.block_size
        for (context, new), table in zip(step.sequences, tables, strict=True)
        for p in range(context, context + new)
    ]
    return StepBatch(
        input_ids=torch.zeros(len(positions), dtype=torch.int64, device=device),
        positions=torch.tensor(positions, device=device),
        token_slots=torch.tensor(slots, device=device),
        query_lens=[new for _, new in step.sequences],
        seq_lens=[context + new for context, new in step.sequences],
        block_tables=tables,
        logit_rows=[],
    )


def check_attention(step: Step, device: str, tiling: Tiling, parts: int) -> None:
    """Both kernels, over one step, are the reference; and write no row of each other's."""
    case = filled(step, device)
    rows = max(tiling.num_rows, step.heads[0] // step.heads[1])
    tiling = replace(tiling, num_rows=1 << (rows - 1).bit_length())
    queries_per_tile = tiling.num_rows // (step.heads[0] // step.heads[1])
    paged = paged_step(case.batch, case.kv.device, queries_per_tile)
    out = torch.full_like(case.q, torch.nan)
    how = (LAYER, paged, step.scale, step.window, step.softcap, case.sinks)
    attend_several(out, case.q, case.kv, *how, tiling, parts)
    is_single = torch.tensor([n == 1 for n in case.batch.query_lens for _ in range(n)])
    assert out[is_single.to(device)].isnan().all()
    attend_single(out, case.q, case.kv, *how, tiling, parts)
    torch.testing.assert_close(out, case.expected, **TOLERANCES[step.dtype])


def check_padding(device: str, tiling: Tiling, parts: int) -> None:
    """Sequences of length 0, whose tables name the padding block, beside one that is there."""
    case = filled(Step(((20, 1),), block_size=16), device)
    paged = paged_step(case.batch, case.kv.device, 0)
    tables = torch.zeros(3, 4, dtype=torch.int32, device=device)
    tables[1, :2] = paged.block_tables[0]
    lengths = torch.tensor([0, 21, 0], dtype=torch.int32, device=device)
    starts = torch.arange(4, dtype=torch.int32, device=device)
    padded = replace(paged, block_tables=tables, seq_lens=lengths, query_starts=starts)
    q = case.q.expand(3, -1, -1).contiguous()
    out = torch.full_like(q, torch.nan)
    attend_single(out, q, case.kv, LAYER, padded, 0.15, None, None, None, tiling, parts)
    torch.testing.assert_close(out[1:2], case.expected, **TOLERANCES[torch.float32])
    assert not out[0].any()
    assert not out[2].any()


def check_pending_rows(step: Step, device: str, tiling: Tiling, parts: int) -> None:
    """A graph's rows: each new token as a sequence that ends with it, over its sequence's table."""
    case = filled(step, device)
    paged = paged_step(case.batch, case.kv.device, 0)
    counts = torch.tensor(case.batch.query_lens, device=device)
    lengths = (case.batch.positions + 1).int()
    rows = replace(
        case.batch,
        query_lens=[1] * len(lengths),
        seq_lens=[paged.max_seq_len] * len(lengths),
        block_tables=(),
        device_tables=paged.block_tables.repeat_interleave(counts, 0),
        device_lens=lengths,
    )
    out = torch.full_like(case.q, torch.nan)
    how = (step.scale, step.window, step.softcap, case.sinks, tiling, parts)
    attend_single(out, case.q, case.kv, LAYER, paged_step(rows, case.kv.device, 0), *how)
    torch.testing.assert_close(out, case.expected, **TOLERANCES[step.dtype])


REFERENCE = TorchBackend()


@dataclass(frozen=True)
class Rows:
    """Tokens, rows of each, and a row's width."""

    num_tokens: int
    num_rows: int
    dim: int
    dtype: torch.dtype
    seed: int = 0

    def noise(self, device, num_rows=None, dim=None, dtype=None, seed=0):
        shape = (self.num_tokens, num_rows or self.num_rows, dim or self.dim)
        generator = torch.Generator().manual_seed(self.seed + seed)
        return (torch.randn(shape, generator=generator) * 3).to(dtype or self.dtype).to(device)


ROUNDED = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-6},
    # a last bit that falls the other variant, times a weight: up to three units in the last place
    torch.bfloat16: {"rtol": 2**-6, "atol": 1e-2},
    torch.float16: {"rtol": 2**-9, "atol": 1e-3},
}


def assert_rounded(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, **ROUNDED[expected.dtype])


def check_norm(rows: Rows, device: str, is_wide: bool, scale: float) -> None:
    x, added = rows.noise(device)[:, 0], rows.noise(device, seed=1)[:, 0]
    weight = rows.noise(device, dtype=torch.float32 if is_wide else None, seed=2)[0, 0]
    for more in (None, added):
        ours, theirs = x.clone(), x.clone()
        normed = triton_ops.norm(ours, weight, 1e-6, more, scale)
        assert_rounded(normed, REFERENCE.norm(theirs, weight, 1e-6, more, scale))
        assert_rounded(ours, theirs)


def check_norm_rows(rows: Rows, device: str) -> None:
    ours = rows.noise(device, num_rows=rows.num_rows + 2)
    theirs, weight = ours.clone(), rows.noise(device, seed=1)[0]
    triton_ops.norm_rows(ours[:, : rows.num_rows], weight, 1e-5)
    REFERENCE.norm_rows(theirs[:, : rows.num_rows], weight, 1e-5)
    assert_rounded(ours, theirs)


def check_gated(rows: Rows, device: str, activation: str) -> None:
    gate_up = rows.noise(device, dim=2 * rows.dim)[:, 0]
    gate_up[0, 0] = -200.0  # nothing overflows on the way to 0
    actual = triton_ops.gated(gate_up.clone(), activation)
    assert_rounded(actual, REFERENCE.gated(gate_up, activation))


def check_place(rows: Rows, device: str, rotary_dim: int, block_size: int) -> None:
    """Queries, keys and pool are torch's, also where a value has overflowed; others' stay."""
    num_kv_heads = 2
    step = Step(((5, rows.num_tokens), (0, 2)), block_size=block_size)
    counts = [-(-(context + new) // block_size) for context, new in step.sequences]
    first, second = torch.arange(sum(counts), 0, -1).split(counts)
    batch = batch_of(step, [first.tolist(), second.tolist()], device)
    rows = replace(rows, num_tokens=rows.num_tokens + 2)
    ours = rows.noise(device, num_rows=rows.num_rows + 2 * num_kv_heads)
    ours[0, 0, 0] = torch.inf
    ours[0, -1, -1], ours[-1, -1, 0], ours[-1, -3, -1] = torch.nan, -torch.inf, 1e5
    theirs = ours.clone()
    angles = replace(rows, num_tokens=64, num_rows=1, dim=max(rotary_dim, 1))
    tables = [(angles.noise(device, seed=1), angles.noise(device, seed=2))]
    shape = (sum(counts) + 1, NUM_LAYERS, 2, block_size, num_kv_heads, rows.dim)
    pools = [torch.zeros(shape, dtype=rows.dtype, device=device) for _ in range(2)]
    table = tables[0] if rotary_dim else None
    how = (batch.positions, batch.token_slots)
    triton_ops.place(ours, rows.num_rows, table, pools[0], LAYER, *how)
    plan = REFERENCE.plan(batch, pools[1], tables)
    rope_index = 0 if rotary_dim else None
    REFERENCE.place(theirs, rows.num_rows, rope_index, pools[1], LAYER, plan)
    torch.testing.assert_close(ours, theirs, **ROUNDED[rows.dtype], equal_nan=True)
    assert_rounded(*pools)


def sample_on(device: str, logits: torch.Tensor, params: list[SamplingParams], indices: list[int]):
    """One token for each row, drawn by the kernel."""

    draws = [draw_of(p, index) for p, index in zip(params, indices, strict=True)]
    rows = torch.tensor(draws, dtype=torch.float64, device=device)
    tokens = sample_rows(logits.to(device), rows)
    if all(draw == NO_DRAW for draw in draws):
        assert sample_rows(logits.to(device)).equal(tokens)
    return tokens.tolist()


def check_draws(device: str, num_rows: int, vocab_size: int) -> None:
    """A batch of all kinds of rows draws what the sampler that sorts draws for each."""
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(num_rows, vocab_size, generator=generator) * 4
    kinds = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.5, "top_k": 20},
        {"temperature": 1.0, "min_p": 0.05, "top_p": 0.8, "top_k": 50},
    ]
    params = [
        SamplingParams(max_tokens=8, seed=i * 7919, **kinds[i % len(kinds)])
        for i in range(num_rows)
    ]
    indices = list(range(num_rows))
    assert sample_on(device, logits, params, indices) == drawn(logits, params, indices)
