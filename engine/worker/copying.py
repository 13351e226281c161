"""Copy KV blocks between pools.

A copy of blocks that an admit fills waits, block by block, until a step has filled each: the loop
reports a sequence's progress. On a device, collected work is done, so a thread copies at once on a
stream of its own, and the loop never waits. In host memory the worker's own cores copy: the loop
does it after the step, because a thread would wait for Python's lock until the next step's kernels
release it, which took longer than the copy. Unused blocks have no pages there, and making pages
takes five times as long as the copy; a thread makes them once the copy is announced, beside the
step that it waits for.

Invariant: a copy's blocks are copied in order, each with all its layers, and reported when they
have arrived; after the last report of a copy its blocks are not touched.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread

import torch

from engine.errors import ChannelClosed, WorkerFailed
from engine.wire.messages import Copied, Copy, Unmapped
from engine.worker.device import Device
from engine.worker.kv_pool import make_pages
from engine.worker.worker_request import WorkerRequest

REPORTED_PAIRS = 16
"""Maximum pairs per report, so that the next hop begins before a long copy ends."""
PROBED_BYTES = 64 << 20
"""Bytes that a device copies per trial; at 350 GB/s they take 190 us, a start a few."""
MOST_PROBED_BLOCKS = 32
_NUM_PROBES = 8
_PROBE_PATIENCE_S = 2.0
"""Maximum seconds to repeat a probe that has never succeeded."""
_PROBE_PAUSE_S = 0.01


@dataclass(slots=True)
class _WaitingCopy:
    """A copy with some unfilled blocks."""

    copy: Copy
    first_block: int
    num_started: int = 0


@dataclass(frozen=True, slots=True)
class _Job:
    """Pairs of a copy whose bytes are ready, from `first` to before `end`."""

    copy: Copy
    first: int
    end: int
    is_last: bool


@dataclass(frozen=True, slots=True)
class _Mapping:
    """A pool in another worker's memory to map or unmap."""

    pool: str
    map: Callable[[], torch.Tensor] | None


