"""Read weights that stay on disk ahead of the steps, and give up the memory of those behind.

The weights are mapped, and the kernel's page cache is the buffer, which all workers share. Left to
itself it would keep nothing: what is used longest ago is what the next step needs first.
Invariant: besides the units that stay, the memory holds one that is computed and one that is read.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from queue import SimpleQueue
from typing import NamedTuple

from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.layer_units import is_expert, names_by_unit, units_on_disk
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.model_file import open_model_fd
from engine.errors import WorkerFailed
from engine.system.mapped_files import address_of
from engine.worker.model.weight import Weight

_AHEAD_BYTES = 128 << 10
"""Bytes asked for in one call: of a longer range the kernel reads no more than its read-ahead."""
_WAIT_BYTES = 8 << 20
"""Bytes waited for between two signs of life."""
_POPULATE_READ = 22  # since Linux 5.14; Python has no name for it
_PAGE = mmap.PAGESIZE


class FileRange(NamedTuple):
    """Bytes of a file, and where they are mapped."""

    fd: int
    start: int
    address: int
    num_bytes: int


class Unit(NamedTuple):
    """Weights that stay on disk until a step comes to them."""

    always: Sequence[FileRange]
    experts: Sequence[FileRange]
    """Read ahead only for steps in which most experts have tokens."""


class WeightsAhead:
    """Follow the steps of one worker through the units.

    Args:
        units: what stays on disk, by number.
        few_tokens: maximum tokens of a step in which many experts have none.
        beat: called as bytes arrive.
        waited: takes the nanoseconds that a step has waited for the disk.
    """

    def __init__(
        self,
        units: Mapping[int, Unit],
        few_tokens: int,
        beat: Callable[[], None],
        waited: Callable[[int], None],
    ) -> None:
        self._units, self._few_tokens = units, few_tokens
        self._beat, self._waited = beat, waited
        order = [*units, *list(units)[:1]]
        self._next = dict(pairwise(order))
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._can_populate = True
        self._used: int | None = None
        """The unit on disk that was entered last."""
        self._due_next: Sequence[FileRange] = ()
        """What is read ahead now."""
        self._asked: SimpleQueue[Sequence[FileRange]] = SimpleQueue()
        threading.Thread(target=self._read_ahead, name="weights", daemon=True).start()

    def enter(self, unit: int, num_tokens: int) -> None:
        """Have a unit in memory before it is computed, and ask for the next one on disk.

        Raises:
            WorkerFailed: the disk does not give it.
        """
        if self._used is not None and self._used != unit:
            self._drop(self._units[self._used])
            self._used = None
        if unit not in self._units or unit == self._used:
            return
        for each in self._due(unit, num_tokens):
            self._wait_for(each)
        self._used = unit
        if self._next[unit] != unit:
            self._due_next = self._due(self._next[unit], num_tokens)
            self._asked.put(self._due_next)

    def _due(self, number: int, num_tokens: int) -> Sequence[FileRange]:
        unit = self._units[number]
        if num_tokens <= self._few_tokens:
            return unit.always
        return [*unit.always, *unit.experts]

    def _read_ahead(self) -> None:
        """Ask for what is due; the call waits while the disk's queue is full, the steps do not."""
        while True:
            asked = self._asked.get()
            with suppress(OSError):  # the step meets it, too, and has someone to tell
                for fd, start, size in _pieces(asked):
                    if asked is not self._due_next:  # the step was faster, and has dropped it
                        break
                    os.posix_fadvise(fd, start, size, os.POSIX_FADV_WILLNEED)

    def _wait_for(self, each: FileRange) -> None:
        first, end = each.address // _PAGE * _PAGE, each.address + each.num_bytes
        while self._can_populate and first < end:
            size, began_ns = min(_WAIT_BYTES, end - first), time.monotonic_ns()
            if self._libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), _POPULATE_READ):
                code = ctypes.get_errno()
                if code != errno.EINVAL:  # that one: an older kernel, and the step takes the faults
                    about = f"weights cannot be read from disk: {os.strerror(code)}"
                    raise WorkerFailed(about, hint="see the kernel log")
                self._can_populate = False
            self._waited(time.monotonic_ns() - began_ns)
            self._beat()
            first += size

    def _drop(self, unit: Unit) -> None:
        """Unmap a unit's pages; the page cache drops what no other worker has mapped."""
        for each in (*unit.always, *unit.experts):
            first = -(-each.address // _PAGE) * _PAGE  # pages at the ends have neighbours' bytes
            size = (each.address + each.num_bytes) // _PAGE * _PAGE - first
            if size > 0:
                dropped = ctypes.c_void_p(first), ctypes.c_size_t(size)
                self._libc.madvise(*dropped, int(mmap.MADV_DONTNEED))
                at = each.start + first - each.address
                os.posix_fadvise(each.fd, at, size, os.POSIX_FADV_DONTNEED)


def _pieces(ranges: Sequence[FileRange]) -> Iterator[tuple[int, int, int]]:
    """Yield descriptor, start and size of each piece that is asked for in one call."""
    for each in ranges:
        end = each.start + each.num_bytes
        for start in range(each.start, end, _AHEAD_BYTES):
            yield each.fd, start, min(_AHEAD_BYTES, end - start)


def units_of(
    config: ModelConfig, ranges: Mapping[str, FileRange], num_bytes: int
) -> dict[int, Unit]:
    """Find the units that stay on disk, of `num_bytes` or little more."""
    names = names_by_unit(ranges, config)
    sizes = [sum(ranges[name].num_bytes for name in each) for each in names]
    return {
        number: Unit(
            [ranges[name] for name in names[number] if not is_expert(name)],
            [ranges[name] for name in names[number] if is_expert(name)],
        )
        for number in units_on_disk(sizes, num_bytes)
    }


def ranges_of(
    weights: Mapping[str, Weight], checkpoint: Checkpoint, arena: tuple[mmap.mmap, int] | None
) -> dict[str, FileRange]:
    """Find where weights lie in a mapped file.

    Args:
        arena: the mapped file of packed weights, and its descriptor; None: matrices are in the
            checkpoint's files.
    """
    if arena is None:
        fds = {file: open_model_fd(file) for file in checkpoint.files}
        stored = checkpoint.tensors
        return {
            name: FileRange(
                fds[stored[name].file],
                stored[name].start,
                weight.data.data_ptr(),
                stored[name].num_bytes,
            )
            for name, weight in weights.items()
            if len(weight.shape) > 1 and stored[name].is_plain
        }
    memory, fd = arena
    first, size = address_of(memory), len(memory)
    places = {name: (each.data.data_ptr(), each.data.nbytes) for name, each in weights.items()}
    return {
        name: FileRange(fd, address - first, address, num_bytes)
        for name, (address, num_bytes) in places.items()
        if first <= address < first + size
    }
