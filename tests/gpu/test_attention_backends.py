"""Every attention backend on the device, in each dtype and block size that it serves."""

import pytest
import torch

from engine.kernels.attention_backends import ATTENTION_BACKENDS, refusal_of
from engine.worker.device import CudaDevice
from engine.worker.model.backend import choose_backend
from engine.worker.model.proving import Prover
from tests.checkpoints import make_checkpoint

CASES = [(row, dtype) for row in ATTENTION_BACKENDS for dtype in row.dtypes]


@pytest.mark.parametrize(("row", "dtype"), CASES, ids=lambda x: getattr(x, "name", x))
def test_a_backend_and_its_small_operations_are_what_the_host_computes(row, dtype, uuid, tmp_path):
    from engine.checkpoint.checkpoint import Checkpoint

    device = CudaDevice(uuid)
    folder = make_checkpoint(tmp_path / "model", num_hidden_layers=1)
    config = Checkpoint.open(folder).config
    names = [each.name for each in ATTENTION_BACKENDS]
    better = names[: names.index(row.name)]
    faults = {refusal_of(name): "the next one is asked for" for name in better}
    kind, block_size = getattr(torch, dtype), row.default_block_size
    on = device.torch_device
    backend = choose_backend(on, kind, config, block_size, faults=faults)
    if backend.name.split()[0] != row.name:
        pytest.skip(f"{row.name} is not to be had here: {backend.name}")
    prover = Prover(config, kind, on, block_size, device.card.num_processors)
    assert prover.attention(backend) is None
    assert list(prover.small(backend)) == []
