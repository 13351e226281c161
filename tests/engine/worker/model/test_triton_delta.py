"""Triton's Gated DeltaNet is torch's, however sequences are cut into steps; by its interpreter."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from engine.worker.model.cuda import CudaBackend
from engine.worker.model.delta import GatedDelta
from engine.worker.model.delta_inputs import RecordRuns
from engine.worker.model.records import RecordBlocks
from tests.engine.worker.model.test_attention import batch_of
from tests.engine.worker.model.test_delta import BLOCK_SIZE, MODELS, SHAPES, Layer
from tests.levels import needs_kernels

pytestmark = [needs_kernels, pytest.mark.usefixtures("real_bfloat16")]


def no_attention(*_):
    raise AssertionError("the layer has none")


class OnGpu(Layer):
    """The layer by Triton beside torch's."""

    def __init__(self, folder, family, shape, dtype):
        super().__init__(folder, family, shape, dtype, "portable")
        self.backend = CudaBackend("triton", no_attention)
        self.triton = GatedDelta(self.config, self.weights, self.layer, self.backend, self.linears)

    def step(self, *sequences, by_torch=False, num_padding=0):
        if by_torch:
            return super().step(*sequences, by_torch=True)
        sequences = [*sequences, *[(None, 0, 1)] * num_padding]
        lengths = [(first, end - first) for _, first, end in sequences]
        batch = batch_of(lengths, [[1] * 20] * len(sequences), BLOCK_SIZE)
        none = [0] * self.record_blocks
        records = [
            (none, none) if owner is None else (self.record(owner, 0), self.record(owner, 1))
            for owner, _, _ in sequences
        ]
        on_device = torch.tensor(records, dtype=torch.int32)
        plan = self.backend.plan(replace(batch, device_records=on_device), self.pool, [])
        x = torch.cat([self.x[first:end] for _, first, end in sequences])
        made = self.triton(x, SimpleNamespace(kv=self.pool, plan=plan, num_few=0))
        for owner, _, _ in sequences:
            if owner is not None:
                self.pool[self.record(owner, 0)] = self.pool[self.record(owner, 1)]
        return made[: len(made) - num_padding]


NUM_FIRST = {"each layout": 5, "one head": 66, "as published": 2}
"""Tokens of the first step; torch's chunks end at 64."""


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(("family", "dtype"), MODELS)
def test_triton_computes_what_torch_does(tmp_path, family, dtype, name):
    layer, first = OnGpu(tmp_path, family, SHAPES[name], dtype), NUM_FIRST[name]
    for parts in ([(0, 0, first), (1, 0, 1)], [(1, 1, 3), (0, first, first + 1), (2, 60, 62)]):
        layer.assert_equals_torch(*parts)


def test_a_sequence_has_the_same_bits_however_it_is_cut(tmp_path):
    whole, cut = (OnGpu(tmp_path, "qwen3_5_text", (1, 2, 16, 9, 4), torch.float32) for _ in "ab")
    expected, first, made = whole.step((0, 0, 12)), 0, []
    for border in (1, 2, 4, 9, 12):
        made.append(cut.step((0, first, border), num_padding=border % 3))
        first = border
    assert torch.equal(torch.cat(made), expected)
    assert torch.equal(cut.values(0), whole.values(0))


def test_a_record_written_again_counts_the_rows_that_are_right(tmp_path):
    layer = OnGpu(tmp_path, "qwen3_next", (2, 4, 16, 24, 4), torch.bfloat16)
    layer.step((0, 0, 5))
    before = layer.pool.clone()
    layer.step((0, 5, 7))
    expected = layer.values(0)
    layer.pool = before.clone()
    layer.step((1, 0, 2), (0, 5, 9), (2, 0, 1))
    read, written = layer.record(0, 0), layer.record(0, 1)
    layer.pool[read] = before[read]
    others = layer.pool.clone()
    records, width = [RecordBlocks(read, written)], layer.record_blocks
    runs = RecordRuns.again([(2, 2)], records, width, torch.device("cpu"))
    layer.triton.write_on_gpu(layer.pool, runs)
    others[written] = layer.pool[written]
    assert torch.equal(*(each.view(torch.uint8)[1:] for each in (layer.pool, others)))
    layer.pool[read] = layer.pool[written]
    assert torch.equal(layer.values(0), expected)
