"""Start workers, share memory between them, and restart them.

Invariants: a worker's death is handled after all its messages, once its process has ended; no
worker outlives the daemon; a restarted worker finds the pools and the converted weights unchanged.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager

import msgspec

from appliance.daemon.process.limits import SpareDescriptors
from appliance.fleet.peer_memory import MemorySharing, PeerPools, log, remove_counters
from appliance.fleet.placement import WorkerPlan
from appliance.fleet.rank_processes import GroupFds, when_ended
from appliance.fleet.worker_state import WorkerState, weights_progress
from engine.errors import ChannelClosed, ChannelGarbled, WorkerFailed, WorkerUnfit
from engine.system.priority import lower_priority
from engine.system.python_child import python_command
from engine.system.signals import signal_name
from engine.units import part_text, size_text
from engine.wire import beats
from engine.wire.channel import DaemonChannel
from engine.wire.messages import (
    Command,
    Failed,
    GpuSpec,
    LoadingProgress,
    PoolMade,
    Ready,
    Report,
    Setup,
    SharedMemory,
    Stepped,
    Unmapped,
    WeightsComplete,
    WeightsLoaded,
)

PROGRESS_S = 10.0
RESTART_BACKOFF_S = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 60.0)
"""Pauses by the number of short lives before; the last one repeats for ever."""
ALONE_BACKOFF_S = 2.0
"""Maximum pause while no worker is ready, unless all are in a crash loop."""
BACKOFF_CHECK_S = 0.25
"""How often a waiting worker looks whether the others still serve."""
SPARE_DESCRIPTORS = 8
"""A restart takes two sockets, a pipe, /dev/null and a counter's memory."""
SPARE_OF_A_RANK = 4
"""Descriptors for each other process of a group: two sockets, and a pidfd."""
_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)
"""Errors of the machine, not of the worker, that prevent a process."""
SHORTAGE_PAUSE_S = 1.0
MAX_FAILED_STARTS = 3
STOP_GRACE_S = 2.0
EXIT_GRACE_S = 0.2
"""Maximum time between the end of a worker's channel and its exit."""
TELLING_S = 1.0
"""Time in which a group's first process tells why another has exited."""
GOMP_SPIN_COUNT = "10000"
"""Bounded spinning between parallel regions.

Passive waiting costs a futex wake in each small region. Endless spinning stalls when another thread
needs the core."""

OnReport = Callable[[str, Report], None]
OnReady = Callable[[str], None]
OnDied = Callable[[str, str], None]
"""Takes the worker's name and the cause of its death."""


WORKER_PROGRAM = python_command("-m", "engine.worker")
RANK_PROGRAM = python_command("-m", "engine.worker.rank")


