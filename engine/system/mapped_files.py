"""Map files that may be larger than memory, and tell how much of one is in it."""

from __future__ import annotations

import ctypes
import mmap

_NORESERVE = 0x4000  # Python has no name for it before 3.13
_PAGE = mmap.PAGESIZE
NUM_SAMPLES = 2048
"""Pages that are looked at; the error is about a hundredth."""


def map_unchanged(fd: int, num_bytes: int) -> mmap.mmap:
    """Map a file privately: torch wants writable memory, and the file must not change.

    None of it is reserved: of a file larger than memory that would be refused.
    """
    flags = mmap.MAP_PRIVATE | _NORESERVE
    return mmap.mmap(fd, num_bytes, flags, mmap.PROT_READ | mmap.PROT_WRITE)


def address_of(memory: mmap.mmap) -> int:
    """Return where a mapping begins."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def resident_bytes(memory: mmap.mmap) -> int | None:
    """Estimate a mapped file's bytes in the page cache; None: the kernel hides them."""
    libc, first, num_pages = ctypes.CDLL(None), address_of(memory), -(-len(memory) // _PAGE)
    is_in_memory, found = (ctypes.c_ubyte * 1)(), 0
    samples = range(0, num_pages, max(num_pages // NUM_SAMPLES, 1))
    for page in samples:
        address = ctypes.c_void_p(first + page * _PAGE)
        if libc.mincore(address, ctypes.c_size_t(_PAGE), is_in_memory):
            return None
        found += is_in_memory[0] & 1
    return len(memory) * found // len(samples)
