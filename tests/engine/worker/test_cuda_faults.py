"""Why CUDA does not start is said with its cause, and what would start it."""

from types import SimpleNamespace

import pytest
import torch

from engine.errors import WorkerFailed, WorkerUnfit
from engine.worker import cuda_faults
from engine.worker.device import CudaDevice


def driver(code=0, version=13000):
    """A made-up libcuda.so.1: what cuInit returns, and the newest CUDA that it knows."""

    def get_version(reference):
        reference._obj.value = version
        return 0

    return lambda: SimpleNamespace(cuInit=lambda flags: code, cuDriverGetVersion=get_version)


def missing():
    raise OSError("libcuda.so.1: cannot open shared object file")


@pytest.mark.parametrize(
    ("built", "found", "cause", "action", "is_lasting"),
    [
        (None, missing, "built for the CPU", "install torch for CUDA", True),
        ("13.0", missing, "libcuda.so.1", "--gpus all", True),
        ("13.0", driver(802), "fabric manager", "nvidia-fabricmanager", False),
        ("13.0", driver(803), "803", "restart", True),
        ("13.0", driver(100), "no GPU", "CUDA_VISIBLE_DEVICES", False),
        ("13.0", driver(999), "999", "nvidia-modprobe", False),
        ("13.0", driver(719), "719", "dmesg", False),
        ("13.0", driver(version=12080), "CUDA 12", "for CUDA 13", True),
        ("13.0", driver(), "finds no GPU", "CUDA_VISIBLE_DEVICES", False),
    ],
)
def test_a_worker_without_cuda_says_why_and_what_to_do(
    built, found, cause, action, is_lasting, monkeypatch
):
    monkeypatch.setattr(torch.version, "cuda", built)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(cuda_faults, "_driver", found)
    with pytest.raises(WorkerFailed) as raised:
        CudaDevice("GPU-0")
    assert raised.value.where == "GPU-0"
    assert isinstance(raised.value, WorkerUnfit) == is_lasting
    assert cause in raised.value.what
    assert action in raised.value.hint
