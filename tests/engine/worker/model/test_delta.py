"""States of Gated DeltaNet have the same bits however their tokens are cut, at every level."""

import json
from dataclasses import replace
from itertools import pairwise
from random import Random
from types import SimpleNamespace

import pytest
import torch

from engine.checkpoint.checkpoint import expected_shapes
from engine.checkpoint.model_config import ModelConfig
from engine.kernels.cpu import load_kernels
from engine.worker.model.compiled import CompiledBackend
from engine.worker.model.delta import GatedDelta, delta_rule
from engine.worker.model.linear import choose_linears
from engine.worker.model.records import RecordBlocks
from engine.worker.model.torch_backend import TorchBackend
from engine.worker.model.weight import Weight
from tests.engine.worker.model.test_attention import batch_of
from tests.levels import each_level

LAYER, BLOCK_SIZE, NUM_TOKENS = 2, 16, 150
SHAPES = {  # key heads, value heads, key_dim, value_dim, tokens of the convolution
    "each layout": (2, 4, 16, 24, 4),
    "one head": (1, 1, 5, 3, 2),
    "as published": (1, 2, 128, 128, 4),
}
MODELS = [("qwen3_next", torch.bfloat16), ("qwen3_5_text", torch.float32)]
"""Projections grouped by key head, and one for each kind."""
TOLERANCES = {
    torch.float32: {"rtol": 1e-4, "atol": 1e-5},
    torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2},
}


