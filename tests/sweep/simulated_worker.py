"""Simulate a worker process: a fake worker behind the real framing of its channel.

It computes nothing, but its next token depends on every token before it, as its blocks have them.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextvars import Context
from functools import partial
from typing import Any

from engine.errors import ChannelClosed
from engine.wire.channel import WorkerChannel
from engine.wire.messages import (
    Command,
    PoolSpec,
    Ready,
    Report,
    Setup,
    WeightsComplete,
    WeightsLoaded,
)
from tests.engine.fake_workers import FakeWorker, next_token
from tests.sweep.virtual_loop import Process, VirtualLoop

EXIT_S = 0.003
"""Virtual time from a process's death until its parent may know."""
VOCABULARY = 126
"""Ids below this are drawn: printable ASCII."""
FIRST_ID = 33
TOKEN_BYTES = 4
COPIED_PER_S = 4e9


def letter_after(token_ids: list[int]) -> int:
    """Return the id of one printable character, a function of everything before it."""
    return FIRST_ID + next_token(token_ids) % (VOCABULARY - FIRST_ID)


class PoolMemory:
    """Read and write tokens where their KV would be: in the memory of the pools, by block.

    A token takes the first bytes of its share of the block; what nobody wrote is 0.
    """

    def __init__(self) -> None:
        self._pools: dict[str, tuple[int, int]] = {}

    def add(self, pool: PoolSpec) -> None:
        """Find a pool's memory, and the bytes of its blocks."""
        if pool.fd is not None:
            self._pools[pool.name] = pool.fd, os.fstat(pool.fd).st_size // pool.num_blocks

    def __setitem__(self, place: tuple[str, int, int], token: int) -> None:
        os.pwrite(*self._at(place, token.to_bytes(TOKEN_BYTES, "little")))

    def __getitem__(self, place: tuple[str, int, int]) -> int:
        return int.from_bytes(os.pread(*self._at(place, TOKEN_BYTES)), "little")

    get = __getitem__

    def copy_block(self, source: tuple[str, int], target: tuple[str, int]) -> None:
        """Copy all bytes of a block."""
        (from_fd, block_bytes), (to_fd, _) = self._pools[source[0]], self._pools[target[0]]
        block = os.pread(from_fd, block_bytes, source[1] * block_bytes)
        os.pwrite(to_fd, block, target[1] * block_bytes)

    def _at(self, place: tuple[str, int, int], what: Any) -> tuple[int, Any, int]:
        name, block_id, offset = place
        fd, block_bytes = self._pools[name]
        return fd, what, block_id * block_bytes + offset * TOKEN_BYTES


class WorkerProcess(Process):
    """What the supervisor takes for a `subprocess.Popen`."""

    def __init__(self, loop: VirtualLoop, memory: PoolMemory, sock: socket.socket) -> None:
        super().__init__("worker")
        self._loop, self._memory = loop, memory
        self._channel, self._socket = WorkerChannel(sock), sock
        self._code: int | None = None
        self._exited = loop.create_future()
        self._fake: FakeWorker | None = None
        self._is_ticking = False
        self._stopped_until_s = 0.0
        self._probes: dict[str, float] = {}
        self.wait = _Waitable(self._wait)
        self.run(loop.add_reader, sock, self._read)

    @property
    def fileno(self) -> int:
        return self._socket.fileno()

    def poll(self) -> int | None:
        return self._code

    def kill(self) -> None:
        """End it now, in the middle of whatever it does."""
        self._end(-signal.SIGKILL)

    def stop(self, seconds: float) -> None:
        """Let it do nothing for a while, as after SIGSTOP."""
        self._stopped_until_s = self._loop.time() + seconds
        self._loop.remove_reader(self._socket)
        self.run(self._loop.call_later, seconds, self._go_on)

    def _go_on(self) -> None:
        self._loop.add_reader(self._socket, self._read)

    def _end(self, code: int) -> None:
        if self.is_dead:
            return
        self.is_dead = True
        self._loop.remove_reader(self._socket)
        self._socket.close()

        def exited() -> None:
            self._code = code
            self._exited.set_result(code)

        self._loop.call_later(EXIT_S, exited, context=Context())  # its own runs nothing any more

    async def _wait(self, timeout: float | None = None) -> int:  # noqa: ASYNC109 - as Popen's
        try:
            return await asyncio.wait_for(asyncio.shield(self._exited), timeout)
        except TimeoutError:
            raise subprocess.TimeoutExpired("worker", timeout or 0) from None

    def _read(self) -> None:
        try:
            for command in self._channel.receive(wait=False):
                if self._loop.count(self):
                    self._take(command)
        except ChannelClosed:
            self._end(0)

    def _take(self, command: Command) -> None:
        if isinstance(command, Setup):
            self.name = command.worker
            for pool in (command.pool, *command.other_pools):
                self._memory.add(pool)
            self._fake = FakeWorker(
                command.worker,
                command.pool.name,
                self._memory,
                max_num_batched_tokens=command.max_num_batched_tokens,
                cpus=command.cpus,
                block_size=command.block_size,
                next_token=letter_after,
            )
            self._probes = {pool.name: COPIED_PER_S for pool in command.other_pools}
            self._fake.copy_block = self._memory.copy_block
            self._later(0.05, partial(self._send, WeightsLoaded()))
        elif isinstance(command, WeightsComplete):
            self._later(0.05, partial(self._send, Ready("simulated", probes=self._probes)))
        elif self._fake is not None:
            self._fake.inbox.append(command)
            self._wake()

    def _send(self, report: Report) -> None:
        try:
            self._channel.send(report)
        except ChannelClosed:
            self._end(0)

    def _later(self, about_s: float, call: Any) -> None:
        delay_s = about_s * self._loop.random.uniform(0.5, 1.5)
        self.run(self._loop.call_later, delay_s, call)

    def _wake(self) -> None:
        if not self._is_ticking:
            self._is_ticking = True
            self._later(0.001, self._tick)

    def _tick(self) -> None:
        """Take commands, copy some blocks, run one step, and report."""
        fake, now_ns = self._fake, time.monotonic_ns()
        assert fake is not None
        if (left_s := self._stopped_until_s - self._loop.time()) > 0:
            self._later(left_s, self._tick)
            return
        self._is_ticking = False
        while fake.inbox:
            fake.receive(now_ns)
        has_copied = fake.copy(now_ns, most=self._loop.random.randint(1, 3))
        fake.step(now_ns)
        is_busy = has_copied or bool(fake.outbox)
        while fake.outbox and self._loop.count(self):
            self._send(fake.outbox.popleft())
        if is_busy:
            self._wake()


class _Waitable:
    """Popen.wait, which the supervisor calls in a thread."""

    def __init__(self, wait: Any) -> None:
        self.as_waited = wait


def spawner(
    loop: VirtualLoop, memory: Callable[[], PoolMemory], started: list[WorkerProcess]
) -> Any:
    """Return what starts workers in place of subprocess.Popen."""

    def popen(command: list[str], **_: Any) -> WorkerProcess:
        fd = int(command[command.index("--channel-fd") + 1])
        worker = WorkerProcess(loop, memory(), socket.socket(fileno=os.dup(fd)))
        started.append(worker)
        return worker

    return popen
