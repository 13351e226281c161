"""Pin the worker's threads to its cores.

Owns: the affinity of all threads of the process.
Invariant: one thread for each core; after it returns no thread may run elsewhere.
Invariant: what the kernel refuses is said, and serving goes on with memory wherever it is.
Never: runs while a step does.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
from contextlib import suppress

import torch


def use_cores(cpus: list[int]) -> None:
    """Compute on these cores from now on."""
    for thread_id in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(int(thread_id), cpus)
    if torch.get_num_threads() != len(cpus):
        torch.set_num_threads(len(cpus))


_NUMBERS = {"x86_64": (237, 239), "aarch64": (235, 236)}
"""Of mbind and get_mempolicy, by machine."""
_PREFERRED = 1
_NODE_OF_ADDRESS = 3
_WORDS = 16
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def prefer_node(memory: torch.Tensor, node: int) -> str | None:
    """Have the kernel take pages of a mapping from a node, whoever touches them first.

    Of memory that several processes map, all follow.

    Args:
        memory: a mapping, from its beginning.
        node: of those that the kernel numbers.

    Returns:
        why that is not so; None: it is.
    """
    numbers = _NUMBERS.get(platform.machine())
    if numbers is None:
        return f"memory cannot be asked for on a NUMA node on {platform.machine()}"
    mask = (ctypes.c_ulong * _WORDS)()
    mask[node // 64] = 1 << node % 64
    address, num_bytes = memory.data_ptr(), memory.numel() * memory.element_size()
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.syscall(
        numbers[0],
        ctypes.c_void_p(address),
        ctypes.c_ulong(-(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES),
        _PREFERRED,
        mask,
        ctypes.c_ulong(64 * _WORDS),
        0,
    )
    if not failed:
        return None
    return f"memory cannot be asked for on NUMA node {node}: {os.strerror(ctypes.get_errno())}"


def node_of(memory: torch.Tensor) -> int | None:
    """The node that the first page of a tensor is on, which is touched; None: it is not known."""
    numbers = _NUMBERS.get(platform.machine())
    if numbers is None:
        return None
    found = ctypes.c_int(-1)
    failed = ctypes.CDLL(None, use_errno=True).syscall(
        numbers[1],
        ctypes.byref(found),
        None,
        ctypes.c_ulong(0),
        ctypes.c_void_p(memory.data_ptr()),
        ctypes.c_ulong(_NODE_OF_ADDRESS),
    )
    return None if failed else found.value


class NodeMemory:
    """On which NUMA node a worker's memory should be, and where it came to be.

    Args:
        node: where its weights and its pool are to be; None: wherever they are touched.
    """

    def __init__(self, node: int | None) -> None:
        self._node = node
        self._refusals: list[str] = []

    def prefer(self, memory: torch.Tensor | mmap.mmap) -> None:
        """Ask for a mapping's pages, before anybody has touched them."""
        if self._node is None:
            return
        if isinstance(memory, mmap.mmap):
            memory = torch.frombuffer(memory, dtype=torch.uint8)
        refusal = prefer_node(memory, self._node)
        if refusal is not None and refusal not in self._refusals:
            self._refusals.append(refusal)

    def notes(self, pool: torch.Tensor) -> list[str]:
        """What is not as it was to be, by where a pool is that has been touched."""
        found = None if self._node is None else node_of(pool)
        if found is None or found == self._node:
            return self._refusals
        return [*self._refusals, f"its pool is on NUMA node {found}, not {self._node}"]
