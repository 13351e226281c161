"""Compute the heads of a Gated DeltaNet layer on a GPU with Triton.

Three kernels: one convolves, and norms queries and keys. One runs each sequence's tokens through
the states, one by one. One norms and gates the results. A state is cut by columns, which do not
depend on each other, so that few sequences use many processors. The inputs of a small step are
kept: the same kernels write its records again from them, without the guesses that were refused.
Invariant: a launch depends on shapes alone, never on a device value, so that it can be captured; a
step reads one record of a sequence and writes another, and no program reads what another writes.

What the kernels compute is engine.worker.model.delta's, in float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.checkpoint.delta_config import GatedDeltaConfig
from engine.worker.model.attention import next_power_of_2
from engine.worker.model.delta_inputs import KEPT_TOKENS, DeltaConstants, DeltaInputs, RecordRuns

_COLUMNS = 8
"""Columns of a state that one warp keeps in registers."""
_TOKENS = 4
"""Tokens of one program where they do not depend on each other."""
_NORM_EPS = tl.constexpr(1e-6)
"""Of queries and keys."""
_part = triton.jit if not triton.knobs.runtime.interpret else lambda function: function
"""A function within kernels; the interpreter would spend most of its time on calls of others."""
_kernel = triton.jit(
    # these differ from step to step, and no step may wait for a compiler
    do_not_specialize=["num_tokens"],
    do_not_specialize_on_alignment=["records", "row_runs", "run_starts", "run_lens"],
)


def gated_delta(
    inputs: DeltaInputs,
    kept: DeltaInputs,
    constants: DeltaConstants,
    config: GatedDeltaConfig,
    kv: torch.Tensor,
    runs: RecordRuns,
) -> torch.Tensor:
    """Compute what the layer's output projection takes, [num_tokens, all_values].

    Args:
        inputs: of the step's tokens.
        kept: where the inputs of the first KEPT_TOKENS are copied to; may be `inputs`.
        constants: of the layer.
        config: of all such layers.
        kv: the pool, of which records are blocks.
        runs: of the step's tokens; a run without tokens before it reads no record.
    """
    num_tokens, device = len(inputs.heads), inputs.heads.device
    pool = kv.view(len(kv), -1).view(torch.float32)
    mixed = torch.empty(num_tokens, config.conv_width, dtype=torch.float32, device=device)
    made = torch.empty(num_tokens, config.all_values, dtype=torch.float32, device=device)
    out = torch.empty(num_tokens, config.all_values, dtype=inputs.heads.dtype, device=device)
    _convolve(mixed, inputs, kept, constants, config, pool, runs)
    _recur(made, mixed, inputs, constants, config, pool, runs)
    tiles = triton.cdiv(num_tokens, _TOKENS)
    _gate_kernel[(tiles, config.num_value_heads)](
        out,
        made,
        inputs.gates,
        constants.norm,
        num_tokens,
        inputs.gates.stride(0),
        inputs.gate_step,
        constants.eps,
        IS_TILED=config.is_output_tiled,
        DIM=next_power_of_2(config.value_dim),
        TOKENS=_TOKENS,
        **_shape(config),
    )
    return out


def _shape(config: GatedDeltaConfig) -> dict[str, int]:
    return {
        "KEY_HEADS": config.num_key_heads,
        "RATIO": config.num_value_heads // config.num_key_heads,
        "KEY_DIM": config.key_dim,
        "VALUE_DIM": config.value_dim,
    }


def _convolve(
    mixed: torch.Tensor,
    inputs: DeltaInputs,
    kept: DeltaInputs,
    constants: DeltaConstants,
    config: GatedDeltaConfig,
    pool: torch.Tensor,
    runs: RecordRuns,
) -> None:
    """Convolve the heads, and keep the first tokens' inputs."""
    tiles = triton.cdiv(len(mixed), _TOKENS)
    _convolve_kernel[(tiles, 2 * config.num_key_heads + config.num_value_heads)](
        mixed,
        inputs.heads,
        inputs.betas,
        inputs.time_steps,
        kept.heads,
        kept.betas,
        kept.time_steps,
        constants.conv,
        pool,
        runs.records,
        runs.of_rows,
        runs.starts,
        runs.lens,
        len(mixed),
        inputs.heads.stride(0),
        *inputs.places,
        inputs.key_step,
        inputs.value_step,
        inputs.betas.stride(0),
        inputs.small_step,
        BLOCK_VALUES=pool.shape[1],
        NUM_BLOCKS=runs.records.shape[2],
        KEPT=KEPT_TOKENS,
        FIRST=constants.number * config.layer_values,
        CONV_SIZE=config.conv_size,
        DIM=next_power_of_2(max(config.key_dim, config.value_dim)),
        TOKENS=_TOKENS,
        **_shape(config),
    )


