"""Pin the worker's threads to its cores.

Invariant: one thread for each core; after it returns no thread may run elsewhere.
Invariant: a refusal of the kernel is reported, and memory stays where it is.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
from contextlib import suppress

import torch


def use_cores(cpus: list[int]) -> None:
    """Compute on these cores from now on; no step runs meanwhile."""
    for thread_id in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(int(thread_id), cpus)
    if torch.get_num_threads() != len(cpus):
        torch.set_num_threads(len(cpus))


_NUMBERS = {"x86_64": (237, 239), "aarch64": (235, 236)}
"""System call numbers of mbind and get_mempolicy, by machine."""
_PREFERRED = 1
_NODE_OF_ADDRESS = 3
_WORDS = 16
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def prefer_node(memory: torch.Tensor, node: int) -> str | None:
    """Make the kernel take a mapping's pages from a node, independent of the first access.

    For memory that several processes map, this holds for all.

    Args:
        memory: a mapping, from its beginning.
        node: the kernel's number of the node.

    Returns:
        the error; None: it worked.
    """
    numbers = _NUMBERS.get(platform.machine())
    if numbers is None:
        return f"memory cannot be bound to a NUMA node on {platform.machine()}"
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
    return f"memory cannot be bound to NUMA node {node}: {os.strerror(ctypes.get_errno())}"


def node_of(memory: torch.Tensor) -> int | None:
    """Return the node of a tensor's first page, touching it; None: unknown."""
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
    """Place a worker's memory on its NUMA node, and report where it is.

    Args:
        node: of its weights and its pool; None: any.
    """

    def __init__(self, node: int | None) -> None:
        self._node = node
        self._refusals: list[str] = []

    def prefer(self, memory: torch.Tensor | mmap.mmap) -> None:
        """Request the pages of an untouched mapping on the node."""
        if self._node is None:
            return
        if isinstance(memory, mmap.mmap):
            memory = torch.frombuffer(memory, dtype=torch.uint8)
        refusal = prefer_node(memory, self._node)
        if refusal is not None and refusal not in self._refusals:
            self._refusals.append(refusal)

    def notes(self, pool: torch.Tensor) -> list[str]:
        """Report memory on the wrong node, given a touched pool."""
        found = None if self._node is None else node_of(pool)
        if found is None or found == self._node:
            return self._refusals
        return [*self._refusals, f"its pool is on NUMA node {found}, not {self._node}"]
