"""Time the sums of a group of two processes, beside adding in order of arrival.

usage: python -m tests.benchmarks.group_sums [--rounds 15] [--hidden 2048] [--dtype bfloat16]

In a group every process adds all four shards' parts as one tree. In order of arrival a process has
one part, adds it under a lock to what others have added, waits, and takes the sum: fewer bytes, and
bits that depend on who comes first. It takes three calls of the kernel, which count at one row.
Waiting alone has no rows. Each process has a core of its own where there are two. The arms take
turns, in an order that is turned each round. Prints the median of the microseconds for one sum, and
of the rounds' ratios to order of arrival, with quartiles.
"""

import argparse
import ctypes
import mmap
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from engine.kernels.cpu import load_kernels
from engine.worker.model.buffers import fresh
from engine.worker.model.compiled import ELEMENT_TYPES
from engine.worker.model.reduction import GroupShape, Reduction

RANKS, SHARDS, ROWS = 2, 4, (1, 8, 512)
ARMS = ("tree", "arrival", "waiting")
_NUM_PLACES, _LINE_BYTES, _SPINS = 2, 1024, 200


class Arrival:
    """Sums in order of arrival, which lie in one of two places by turns.

    Args:
        fd: of shared memory for them.
        lock: that whoever adds holds.
    """

    def __init__(self, shape: GroupShape, fd: int, lock: Any, reduction: Reduction) -> None:
        self._kernels, _ = load_kernels()
        self._shape, self._lock, self._reduction = shape, lock, reduction
        memory = mmap.mmap(fd, _NUM_PLACES * (_LINE_BYTES + shape.part_bytes))
        shared = torch.frombuffer(memory, dtype=torch.uint8).view(_NUM_PLACES, -1)
        self._arrived = [
            shared[place, :4].view(torch.int32).numpy() for place in range(_NUM_PLACES)
        ]
        parts = shared[:, _LINE_BYTES:].view(shape.dtype)
        self._sums = parts.view(_NUM_PLACES, shape.max_rows, shape.hidden_size)
        self._own = ctypes.create_string_buffer(4096 + 64)  # a group of this process alone
        self._own_at = -(-ctypes.addressof(self._own) // 64) * 64
        self._turn = 0

    def sum(self, part: torch.Tensor, num_rows: int) -> torch.Tensor:
        """Add this process's part, wait for the others', and take the sum."""
        place = self._turn = 1 - self._turn
        sums, arrived = self._sums[place], self._arrived[place]
        if not any(self._lock.acquire(block=False) for _ in range(_SPINS)):
            self._lock.acquire()
        if arrived[0] % RANKS == 0:
            self._add(sums, part, 1, 0, num_rows)
        else:
            stride = (part.data_ptr() - sums.data_ptr()) // sums.itemsize
            self._add(sums, sums, 2, stride, num_rows)
        arrived[0] += 1
        self._lock.release()
        self._reduction.wait()
        out = fresh("sum", num_rows, self._shape.hidden_size, self._shape.dtype)
        self._add(out, sums, 1, 0, num_rows)
        return out

    def own_part(self, rank: int) -> torch.Tensor:
        """Make a process's part, in memory of its own."""
        return torch.full_like(self._sums[0], rank + 1)

    def _add(
        self, out: torch.Tensor, parts: torch.Tensor, count: int, stride: int, num_rows: int
    ) -> None:
        shape = self._shape
        how = (ELEMENT_TYPES[shape.dtype], num_rows, shape.hidden_size, stride, count, 0, 1, 1)
        self._kernels.reduce(out.data_ptr(), parts.data_ptr(), self._own_at, *how)


def run(rank: int, options: Any, fds: tuple[int, int], lock: Any, results: Any) -> None:
    """Be one process of the group, and send the first one's microseconds."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    dtype = getattr(torch, options.dtype)
    shape = GroupShape(RANKS, SHARDS, max(ROWS), options.hidden, 64, dtype)
    reduction = Reduction(load_kernels()[0], shape, fds[0], rank)
    reduction.prove()
    arrival = Arrival(shape, fds[1], lock, reduction)
    part = arrival.own_part(rank)
    for place in range(_NUM_PLACES):
        for shard in shape.own_shards(rank):
            reduction.part(place, shard, max(ROWS)).fill_((rank + 1) / 2)
    turn = 0

    def tree(num_rows: int) -> torch.Tensor:
        nonlocal turn
        turn = 1 - turn
        return reduction.sum(turn, num_rows, fresh)

    arms: dict[str, Callable[[int], Any]] = {
        "tree": tree,
        "arrival": lambda num_rows: arrival.sum(part, num_rows),
        "waiting": lambda _num_rows: reduction.wait(),
    }
    for num_rows in ROWS:
        for name in ("tree", "arrival"):
            for _ in range(4):
                assert bool((arms[name](num_rows) == RANKS * (RANKS + 1) // 2).all()), name
        times = max(2000 // num_rows, 40)
        for number in range(options.rounds):
            for name in ARMS if number % 2 else ARMS[::-1]:
                call = arms[name]
                reduction.wait()
                began = time.perf_counter()
                for _ in range(times):
                    call(num_rows)
                took_us = (time.perf_counter() - began) / times * 1e6
                if rank == 0:
                    results.put((num_rows, name, took_us))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    options = parser.parse_args()
    fds = os.memfd_create("sums"), os.memfd_create("arrival")
    os.ftruncate(fds[1], _NUM_PLACES * (_LINE_BYTES + max(ROWS) * options.hidden * 4))
    context = multiprocessing.get_context("fork")
    lock, results = context.Lock(), context.SimpleQueue()
    run_args = (options, fds, lock, results)
    processes = [context.Process(target=run, args=(rank, *run_args)) for rank in range(RANKS)]
    for process in processes:
        process.start()
    found: dict[tuple[int, str], list[float]] = {}
    for _ in range(len(ROWS) * options.rounds * len(ARMS)):
        num_rows, name, took_us = results.get()
        found.setdefault((num_rows, name), []).append(took_us)
    for process in processes:
        process.join()
    load = os.getloadavg()[0]
    print(f"{options.hidden} of {options.dtype}, {options.rounds} rounds, load {load:.1f}")
    for (num_rows, name), times_us in sorted(found.items()):
        ratios = [
            ours / theirs for ours, theirs in zip(times_us, found[num_rows, "arrival"], strict=True)
        ]
        low, middle, high = statistics.quantiles(ratios, n=4)
        us = statistics.median(times_us)
        print(f"{num_rows} rows, {name}: {us:.1f} us; {middle:.2f} [{low:.2f}, {high:.2f}]")


if __name__ == "__main__":
    main()
