"""Run asyncio on virtual time, for simulated processes that can be killed between two events.

A process is a context variable: what a process starts belongs to it. A killed one runs nothing any
more, not even its `finally`, as after SIGKILL: its callbacks are dropped, and its tasks are kept so
that nothing closes them.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import heapq
import itertools
import random
import selectors
import time
from collections.abc import Callable, Iterator
from contextvars import Context, ContextVar, copy_context
from typing import Any

START_NS = 10**15
"""CLOCK_MONOTONIC at the beginning, eleven days after boot."""
EPOCH_S = 1_800_000_000
SHORTEST_S = 20e-6
"""Virtual time that a callback takes."""
MOST_TURNS = 1_000_000


class Stuck(AssertionError):
    """Nothing can happen any more, or too much has, and what is waited for has not."""


class Process:
    """A simulated process: a worker, the daemon or a client."""

    _pids = itertools.count(1000)

    def __init__(self, name: str) -> None:
        self.name, self.pid = name, next(self._pids)
        self.is_dead = False
        self.stopped_until_ns = 0
        self.held: list[Any] = []
        """Callbacks that wait for SIGCONT."""
        self.graveyard: list[Any] = []
        """Tasks that nobody may unwind."""

    def run(self, call: Callable[..., Any], *args: Any) -> Any:
        """Call something inside this process."""
        context = copy_context()
        context.run(PROCESS.set, self)
        return context.run(call, *args)


PROCESS: ContextVar[Process | None] = ContextVar("process", default=None)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer when nothing else is to be done.

    Sockets are the kernel's own, between ends that are both in this loop. Seeds order what is ready
    at the same time. An *event* is a timer, a socket that became ready, or a message.

    Args:
        seed: of the order.
        on_event: called before each event, with its number and the process that takes it.
        after_event: called after each event of a timer or a socket.
    """

    def __init__(
        self,
        seed: int,
        on_event: Callable[[int, Process], None],
        after_event: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(_Selector())
        self.now_ns = START_NS
        self.random = random.Random(seed)
        self.num_events = 0
        self._on_event, self._after_event = on_event, after_event
        self._num_turns = 0
        self._resumed: list[Any] = []
        self.set_task_factory(_make_task)

    def time(self) -> float:
        return self.now_ns / 1e9

    def add_signal_handler(self, *_: Any) -> None:
        """Leave signals to the real process: a simulated one gets none."""

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> asyncio.Future[Any]:
        """Do a thread's work some time later, whole, as one event."""
        called = func.args[0] if isinstance(func, functools.partial) and func.args else func
        waited = getattr(called, "as_waited", None)
        if waited is not None:
            return asyncio.ensure_future(waited(*func.args[1:]), loop=self)
        ended = self.create_future()

        def work() -> None:
            try:
                result = func(*args)
            except BaseException as error:  # noqa: BLE001 - it is raised where it is waited for
                if not ended.cancelled():
                    ended.set_exception(error)
            else:
                if not ended.cancelled():
                    ended.set_result(result)

        self.call_later(self.random.uniform(1e-4, 2e-3), work)
        return ended

    def _run_once(self) -> None:
        """Run what is ready; without anything, the clock goes on to the next timer."""
        self._num_turns += 1
        if self._num_turns > MOST_TURNS:
            raise Stuck(f"{MOST_TURNS} turns of the loop")
        timers: list[Any] = self._scheduled
        ready = self._ready
        while timers and timers[0]._cancelled:
            self._timer_cancelled_count -= 1
            heapq.heappop(timers)._scheduled = False
        num_before = len(ready)
        ready.extend(self._resumed)
        self._resumed.clear()
        found = [each for each in self._selector.select(0) if not self._is_stopped(each)]
        self.random.shuffle(found)
        self._process_events(found)
        if not ready:
            if not timers:
                raise Stuck("nothing is left to happen")
            self.now_ns = max(self.now_ns, round(timers[0]._when * 1e9))
        while timers and timers[0]._when * 1e9 <= self.now_ns + 1:
            handle = heapq.heappop(timers)
            handle._scheduled = False
            ready.append(handle)
        for index in range(len(ready)):
            self._run_handle(ready.popleft(), is_event=index >= num_before)

    def stop_process(self, process: Process, seconds: float) -> None:
        """Let a process do nothing for a while, as after SIGSTOP: its callbacks wait."""
        process.stopped_until_ns = until_ns = self.now_ns + round(seconds * 1e9)

        def go_on() -> None:
            if process.stopped_until_ns == until_ns:  # it has not been stopped again
                process.stopped_until_ns = 0
                self._resumed += process.held
                process.held.clear()

        self.call_later(seconds, go_on, context=Context())

    def _is_stopped(self, found: Any) -> bool:
        """Say whether a ready socket's process is stopped."""
        reader_and_writer = found[0].data
        processes = [handle._context.get(PROCESS) for handle in reader_and_writer if handle]
        return any(each and each.stopped_until_ns > self.now_ns for each in processes)

    def count(self, process: Process) -> bool:
        """Count one event of a process, before which any process may end; False: it has."""
        if not process.is_dead:
            self.num_events += 1
            self._on_event(self.num_events, process)
        return not process.is_dead

    def _run_handle(self, handle: Any, *, is_event: bool) -> None:
        if handle._cancelled:
            return
        process = handle._context.get(PROCESS)
        if process is not None and process.stopped_until_ns > self.now_ns:
            process.held.append(handle)
            return
        if process is not None and is_event:
            self.count(process)
            if handle._cancelled:  # by what happened just before it
                return
        if process is not None and process.is_dead:
            process.graveyard.append(handle)
            return
        self.now_ns += round(SHORTEST_S * 1e9)
        handle._run()
        if is_event:
            self._after_event()


def _make_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> Any:
    """Make a task that its process keeps."""
    task = asyncio.Task(coroutine, loop=loop, **options)
    if (process := PROCESS.get()) is not None:
        process.graveyard.append(task)
    return task


class _Selector(selectors.SelectSelector):
    """Ready files in the order of their numbers."""

    def select(self, timeout: float | None = None) -> list[Any]:
        return sorted(super().select(0), key=lambda found: found[0].fd)


@contextlib.contextmanager
def virtual_time(loop: VirtualLoop) -> Iterator[None]:
    """Let the `time` module tell the loop's time."""
    kept = {name: getattr(time, name) for name in _CLOCKS}
    clocks = {
        "monotonic": lambda: loop.now_ns / 1e9,
        "monotonic_ns": lambda: loop.now_ns,
        "perf_counter": lambda: loop.now_ns / 1e9,
        "perf_counter_ns": lambda: loop.now_ns,
        "time": lambda: EPOCH_S + (loop.now_ns - START_NS) / 1e9,
        "time_ns": lambda: EPOCH_S * 10**9 + loop.now_ns - START_NS,
    }
    try:
        for name, clock in clocks.items():
            setattr(time, name, clock)
        yield
    finally:
        for name, clock in kept.items():
            setattr(time, name, clock)


_CLOCKS = ("monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "time", "time_ns")
