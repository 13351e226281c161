"""Run the daemon's own code on a simulated machine: its loop, sockets and log are real.

Its workers are simulated, time is virtual, and what would be a thread is an event.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import json
import os
import random
import secrets
import signal
import socket
import sqlite3
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import appliance.daemon.process.disk_reads
import appliance.daemon.start
import appliance.daemon.survival.keeper_channel
import appliance.fleet.supervisor
import engine.scheduler.offload.disk
from appliance.api.core import fair_threads
from appliance.configuration.settings import ServeConfig
from appliance.http.access import AccessPolicy
from appliance.observe.telemetry import deadlines
from appliance.observe.telemetry.thread_times import ThreadTime
from engine.errors import InvariantViolated
from engine.reader.jobs import JOBS
from engine.scheduler.cache.topology import PREFILL
from engine.scheduler.offload import slab_files
from engine.scheduler.router import Router
from engine.scheduler.routing.worker_routes import MAX_FAILED_COPIES, MIN_CHUNK_TOKENS
from engine.text.encoder import Encoder
from engine.text.reading import READER
from engine.text.tokenizer import Tokenizer, TokenizerFiles
from tests.sweep.keeper import Keeper
from tests.sweep.virtual_loop import PROCESS, Process, VirtualLoop, virtual_time
from tests.worlds.simulated_worker import ChildProcess, spawner, when_ended

DISK_FAULTS = ("EIO", "ENOSPC", "flipped", "torn")
DAEMON, WORKERS = "daemon", "workers"
RESTART_S, RETRY_S = 0.1, 0.02
LONGEST_RETRY_S = 5.0
LOADING, BUSY = 503, 429
"""After a long stop the queue seems slow, and the daemon asks new requests to come again."""
DEFAULTS = {
    "ssd_cache": "off",
    "model_aliases": ("any",),
    "max_model_len": 1024,
    "speculate": 0,
    "kv_memory_bytes": 4 << 20,
}
PAGE_BYTES, FIRST_BYTES = 4096, 512
LONGEST_S = 300.0
"""Virtual time after which everything must have ended."""


Row = tuple[str, int, int, str]


@dataclass(slots=True)
class Reply:
    """What a client got."""

    status: int = 0
    head: bytes = b""
    body: bytes = b""
    is_whole: bool = False


@dataclass(slots=True)
class Call:
    """What a client sends, and how it reads the reply."""

    name: str
    path: str
    body: dict[str, Any]
    at_s: float = 0.0
    hangs_up_after: int | None = None
    """Bytes of the reply after which it is gone; None: it reads to the end."""
    pause_s: float = 0.0
    """Before each read: a slow reader."""
    after: str | None = None
    """The call whose reply it waits for."""


@dataclass(slots=True)
class Outcome:
    """All that is to be seen of a run from outside, and what was found inside."""

    replies: dict[str, Reply] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    """Of the log: endpoint, status, output tokens, finish reason."""
    facts: list[dict[str, int]] = field(default_factory=list)
    """Of each row what scenarios are made for, such as preemptions."""
    num_at_ready: int = 0
    """Events before all workers were ready: a worker that dies before is the end of a start."""
    num_events: int = 0
    num_started: int = 0
    """Workers ever started."""
    problems: list[str] = field(default_factory=list)

    def has_shown(self, what: str | None) -> bool:
        """Say whether some row counts one of these."""
        return what is None or any(facts[what] for facts in self.facts)


class Machine:
    """One machine with one daemon.

    Args:
        models: folders of checkpoints, of which tokenizer and shape are read: the first one's,
            and the others' by name.
        folder: for socket, log and state.
        seed: of the order of events.
        options: settings of the daemon.
        on_event: called before each event, with this machine, its number and whose it is.
    """

    def __init__(
        self,
        models: list[Path],
        folder: Path,
        seed: int,
        options: dict[str, Any],
        on_event: Callable[[Machine, int, Process], None] = lambda *_: None,
    ) -> None:
        self.folder, self.workers = folder, list[ChildProcess]()
        self.loop = VirtualLoop(
            seed, lambda number, process: on_event(self, number, process), self._look_inside
        )
        first, *others = (
            ServeConfig(model=model, socket=folder / "s", state_dir=folder, **DEFAULTS | options)
            for model in models
        )
        self.config = replace(first, models={str(each.model.name): each for each in others})
        self._random = random.Random(seed)
        self.problems: list[str] = []
        self.daemon: Any = None
        self.num_at_ready = 0
        self.is_checked = True
        """Whether invariants are checked after every event."""
        self._seen = set[tuple[int, int, int]]()
        """Admissions by router, sequence and generation."""
        self._disk_fault = ""
        self._files_before = set(map(int, os.listdir("/proc/self/fd")))
        self._clients: set[socket.socket] = set()
        self._booting: asyncio.Task[None] | None = None
        self._keeper = Keeper()
        self._lives: list[Process] = []
        """All lives of the daemon: what a killed one held stays held."""
        self._is_stopping = False

    def run(self, calls: list[Call]) -> Outcome:
        """Start, serve all calls, stop."""
        with contextlib.closing(self.loop), self._patched(), virtual_time(self.loop):
            try:
                replies = self.loop.run_until_complete(self._serve(calls))
            finally:
                self._end_log()
        rows, facts, endings = self._logged()
        num_killed = len(self._lives) - 1
        if left := self._keeper.names:
            self.problems.append(f"the keeper still has {left}")
        if endings != ["crash"] * num_killed + ["clean"]:
            self.problems.append(f"{num_killed} daemons were killed, and the runs ended {endings}")
        counts = self.num_at_ready, self.loop.num_events, len(self.workers)
        return Outcome(replies, rows, facts, *counts, self.problems)

    def _end_log(self) -> None:
        """End a failed run's log: a fork while its thread works leaves SQLite locked."""
        log = getattr(self.daemon, "_request_log", None)
        if log is not None:
            log.close()

    def suffer(self, what: str) -> bool:
        """Let something fail: see Fault. False: there is nothing to fail."""
        self.is_checked = True
        if what in DISK_FAULTS:
            self._disk_fault = what
            return True
        if what == DAEMON:
            return self.kill_daemon()
        if what == WORKERS:
            return sum(map(self.suffer, sorted({worker.name for worker in self.workers}))) > 0
        name, _, num_beats = what.partition("~")
        if num_beats:
            return self._starve(name, int(num_beats))
        name, _, stop_s = what.partition(":")
        if name == DAEMON and (self._booting is not None or self._is_stopping):
            return False
        for process in (self._lives[-1], *reversed(self.workers)):
            if process.name == name and not process.is_dead:
                self.loop.stop_process(process, float(stop_s)) if stop_s else process.kill()
                return True
        return False

    def _starve(self, name: str, num_beats: int) -> bool:
        for worker in reversed(self.workers):
            if worker.name == name and not worker.is_dead:
                worker.starve(num_beats)
                return True
        return False

    @contextlib.contextmanager
    def _patched(self) -> Iterator[None]:
        processes = SimpleNamespace(
            Popen=spawner(self.loop, self._may_write, self.workers),
            DEVNULL=subprocess.DEVNULL,
            TimeoutExpired=subprocess.TimeoutExpired,
        )
        drawn = self._random
        with (
            mock.patch.object(appliance.fleet.supervisor, "subprocess", processes),
            mock.patch.object(appliance.fleet.supervisor, "when_ended", when_ended),
            mock.patch.object(
                appliance.daemon.process.disk_reads, "start_new_thread", lambda run, _: run()
            ),
            mock.patch.object(deadlines, "times_of", self._times_of),
            mock.patch.object(appliance.daemon.start, "standing_threads", _unused_threads),
            mock.patch.object(fair_threads, "standing_threads", _unused_threads),
            mock.patch.object(engine.scheduler.offload.disk, "Thread", _Never),
            mock.patch.object(
                engine.scheduler.offload.disk.Disk,
                "begin",
                lambda disk, job: self._begin(disk, job),
            ),
            mock.patch.object(slab_files.Slabs, "write", self._failing(slab_files.Slabs.write)),
            mock.patch.object(slab_files.Slabs, "read", self._failing(slab_files.Slabs.read)),
            mock.patch.object(Tokenizer, "from_files", _built_tokenizer),
            mock.patch.object(READER, "read_model", lambda *job, kept: _read_model(*job)),
            mock.patch.object(READER, "read", self._read),
            mock.patch.object(READER, "tell", READER.tell),
            mock.patch.object(secrets, "token_hex", lambda n=16: drawn.randbytes(n).hex()),
            mock.patch.object(
                appliance.daemon.survival.keeper_channel,
                "_channel",
                return_value=self._keeper,
            ),
            mock.patch.object(secrets, "token_bytes", drawn.randbytes),
            mock.patch.object(secrets, "randbits", drawn.getrandbits),
            mock.patch.dict(
                os.environ, {"PENSTOCK_MEASURE": "0", "XDG_RUNTIME_DIR": str(self.folder)}
            ),
        ):
            yield

    def _times_of(self, pids: list[int]) -> dict[int, ThreadTime]:
        """Show a starved worker as waiting for a core; a stopped one waits for none."""
        is_starved = any(each.pid in pids and each.num_late_beats for each in self.workers)
        return {pids[0] if pids else 0: ThreadTime(is_starved, 0.0, 0.0)}

    def _failing(self, call: Callable[..., None]) -> Callable[..., None]:
        """Let the disk's next operation fail once a fault is wanted."""

        def called(slabs: Any, *args: Any) -> None:
            fault, self._disk_fault = self._disk_fault, ""
            if fault in ("EIO", "ENOSPC"):
                number = getattr(errno, fault)
                raise OSError(number, os.strerror(number))
            call(slabs, *args)
            if fault:
                for path in slabs.folder.iterdir():
                    _damage(path, self._random, is_torn=fault == "torn")

        return called

    def _read(self, job: str, *args: Any) -> str:
        """Do a job of the reader here; the daemon may be killed just before, amid preparing."""
        process = PROCESS.get()
        is_prepared = process is not None and job != "takes_tools"  # which a model is asked once
        if is_prepared and not self.loop.count(process):
            raise _Killed
        return JOBS[job](*args)

    def _begin(self, disk: Any, job: Any) -> None:
        """Do a job of a disk some time later, as one event."""
        buffer = slab_files.RecordBuffer(disk._slabs.block_bytes)
        delay_s = self.loop.random.uniform(2e-4, 5e-3)
        self.loop.call_later(delay_s, disk.run_job, job, buffer)

    async def _serve(self, calls: list[Call]) -> dict[str, Reply]:
        self.loop.set_exception_handler(self._failed)
        async with asyncio.timeout(LONGEST_S):
            await self._boot()
            self.num_at_ready = self.loop.num_events
            replies = {call.name: Reply() for call in calls}
            ended = {call.name: asyncio.Event() for call in calls}
            await asyncio.gather(*(self._call(call, replies, ended) for call in calls))
            while (booting := self._booting) is not None:
                await asyncio.wait({booting})
                if not booting.cancelled():  # else a later death has begun another
                    booting.result()
            await self._quiet()
            self._is_stopping = True
            self.daemon._on_signal(signal.SIGTERM)
            await self._running
        return replies

    async def _boot(self) -> None:
        """Start a daemon, and wait until it is ready."""
        self._lives.append(Process(DAEMON))
        policy = AccessPolicy.from_config(self.config)
        stacks_fd = os.dup(2)
        self.daemon = daemon = appliance.daemon.start._Daemon(
            self.config, lambda: self.config, None, self._keeper.pass_on(), stacks_fd
        )
        self._running = self._lives[-1].run(self.loop.create_task, daemon.run(policy))
        self._running.add_done_callback(lambda _: os.close(stacks_fd))
        while not daemon._is_ready:
            if self._running.done():
                self._running.result()
            await asyncio.sleep(0.01)
        self._booting = None

    def kill_daemon(self) -> bool:
        """End the daemon as SIGKILL does; another one starts soon. False: none is ready."""
        if self._is_stopping or (self._booting is not None and not self.daemon._is_ready):
            return False
        if self._booting is not None:  # it has only to notice that the daemon is ready
            self._booting.cancel()
        self._lives[-1].is_dead = True
        lost_log, path = self.daemon._request_log, str(self.config.log_path)
        lost_log._commit = lambda *_: threading.Event().wait()  # its thread is gone
        kept = self._files_before.union(*(worker.files for worker in self.workers))
        kept |= (
            self._keeper.files
            | {client.fileno() for client in self._clients}
            | {self.loop._csock.fileno()}
        )
        kept |= {self.loop._ssock.fileno(), -1}
        watched = self.loop._selector.get_map()
        nothing = os.open(os.devnull, os.O_RDWR)
        for fd in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError):
                if (
                    fd in kept
                    or fd == nothing
                    or os.readlink(f"/proc/self/fd/{fd}").startswith(path)
                ):
                    continue
                if fd in watched:
                    self.loop._selector.unregister(fd)
                os.dup2(nothing, fd)  # its number stays taken: objects that have it still live
        os.close(nothing)
        again = Context().run(self.loop.create_task, self._start_again())
        self._booting = again
        return True

    async def _start_again(self) -> None:
        await asyncio.sleep(RESTART_S)
        for worker in self.workers:  # as the keeper does
            worker.kill()
        await self._boot()

    def _look_inside(self) -> None:
        """Check the router's invariants."""
        router = getattr(self.daemon._served, "router", None)
        if not self.is_checked or router is None or self._lives[-1].is_dead or self.problems:
            return
        try:
            router.check_invariants()
            self._check_streams(router)
        except InvariantViolated as error:
            self.problems.append(f"event {self.loop.num_events}: {error}")

    def _check_streams(self, router: Router) -> None:
        """Raise InvariantViolated if a prompt came to streams although a prefill worker lives."""
        prefills, running = router.topology.playing(PREFILL), list(router.at.running.values())
        new = [one for one in running if (id(router), one.seq_id, one.generation) not in self._seen]
        self._seen.update((id(router), one.seq_id, one.generation) for one in new)
        if router.roles.ready_workers.isdisjoint(prefills) or router.roles.roles == "colocated":
            return
        for one in new:
            # Decode computes the token sampled last; what lies before it is prefill's.
            known = max(one.num_prompt_tokens, one.num_tokens - 1)
            num_left, worker = known - one.num_computed_tokens, one.worker
            is_let = worker in prefills or one.spares_streams_at == worker
            is_let |= one.is_on_probation  # workers died with it: no other one is risked
            is_let |= num_left <= MIN_CHUNK_TOKENS or one.num_failed_copies >= MAX_FAILED_COPIES
            if not is_let and any(s.worker == worker and s.output_token_ids for s in running):
                about = f"{num_left} prompt tokens came to the streams"
                raise InvariantViolated(about, where=str(worker))

    def _may_write(self, pool: str, block_id: int) -> bool:
        """Say whether no other request can find this block."""
        pools = self.daemon._served.router.ledger.pools
        return pool not in pools or block_id not in pools[pool].index

    async def _quiet(self) -> None:
        """Wait until nothing is held any more."""
        router = self.daemon._served.router
        service = self.daemon._service
        while not router.is_idle or service.not_ready_reason():  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        router.check_invariants()
        for name, pool in router.ledger.pools.items():
            if pool.num_free != pool.capacity:
                self.problems.append(f"{name}: {pool.capacity - pool.num_free} blocks are held")

    def _failed(self, _: Any, context: dict[str, Any]) -> None:
        self.problems.append(f"{context.get('message')}: {context.get('exception')!r}")

    async def _call(
        self, call: Call, replies: dict[str, Reply], ended: dict[str, asyncio.Event]
    ) -> None:
        if call.after is not None:
            await ended[call.after].wait()
        await asyncio.sleep(call.at_s)
        reply = replies[call.name]
        body = json.dumps(call.body).encode()
        head = f"POST {call.path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        wait_s = RETRY_S
        while not await self._ask(call, reply, head.encode() + body):
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, LONGEST_RETRY_S)
        ended[call.name].set()

    async def _ask(self, call: Call, reply: Reply, request: bytes) -> bool:
        """Send the request and read its reply; False: it is to ask again, as SDKs do."""
        client, said = socket.socket(socket.AF_UNIX), b""
        client.setblocking(False)
        self._clients.add(client)
        try:
            await self.loop.sock_connect(client, str(self.config.socket))
            await self.loop.sock_sendall(client, request)
            while part := await self.loop.sock_recv(client, 4096):
                said += part
                if call.hangs_up_after is not None and len(said) >= call.hangs_up_after:
                    break
                await asyncio.sleep(call.pause_s)
            else:
                reply.is_whole = True
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        except OSError:  # the daemon died
            reply.is_whole = False
        finally:
            self._clients.discard(client)
            client.close()
        reply.head, _, reply.body = said.partition(b"\r\n\r\n")
        reply.status = int(said.split()[1]) if said else 0
        # 0: a daemon died before it had accepted this
        return reply.status not in (0, LOADING, BUSY)

    def _logged(self) -> tuple[list[Row], list[dict[str, int]], list[str]]:
        """Read requests, what they counted, and how each of the daemon's runs ended."""
        with contextlib.closing(sqlite3.connect(self.config.log_path)) as db:
            db.row_factory = sqlite3.Row
            found = list(db.execute("SELECT * FROM requests ORDER BY id"))
            endings = [row["stop_reason"] for row in db.execute("SELECT * FROM runs")]
        facts = [{name: row[name] or 0 for name in _FACTS} for row in found]
        return [tuple(row[name] for name in _COLUMNS) for row in found], facts, endings