def noise(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Layer:
    """The second recurrent layer of a random model, by the kernels of a level and by torch."""

    def __init__(self, folder, family, shape, dtype, level):
        names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
        names = (*names, "conv_kernel_dim")
        keys = {f"linear_{name}": size for name, size in zip(names, shape, strict=True)}
        keys |= {"model_type": family, "vocab_size": 300, "hidden_size": 48, "head_dim": 8}
        keys |= {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 32}
        (folder / "config.json").write_text(json.dumps(keys | {"num_hidden_layers": 4}))
        self.config, self.dtype = ModelConfig.from_folder(folder), dtype
        generator = torch.Generator().manual_seed(3)
        weights = {
            name: Weight.plain(torch.randn(size, generator=generator) / size[-1] ** 0.5)
            for name, size in expected_shapes(self.config)
            if f".{LAYER}.linear_attn" in name
        }
        for name, weight in weights.items():  # long decays and short ones, gates far from 0
            if name.endswith("A_log"):
                weight.data.uniform_(-4.0, 2.0, generator=generator)
            elif name.endswith("dt_bias"):
                weight.data.uniform_(-5.0, 1.0, generator=generator)
        weights = {name: Weight.plain(w.values.to(dtype)) for name, w in weights.items()}
        self.weights, self.layer = weights, LAYER
        self.linears = linears = choose_linears("cpu", dtype, level)
        self.backends = CompiledBackend(*load_kernels(level)), TorchBackend()
        self.kernel, self.torch = (
            GatedDelta(self.config, weights, LAYER, backend, linears) for backend in self.backends
        )
        self.record_blocks = self.config.record_blocks(BLOCK_SIZE, str(dtype)[6:])
        self.x = (8 * noise((NUM_TOKENS, 48), 4)).to(dtype)
        self.pool = self.new_pool()

    def new_pool(self):
        """Blocks for four sequences' records, full of numbers."""
        config = self.config
        shape = (1 + 8 * self.record_blocks, config.num_kv_layers, 2, BLOCK_SIZE, 2, 8)
        pool = noise(shape, 5).mul(0.5)
        if self.dtype != torch.float32:  # the bytes of records are float32
            pool = noise((*shape[:-1], 4), 5).mul(0.5).view(self.dtype)
        return pool

    def record(self, owner, place):
        first = 1 + (2 * owner + place) * self.record_blocks
        return list(range(first, first + self.record_blocks))

    def step(self, *sequences, by_torch=False, num_threads=1):
        """Compute (owner, first token, end) of each; its record goes to its other place."""
        torch.set_num_threads(num_threads)
        lengths = [(first, end - first) for _, first, end in sequences]
        batch = batch_of(lengths, [[1] * 20] * len(sequences), BLOCK_SIZE)
        records = [
            RecordBlocks(self.record(owner, 0) if first else (), self.record(owner, 1))
            for owner, first, _ in sequences
        ]
        plan = self.backends[by_torch].plan(replace(batch, records=records), self.pool, [])
        x = torch.cat([self.x[first:end] for _, first, end in sequences])
        layer = self.torch if by_torch else self.kernel
        made = layer(x, SimpleNamespace(kv=self.pool, plan=plan, num_few=0)).clone()
        torch.set_num_threads(1)
        for owner, _, _ in sequences:  # what is written becomes what is read
            self.pool[self.record(owner, 0)] = self.pool[self.record(owner, 1)]
        return made

    def values(self, owner):
        """The layer's part of a sequence's record."""
        record = self.pool[self.record(owner, 0)].flatten().view(torch.float32)
        delta = self.config.delta
        return record[LAYER * delta.layer_values :][: delta.layer_values].clone()

    def assert_equals_torch(self, *sequences):
        """One step has the results, the records and the untouched blocks of torch's."""
        before = self.pool.clone()
        expected = self.step(*sequences, by_torch=True)
        states = [self.values(owner) for owner, _, _ in sequences]
        after, self.pool = self.pool, before
        torch.testing.assert_close(self.step(*sequences), expected, **TOLERANCES[self.dtype])
        for (owner, _, _), state in zip(sequences, states, strict=True):
            torch.testing.assert_close(self.values(owner), state, rtol=1e-4, atol=1e-4)
        elsewhere = slice(self.record(3, 0)[0], None)
        assert torch.equal(*(each.view(torch.uint8)[elsewhere] for each in (self.pool, after)))


@pytest.fixture(params=SHAPES, ids=lambda name: name.replace(" ", "-"))
def shape(request):
    return SHAPES[request.param]


@each_level
@pytest.mark.parametrize(("family", "dtype"), MODELS)
def test_the_kernel_computes_what_torch_does(tmp_path, level, family, dtype, shape):
    layer = Layer(tmp_path, family, shape, dtype, level)
    for parts in ([(0, 0, 90), (1, 0, 1)], [(1, 1, 7), (0, 90, 91), (2, 40, 75)]):
        layer.assert_equals_torch(*parts)


@each_level
@pytest.mark.parametrize(("family", "dtype"), MODELS)
def test_any_cut_and_any_neighbours_leave_the_same_bits(tmp_path, level, family, dtype, shape):
    layer, rng = Layer(tmp_path, family, shape, dtype, level), Random(1)
    whole, state = layer.step((0, 0, NUM_TOKENS)), layer.values(0)
    some = [sorted(rng.sample(range(1, NUM_TOKENS), 5)) for _ in range(3)]
    for cuts in (range(1, 70), *some):
        for first, end in pairwise((0, *cuts, NUM_TOKENS)):
            beside = [(1, 9, 9 + rng.randint(1, 40)), (2, 3, 4)][: rng.randint(0, 2)]
            num_threads = rng.choice([1, 3])
            made = layer.step(*beside, (3, first, end), num_threads=num_threads)
            assert torch.equal(made[first - end :], whole[first:end]), (first, end)
        assert torch.equal(layer.values(3), state)


def test_a_step_that_keeps_no_record_computes_all_the_same(tmp_path):
    layer = Layer(tmp_path, "qwen3_5_text", SHAPES["each layout"], torch.float32, None)
    expected, pool = layer.step((0, 0, 9)), layer.pool.clone()
    batch = batch_of([(0, 9)], [[1]], BLOCK_SIZE)
    for records in ((), [RecordBlocks()]):
        plan = layer.backends[0].plan(replace(batch, records=records), layer.pool, [])
        made = layer.kernel(layer.x[:9], SimpleNamespace(kv=layer.pool, plan=plan, num_few=0))
        assert torch.equal(made, expected)
    assert torch.equal(layer.pool, pool)


def test_torchs_chunks_that_end_with_blocks_repeat_what_the_whole_prompt_does():
    shape, key_dim, value_dim = (4, 200), 16, 24
    q, k = (noise((*shape, key_dim), seed) / 4 for seed in (1, 2))
    v, decay, beta = noise((*shape, value_dim), 3), -noise((200, 4), 4).abs(), noise((200, 4), 5)
    beta, state = beta.sigmoid(), torch.zeros(4, key_dim, value_dim)
    whole, last = delta_rule(q, k, v, decay, beta, state, 0)
    for first, end in ((0, 128), (128, 192), (192, 200)):
        part = slice(first, end)
        heads = (q[:, part], k[:, part], v[:, part])
        made, state = delta_rule(*heads, decay[part], beta[part], state, first)
        assert torch.equal(made, whole[part])
    assert torch.equal(state, last)
