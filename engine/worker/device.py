"""Wrap a worker's device: CPU cores, or a GPU with its memory, copies and graphs.

The one door to torch.cuda.

The daemon has set CUDA_VISIBLE_DEVICES.

Invariant: only functions that say so wait for the device; allocated memory can be shared with
another process.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
import torch

from engine.errors import WorkerFailed, WorkerUnfit
from engine.worker.cuda_faults import cuda_fault

_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_DRIVER = Path("/proc/driver/nvidia/version")
_ATTRIBUTE_MPS_ENABLED = 133
"""CU_DEVICE_ATTRIBUTE_MPS_ENABLED of cuda.h."""
_UNSHAREABLE = ("expandable_segments:true", "backend:cudamallocasync")


class Memory(NamedTuple):
    """The device's memory in bytes, over all processes, and this process's peak."""

    free_bytes: int
    total_bytes: int
    allocated_bytes: int
    peak_bytes: int
    """Maximum allocated at once since forget_peak()."""


@dataclass(slots=True)
class DeviceTime:
    """The device's time for the work given within Device.beside()."""

    elapsed_ns: int = 0
    """The device's time from the beginning to the end of the work."""
    host_waited_ns: int = 0
    """The thread's wait for a core or Python's lock before all work was given."""

    @property
    def reliable_ns(self) -> int | None:
        """The time; None if the device may have waited for the host for a quarter of it."""
        return None if 4 * self.host_waited_ns > self.elapsed_ns else self.elapsed_ns


class Card(NamedTuple):
    """What a proof of kernels depends on."""

    name: str
    driver: str
    num_processors: int


