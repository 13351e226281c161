"""Check what would fail at the first run on a GPU, with commands that correct it.

Invariant: checks read the record alone, so that any machine can be checked anywhere; an unreported
value is not assumed bad.
"""

from __future__ import annotations

import itertools
import math
import re
import resource
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from appliance.devices.gpu_list import Gpu, Holder, list_gpus
from appliance.devices.inventory import mps_runs
from appliance.devices.nvml import Nvml, open_nvml
from appliance.doctor.finding import Finding
from appliance.fleet.gpu_placement import (
    PREFILL_PERCENT,
    WORKER_BYTES,
    choose_gpus,
    installed_torch,
)
from appliance.hub.fits import GPU_OVERHEAD_BYTES, LEAST_TOKENS
from engine.kernels.attention_needs import flash_attn_fault, triton_fault
from engine.units import part_text, size_text

_DIVISIBLE = re.compile(r"\b(A100|A800|H100|H800|H20|H200|GH200|B200|GB200)\b")
_SIZES = (40, 80, 94, 96, 141, 180)
_PROFILE = re.compile(r"MIG (\d)g\.(\d+)gb")


@dataclass(frozen=True, slots=True)
class Profile:
    """A size of MIG instance in NVIDIA's terms."""

    num_slices: int
    """Sevenths of the processors."""
    num_eighths: int
    """Eighths of the memory."""
    most: int
    """Maximum instances of it on one GPU."""

    def named(self, gpu_memory_bytes: int) -> str:
        """Return the name in `nvidia-smi mig`, by its part of the GPU's nominal memory."""
        gib = gpu_memory_bytes / 2**30
        sold = next((size for size in _SIZES if size >= gib), math.ceil(gib))
        return f"{self.num_slices}g.{math.floor(sold * self.num_eighths / 8 + 0.5)}gb"

    def bytes_of(self, gpu_memory_bytes: int) -> int:
        """Bytes of a MIG instance's memory."""
        return gpu_memory_bytes * self.num_eighths // 8


PROFILES = (Profile(3, 4, 2), Profile(2, 2, 3), Profile(1, 2, 4), Profile(1, 1, 7))
"""The profiles with at least two instances, the largest first."""


def memory_to_divide(gpus: list[Gpu]) -> int | None:
    """Return the bytes of a GPU that MIG can divide; None: no such GPU here."""
    for gpu in gpus:
        found = _PROFILE.search(gpu.model)
        if found is not None:
            slices = int(found[1])
            eighths = {p.num_slices: p.num_eighths for p in PROFILES} | {7: 8, 4: 4}
            return gpu.memory_bytes * 8 // eighths.get(slices, slices)
        if _DIVISIBLE.search(gpu.model):
            return gpu.memory_bytes
    return None


def layouts(
    gpu_memory_bytes: int, weights_bytes: int, kv_token_bytes: int
) -> Iterator[tuple[str, str, bool]]:
    """Yield each layout: its profiles, its meaning for the model, and whether it is useful."""
    for profile in PROFILES:
        name = f"{profile.most} x {profile.named(gpu_memory_bytes)}"
        memory = profile.bytes_of(gpu_memory_bytes)
        tokens = (memory - weights_bytes - GPU_OVERHEAD_BYTES) // kv_token_bytes
        if tokens < LEAST_TOKENS:
            short = (LEAST_TOKENS - tokens) * kv_token_bytes
            yield name, f"{size_text(short)} short each", False
        else:
            about = f"{tokens:,} tokens of KV each; {profile.most} workers, blocks through the host"
            yield name, about, True


_MOST_HOLDERS = 3
_RING_BYTES = 1 << 30
"""Approximate bytes that the shm transport locks."""
_UVM = Path("/dev/nvidia-uvm")
_P2P_READ, _P2P_WRITE = 0, 1
"""Values of nvmlGpuP2PCapsIndex_t."""


