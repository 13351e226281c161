"""What bench holds a step against, and the model that it steps."""

import math

import pytest
import torch

from engine.checkpoint.checkpoint import expected_shapes
from engine.checkpoint.model_config import ModelConfig
from engine.kernels.costs import step_values
from engine.kernels.cpu import EXACT, WIDENED
from engine.kernels.product_choice import AS_STORED, ProductChoice
from engine.worker import measure
from engine.worker.kernel_cases import KernelFixture
from engine.worker.measure import LLAMA_8B, Bench, _config, own_dtype, steps, transports
from engine.worker.model.linear import as_one_matrix
from tests.checkpoints import make_checkpoint
from tests.levels import needs_kernels

OPENED = ["product up and gates", "product down", "product head"]
APART = ["product up", "gated activation", "product down", "product head"]


@needs_kernels
@pytest.mark.parametrize(
    ("dtype", "choice", "timed"),
    [("bfloat16", ProductChoice(EXACT, WIDENED, ""), OPENED), ("float32", AS_STORED, APART)],
)
def test_gates_are_timed_where_a_step_opens_them(dtype, choice, timed, tmp_path):
    config = ModelConfig.from_folder(make_checkpoint(tmp_path / "m"))
    fixture = KernelFixture.of(config, getattr(torch, dtype), torch.device("cpu"), 16, choice)
    cases = [case for case in fixture.cases({}, [3]) if {"product", "gated"} & {*case.what.split()}]
    assert [case.what for case in cases] == timed
    for case in cases:
        case.call(0)
        assert case.cost.num_flops > 0 or case.what == "gated activation"


def num_values(config):
    return sum(math.prod(shape) for _, shape in expected_shapes(config) if len(shape) > 1)


def test_a_decode_step_reads_all_but_the_embedding_table():
    config = _config(None, is_small=False, free_bytes=None)
    table = LLAMA_8B["vocab_size"] * LLAMA_8B["hidden_size"]
    values = step_values(config)
    assert values.read(1) == values.read(64) == num_values(config) - table
    assert 15.0e9 < 2 * values.read(1) < 15.1e9  # bytes of an 8B model's step in bfloat16


def test_a_prompt_has_logits_for_its_last_token_alone():
    values = step_values(_config(None, is_small=False, free_bytes=None))
    assert values.prefill_flops(4096) - values.prefill_flops(4095) == 2 * values.dense
    assert values.prefill_flops(1) == 2 * (values.dense + values.head)


def test_a_table_that_is_also_the_projection_is_read_once(tmp_path):
    config = ModelConfig.from_folder(make_checkpoint(tmp_path / "m", "gemma2"))
    assert config.is_tied
    assert step_values(config).read(1) == num_values(config)


def test_a_mixture_is_read_as_far_as_its_tokens_can_need(tmp_path):
    config = ModelConfig.from_folder(make_checkpoint(tmp_path / "m", "qwen3_moe"))
    values, mixture = step_values(config), config.experts
    share = mixture.num_per_token / mixture.num_experts
    assert values.experts > 0
    assert values.read(1) == values.dense + values.head + round(values.experts * share)
    assert values.read(1000) == values.dense + values.head + values.experts


@pytest.fixture
def bench(monkeypatch, tmp_path):
    monkeypatch.setattr(measure, "_MIN_SAMPLE_S", 0.0)
    config = ModelConfig.from_folder(make_checkpoint(tmp_path / "m"))
    return Bench(config, "float32", 1 << 16, 16)


def test_the_benchs_weights_lie_together_as_a_workers(bench, monkeypatch):
    monkeypatch.setattr(measure, "Transformer", lambda config, weights, *shape: weights)
    weights = bench.transformer(64)
    for names in (["self_attn.q", "self_attn.k", "self_attn.v"], ["mlp.gate", "mlp.up"]):
        parts = [weights[f"model.layers.1.{name}_proj.weight"].values for name in names]
        assert torch.equal(as_one_matrix(parts), torch.cat(parts))
    deviation = weights["lm_head.weight"].values.std() * math.sqrt(bench.config.hidden_size)
    assert float(deviation) == pytest.approx(1, rel=0.1)


def test_a_prompts_blocks_are_its_own(bench, monkeypatch):
    seen, make_pool = [], bench.pool
    monkeypatch.setattr(bench, "pool", lambda n: seen.append(make_pool(n)) or seen[-1])
    with torch.inference_mode():
        rows = list(steps(bench, [(1, 16)], 4 * bench.block_size))
    assert [row.what for row in rows] == ["decode step", "prefill chunk"]
    (pool,) = seen
    assert pool[1:5].flatten(1).any(1).all()
    assert not pool[0].any()


def test_blocks_are_timed_to_the_host_and_back(bench):
    rows = list(transports(bench, 3))
    assert [row.what for row in rows] == ["blocks to the host", "blocks from the host"]
    assert all(row.rate > 0 for row in rows)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_model_is_stepped_in_the_dtype_that_it_was_saved_in(dtype, tmp_path):
    assert own_dtype(make_checkpoint(tmp_path / "m", "llama", dtype)) == dtype
    assert own_dtype(tmp_path) == own_dtype(None) == "bfloat16"


@needs_kernels
def test_matrices_are_packed_where_a_workers_are(bench, monkeypatch):
    monkeypatch.setattr(measure, "products_here", lambda: ProductChoice(EXACT, 0, ""))
    paired = Bench(bench.config, "bfloat16", 1 << 16, 16)
    monkeypatch.setattr(measure, "Transformer", lambda config, weights, *how: (weights, how))
    weights, how = paired.transformer(64)
    assert EXACT in how
    schemes = {name: weight.scheme for name, weight in weights.items()}
    assert schemes["lm_head.weight"] == schemes["model.layers.0.mlp.up_proj.weight"]
    assert schemes["lm_head.weight"] == "bfloat16_pairs"
    assert schemes["model.embed_tokens.weight"] == schemes["model.norm.weight"] == "bfloat16"