class Copier:
    """Run all copies of one worker.

    Args:
        pools: by name, its own and the pools that it copies to or from; handed over, because
            another worker's memory is only unmapped when no other reference is left.
        send: passes a report on, from any thread.
        device: of its own pool; None: it is in host memory.
    """

    def __init__(
        self,
        pools: dict[str, torch.Tensor],
        block_size: int,
        send: Callable[[Copied | Unmapped], None],
        device: Device | None = None,
    ) -> None:
        self._pools = pools
        self._block_size = block_size
        self._send = send
        self._device = device
        self._waiting: dict[tuple[int, int], list[_WaitingCopy]] = {}
        """Waiting copies by seq_id and generation."""
        self._jobs: SimpleQueue[_Job | _Mapping] = SimpleQueue()
        """Jobs of the thread, with a device."""
        self._thread: Thread | None = None
        self._due: deque[_Job | _Mapping] = deque()
        """Jobs of the loop, without a device."""
        self._failed: set[int] = set()
        """Copies reported as failed before all their parts came."""
        self._page_maker = ThreadPoolExecutor(1, "pages") if device is None else None

    def take(self, copy: Copy, running: WorkerRequest | None) -> None:
        """Begin a copy that the daemon has ordered.

        Args:
            running: the sequence that fills its blocks, if it is still here.
        """
        filler = copy.filled_by
        if filler is None or running is None or running.generation != filler.generation:
            self._start(copy, 0, len(copy.pairs), is_last=True)
            return
        key = (filler.seq_id, filler.generation)
        self._waiting.setdefault(key, []).append(_WaitingCopy(copy, filler.first_block))
        if self._page_maker is not None:
            pairs = copy.with_windows(0, len(copy.pairs))
            self._page_maker.submit(_make_target_pages, self._pools[copy.to_pool], pairs)
        self.advance(running)

    def advance(self, running: WorkerRequest) -> None:
        """Start copying what a step has filled: full blocks, or all of a complete sequence."""
        key = (running.seq_id, running.generation)
        waiting = self._waiting.get(key)
        if not waiting:
            return
        num_full = running.num_computed_tokens // self._block_size
        for each in waiting:
            pairs = each.copy.pairs
            end = len(pairs) if running.is_complete else num_full - each.first_block
            end = max(min(end, len(pairs)), each.num_started)
            if end > each.num_started:
                self._start(each.copy, each.num_started, end, is_last=end == len(pairs))
                each.num_started = end
        left = [each for each in waiting if each.num_started < len(each.copy.pairs)]
        if left:
            self._waiting[key] = left
        else:
            del self._waiting[key]

    def remap(self, pool: str, map_pool: Callable[[], torch.Tensor] | None) -> None:
        """Use a pool's new memory, or unmap the old, after the copies taken before.

        Copies taken while it is unmapped fail.
        """
        self._put(_Mapping(pool, map_pool))

    def drop(self, running: WorkerRequest) -> None:
        """End the waiting copies of an ended sequence; unfilled blocks are not needed."""
        for each in self._waiting.pop((running.seq_id, running.generation), []):
            self._start(each.copy, 0, 0, is_last=True)

    @property
    def has_work(self) -> bool:
        """True if the loop has something to copy."""
        return bool(self._due)

    def work(self, until_ns: int) -> None:
        """Copy the loop's due parts: at least one part, and no new one after that time."""
        while self._due:
            self._do(self._due.popleft())
            if time.monotonic_ns() >= until_ns:
                return

    def _start(self, copy: Copy, first: int, end: int, *, is_last: bool) -> None:
        while True:
            part_end = min(first + REPORTED_PAIRS, end)
            self._put(_Job(copy, first, part_end, is_last and part_end == end))
            first = part_end
            if first >= end:
                return

    def _put(self, job: _Job | _Mapping) -> None:
        if self._device is None:
            self._due.append(job)
            return
        if self._thread is None:
            self._thread = Thread(target=self._run, name="copies", daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def _run(self) -> None:
        with contextlib.suppress(ChannelClosed):  # then the loop ends, too
            while True:
                self._do(self._jobs.get())

    def _do(self, job: _Job | _Mapping) -> None:
        if not isinstance(job, _Job):
            self._remap(job)
            return
        copy_id = job.copy.copy_id
        if copy_id not in self._failed:
            report = self._done(job)
            self._send(report)
            if report.error is not None:
                self._failed.add(copy_id)
        if job.is_last:
            self._failed.discard(copy_id)

    def _remap(self, mapping: _Mapping) -> None:
        self._pools.pop(mapping.pool, None)  # the last reference: this closes the mapping
        if mapping.map is None:
            self._send(Unmapped(mapping.pool))
            return
        try:
            with contextlib.nullcontext() if self._device is None else self._device.beside():
                self._pools[mapping.pool] = mapping.map()
        except Exception:  # noqa: BLE001  # copies fail, which the daemon hears of
            traceback.print_exc()

    def _done(self, job: _Job) -> Copied:
        """Copy a job's pairs; return the report."""
        copy, started_ns = job.copy, time.monotonic_ns()
        try:
            source, target = self._pools[copy.from_pool], self._pools[copy.to_pool]
            pairs = copy.with_windows(job.first, job.end)
            num_bytes, link_ns = copy_blocks(source, target, pairs, self._device)
        except Exception as error:  # noqa: BLE001  # whatever it is, the daemon computes it again
            about = f"{type(error).__name__}: {error}"
            ended_ns = time.monotonic_ns()
            return Copied(copy.copy_id, 0, 0, started_ns, ended_ns, is_last=True, error=about)
        return Copied(
            copy.copy_id,
            job.end - job.first,
            num_bytes,
            started_ns,
            time.monotonic_ns(),
            job.is_last,
            link_ns=link_ns,
        )


def copy_blocks(
    source: torch.Tensor,
    target: torch.Tensor,
    pairs: list[tuple[int, int]],
    device: Device | None = None,
) -> tuple[int, int | None]:
    """Copy blocks in order, and wait for their arrival.

    Shapes: source and target [num_blocks, num_layers, 2, ...], as pools are.

    Args:
        target: another.
        pairs: blocks of the one, and of the other.
        device: the pools' device; None: both are in host memory.

    Returns:
        the bytes copied, and the device's time; None: the host was too busy to measure.
    """
    num_bytes = target.stride(0) * target.element_size()
    if device is None:
        started_ns = time.monotonic_ns()
        for from_id, to_id, count in _runs(pairs):
            at, to = source[from_id].data_ptr(), target[to_id].data_ptr()
            ctypes.memmove(to, at, count * num_bytes)
        return len(pairs) * num_bytes, max(time.monotonic_ns() - started_ns, 1)
    with device.beside() as taken:
        for from_id, to_id in pairs:
            target[to_id].copy_(source[from_id], non_blocking=True)
    return len(pairs) * num_bytes, taken.reliable_ns


def _make_target_pages(target: torch.Tensor, pairs: list[tuple[int, int]]) -> None:
    """Make the pages of the blocks that will be copied to."""
    for _, to_id, count in _runs(pairs):
        make_pages(target, to_id, count)


def _runs(pairs: list[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """Merge pairs that are adjacent in both pools into runs: the first pair and the length."""
    start = 0
    for i in range(1, len(pairs) + 1):
        from_id, to_id = pairs[start]
        if i == len(pairs) or pairs[i] != (from_id + i - start, to_id + i - start):
            yield from_id, to_id, i - start
            start = i


def probe(pool: torch.Tensor, other: torch.Tensor, device: Device | None = None) -> float:
    """Copy a pattern to the padding block of another pool and back, and measure the rate.

    All workers send an equal pattern, so concurrent probes do not disturb each other. The other
    pool's worker may write padding there during its warm-up, so one success is enough, and the
    probe repeats until then. A device copies the block many times, so that the rate is not hidden
    by the start of one copy.

    Returns:
        bytes per second, both ways counted; the best of a few.

    Raises:
        WorkerFailed: the data came back changed.
    """
    values = torch.arange(pool[0].numel(), dtype=torch.float32).remainder_(127)
    sent = values.view(1, *pool.shape[1:]).to(pool.dtype).to(pool.device)
    back = torch.empty_like(sent)
    block_bytes = sent.numel() * sent.element_size()
    count = 1 if device is None else min(-(-PROBED_BYTES // block_bytes), MOST_PROBED_BLOCKS)
    pairs = [(0, 0)] * count
    rates: list[float] = []
    is_intact, num_tries = False, 0
    patient_until_s = time.monotonic() + _PROBE_PATIENCE_S
    while num_tries < _NUM_PROBES or not is_intact:
        if num_tries >= _NUM_PROBES:
            if time.monotonic() > patient_until_s:
                raise WorkerFailed(
                    "data copied to another pool and back came back changed",
                    where="handoff",
                    hint="the memory or the device is at fault; see the kernel log",
                )
            time.sleep(_PROBE_PAUSE_S)
        num_tries += 1
        back.zero_()
        _settle(device)
        started_ns = time.monotonic_ns()
        to_bytes, to_ns = copy_blocks(sent, other, pairs, device)
        from_bytes, from_ns = copy_blocks(other, back, pairs, device)
        elapsed_ns = time.monotonic_ns() - started_ns  # where the device's clock says nothing
        if to_ns is not None and from_ns is not None:
            elapsed_ns = to_ns + from_ns
        rates.append((to_bytes + from_bytes) / max(elapsed_ns, 1) * 1e9)
        is_intact = is_intact or torch.equal(back, sent)
    return max(rates)


def _settle(device: Device | None) -> None:
    """Wait for work on the steps' stream, which the copies' stream does not."""
    if device is not None:
        device.mark()()