class Supervisor:
    """Start the daemon's workers, read their messages, and restart dead ones."""

    def __init__(
        self,
        workers: list[tuple[WorkerPlan, Setup]],
        inherited_fds: list[int],
        *,
        on_report: OnReport,
        on_ready: OnReady,
        on_died: OnDied,
        on_lost: OnDied,
        program: Sequence[str] = WORKER_PROGRAM,
        stacks_fd: int | None = None,
        behind: Collection[str] = (),
    ) -> None:
        """Make the states of its workers, without processes.

        Args:
            behind: workers that do not decode, and so leave a raised priority to others.
        """
        self.workers = {plan.name: WorkerState(plan, setup) for plan, setup in workers}
        self._fds = inherited_fds
        self._program = program
        self._stacks_fd = stacks_fd
        self._behind = behind
        self._on_report = on_report
        self._on_ready = on_ready
        self._on_died = on_died
        self._on_lost = on_lost
        self._tasks: list[asyncio.Task[None]] = []
        self._is_stopping = False
        self._logged_at_s = self._loading_since_s = 0.0
        self._has_told_loading = self._has_told_loaded = False
        self._started: asyncio.Future[None] | None = None
        self._sharing = MemorySharing([plan for plan, _ in workers], self.send)
        self._peers = PeerPools((setup for _, setup in workers), self.send)
        most_others = max((plan.num_others for plan, _ in workers), default=0)
        self._spare = SpareDescriptors(SPARE_DESCRIPTORS + most_others * SPARE_OF_A_RANK)

    @property
    def is_lost(self) -> bool:
        """True if every worker failed to restart too often to wait for it."""
        return all(w.num_failed_starts >= MAX_FAILED_STARTS for w in self.workers.values())

    @property
    def is_started(self) -> bool:
        """True once all workers have been ready together."""
        started = self._started
        if started is None or not started.done() or started.cancelled():
            return False
        return started.exception() is None

    def awaited(self, silence_s: float) -> list[str]:
        """List the starting workers with their progress; empty while log lines show it."""
        if time.monotonic() - self._logged_at_s < silence_s:
            return []
        return [f"worker {n} ({w.stage})" for n, w in self.workers.items() if w.state != "ready"]

    def waits_for_others(self, name: str) -> bool:
        """Say whether a loading worker has done its part and waits for others."""
        has_loaded = self.workers[name].has_loaded
        is_early = has_loaded and not all(w.has_loaded for w in self.workers.values())
        return is_early or self._sharing.waits(name) or self._peers.waits(name)

    def spawn_all(self) -> None:
        """Start every process now; they import torch while the daemon keeps building."""
        for worker in self.workers.values():
            self._spawn(worker)

    async def run(self) -> None:
        """Start the conversation with all spawned workers; return when all are ready.

        Raises:
            WorkerFailed: one of them could not load.
        """
        self._started = asyncio.get_running_loop().create_future()
        self._loading_since_s = self._logged_at_s = time.monotonic()
        for worker in self.workers.values():
            task = asyncio.create_task(self._watch(worker))
            task.add_done_callback(functools.partial(self._watch_ended, worker))
            self._tasks.append(task)
        await self._started

    def send(self, name: str, command: Command) -> None:
        """Send a command; it is lost if the worker is dead, which ends all its commands."""
        channel = self.workers[name].channel
        if channel is not None:
            channel.send(command)

    async def stop(self) -> None:
        """Close the channels; kill workers that do not exit within the grace period."""
        self._is_stopping = True
        deadline = time.monotonic() + STOP_GRACE_S
        for worker in self.workers.values():
            if worker.channel is not None:
                worker.channel.close()
            elif worker.socket is not None:
                worker.socket.close()
        for worker in self.workers.values():
            if worker.process is None:
                continue
            for process in (worker.process, *worker.others):
                await _ended(process, max(deadline - time.monotonic(), 0.0))
            if worker.setup.gpu is not None:
                remove_counters(worker.process.pid)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._spare.close()

    def _spawn(self, worker: WorkerState) -> None:
        with self._spare.given_up(), _new_beats(worker) as beats_fd:
            worker.process, *worker.others = self._start_processes(worker, beats_fd)
        worker.pid = worker.process.pid
        worker.state = "loading"
        worker.failure = None
        worker.is_reaped.clear()

    def _start_processes(
        self, worker: WorkerState, beats_fd: int | None
    ) -> list[subprocess.Popen[bytes]]:
        """Start a worker's process, or a group's, and open our end of the first one's channel."""
        reach = sorted({cpu for each in self.workers.values() for cpu in each.plan.cpus})
        common, own = ["--cpus", ",".join(map(str, reach))], list[int]()  # Setup names its own
        if self._stacks_fd is not None:
            common += ["--stacks-fd", str(self._stacks_fd)]
            own.append(self._stacks_fd)
        started: list[subprocess.Popen[bytes]] = []
        with closing(GroupFds(worker.plan.num_others)) as group:
            ours, theirs = socket.socketpair()
            arguments, fds = group.of_first
            arguments += ["--channel-fd", str(theirs.fileno())]
            fds.append(theirs.fileno())
            if beats_fd is not None:
                arguments += ["--beats-fd", str(beats_fd)]
                fds.append(beats_fd)
            commands = [([*self._program, *arguments], fds)]
            for rank in range(1, 1 + worker.plan.num_others):
                arguments, fds = group.of(rank)
                commands.append(([*RANK_PROGRAM, *arguments], fds))
            try:
                for rank, (command, fds) in enumerate(commands):
                    inherited = [*fds, *own, *self._fds]
                    env = self._environment(worker, rank)
                    started.append(_opened([*command, *common], inherited, env))
                    if worker.plan.name in self._behind:
                        lower_priority(0, started[-1].pid)
            except OSError:
                ours.close()
                for process in started:
                    process.kill()
                    process.wait()
                raise
            finally:
                theirs.close()
        worker.socket = ours
        return started

    def _environment(self, worker: WorkerState, rank: int) -> dict[str, str]:
        plan = worker.plan
        num_threads = str(len(plan.ranks[rank] if plan.ranks else plan.cpus))
        env = {
            **os.environ,
            "OMP_NUM_THREADS": num_threads,
            "MKL_NUM_THREADS": num_threads,
            "GOMP_SPINCOUNT": GOMP_SPIN_COUNT,
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # as NVML, in all workers
        }
        if worker.setup.gpu is not None:
            env["CUDA_VISIBLE_DEVICES"] = self._visible_to(worker.setup.gpu)
        if plan.mps_percent is not None:
            env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(plan.mps_percent)
        return env

    def _visible_to(self, gpu: GpuSpec) -> str:
        """Return the UUIDs that CUDA may see: one instance, or all whole GPUs in use.

        If any GPU is divided, CUDA sees one instance and no whole GPU unless they are named.
        """
        if gpu.uuid.startswith("MIG-"):
            return gpu.uuid
        served = [each.setup.gpu for each in self.workers.values() if each.setup.gpu is not None]
        return ",".join(dict.fromkeys(x.uuid for x in served if not x.uuid.startswith("MIG-")))

    async def _watch(self, worker: WorkerState) -> None:
        """Watch and restart one worker until the daemon stops."""
        while not self._is_stopping:
            await self._live(worker)
            if self._is_stopping:
                return
            worker.num_short_lives = 0 if worker.is_stable else worker.num_short_lives + 1
            worker.pause_s = _backoff_s(worker.num_short_lives)
            await self._reap(worker)
            await self._end_dependents(worker)
            if self._started is not None and not self.is_started:
                if not self._started.done():
                    self._started.set_exception(worker.failure or self._died_early(worker))
                return
            if isinstance(worker.failure, WorkerUnfit):
                return
            await self._respawn(worker)

    def _watch_ended(self, worker: WorkerState, task: asyncio.Task[None]) -> None:
        """Fail what waits for a worker after its watcher crashed, which is a bug."""
        if task.cancelled() or task.exception() is None:
            return
        about = f"worker {worker.plan.name} is no longer watched: {task.exception()!r}"
        log.error("%s", about, exc_info=task.exception())
        if worker.process is not None:
            worker.process.kill()
        worker.state, worker.num_failed_starts = "restarting", MAX_FAILED_STARTS
        if self._started is not None and not self._started.done():
            self._started.set_exception(WorkerFailed(about))
        else:
            self._on_lost(worker.plan.name, about)

    async def _respawn(self, worker: WorkerState) -> None:
        """Start the process again after a growing pause; try until it runs."""
        is_told = False
        while True:
            await self._pause(worker)
            if self._is_stopping:
                return
            try:
                self._spawn(worker)
            except OSError as error:
                cause = f"no process for it: {error.strerror}"
                if error.errno not in _SHORTAGES:
                    worker.num_short_lives += 1
                    worker.pause_s = _backoff_s(worker.num_short_lives)
                    self._note_failed_start(worker, cause)
                    continue
                if not is_told:
                    log.error("worker %s waits to be restarted: %s", worker.plan.name, cause)
                worker.pause_s, is_told = SHORTAGE_PAUSE_S, True
            else:
                worker.num_restarts += 1
                return

    async def _pause(self, worker: WorkerState) -> None:
        """Pause before a restart; briefly while no other worker serves."""
        began_s = time.monotonic()
        while not self._is_stopping:
            is_served = any(each.state == "ready" for each in self.workers.values())
            most_s = math.inf if is_served or self.is_lost else ALONE_BACKOFF_S
            left_s = began_s + min(worker.pause_s, most_s) - time.monotonic()
            if left_s <= 0:
                return
            await asyncio.sleep(min(left_s, BACKOFF_CHECK_S))

    def _note_failed_start(self, worker: WorkerState, cause: str) -> None:
        worker.num_failed_starts += 1
        about = f"worker {worker.plan.name} could not be restarted: {cause}"
        if isinstance(worker.failure, WorkerUnfit):
            worker.num_failed_starts = MAX_FAILED_STARTS
            about += f"; not tried again: {worker.failure.hint}"
        log.error("%s", about)
        if worker.num_failed_starts == MAX_FAILED_STARTS:
            self._on_lost(worker.plan.name, about)

    async def _live(self, worker: WorkerState) -> None:
        """Read one process's messages until its channel ends."""
        assert worker.socket is not None
        channel = worker.channel = await DaemonChannel.open(worker.socket)
        weights = worker.setup.weights
        if weights is not None and self.is_started:
            weights = msgspec.structs.replace(weights, is_filled=True)
        measures_kv = worker.setup.measures_kv and not self.is_started
        setup = msgspec.structs.replace(worker.setup, weights=weights, measures_kv=measures_kv)
        channel.send(setup)
        worker.ready_at_s, worker.has_stepped = None, False
        stop_watching = self._watch_others(worker)
        try:
            while True:
                report = await channel.receive()
                worker.num_reports += 1
                match report:
                    case LoadingProgress(loaded_bytes, total_bytes):
                        worker.loaded_bytes, worker.total_bytes = loaded_bytes, total_bytes
                        self._log_progress()
                    case WeightsLoaded():
                        self._weights_loaded(worker)
                    case PoolMade(num_blocks, memory):
                        self._pool_made(worker, num_blocks, memory)
                        self._on_report(worker.plan.name, report)
                    case Ready():
                        worker.state, worker.ready = "ready", report
                        worker.weights_loss = report.weights_loss or worker.weights_loss
                        worker.kv_loss = report.kv_loss or worker.kv_loss
                        worker.num_failed_starts = 0
                        worker.ready_at_s = time.monotonic()
                        self._keep_findings(worker, report)
                        self._ready(worker)
                    case Unmapped(pool):
                        self._peers.unmapped(worker.plan.name, pool)
                    case Failed(what, where, hint, is_lasting):
                        kind = WorkerUnfit if is_lasting else WorkerFailed
                        worker.failure = kind(what, where=where or worker.plan.name, hint=hint)
                    case _:
                        if not worker.has_stepped:
                            worker.has_stepped = _has_ended_well(report)
                        self._on_report(worker.plan.name, report)
        except ChannelClosed as error:
            if isinstance(error, ChannelGarbled):
                worker.failure = WorkerFailed(error.what)
            worker.channel = None
            channel.close()
        finally:
            stop_watching()

    def _watch_others(self, worker: WorkerState) -> Callable[[], None]:
        """Watch a group's processes besides the first; return what ends the watch."""
        watches = ExitStack()
        for rank, process in enumerate(worker.others, 1):
            ended = functools.partial(self._other_ended, worker, rank)
            watches.callback(when_ended(process, ended))
        return watches.close

    def _other_ended(self, worker: WorkerState, rank: int) -> None:
        """End a group of which one process has ended: the first may wait for it for ever."""
        first, code = worker.process, worker.others[rank - 1].wait()
        if first is None or code == 0 or self._is_stopping:  # it exits so after the first
            return
        worker.failure = WorkerFailed(f"its process {rank} ended: {_describe_exit(code)}")
        if code < 0:
            first.kill()
        else:  # by an error, which it has told
            asyncio.get_running_loop().call_later(TELLING_S, first.kill)

    def _log_progress(self) -> None:
        """Print a line every PROGRESS_S of a long load, and one at its end."""
        loaded, total = weights_progress(self.workers.values())
        is_known = all(w.total_bytes for w in self.workers.values())
        now_s = time.monotonic()
        is_due = loaded == total or now_s - self._logged_at_s >= PROGRESS_S
        if self.is_started or self._has_told_loaded or not is_known or not is_due:
            return
        self._logged_at_s = now_s
        if loaded < total:
            self._has_told_loading = True
            log.info("loading weights: %s", part_text(loaded, total))
        else:
            self._has_told_loaded = True
            took_s = now_s - self._loading_since_s
            if self._has_told_loading:  # the model is a small one else
                log.info("loaded %s of weights in %.1f s", size_text(total), took_s)

    def _weights_loaded(self, worker: WorkerState) -> None:
        """Let workers continue once every share of the weights is loaded."""
        was_complete = all(w.has_loaded for w in self.workers.values())
        worker.has_loaded = True
        if was_complete:
            self._weights_complete(worker.plan.name)
        elif all(w.has_loaded for w in self.workers.values()):
            for name in self.workers:
                self._weights_complete(name)

    def _weights_complete(self, name: str) -> None:
        self.send(name, WeightsComplete())
        self._sharing.on_weights_complete(name)
        self._peers.on_weights_complete(name)

    def _pool_made(self, worker: WorkerState, num_blocks: int, memory: SharedMemory | None) -> None:
        """Fix the pool's size for this and later lives of the worker."""
        gpu, pool = worker.setup.gpu, worker.setup.pool
        assert gpu is not None, "pools on cores are the daemon's"
        worker.setup = msgspec.structs.replace(
            worker.setup,
            pool=msgspec.structs.replace(pool, num_blocks=num_blocks),
            gpu=msgspec.structs.replace(gpu, min_blocks=num_blocks),
        )
        self._sharing.exported(memory)
        self._peers.made(worker.plan.name, memory)

    def _keep_findings(self, worker: WorkerState, ready: Ready) -> None:
        """Spare the worker's later lives the timing of steps, and the self-test."""
        gpu = worker.setup.gpu
        if gpu is not None:
            proofs = gpu.proofs if ready.proof is None else [ready.proof]
            tokens = ready.max_num_batched_tokens
            gpu = msgspec.structs.replace(gpu, step_tokens=tokens, proofs=proofs)
            worker.setup = msgspec.structs.replace(worker.setup, gpu=gpu)

    def end_hung(self, name: str, about: str) -> None:
        """Kill a hung worker; it is restarted like any dead one."""
        worker = self.workers[name]
        if worker.state in ("ready", "loading") and worker.process is not None:
            where = name if worker.state == "loading" else ""  # otherwise its reader adds the name
            worker.failure = WorkerFailed(about, where=where)
            worker.process.kill()

    async def _end_dependents(self, worker: WorkerState) -> None:
        """End the workers that depend on a dead worker's memory or GPU state.

        All of them have ended before one restarts.
        """
        name = worker.plan.name
        ending = dict.fromkeys(self._sharing.ended(name), f"it used the memory of worker {name}")
        for neighbour in self._mps_clients_hurt_by(worker):
            ending.setdefault(neighbour, f"worker {name} was killed on the GPU that MPS shares")
        for dependent, about in ending.items():
            other = self.workers[dependent]
            if other.process is not None:
                other.failure = WorkerFailed(about)
                other.process.kill()
                await other.is_reaped.wait()
        for dependent in await self._peers.ended(name):
            self.end_hung(dependent, f"it mapped memory of worker {name}, which died")

    def _mps_clients_hurt_by(self, worker: WorkerState) -> list[str]:
        """Name the workers that MPS leaves in an undefined state when this one was killed.

        NVIDIA promises nothing for a server and its clients after a client died with work running.
        A worker that exits by itself has waited for its work.
        """
        code = None if worker.process is None else worker.process.poll()
        gpu = worker.setup.gpu
        if gpu is None or not worker.uses_mps or code is None or code >= 0:
            return []
        return [
            name
            for name, other in self.workers.items()
            if other is not worker and other.setup.gpu and other.setup.gpu.uuid == gpu.uuid
        ]

    def _ready(self, worker: WorkerState) -> None:
        self._on_ready(worker.plan.name)
        all_ready = all(w.state == "ready" for w in self.workers.values())
        if all_ready and self._started is not None and not self._started.done():
            self._started.set_result(None)

    async def _reap(self, worker: WorkerState) -> None:
        """Wait for the process to end after its channel has, and tell the daemon.

        Until it ends, a copy that it began may still write another worker's blocks, so its commands
        stay open.
        """
        assert worker.process is not None
        was_ready = worker.state == "ready"
        code = await _ended(worker.process, EXIT_GRACE_S)  # later it cannot be heard any more
        for process in worker.others:
            await _ended(process, 0.0)
        worker.state = "restarting"
        cause = str(worker.failure) if worker.failure else _describe_exit(code)
        about = f"worker {worker.plan.name} (pid {worker.pid}) died: {cause}"
        if worker.setup.gpu is not None:
            remove_counters(worker.process.pid)
        worker.pid = None
        if was_ready:
            self._on_died(worker.plan.name, about)
        elif self.is_started:
            self._note_failed_start(worker, cause)
        worker.is_reaped.set()
        self._spare.refill()  # its channel's descriptor is free

    def _died_early(self, worker: WorkerState) -> WorkerFailed:
        code = worker.process.poll() if worker.process is not None else None
        return WorkerFailed(
            f"the worker ended while loading ({_describe_exit(code)})",
            where=worker.plan.name,
            hint="see its output above; the kernel log shows out-of-memory kills",
        )