@dataclass(frozen=True, slots=True)
class GpuHost:
    """The facts of a machine with GPUs that a first run depends on."""

    gpus: list[Gpu]
    torch: str | None
    torch_cuda: tuple[int, int] | None = None
    """The CUDA version that torch is built for; None: unknown."""
    driver: str | None = None
    driver_cuda: tuple[int, int] | None = None
    """The newest CUDA version that the driver supports."""
    triton_fault: str | None = None
    flash_attn_fault: str | None = None
    has_uvm: bool = True
    memlock_bytes: int | None = None
    """The limit of locked memory; None: unlimited."""
    has_mps: bool = False
    parted: list[tuple[str, str]] = field(default_factory=list)
    """Pairs of GPUs that cannot reach each other's memory."""

    @classmethod
    def of_machine(cls) -> GpuHost:
        """Read this machine's GPUs, driver and libraries."""
        nvml = open_nvml()
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        cuda = None if nvml is None else nvml.ask("nvmlSystemGetCudaDriverVersion_v2")
        gpus = list_gpus(nvml)
        return cls(
            gpus,
            installed_torch(),
            torch_cuda=_torch_cuda(),
            driver=None if nvml is None else nvml.ask("nvmlSystemGetDriverVersion"),
            driver_cuda=None if cuda is None else (cuda // 1000, cuda % 1000 // 10),
            triton_fault=triton_fault(),
            flash_attn_fault=flash_attn_fault() if gpus else None,
            has_uvm=_UVM.exists(),
            memlock_bytes=None if soft == resource.RLIM_INFINITY else soft,
            has_mps=mps_runs(),
            parted=[] if nvml is None else _parted(nvml),
        )


def _torch_cuda() -> tuple[int, int] | None:
    """Find the CUDA version of torch, or of the runtime installed with it."""
    for name in ("torch", "nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12"):
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        if name != "torch":
            major, minor, *_ = version.split(".")
            return int(major), int(minor)
        local = version.partition("+cu")[2]
        if local.isdigit():
            return int(local[:-1]), int(local[-1])
    return None


def _parted(nvml: Nvml) -> list[tuple[str, str]]:
    handles = {
        f"gpu{index}": nvml.ask("nvmlDeviceGetHandleByIndex", index)
        for index in range(nvml.ask("nvmlDeviceGetCount") or 0)
    }
    return [
        (one, other)
        for one, other in itertools.combinations(handles, 2)
        if any(
            nvml.ask("nvmlDeviceGetP2PStatus", handles[one], handles[other], caps) not in (0, None)
            for caps in (_P2P_READ, _P2P_WRITE)
        )
    ]


def gpu_findings(
    host: GpuHost, weights_bytes: int | None = None, kv_token_bytes: int | None = None
) -> Iterator[Finding]:
    """Yield all findings about GPUs, in the order in which a first run would meet them.

    Args:
        weights_bytes: of the model to be served, as stored; None: unknown.
        kv_token_bytes: of its KV; None: unknown.
    """
    if not host.gpus:
        yield Finding("gpu", "ok", "no NVIDIA driver; it serves on CPU cores")
        return
    used, about = choose_gpus("auto", host.gpus, host.torch)
    if not used:
        is_hidden = all(gpu.obstacle for gpu in host.gpus)
        hint = "unset CUDA_VISIBLE_DEVICES, or make an instance: nvidia-smi mig -cgi 0 -C"
        yield Finding(
            "gpu", "note", f"{about}; it serves on CPU cores",
            hint if is_hidden else "install torch for CUDA to serve on a GPU",
        )  # fmt: skip
        return
    gpu = used[0]
    serves = f"serves on {gpu.name}, {gpu.model}, {size_text(gpu.memory_bytes)}"
    yield Finding("gpu", "ok", serves if about is None else f"{serves}; {about}")
    yield _driver(host)
    yield _uvm(host)
    yield from _kernels(host, gpu)
    yield from _memory(gpu, weights_bytes)
    yield _memlock(host)
    yield from _sharing(host, gpu)
    yield from _layouts(host, weights_bytes, kv_token_bytes)


def _layouts(
    host: GpuHost, weights_bytes: int | None, kv_token_bytes: int | None
) -> Iterator[Finding]:
    """Yield what MIG could make of a GPU here, for this model."""
    memory = memory_to_divide(host.gpus)
    if memory is None or not weights_bytes or not kv_token_bytes:
        return
    found = list(layouts(memory, weights_bytes, kv_token_bytes))
    fitting = "; ".join(f"{name}: {about}" for name, about, is_of_use in found if is_of_use)
    others = "; ".join(f"{name}: {about}" for name, about, is_of_use in found if not is_of_use)
    suits = f"this model suits {fitting}" if fitting else "no two instances can hold this model"
    yield Finding("mig layouts", "ok", f"{suits}{f' (not {others})' if others else ''}")


def _driver(host: GpuHost) -> Finding:
    driver, built = f"driver {host.driver or 'unknown'}", host.torch_cuda
    if host.driver_cuda is None or built is None:
        return Finding("driver", "ok", f"{driver}; torch's compatibility is unknown")
    knows = f"{driver} knows CUDA {'.'.join(map(str, host.driver_cuda))}"
    needs = f"torch {host.torch} is built for {'.'.join(map(str, built))}"
    if host.driver_cuda[0] < built[0]:  # within a major version any driver runs any build
        return Finding(
            "driver", "bad", f"{knows}, {needs}: torch finds no GPU, and no worker starts",
            f"apt install a driver for CUDA {built[0]}, or install torch for CUDA "
            f"{host.driver_cuda[0]}: pip install torch --index-url "
            f"https://download.pytorch.org/whl/cu{host.driver_cuda[0]}{6 if built[0] == 13 else 8}",
        )  # fmt: skip
    return Finding("driver", "ok", f"{knows}, {needs}")


def _uvm(host: GpuHost) -> Finding:
    if host.has_uvm:
        return Finding("uvm", "ok", f"{_UVM} is there")
    return Finding(
        "uvm", "bad", f"{_UVM} is missing: an unprivileged worker cannot start CUDA",
        "sudo nvidia-modprobe -u -c 0 (penstock-gpu.service does so; a container needs the device)",
    )  # fmt: skip


def _kernels(host: GpuHost, gpu: Gpu) -> Iterator[Finding]:
    if gpu.capability is not None and gpu.capability < (8, 0):
        yield Finding(
            "attention", "note", f"{gpu.name} is older than compute capability 8.0: torch computes "
            "attention, several times slower, in float16", "serve on a newer GPU with --devices",
        )  # fmt: skip
    if host.triton_fault is not None:
        hint = {
            "no triton": "pip install triton",
            "no C compiler for triton": "apt install gcc",
            "no Python.h for triton": "apt install python3-dev",
        }[host.triton_fault]
        yield Finding(
            "triton", "note",
            f"{host.triton_fault}: torch replaces its kernels, several times slower", hint,
        )  # fmt: skip
    else:
        yield Finding("triton", "ok", "triton has a C compiler and Python's headers")
    fault = host.flash_attn_fault
    if fault is None:
        yield Finding("flash-attn", "ok", "flash-attn imports")
    elif fault.startswith("no "):
        yield Finding("flash-attn", "ok", f"{fault}; torch or triton computes attention")
    else:
        yield Finding(
            "flash-attn", "note", f"flash-attn is {fault}; torch or triton computes attention",
            "pip install --force-reinstall --no-build-isolation --no-deps flash-attn",
        )  # fmt: skip


def _memory(gpu: Gpu, weights_bytes: int | None) -> Iterator[Finding]:
    if weights_bytes is None or gpu.free_bytes is None:
        return
    free, needed = gpu.free_bytes, weights_bytes + WORKER_BYTES
    found = f"{part_text(free, gpu.memory_bytes)} free, weights {size_text(weights_bytes)}"
    holders = "; ".join(map(_holder_text, gpu.holders[:_MOST_HOLDERS]))
    if weights_bytes >= free:
        end = "end other processes: nvidia-smi --query-compute-apps=pid,used_memory --format=csv"
        end = f"end it, or serve on another GPU: {holders}" if holders else end
        hint = end if needed < gpu.memory_bytes else "serve a smaller model, or with --devices cpu"
        yield Finding("gpu memory", "bad", f"{found}: they do not fit, so the worker ends", hint)
    elif needed >= free:
        yield Finding(
            "gpu memory", "note", f"{found}: almost no memory is left for KV",
            f"serve a smaller model; {holders or 'nvidia-smi shows what else uses the GPU'}",
        )  # fmt: skip
    else:
        yield Finding("gpu memory", "ok", found)


def _holder_text(holder: Holder) -> str:
    """Name a process that holds a GPU's memory; in a container the kernel may not know it."""
    name = "another process"
    with suppress(OSError):
        name = (Path("/proc") / str(holder.pid) / "comm").read_text().strip()
    held = "memory" if holder.num_bytes is None else size_text(holder.num_bytes)
    return f"pid {holder.pid} ({name}) holds {held}"


def _memlock(host: GpuHost) -> Finding:
    if host.memlock_bytes is None or host.memlock_bytes >= _RING_BYTES:
        return Finding("memlock", "ok", "the limit of locked memory is high enough")
    return Finding(
        "memlock", "note", f"{size_text(host.memlock_bytes)} may be locked: a staging buffer for "
        "--transport shm may be refused", "ulimit -l unlimited (in a unit: LimitMEMLOCK=infinity)",
    )  # fmt: skip


def _sharing(host: GpuHost, gpu: Gpu) -> Iterator[Finding]:
    if host.has_mps:
        found = (
            "MPS runs: two workers compute at once on a GPU, prefill on "
            f"{PREFILL_PERCENT} % of its processors"
        )
        yield Finding("mps", "ok", found)
    else:
        yield Finding(
            "mps", "ok", "MPS does not run: with --roles static two workers on a GPU take turns",
            "nvidia-cuda-mps-control -d, as the user who serves",
        )  # fmt: skip
    if gpu.uuid.startswith("MIG-"):
        yield Finding("mig", "ok", f"{gpu.name} is an instance; power and clocks are its GPU's")
    if host.parted:
        pairs = ", ".join(f"{one} and {other}" for one, other in host.parted)
        yield Finding(
            "p2p",
                "note",
                f"{pairs} cannot reach each other's memory: blocks go through the host",
                "nvidia-smi topo -p2p r; virtual machines and IOMMUs are the usual cause",
        )  # fmt: skip
