"""The interpreter's cases, and larger ones, on the device itself."""

import pytest
import torch

from engine.checkpoint.model_config import ACTIVATIONS
from engine.worker.model.attention import several_queries_tiling, single_query_tiling
from engine.worker.model.cuda import DeviceLimits
from tests.engine.kernel_cases import (
    MIXED,
    PENDING,
    STEPS,
    Rows,
    Step,
    check_attention,
    check_draws,
    check_gated,
    check_norm,
    check_norm_rows,
    check_padding,
    check_pending_rows,
    check_place,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
LONG = ((0, 700), (3000, 1), (1000, 300), (517, 129), (4096, 1))
STEPS = [
    *STEPS,
    Step(LONG, heads=(32, 8), head_dim=128, block_size=64, dtype=torch.bfloat16),
    Step(LONG, heads=(32, 8), head_dim=128, block_size=16, dtype=torch.bfloat16, window=256),
    Step(LONG, heads=(8, 4), head_dim=256, block_size=64, dtype=torch.bfloat16, softcap=50.0),
    Step(LONG, heads=(12, 12), head_dim=64, block_size=256, dtype=torch.float16),
    Step(LONG, heads=(9, 3), head_dim=64, block_size=33),
    Step(MIXED, heads=(71, 1), head_dim=64, block_size=64, dtype=torch.bfloat16),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("kind", [several_queries_tiling, single_query_tiling])
@pytest.mark.parametrize("parts", [1, 8])
@pytest.mark.parametrize("step", STEPS, ids=str)
def test_every_sequence_gets_what_it_would_get_alone(step, parts, kind):
    shared_bytes = DeviceLimits.of(torch.device("cuda")).shared_bytes
    group_size = step.heads[0] // step.heads[1]
    tiling = kind(group_size, step.head_dim, step.dtype.itemsize, shared_bytes)
    check_attention(step, "cuda", tiling, parts)


def test_a_row_that_pads_a_graphs_batch_sees_nothing_and_yields_zeros():
    check_padding("cuda", single_query_tiling(2, 64, 4, 49_152), 4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_guess_sees_the_keys_up_to_its_own(dtype):
    step = Step(PENDING, heads=(32, 8), head_dim=128, block_size=64, dtype=dtype)
    check_pending_rows(step, "cuda", single_query_tiling(4, 128, dtype.itemsize, 99_000), 4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 4096, 5000])
def test_small_operations_do_what_torchs_do(dim, dtype):
    rows = Rows(37, 5, dim, dtype)
    check_norm(rows, "cuda", is_wide=False, scale=0.22)
    check_norm(rows, "cuda", is_wide=True, scale=1.0)
    check_norm_rows(rows, "cuda")
    for activation in ACTIVATIONS:
        check_gated(rows, "cuda", activation)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(128, 128), (80, 32), (64, 0), (256, 256)])
def test_heads_turn_by_their_positions_and_reach_their_blocks_finite(head_dim, rotary_dim, dtype):
    check_place(Rows(40, 32, head_dim, dtype), "cuda", rotary_dim, 64)


@pytest.mark.parametrize("vocab_size", [300, 20_000, 128_256])
def test_rows_of_a_batch_draw_what_the_sampler_that_sorts_draws(vocab_size):
    check_draws("cuda", num_rows=40, vocab_size=vocab_size)