async def _ended(process: subprocess.Popen[bytes], grace_s: float) -> int:
    """Wait for a process's exit code; kill it when the time is over.

    It can take long even then: a thread waits, not the loop.
    """
    try:
        return await asyncio.to_thread(process.wait, grace_s)
    except subprocess.TimeoutExpired:
        process.kill()
        return await asyncio.to_thread(process.wait)


def _opened(command: list[str], fds: list[int], env: dict[str, str]) -> subprocess.Popen[bytes]:
    # Ctrl-C goes to the whole group, and the worker ignores it only once Python is up.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return subprocess.Popen(
            command,
            pass_fds=fds,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno(),
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@contextmanager
def _new_beats(worker: WorkerState) -> Iterator[int | None]:
    """Make the counter of a worker's next process, to be inherited; None: on a GPU it has none."""
    if worker.setup.gpu is not None:
        yield None
        return
    fd = beats.new_fd()
    try:
        worker.beats = beats.Beats(fd)
        yield fd
    finally:
        os.close(fd)


def _has_ended_well(report: Report) -> bool:
    """Say whether a report's step computed valid numbers for all its sequences."""
    if not isinstance(report, Stepped) or not any(e.num_scheduled_tokens for e in report.entries):
        return False
    return not any(entry.is_fault for entry in report.entries)


def _backoff_s(num_short_lives: int) -> float:
    """Return the pause before a restart; none after a stable life or the first short one."""
    place = min(max(num_short_lives - 1, 0), len(RESTART_BACKOFF_S) - 1)
    return RESTART_BACKOFF_S[place]


def _describe_exit(code: int | None) -> str:
    if code is not None and code < 0:
        return f"killed by {signal_name(-code)}"
    return f"exit code {code}"
