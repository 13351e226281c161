"""Simulate a worker process: a fake worker behind the real framing of its channel.

It computes nothing, but its next token depends on every token before it, as its blocks have them.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import struct
import subprocess
import time
import zlib
from collections.abc import Callable
from contextvars import Context
from functools import partial
from pathlib import Path
from typing import Any

from engine.errors import ChannelClosed
from engine.wire.beats import Beats
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
from tests.sweep.virtual_loop import Process, VirtualLoop
from tests.worlds.fake_workers import FakeWorker, next_token

HELD_S = 12.0
"""Virtual time for which a starved worker gets no core before a beat: longer than any patience."""
EXIT_S = 0.003
"""Virtual time from a process's death until its parent may know."""
VOCABULARY = 126
"""Ids below this are drawn: printable ASCII."""
FIRST_ID = 33
TOKEN_BYTES = 4
COPIED_PER_S = 4e9
STEP_S = 0.0007
CALLS_A_TOOL = 126
"""The id in a chat (`~`) that makes the reply one tool call."""
TOOL_CALL = b'<tool_call>\n{"name": "look", "arguments": {"at": "####"}}\n</tool_call>'
"""Each # is a digit that depends on everything before it."""
TURN_ID, LINE_END_ID, END_ID = 298, 10, 297
MOST_SEEDS = 1000
"""Seeds that the daemon draws are larger."""
WINDOW_TOKENS = 24
"""The window of tests.checkpoints' models."""
GUESSED_AT_ONCE = 4
"""Tokens of a step if speculation is on."""


def letter_after(token_ids: list[int]) -> int:
    """Return the next id, a function of everything before it: a printable character mostly."""
    drawn = next_token(token_ids)
    if CALLS_A_TOOL in token_ids and TURN_ID in token_ids:
        turn = len(token_ids) - token_ids[::-1].index(TURN_ID)
        num_written = len(token_ids) - token_ids.index(LINE_END_ID, turn) - 1
        if num_written >= len(TOOL_CALL):
            return END_ID
        letter = TOOL_CALL[num_written]
        return ord("0") + drawn % 10 if letter == ord("#") else letter
    return FIRST_ID + drawn % (VOCABULARY - FIRST_ID)


Place = tuple[str, int, int | str]
"""Pool, block, and the token's offset or RECORD."""
MayWrite = Callable[[str, int], bool]


class PoolMemory:
    """Read and write tokens where their KV would be: in the memory of the pools, by block.

    Tokens lie at the beginning of their block, a record's part behind them; unwritten, they are 0.
    """

    def __init__(self) -> None:
        self._pools: dict[str, tuple[int, int]] = {}
        self._block_size = 0

    def add(self, pool: PoolSpec, block_size: int) -> None:
        """Find a pool's memory, and the bytes of its blocks."""
        self._block_size = block_size
        if pool.fd is not None:
            block_bytes = os.fstat(pool.fd).st_size // pool.num_blocks
            self._pools[pool.name] = os.dup(pool.fd), block_bytes

    @property
    def files(self) -> set[int]:
        """Its own descriptors, which outlive the daemon."""
        return {fd for fd, _ in self._pools.values()}

    def close(self) -> None:
        for fd in self.files:
            os.close(fd)
        self._pools.clear()

    def __setitem__(self, place: Place, token: int) -> None:
        os.pwrite(*self._at(place, token.to_bytes(TOKEN_BYTES, "little")))

    def __getitem__(self, place: Place) -> int:
        return int.from_bytes(os.pread(*self._at(place, TOKEN_BYTES)), "little")

    get = __getitem__

    def pop(self, place: Place, _: None) -> None:
        """Overwrite what is there."""
        self[place] = 0

    def wipe(self, pool: str, block_id: int) -> None:
        """Overwrite all tokens of a block."""
        os.pwrite(*self._at((pool, block_id, 0), bytes(self._block_size * TOKEN_BYTES)))

    def tokens(self, pool: str, block_id: int, count: int) -> tuple[int, ...]:
        """Read the first tokens of a block at once."""
        _, count_bytes, start = self._at((pool, block_id, 0), count * TOKEN_BYTES)
        read = os.pread(self._pools[pool][0], count_bytes, start)
        return struct.unpack(f"<{count}I", read)

    def copy_block(self, source: tuple[str, int], target: tuple[str, int]) -> None:
        """Copy all bytes of a block."""
        (from_fd, block_bytes), (to_fd, _) = self._pools[source[0]], self._pools[target[0]]
        block = os.pread(from_fd, block_bytes, source[1] * block_bytes)
        os.pwrite(to_fd, block, target[1] * block_bytes)

    def _at(self, place: Place, what: Any) -> tuple[int, Any, int]:
        name, block_id, offset = place
        fd, block_bytes = self._pools[name]
        offset = self._block_size if isinstance(offset, str) else offset
        return fd, what, block_id * block_bytes + offset * TOKEN_BYTES


