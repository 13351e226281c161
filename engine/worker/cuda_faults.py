"""Say why CUDA does not start on this machine, and what would start it."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch


class CudaFault(NamedTuple):
    """A state with its cause, and what to do."""

    what: str
    hint: str
    is_lasting: bool = True
    """Whether it stays until a person changes something; a driver may still be starting."""


_OF_CODES = {
    100: CudaFault(
        "the driver sees no GPU", "CUDA_VISIBLE_DEVICES may hide it; see nvidia-smi", False
    ),
    802: CudaFault(
        "GPUs on NVSwitch wait for their fabric manager (CUDA error 802)",
        "systemctl start nvidia-fabricmanager, in the driver's version",
        False,
    ),
    803: CudaFault(
        "the driver's library is of another version than its module (CUDA error 803)",
        "restart the machine, or load the new nvidia modules",
    ),
    804: CudaFault(
        "this GPU takes no driver library of a newer CUDA (CUDA error 804)",
        "remove cuda-compat from LD_LIBRARY_PATH",
    ),
    999: CudaFault(
        "the driver does not start (CUDA error 999)",
        "sudo nvidia-modprobe -u -c 0, or see dmesg for XIDs",
        False,
    ),
}
"""By what cuInit returns."""


def cuda_fault() -> CudaFault:
    """Find out why torch has no GPU."""
    built = torch.version.cuda
    if built is None:
        about = f"torch {torch.__version__} is built for the CPU"
        return CudaFault(about, "install torch for CUDA")
    try:
        driver = _driver()
    except OSError:
        about = "the driver's libcuda.so.1 is missing"
        return CudaFault(about, "install NVIDIA's driver; start a container with --gpus all")
    code = int(driver.cuInit(0))
    if code:
        about = f"the driver does not start (CUDA error {code})"
        return _OF_CODES.get(code) or CudaFault(about, "nvidia-smi and dmesg say more", False)
    version = ctypes.c_int(0)
    driver.cuDriverGetVersion(ctypes.byref(version))
    known, wanted = version.value // 1000, int(built.partition(".")[0])
    if known < wanted:
        about = f"the driver knows CUDA {known}, torch {torch.__version__} is built for {wanted}"
        return CudaFault(about, f"install a driver for CUDA {wanted}, or torch for CUDA {known}")
    about = f"torch {torch.__version__} finds no GPU that it can use"
    return CudaFault(about, "CUDA_VISIBLE_DEVICES may hide it", False)


def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")
