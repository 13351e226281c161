"""Triton's small operations do what torch's do; by its interpreter."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.checkpoint.model_config import ACTIVATIONS
from engine.worker.model import triton_ops
from tests.engine.kernel_cases import Rows, check_gated, check_norm, check_norm_rows, check_place

rows = st.builds(
    Rows,
    num_tokens=st.integers(1, 4),
    num_rows=st.integers(1, 11),
    dim=st.integers(1, 70),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 1000),
)
# the fixture repairs the interpreter for all examples alike
examples = settings(
    deadline=None, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
pytestmark = pytest.mark.usefixtures("real_bfloat16")


@examples
@given(rows=rows, is_wide=st.booleans(), scale=st.sampled_from([1.0, 0.22]))
def test_norms_add_first_and_round_as_torch_does(rows, is_wide, scale):
    check_norm(rows, "cpu", is_wide, scale)


@examples
@given(rows=rows)
def test_rows_are_normed_each_by_its_own_weight_and_nothing_else_changes(rows):
    check_norm_rows(rows, "cpu")


@pytest.mark.parametrize("activation", ACTIVATIONS)
@examples
@given(rows=rows)
def test_gates_open_as_torchs_do(activation, rows):
    check_gated(rows, "cpu", activation)


def test_a_row_wider_than_a_tile_is_gated_to_its_end():
    check_gated(Rows(2, 1, 5000, torch.bfloat16), "cpu", "silu")


@examples
@given(
    rows=rows,
    rotated=st.sampled_from(["none", "half", "all"]),
    block_size=st.sampled_from([1, 4, 64]),
)
def test_heads_turn_by_their_positions_and_reach_their_blocks_finite(rows, rotated, block_size):
    rotary_dim = {"none": 0, "half": rows.dim // 4 * 2, "all": rows.dim // 2 * 2}[rotated]
    check_place(rows, "cpu", rotary_dim, block_size)


def test_a_step_without_tokens_launches_nothing():
    empty = torch.empty(0, 8)
    assert triton_ops.norm(empty, torch.ones(8), 1e-6, None, 1.0).shape == (0, 8)
    assert triton_ops.gated(empty, "silu").shape == (0, 4)
    triton_ops.norm_rows(empty[:, None], torch.ones(1, 8), 1e-6)