class Device(Protocol):
    """The interface to a worker's accelerator; tests have one without hardware."""

    torch_device: torch.device

    @property
    def card(self) -> Card | None:
        """The hardware; None: made up, and nothing is to be proved of it."""

    def pinned(self, values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
        """Make a host tensor that the device can copy from while the host continues."""

    def buffer(self, num_bytes: int) -> torch.Tensor:
        """Make host memory that the device can copy from while the host continues."""

    def mark(self) -> Callable[[], None]:
        """Mark the present end of the device's work; calling the result waits for it."""

    def fetch(self, tensor: torch.Tensor) -> Callable[[], list[int]]:
        """Start to copy a tensor to the host; calling the result waits for its values."""

    def beside(self) -> AbstractContextManager[DeviceTime]:
        """Run a thread's work beside the steps, done at the end; the result has its time."""

    def capture(self, step: Callable[[], None]) -> Callable[[], None]:
        """Run once and record; calling the result repeats the recorded run on the device."""

    def finish(self) -> None:
        """Wait until all of this process's work on the device is done."""

    def memory(self) -> Memory:
        """Free, total and peak bytes of the device; waits for it."""

    def forget_peak(self) -> None:
        """Begin measuring a new peak of memory."""

    def export(self, memory: torch.Tensor) -> bytes:
        """Return a handle by which another process maps a tensor; the tensor must stay."""

    def map(self, exported: bytes) -> torch.Tensor:
        """Map another process's exported bytes as [num_bytes] of uint8, without a copy."""

    def pin(self, memory: torch.Tensor) -> None:
        """Let the device copy from and to existing host memory, for good."""

    @property
    def is_served_by_mps(self) -> bool:
        """Whether processes compute on it at once; otherwise they alternate."""


class CudaDevice:
    """Use one GPU through torch.cuda.

    Args:
        uuid: from NVML, `GPU-...`.

    Raises:
        WorkerFailed: torch cannot use it, or could not share its memory.
    """

    def __init__(self, uuid: str) -> None:
        check_allocator()
        index = _index_of(uuid)
        torch.cuda.set_device(index)
        sum_in_float32()
        self.torch_device = torch.device("cuda", index)
        self._aside: Any = None
        """The stream of all captures."""
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        """The stream of copies."""

    def pinned(self, values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
        """Make a host tensor; its memory is reused only after copies from it are done."""
        return torch.tensor(values, dtype=dtype, pin_memory=True)

    def buffer(self, num_bytes: int) -> torch.Tensor:
        """Make pinned memory; its next writer must wait for copies from it."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def mark(self) -> Callable[[], None]:
        """Record an event on the current stream; waiting for it sleeps and uses no core."""
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record()
        return event.synchronize

    def fetch(self, tensor: torch.Tensor) -> Callable[[], list[int]]:
        """Start a copy to pinned memory, in order with the steps."""
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        copy.copy_(tensor, non_blocking=True)
        wait = self.mark()

        def values() -> list[int]:
            wait()
            return copy.tolist()

        return values

    @contextlib.contextmanager
    def beside(self) -> Iterator[DeviceTime]:
        """Run work on a stream of its own, for one thread, timed by events around it."""
        taken, events = DeviceTime(), []
        for _ in range(2):
            event: Any = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
            events.append(event)
        with torch.cuda.device(self.torch_device), torch.cuda.stream(self._side):
            events[0].record()
            idle_ns = time.monotonic_ns() - time.thread_time_ns()
            yield taken
            taken.host_waited_ns = max(time.monotonic_ns() - time.thread_time_ns() - idle_ns, 0)
            events[1].record()
            events[1].synchronize()
            taken.elapsed_ns = max(round(events[0].elapsed_time(events[1]) * 1e6), 1)

    def capture(self, step: Callable[[], None]) -> Callable[[], None]:
        """Record a graph; all graphs share one pool of memory, so never run two at once.

        All are recorded on one stream, so that libraries set up their workspaces once; each other
        stream would have workspaces of its own. No graph is ever freed: a pool without graphs
        cannot be used again while a workspace lies in it.
        """
        if self._aside is None:
            self._aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._aside):
            step()  # what libraries set up at their first call must not be captured
        torch.cuda.current_stream().wait_stream(self._aside)
        graph = torch.cuda.CUDAGraph()
        pool = self._graphs[0].pool() if self._graphs else None
        with torch.cuda.graph(graph, pool=pool, stream=self._aside):
            step()
        self._graphs.append(graph)
        return graph.replay

    def finish(self) -> None:
        """Wait for all streams."""
        torch.cuda.synchronize()

    def memory(self) -> Memory:
        self.finish()
        torch.cuda.empty_cache()
        free_bytes, total_bytes = torch.cuda.mem_get_info()
        allocated_bytes = torch.cuda.memory_allocated()
        return Memory(free_bytes, total_bytes, allocated_bytes, torch.cuda.max_memory_allocated())

    def forget_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def export(self, memory: torch.Tensor) -> bytes:
        """Share a tensor by CUDA IPC; torch's allocator knows its segment.

        The memory is complete when its handle is sent, so the importer opens no event: torch would
        open the event on the importer's GPU, although it was made on the exporter's.
        """
        self.finish()
        storage: Any = memory.untyped_storage()
        _device, *where, _has_event = storage._share_cuda_()
        return msgspec.msgpack.encode(where)

    def map(self, exported: bytes) -> torch.Tensor:
        """Map by CUDA IPC; torch closes the mapping with the last tensor over it."""
        where = msgspec.msgpack.decode(exported)
        storages: Any = torch.UntypedStorage
        storage = storages._new_shared_cuda(self.torch_device.index, *where, False)
        mapped: Any = torch.empty(0, dtype=torch.uint8, device=self.torch_device)
        mapped.set_(storage)
        return torch.as_tensor(mapped)

    def pin(self, memory: torch.Tensor) -> None:
        """Lock the pages and tell the driver; the end of the process undoes it."""
        cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        num_bytes = memory.numel() * memory.element_size()
        error = int(cudart.cudaHostRegister(memory.data_ptr(), num_bytes, 0))
        if error:
            raise WorkerFailed(
                f"{num_bytes} bytes of the staging buffer could not be pinned (CUDA error {error})",
                where=str(self.torch_device),
                hint="raise the limit of locked memory, or serve with transport alias",
            )

    @property
    def card(self) -> Card:
        """The GPU, with the driver's version and build."""
        found = torch.cuda.get_device_properties(self.torch_device)
        driver = _DRIVER.read_text() if _DRIVER.exists() else ""
        return Card(found.name, driver, found.multi_processor_count)

    @property
    def is_served_by_mps(self) -> bool:
        """Whether NVIDIA's MPS serves this process, as the driver says."""
        value = ctypes.c_int(0)
        driver = ctypes.CDLL("libcuda.so.1")
        driver.cuDeviceGetAttribute(
            ctypes.byref(value), _ATTRIBUTE_MPS_ENABLED, self.torch_device.index
        )
        return bool(value.value)


def sum_in_float32() -> None:
    """Make cuBLAS add up products of bfloat16 and float16 in float32, also between parts."""
    matmul = torch.backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = False
    matmul.allow_fp16_reduced_precision_reduction = False


@contextlib.contextmanager
def finished_at_the_end(device: Device) -> Iterator[None]:
    """Wait for the device at any end of a worker.

    Under MPS a process that ends with work running can break the others on its GPU.
    """
    try:
        yield
    finally:
        with suppress(RuntimeError):  # the device has failed, which the worker's own error says
            device.finish()


def check_allocator() -> None:
    """Refuse an allocator whose memory cannot be shared by CUDA IPC.

    Raises:
        WorkerUnfit: naming the variable that chose it.
    """
    for name in _ALLOCATOR_VARIABLES:
        setting = os.environ.get(name, "")
        if any(word in setting.replace(" ", "").lower() for word in _UNSHAREABLE):
            raise WorkerUnfit(
                f"{setting!r} allocates memory that no other process can map",
                where=name,
                hint="leave out expandable_segments and backend:cudaMallocAsync",
            )


def _index_of(uuid: str) -> int:
    """Return torch's number of a GPU, which depends on the visible ones and their order."""
    if not torch.cuda.is_available():
        fault = cuda_fault()
        kind = WorkerUnfit if fault.is_lasting else WorkerFailed
        raise kind(fault.what, where=uuid, hint=fault.hint)
    if uuid.startswith("MIG-") and torch.cuda.device_count() == 1:
        return 0  # an instance is the only device that there is where CUDA_VISIBLE_DEVICES names it
    wanted = uuid.removeprefix("GPU-")
    seen = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
    if wanted not in seen:
        raise WorkerFailed(
            f"torch sees {len(seen)} GPUs, and not this one",
            where=uuid,
            hint="CUDA_VISIBLE_DEVICES may hide it",
        )
    return seen.index(wanted)
