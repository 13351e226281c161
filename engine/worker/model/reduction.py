"""Share memory with a group's other processes: parts of sums, logits, and when a step stops.

Invariant: a sum has the parts of all shards, added in one order; parts of attention and of
feed-forward lie apart and take turns, so that none is written again before all have read it.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass

import torch

from engine.checkpoint.shard_bytes import NUM_PLACES
from engine.errors import WorkerFailed
from engine.kernels.cpu import Kernels
from engine.worker.model.buffers import Take, fresh
from engine.worker.model.compiled import ELEMENT_TYPES

ATTENTION, FEED_FORWARD = range(2)
"""The places of parts, by what makes them."""
_HEAD_BYTES = 4096
_WAITED_AT, _LINE_BYTES = 576, 64
"""Each process's time of waiting, in a cache line of its own; see `struct group`."""
_STOP_AT = 2048
"""Where the first process says whether a step ends, behind the counters of arrivals."""
_PROVED_ROWS = (1, 3, 9)


@dataclass(frozen=True, slots=True)
class GroupShape:
    """What the size of a group's memory depends on."""

    num_ranks: int
    num_shards: int
    max_rows: int
    """Rows of the largest step, a multiple of 64."""
    hidden_size: int
    vocab_size: int
    dtype: torch.dtype

    @property
    def part_bytes(self) -> int:
        """Bytes of one shard's part of a sum."""
        return self.max_rows * self.hidden_size * self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        """Bytes of all; a step touches only what its rows need."""
        logits_bytes = self.max_rows * self.vocab_size * torch.float32.itemsize
        return _HEAD_BYTES + NUM_PLACES * self.num_shards * self.part_bytes + logits_bytes

    def own_shards(self, rank: int) -> range:
        """Return the numbers of a process's shards."""
        each = self.num_shards // self.num_ranks
        return range(rank * each, (rank + 1) * each)


class Reduction:
    """One process's view of the memory.

    Args:
        fd: of the memory; zeros when the group starts.
        rank: number of the process in the group.
    """

    def __init__(self, kernels: Kernels, shape: GroupShape, fd: int, rank: int) -> None:
        if os.fstat(fd).st_size < shape.num_bytes:
            os.ftruncate(fd, shape.num_bytes)
        self.shape, self.rank = shape, rank
        self._kernels = kernels
        self._memory = torch.frombuffer(mmap.mmap(fd, shape.num_bytes), dtype=torch.uint8)
        self._stop = self._memory[_STOP_AT : _STOP_AT + 8].view(torch.int64)
        waited = self._memory[_WAITED_AT : _WAITED_AT + shape.num_ranks * _LINE_BYTES]
        self._waited_ns = waited.view(torch.int64).view(shape.num_ranks, -1)[:, 0]
        first = _HEAD_BYTES + NUM_PLACES * shape.num_shards * shape.part_bytes
        logits = self._memory[first:].view(torch.float32)
        self._logits = logits.view(shape.max_rows, shape.vocab_size)
        places = self._memory[_HEAD_BYTES:first].view(shape.dtype)
        self._parts = places.view(NUM_PLACES, shape.num_shards, shape.max_rows, shape.hidden_size)

    def part(self, place: int, shard: int, num_rows: int) -> torch.Tensor:
        """Return where a shard's part of a sum is to be written, [num_rows, hidden_size].

        Raises:
            WorkerFailed: the step has more rows than there is room for.
        """
        if num_rows > self.shape.max_rows:
            what = f"a step of {num_rows} rows, where a group has room for {self.shape.max_rows}"
            raise WorkerFailed(what, hint="lower --kv-memory, which admits as many sequences")
        return self._parts[place, shard, :num_rows]

    def sum(self, place: int, num_rows: int, take: Take) -> torch.Tensor:
        """Wait for all parts; return their sum, [num_rows, hidden_size]."""
        shape = self.shape
        out = take("sum", num_rows, shape.hidden_size, shape.dtype)
        self._reduce(out.data_ptr(), self._parts[place].data_ptr(), num_rows)
        return out

    @property
    def waited_ns(self) -> list[int]:
        """How long each process has waited for the others since the start."""
        waited: list[int] = self._waited_ns.tolist()
        return waited

    def wait(self) -> None:
        """Wait until all processes have come here."""
        self._reduce(0, 0, 0)

    def _reduce(self, out: int, parts: int, num_rows: int) -> None:
        shape = self.shape
        self._kernels.reduce(
            out,
            parts,
            self._memory.data_ptr(),
            ELEMENT_TYPES[shape.dtype],
            num_rows,
            shape.hidden_size,
            shape.max_rows * shape.hidden_size,
            shape.num_shards,
            self.rank,
            shape.num_ranks,
            torch.get_num_threads(),
        )

    def gathered(self, parts: list[tuple[int, torch.Tensor]], num_rows: int) -> torch.Tensor:
        """Bring logits together for the first process; the others get none.

        Args:
            parts: this process's, each with its first column.

        Returns:
            float32 [num_rows, vocab_size], or [0, vocab_size].
        """
        for first, part in parts:
            self._logits[:num_rows, first : first + part.shape[1]] = part
        self.wait()
        return self._logits[: 0 if self.rank else num_rows].clone()

    def agreed(self, is_over: bool) -> bool:
        """Let the first process say whether the step ends here, and all know it.

        A sum lies between two such words, so that none is written before all have read the last.
        """
        if self.rank == 0:
            self._stop[0] = is_over
        self.wait()
        return bool(self._stop[0])

    def prove(self) -> None:
        """Add up known parts together with the other processes.

        Raises:
            WorkerFailed: a sum is wrong.
        """
        shape = self.shape
        rows = torch.arange(max(_PROVED_ROWS) * shape.hidden_size).view(-1, shape.hidden_size) % 31
        for place in range(NUM_PLACES):
            for count in _PROVED_ROWS:
                for shard in shape.own_shards(self.rank):
                    self.part(place, shard, count).copy_(rows[:count] + shard)
                num_shards = shape.num_shards
                expected = num_shards * rows[:count] + num_shards * (num_shards - 1) // 2
                if not torch.equal(self.sum(place, count, fresh), expected.to(shape.dtype)):
                    what = f"a sum of {count} rows over the group is wrong"
                    raise WorkerFailed(what, where="self-test", hint="penstock doctor --self-test")
                self.wait()