class _Worker(FakeWorker):
    """A fake worker whose tokens depend on the seed, too, where a client sets one."""

    def read(self, running: Any) -> list[int]:
        """Return the tokens in its blocks, behind the seed; the newest in its window blocks."""
        seed, size, end = running.sampling.seed, self.block_size, running.num_computed_tokens
        read = [seed] if seed < MOST_SEEDS else []
        for start in range(0, end, size):
            count, table = min(end - start, size), running.block_table
            if running.window_tables and start + count > end - WINDOW_TOKENS:
                table = running.window_tables[start // size % len(running.window_tables)]
            read += self.memory.tokens(self.pool, table[start // size], count)
        return read

    def forget_tokens(self, block_id: int) -> None:
        """Overwrite a block's tokens at once."""
        self.memory.wipe(self.pool, block_id)

    def record_of(self, place: int, token_ids: list[int]) -> int:
        """Return a record's part in few bytes."""
        return zlib.crc32(repr((place, token_ids)).encode())


class ChildProcess(Process):
    """What the supervisor takes for a `subprocess.Popen`."""

    def __init__(self, loop: VirtualLoop, beats: Beats) -> None:
        super().__init__("worker")
        self._loop, self._beats, self.num_late_beats = loop, beats, 0
        """How many of its next beats come late, as other programs have its core."""
        self._code: int | None = None
        self.exited = loop.create_future()
        self.wait = _Waitable(self._wait, self.poll)

    @property
    def files(self) -> set[int]:
        """Its own descriptors."""
        return set()

    def poll(self) -> int | None:
        return self._code

    def kill(self) -> None:
        """End it now, in the middle of whatever it does."""
        self._end(-signal.SIGKILL)

    def starve(self, num_beats: int) -> None:
        """Keep it from its core before each of its next beats, which are within one step."""
        self.num_late_beats = num_beats
        if num_beats and not self.is_dead:
            self._loop.stop_process(self, HELD_S)
            self._loop.call_later(HELD_S, self._beat_late, context=Context())

    def _beat_late(self) -> None:
        self._beats.beat()
        self.starve(self.num_late_beats - 1)

    def _end(self, code: int) -> None:
        if self.is_dead:
            return
        self.is_dead = True
        self._close()

        def exited() -> None:
            self._code = code
            self.exited.set_result(code)

        self._loop.call_later(EXIT_S, exited, context=Context())  # its own runs nothing any more

    async def _wait(self, timeout: float | None = None) -> int:  # noqa: ASYNC109 - as Popen's
        try:
            return await asyncio.wait_for(asyncio.shield(self.exited), timeout)
        except TimeoutError:
            raise subprocess.TimeoutExpired("worker", timeout or 0) from None

    def _close(self) -> None: ...


class RankProcess(ChildProcess):
    """A process of a group besides the first, which waits for it in each step."""

    def exit(self) -> None:
        """End as the first one has, unless it is stopped."""
        if self.stopped_until_ns <= self._loop.now_ns:
            self._end(0)


class WorkerProcess(ChildProcess):
    """A worker's process, or the first of its group."""

    def __init__(
        self, loop: VirtualLoop, may_write: MayWrite, sock: socket.socket, beats: Beats
    ) -> None:
        super().__init__(loop, beats)
        self._memory, self._may_write = PoolMemory(), may_write
        self._channel, self._socket = WorkerChannel(sock), sock
        self._fake: _Worker | None = None
        self._is_ticking = False
        self._probes: dict[str, float] = {}
        self._ranks: list[RankProcess] = []
        self.run(loop.add_reader, sock, self._read)

    @property
    def files(self) -> set[int]:
        """Its own descriptors."""
        return {self._socket.fileno()} | self._memory.files

    def new_rank(self) -> RankProcess:
        """Start another process of its group."""
        self._ranks.append(RankProcess(self._loop, self._beats))
        return self._ranks[-1]

    def _close(self) -> None:
        self._loop.remove_reader(self._socket)
        self._socket.close()
        self._memory.close()
        for rank in self._ranks:
            self._loop.call_later(EXIT_S, rank.exit, context=Context())

    def _read(self) -> None:
        try:
            for command in self._channel.receive(wait=False):
                if self._loop.count(self):
                    self._take(command)
        except ChannelClosed:
            self._end(0)

    def _take(self, command: Command) -> None:
        if isinstance(command, Setup):
            self._set_up(command)
        elif isinstance(command, WeightsComplete):
            self._later(0.05, partial(self._send, Ready("simulated", probes=self._probes)))
        elif self._fake is not None:
            self._fake.inbox.append(command)
            self._wake()

    def _set_up(self, command: Setup) -> None:
        self.name = f"{command.worker}@{Path(command.model_dir).name}"
        for number, rank in enumerate(self._ranks, 1):
            rank.name = f"{self.name}+{number}"
        for pool in (command.pool, *command.other_pools):
            self._memory.add(pool, command.block_size)
        fake = self._fake = _Worker(
            command.worker,
            command.pool.name,
            self._memory,
            max_num_batched_tokens=command.max_num_batched_tokens,
            cpus=command.cpus,
            block_size=command.block_size,
            next_token=letter_after,
        )
        fake.eos_token_ids = (END_ID,)
        fake.tokens_per_step = 1 if command.max_drafted == 0 else GUESSED_AT_ONCE
        fake.copy_block, fake.may_write = self._memory.copy_block, self._may_write
        self._probes = {pool.name: COPIED_PER_S for pool in command.other_pools}
        self._later(0.05, partial(self._send, WeightsLoaded()))

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
            self._later(STEP_S, self._tick)

    def _tick(self) -> None:
        """Take commands, copy some blocks, and run one step."""
        if any(rank.is_dead for rank in self._ranks):
            return  # it waits for the other's part of a sum, for ever
        held_ns = max((rank.stopped_until_ns for rank in self._ranks), default=0)
        if held_ns > self._loop.now_ns:
            self.run(self._loop.call_later, (held_ns - self._loop.now_ns) / 1e9, self._tick)
            return
        fake, now_ns = self._fake, time.monotonic_ns()
        assert fake is not None
        while fake.inbox:
            fake.receive(now_ns)
        has_copied = fake.copy(now_ns, most=self._loop.random.randint(1, 3))
        fake.step(now_ns)
        self._beats.beat()
        if has_copied or fake.outbox:
            self._later(STEP_S, self._report)
        else:
            self._is_ticking = False

    def _report(self) -> None:
        """Say what the step did: what the daemon has decided meanwhile crosses with it."""
        fake = self._fake
        assert fake is not None
        self._is_ticking = False
        self._send(fake.outbox.popleft())
        while fake.outbox and self._loop.count(self):
            self._send(fake.outbox.popleft())
        self._wake()


class _Waitable:
    """Popen.wait, which the supervisor calls in a thread, or once the process has exited."""

    def __init__(self, wait: Any, poll: Any) -> None:
        self.as_waited, self._poll = wait, poll

    def __call__(self) -> int:
        code: int = self._poll()
        return code


def when_ended(process: ChildProcess, call: Callable[[], None]) -> Callable[[], None]:
    """Call once a process has exited; return what gives up waiting, as the supervisor's."""

    def ended(_: Any) -> None:
        call()

    process.exited.add_done_callback(ended)
    return lambda: process.exited.remove_done_callback(ended)


def spawner(loop: VirtualLoop, may_write: MayWrite, started: list[ChildProcess]) -> Any:
    """Return what starts workers in place of subprocess.Popen."""

    def popen(command: list[str], **_: Any) -> ChildProcess:
        if "--channel-fd" not in command:
            first = next(each for each in reversed(started) if isinstance(each, WorkerProcess))
            started.append(first.new_rank())
            return started[-1]
        fd = int(command[command.index("--channel-fd") + 1])
        beats = Beats(int(command[command.index("--beats-fd") + 1]))
        worker = WorkerProcess(loop, may_write, socket.socket(fileno=os.dup(fd)), beats)
        started.append(worker)
        return worker

    return popen
