"""Prove this machine's kernels for a model at will, and print a report to send.

Run as `python -m engine.worker.self_test_report FOLDER DTYPE`; prints one JSON object.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from pathlib import Path

import torch

from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.weights_layout import panels_layout
from engine.errors import PenstockError
from engine.kernels.attention_backends import AttentionNeeds, choose_attention, this_machine
from engine.text.read_models import read_checkpoint
from engine.worker.cuda_faults import cuda_fault
from engine.worker.device import CudaDevice, sum_in_float32
from engine.worker.model.backend import Backend, choose_backend
from engine.worker.model.proving import Prover
from engine.worker.model.torch_backend import TorchBackend
from engine.worker.model.weight import MatrixRows
from engine.worker.model.weights import first_rows

CPU_BLOCK_SIZE, CPU_PROCESSORS = 64, 8


def report(checkpoint: Checkpoint, dtype: str) -> dict[str, object]:
    """Prove what would serve, and its twin in torch; name what is wrong."""
    config = checkpoint.config
    kind = getattr(torch, dtype)
    if torch.cuda.is_available():
        sum_in_float32()
        index = torch.cuda.current_device()
        device = CudaDevice(f"GPU-{torch.cuda.get_device_properties(index).uuid}")
        card, on = device.card, device.torch_device
        machine = this_machine(torch.cuda.get_device_capability(on))
        needs = AttentionNeeds.of(config, dtype)
        block_size = choose_attention(needs, machine).backend.default_block_size
        about, num_processors = f"{card.name}, {card.driver.strip()}", card.num_processors
    else:
        on, block_size, num_processors = torch.device("cpu"), CPU_BLOCK_SIZE, CPU_PROCESSORS
        about = f"{platform.processor() or platform.machine()}, {cuda_fault().what}"
    matrices = _matrices(checkpoint, dtype, is_on_gpu=on.type == "cuda")
    prover = Prover(config, kind, on, block_size, num_processors, matrices)
    backends = [choose_backend(on, kind, config, block_size), TorchBackend()]
    return {
        "device": about,
        "torch": torch.__version__,
        "dtype": dtype,
        "block_size": block_size,
        "num_steps": prover.num_steps,
        "backends": [_of_backend(prover, backend) for backend in backends],
    }


def _matrices(checkpoint: Checkpoint, dtype: str, *, is_on_gpu: bool) -> tuple[MatrixRows, ...]:
    """Read rows of each form that the model's matrices are multiplied in here."""
    layout = panels_layout(checkpoint, dtype, is_on_gpu=is_on_gpu)
    return () if layout is None else first_rows(checkpoint, layout)


def _of_backend(prover: Prover, backend: Backend) -> dict[str, object]:
    started_s = time.monotonic()
    is_torch = isinstance(backend, TorchBackend)
    rows = tuple(each.widened for each in prover.matrices) if is_torch else prover.matrices
    products = prover.products(rows)
    found = [*prover.faults(backend), *([] if products is None else [products])]
    return {
        "name": backend.name,
        "wrong": {each.operation: each.about for each in found},
        "took_ms": round((time.monotonic() - started_s) * 1e3),
    }


def main() -> None:
    """Print the report, or end with the reason."""
    try:
        found = report(read_checkpoint(Path(sys.argv[1])), sys.argv[2])
    except PenstockError as error:
        sys.exit(str(error))
    print(json.dumps(found))  # noqa: T201  # its one result


if __name__ == "__main__":
    main()