_COLUMNS = ("endpoint", "http_status", "completion_tokens", "finish_reason")
_FACTS = ("preemptions", "cached_tokens", "restored_tokens", "handoff_blocks")


@functools.cache
def _read_model(job: str, *args: Any) -> bytes:
    """Do a job on a model's files here."""
    read = JOBS[job](*args)
    assert isinstance(read, bytes)
    return read


_build_tokenizer, _built = Tokenizer.from_files, dict[Path, Tokenizer]()
"""Once per process: reading it takes longer than a run."""


def _built_tokenizer(files: TokenizerFiles, _encoder: Encoder) -> Tokenizer:
    """Return a tokenizer that has rendered nothing, as a new daemon's."""
    if files.where not in _built:
        _built[files.where] = _build_tokenizer(files)
    tokenizer = _built[files.where]
    if tokenizer.chat_template is not None:
        tokenizer.chat_template.known_forms.clear()
    return tokenizer


def _damage(path: Path, drawn: random.Random, *, is_torn: bool) -> None:
    """Flip a bit of every second page, or lose the rest of it; a slab's first page stays.

    In pages that begin a record this is in its head, or in its tokens, which lie behind that.
    """
    if not path.is_file():
        return
    with path.open("r+b") as file:
        for start in range(drawn.choice([1, 2]) * PAGE_BYTES, path.stat().st_size, 2 * PAGE_BYTES):
            file.seek(start)
            page = bytearray(file.read(PAGE_BYTES))
            at = drawn.randrange(FIRST_BYTES)
            if is_torn:
                page[at:] = bytes(len(page) - at)
            else:
                page[at] ^= 1
            file.seek(start)
            file.write(page)


def _unused_threads(*_: Any) -> ThreadPoolExecutor:
    """Return threads that never start, as the loop does their work."""
    return ThreadPoolExecutor(1)


class _Killed(BaseException):
    """Ends what a thread of a killed daemon was at."""


class _Never:
    """A thread that does nothing: its work comes as events."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.is_alive = lambda: False

    def start(self) -> None: ...

    def join(self, timeout: float) -> None: ...