def _recur(
    made: torch.Tensor,
    mixed: torch.Tensor,
    inputs: DeltaInputs,
    constants: DeltaConstants,
    config: GatedDeltaConfig,
    pool: torch.Tensor,
    runs: RecordRuns,
) -> None:
    """Run the tokens through the states."""
    columns = min(_COLUMNS, next_power_of_2(config.value_dim))
    grid = len(runs.lens), config.num_value_heads, triton.cdiv(config.value_dim, columns)
    values = (pool.shape[1], config.layer_values, config.tail_values)
    _recur_kernel[grid](
        made,
        mixed,
        inputs.betas,
        inputs.time_steps,
        constants.decay,
        constants.step_bias,
        pool,
        runs.records,
        runs.starts,
        runs.lens,
        inputs.betas.stride(0),
        inputs.small_step,
        BLOCK_VALUES=pool.shape[1],
        NUM_BLOCKS=runs.records.shape[2],
        FIRST=constants.number * config.layer_values,
        TAIL_VALUES=config.tail_values,
        ROWS_FIT=all(size % config.value_dim == 0 for size in values),
        KEYS=next_power_of_2(config.key_dim),
        COLUMNS=columns,
        num_warps=1,
        **_shape(config),
    )


@_part
def _place(pool, blocks, value, BLOCK_VALUES: tl.constexpr, mask):
    """Find a record's values, which go over into its next block wherever one is full."""
    block = tl.load(blocks + value // BLOCK_VALUES, mask=mask, other=0).to(tl.int64)
    return pool + block * BLOCK_VALUES + value % BLOCK_VALUES


@_kernel
def _convolve_kernel(
    mixed, heads, betas, time_steps, kept_heads, kept_betas, kept_steps, conv, pool, records,
    row_runs, run_starts, run_lens, num_tokens,
    stride, keys_at, values_at, key_step, value_step, small_stride, small_step,
    KEY_HEADS: tl.constexpr, RATIO: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_VALUES: tl.constexpr, NUM_BLOCKS: tl.constexpr, FIRST: tl.constexpr,
    CONV_SIZE: tl.constexpr, DIM: tl.constexpr, TOKENS: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """Run a program for some tokens and one head of queries, keys or values."""
    head, dims = tl.program_id(1), tl.arange(0, DIM)
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    all_keys: tl.constexpr = KEY_HEADS * KEY_DIM
    width: tl.constexpr = 2 * all_keys + KEY_HEADS * RATIO * VALUE_DIM
    value_head = head - 2 * KEY_HEADS
    is_value = value_head >= 0
    channels = tl.where(is_value, 2 * all_keys + value_head * VALUE_DIM, head * KEY_DIM) + dims
    of_value = values_at + value_head // RATIO * value_step + value_head % RATIO * VALUE_DIM
    of_key = head // KEY_HEADS * keys_at + head % KEY_HEADS * key_step
    columns = tl.where(is_value, of_value, of_key) + dims
    is_dim = dims < tl.where(is_value, VALUE_DIM, KEY_DIM)
    is_there = (tokens < num_tokens)[:, None] & is_dim[None, :]
    runs = tl.load(row_runs + tokens, mask=tokens < num_tokens, other=0)
    first_rows = tl.load(run_starts + runs)
    counts = tl.load(run_starts + runs + 1) - first_rows
    has_before = (tl.load(run_lens + runs) > counts)[:, None]
    own = tokens - first_rows
    read = (records + runs * (2 * NUM_BLOCKS))[:, None]
    tails = FIRST + channels[None, :]
    summed = tl.zeros([TOKENS, DIM], tl.float32)
    x = summed
    for tap in tl.static_range(CONV_SIZE):
        is_new = (own + tap >= CONV_SIZE - 1)[:, None]
        rows = (tokens + (tap + 1 - CONV_SIZE)).to(tl.int64)[:, None]
        x = tl.load(heads + rows * stride + columns[None, :], mask=is_there & is_new, other=0.0)
        x = x.to(tl.float32)
        if tap < CONV_SIZE - 1:
            is_old = is_there & (own + tap < CONV_SIZE - 1)[:, None] & has_before
            value = tails + (own + tap)[:, None] * width
            x += tl.load(_place(pool, read, value, BLOCK_VALUES, is_old), mask=is_old, other=0.0)
        factors = tl.load(conv + tap * width + channels, mask=is_dim, other=0.0)
        summed += x * factors[None, :]
    summed = summed / (1.0 + tl.exp(-summed))
    scale = tl.where(head < KEY_HEADS, KEY_DIM**-0.5, 1.0)
    scale = scale * tl.rsqrt(tl.sum(summed * summed, 1) + _NORM_EPS)
    if not is_value:
        summed *= scale[:, None]
    rows = tokens.to(tl.int64)[:, None]
    tl.store(mixed + rows * width + channels[None, :], summed, mask=is_there)
    # x are now the tokens' own inputs
    places = kept_heads + rows * width + channels[None, :]
    tl.store(places, x.to(kept_heads.dtype.element_ty), mask=is_there & (rows < KEPT))
    small = tokens * small_stride + value_head // RATIO * small_step + value_head % RATIO
    own_small = tokens * (KEY_HEADS * RATIO) + value_head
    is_small = tokens < tl.where(is_value, tl.minimum(num_tokens, KEPT), 0)
    _copy(kept_betas + own_small, betas + small, is_small)
    _copy(kept_steps + own_small, time_steps + small, is_small)
    _keep_tail(
        x, tails, width, own, counts, has_before, is_there, pool, read,
        BLOCK_VALUES, NUM_BLOCKS, CONV_SIZE - 1,
    )  # fmt: skip


@_part
def _copy(to, places, mask):
    tl.store(to, tl.load(places, mask=mask), mask=mask)


@_part
def _keep_tail(
    x, tails, width: tl.constexpr, own, counts, has_before, is_there, pool, read,
    BLOCK_VALUES: tl.constexpr, NUM_BLOCKS: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """Write the inputs before each run's next token to its record."""
    written = read + NUM_BLOCKS
    row = own - counts + KEPT
    is_kept = is_there & (row >= 0)[:, None]
    value = tails + row[:, None] * width
    tl.store(_place(pool, written, value, BLOCK_VALUES, is_kept), x, mask=is_kept)
    for slot in tl.static_range(KEPT):
        is_moved = is_there & ((own == 0) & (slot + counts < KEPT))[:, None]
        is_old = is_moved & has_before
        value = tails + (slot + counts)[:, None] * width
        old = tl.load(_place(pool, read, value, BLOCK_VALUES, is_old), mask=is_old, other=0.0)
        value = tails + slot * width + tl.zeros_like(value)
        tl.store(_place(pool, written, value, BLOCK_VALUES, is_moved), old, mask=is_moved)


@_part
def _token(
    mixed, betas, time_steps, row, end, small, stride, head, keys, columns, decay, bias,
    KEY_HEADS: tl.constexpr, RATIO: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
):  # fmt: skip
    """Load what a token does to a state; nothing from `end` on."""
    all_keys: tl.constexpr = KEY_HEADS * KEY_DIM
    width: tl.constexpr = 2 * all_keys + KEY_HEADS * RATIO * VALUE_DIM
    of_token = mixed + row * width
    is_key = keys < tl.where(row < end, KEY_DIM, 0)
    is_column = columns < tl.where(row < end, VALUE_DIM, 0)
    query_places = of_token + head // RATIO * KEY_DIM + keys
    q = tl.load(query_places, mask=is_key, other=0.0)
    k = tl.load(query_places + all_keys, mask=is_key, other=0.0)
    value_places = of_token + 2 * all_keys + head * VALUE_DIM + columns
    v = tl.load(value_places, mask=is_column, other=0.0)
    beta = tl.load(betas + row * stride + small, mask=row < end, other=0.0).to(tl.float32)
    time = tl.load(time_steps + row * stride + small, mask=row < end, other=0.0).to(tl.float32)
    time += bias
    time = tl.where(time > 20.0, time, tl.log(1.0 + tl.exp(tl.minimum(time, 20.0))))
    return q, k, v, 1.0 / (1.0 + tl.exp(-beta)), tl.exp(decay * time)


@_kernel
def _recur_kernel(
    out, mixed, betas, time_steps, decays, biases, pool, records, run_starts, run_lens,
    stride, small_step,
    KEY_HEADS: tl.constexpr, RATIO: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_VALUES: tl.constexpr, NUM_BLOCKS: tl.constexpr, FIRST: tl.constexpr,
    TAIL_VALUES: tl.constexpr, ROWS_FIT: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Run a program for each run, value head and some columns of its state."""
    run, head = tl.program_id(0), tl.program_id(1)
    keys = tl.arange(0, KEYS)
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    first_row = tl.load(run_starts + run)
    end = tl.load(run_starts + run + 1)
    is_column = (columns < VALUE_DIM)[None, :]
    is_there = (keys < KEY_DIM)[:, None] & is_column
    has_before = tl.load(run_lens + run) > end - first_row
    is_old = (keys < tl.where(has_before, KEY_DIM, 0))[:, None] & is_column
    rows = FIRST + TAIL_VALUES + (head * KEY_DIM + keys)[:, None] * VALUE_DIM
    is_row = (keys < KEY_DIM)[:, None]
    read = records + run * (2 * NUM_BLOCKS)
    written = read + NUM_BLOCKS
    if ROWS_FIT:  # a row of a state lies in one block
        old = _place(pool, read, rows, BLOCK_VALUES, is_row) + columns[None, :]
        new = _place(pool, written, rows, BLOCK_VALUES, is_row) + columns[None, :]
    else:
        values = rows + columns[None, :]
        old = _place(pool, read, values, BLOCK_VALUES, is_there)
        new = _place(pool, written, values, BLOCK_VALUES, is_there)
    state = tl.load(old, mask=is_old, other=0.0)
    decay, bias = tl.load(decays + head), tl.load(biases + head)
    small = head // RATIO * small_step + head % RATIO
    row = first_row.to(tl.int64)
    q, k, v, beta, shrink = _token(
        mixed, betas, time_steps, row, end, small, stride, head, keys, columns, decay, bias,
        KEY_HEADS, RATIO, KEY_DIM, VALUE_DIM,
    )  # fmt: skip
    for _ in range(first_row, end):
        # the next token's values are loaded while this one's are used
        next_q, next_k, next_v, next_beta, next_shrink = _token(
            mixed, betas, time_steps, row + 1, end, small, stride, head, keys, columns, decay, bias,
            KEY_HEADS, RATIO, KEY_DIM, VALUE_DIM,
        )  # fmt: skip
        state = state * shrink
        change = (v - tl.sum(state * k[:, None], 0)) * beta
        state += k[:, None] * change[None, :]
        made = tl.sum(state * q[:, None], 0)
        places = out + (row * (KEY_HEADS * RATIO) + head) * VALUE_DIM + columns
        tl.store(places, made, mask=columns < VALUE_DIM)
        q, k, v, beta, shrink, row = next_q, next_k, next_v, next_beta, next_shrink, row + 1
    tl.store(new, state, mask=is_there)


@_kernel
def _gate_kernel(
    out, made, gates, weight, num_tokens, stride, gate_step, eps,
    KEY_HEADS: tl.constexpr, RATIO: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    IS_TILED: tl.constexpr, DIM: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Run a program for some tokens and one value head: norm it, and multiply by its gate."""
    head, dims = tl.program_id(1), tl.arange(0, DIM)
    tokens = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    is_there = (tokens < num_tokens)[:, None] & (dims < VALUE_DIM)[None, :]
    of_token = tokens[:, None] * (KEY_HEADS * RATIO * VALUE_DIM)
    x = tl.load(made + of_token + head * VALUE_DIM + dims[None, :], mask=is_there, other=0.0)
    scale = tl.rsqrt(tl.sum(x * x, 1) / VALUE_DIM + eps)
    column = head // RATIO * gate_step + head % RATIO * VALUE_DIM
    places = gates + tokens[:, None] * stride + column + dims[None, :]
    gate = tl.load(places, mask=is_there, other=0.0).to(tl.float32)
    factors = tl.load(weight + dims, mask=dims < VALUE_DIM, other=0.0)
    x = x * scale[:, None] * factors[None, :] * (gate / (1.0 + tl.exp(-gate)))
    if IS_TILED:
        head = head % RATIO * KEY_HEADS + head // RATIO
    places = out + of_token + head * VALUE_DIM + dims[None, :]
    tl.store(places, x.to(out.dtype.element_ty), mask=is_there)
