"""The compiled small operations do what torch's do, at every level and dtype."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.checkpoint.model_config import ACTIVATIONS
from engine.kernels.cpu import load_kernels
from engine.worker.model.torch_backend import TorchBackend
from tests.engine.worker.model.test_attention import LEVELS, backend_of, batch_of

TORCH = TorchBackend()
TOLERANCES = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-6},
    # a last bit that falls the other variant, times a weight: up to three units in the last place
    torch.bfloat16: {"rtol": 2**-6, "atol": 1e-2},
}
shapes = st.fixed_dictionaries(
    {
        "num_tokens": st.integers(1, 5),
        "num_rows": st.integers(1, 4),
        "dim": st.integers(1, 70),
        "dtype": st.sampled_from(list(TOLERANCES)),
        "seed": st.integers(0, 1000),
    }
)
every_level = pytest.mark.parametrize("level", LEVELS[1:])


def noise(shape, dtype, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul_(3).to(dtype)


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, **TOLERANCES[expected.dtype])


@every_level
@settings(deadline=None, max_examples=25)
@given(shape=shapes, is_wide=st.booleans(), scale=st.sampled_from([1.0, 0.22]))
def test_norms_add_first_and_round_as_torch_does(level, shape, is_wide, scale):
    dtype, seed = shape["dtype"], shape["seed"]
    x = noise((shape["num_tokens"], shape["dim"]), dtype, seed)
    added = noise(x.shape, dtype, seed + 1)
    weight = noise((shape["dim"],), torch.float32 if is_wide else dtype, seed + 2)
    for more in (None, added):
        ours, theirs = x.clone(), x.clone()
        assert_close(
            backend_of(level).norm(ours, weight, 1e-6, more, scale),
            TORCH.norm(theirs, weight, 1e-6, more, scale),
        )
        assert_close(ours, theirs)


@every_level
@settings(deadline=None, max_examples=25)
@given(shape=shapes)
def test_rows_are_normed_each_by_its_own_weight_and_nothing_else_changes(level, shape):
    num_tokens, num_rows, dim = shape["num_tokens"], shape["num_rows"], shape["dim"]
    ours = noise((num_tokens, num_rows + 2, dim), shape["dtype"], shape["seed"])
    theirs = ours.clone()
    weight = noise((num_rows, dim), shape["dtype"], 7)
    backend_of(level).norm_rows(ours[:, :num_rows], weight, 1e-5)
    TORCH.norm_rows(theirs[:, :num_rows], weight, 1e-5)
    assert_close(ours, theirs)


@every_level
@pytest.mark.parametrize("activation", ACTIVATIONS)
@settings(deadline=None, max_examples=25)
@given(shape=shapes)
def test_gates_open_as_torchs_do(level, activation, shape):
    gate_up = noise((shape["num_tokens"], 2 * shape["dim"]), shape["dtype"], shape["seed"])
    gate_up[0, 0] = -200.0  # nothing overflows on the way to 0
    actual = backend_of(level).gated(gate_up.clone(), activation)
    assert_close(actual, TORCH.gated(gate_up.clone(), activation))


@every_level
@settings(deadline=None, max_examples=25)
@given(shape=shapes, half=st.integers(1, 40), passing=st.sampled_from([0, 3]))
def test_heads_turn_by_their_positions_and_reach_their_blocks(level, shape, half, passing):
    num_tokens, num_heads, dtype = shape["num_tokens"], shape["num_rows"], shape["dtype"]
    head_dim, num_kv_heads = 2 * half + passing, 2
    tables = [tuple(noise((64, 1, 2 * half), dtype, seed) for seed in (1, 2))]
    batch = batch_of([(5, num_tokens), (0, 2)], [[3, 2, 1], [4]], 4)
    ours = noise((num_tokens + 2, num_heads + 2 * num_kv_heads, head_dim), dtype, shape["seed"])
    theirs = ours.clone()
    pools = []
    for backend, qkv in ((backend_of(level), ours), (TORCH, theirs)):
        kv = torch.zeros(5, 2, 2, 4, num_kv_heads, head_dim, dtype=dtype)
        backend.place(qkv, num_heads, 0, kv, 1, backend.plan(batch, kv, tables))
        pools.append(kv)
    assert_close(ours, theirs)
    assert_close(*pools)


def test_a_level_that_is_not_there_is_refused_by_name():
    with pytest.raises(ImportError, match="sse9"):
        load_kernels("sse9")


def test_a_wrong_number_of_arguments_is_an_error():
    kernels, _ = load_kernels()
    with pytest.raises(TypeError, match="expected 15 arguments, got 1"):
        kernels.rms_norm(1)
