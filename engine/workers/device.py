"""The GPU that a worker computes on: memory, copies, graphs. The door to torch.cuda.

Owns: the CUDA context's settings, the memory of captured graphs.
Called by: engine.workers.__main__ (makes it), runner, graphs, sharing, streaming.
Invariant: nothing here waits for the device but what says so; what is allocated can be shared with
another process.
Never: sets CUDA_VISIBLE_DEVICES, which would hide the other worker's memory; chooses a device.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from engine.errors import WorkerFailed

_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_UNSHAREABLE = ("expandable_segments:true", "backend:cudamallocasync")


class Memory(NamedTuple):
    """Bytes of the device, for whoever uses it, and of this process."""

    free_bytes: int
    total_bytes: int
    allocated_bytes: int
    peak_bytes: int
    """Most that was allocated at once since forget_peak()."""


class Device(Protocol):
    """What a worker needs of its accelerator; tests have one without hardware."""

    torch_device: torch.device

    def pinned(self, values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
        """A host tensor that the device can copy from while the host goes on."""

    def fetch(self, tensor: torch.Tensor) -> Callable[[], list[int]]:
        """Start to copy a tensor to the host; calling the result waits for its values."""

    def capture(self, step: Callable[[], None]) -> Callable[[], None]:
        """Run once and record; calling the result does on the device what the recorded run did."""

    def memory(self) -> Memory:
        """As it is now; waits for the device."""

    def forget_peak(self) -> None:
        """Begin a new peak at what is allocated."""


class CudaDevice:
    """One GPU by way of torch.cuda.

    Args:
        uuid: as NVML has it, `GPU-...`.

    Raises:
        WorkerFailed: torch cannot use it, or could not share its memory.
    """

    def __init__(self, uuid: str) -> None:
        check_allocator()
        index = _index_of(uuid)
        torch.cuda.set_device(index)
        self.torch_device = torch.device("cuda", index)
        self._graph_memory: Any = None

    def pinned(self, values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
        """A host tensor; its memory is not used again before copies from it are done."""
        return torch.tensor(values, dtype=dtype, pin_memory=True)

    def fetch(self, tensor: torch.Tensor) -> Callable[[], list[int]]:
        """Start a copy to pinned memory, in order with the steps."""
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        copy.copy_(tensor, non_blocking=True)
        is_done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        is_done.record()

        def values() -> list[int]:
            is_done.synchronize()
            return copy.tolist()

        return values

    def capture(self, step: Callable[[], None]) -> Callable[[], None]:
        """Record a graph; all graphs share one pool of memory, so never run two at once."""
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            step()  # what libraries set up at their first call must not be captured
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._graph_memory):
            step()
        self._graph_memory = graph.pool()
        return graph.replay

    def memory(self) -> Memory:
        """What the driver reports, and this process's allocator."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free_bytes, total_bytes = torch.cuda.mem_get_info()
        allocated_bytes = torch.cuda.memory_allocated()
        return Memory(free_bytes, total_bytes, allocated_bytes, torch.cuda.max_memory_allocated())

    def forget_peak(self) -> None:
        """Begin a new peak."""
        torch.cuda.reset_peak_memory_stats()


def check_allocator() -> None:
    """Refuse an allocator whose memory cannot be shared by CUDA IPC.

    Raises:
        WorkerFailed: naming the variable that chose it.
    """
    for name in _ALLOCATOR_VARIABLES:
        setting = os.environ.get(name, "")
        if any(word in setting.replace(" ", "").lower() for word in _UNSHAREABLE):
            raise WorkerFailed(
                f"{setting!r} allocates memory that no other process can map",
                where=name,
                hint="leave out expandable_segments and backend:cudaMallocAsync",
            )


def _index_of(uuid: str) -> int:
    """Torch's number of a GPU, which depends on what is visible and in which order."""
    if not torch.cuda.is_available():
        raise WorkerFailed(
            f"torch {torch.__version__} finds no GPU that it can use",
            where=uuid,
            hint="install torch for CUDA, and a driver that is new enough",
        )
    wanted = uuid.removeprefix("GPU-")
    seen = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
    if wanted not in seen:
        raise WorkerFailed(
            f"torch sees {len(seen)} GPUs, and not this one",
            where=uuid,
            hint="CUDA_VISIBLE_DEVICES may hide it",
        )
    return seen.index(wanted)
