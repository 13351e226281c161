"""List the kinds of faults: each is a context in which something is wrong."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import resource
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from random import Random
from typing import NamedTuple

import msgspec

from engine.wire.channel import frame
from engine.wire.messages import Copied
from tests.benchmarks.hostile import Target, attack
from tests.faults.disks import briefly, flip
from tests.faults.questions import long_body
from tests.faults.subject import Subject
from tests.faults.wire import Manner, ask, reset

_PIDFD_GETFD = 438
"""The number of the system call, on x86-64 and on ARM."""
PIDS = Path("/sys/fs/cgroup/pids")

Hurt = Callable[[Subject, Random], AbstractContextManager[None]]


class Kind(NamedTuple):
    """A fault and what it touches: two at once touch different things."""

    name: str
    touches: str
    hurt: Hurt
    is_possible: Callable[[Subject], bool]


KINDS: list[Kind] = []


def kind(
    touches: str, is_possible: Callable[[Subject], bool] = lambda _: True
) -> Callable[[Callable[[Subject, Random], Iterator[None]]], Hurt]:
    """Add a generator function to the list, by its name."""

    def add(function: Callable[[Subject, Random], Iterator[None]]) -> Hurt:
        hurt = contextlib.contextmanager(function)
        KINDS.append(Kind(function.__name__.replace("_", " "), touches, hurt, is_possible))
        return hurt

    return add


def _signal(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, number)


# processes


@kind("worker")
def kill_a_worker(subject: Subject, rng: Random) -> Iterator[None]:
    if pids := subject.worker_pids(ready_only=True):
        _signal([rng.choice(pids)], signal.SIGKILL)
    yield


@kind("worker")
def kill_all_workers(subject: Subject, rng: Random) -> Iterator[None]:
    _signal(subject.worker_pids(), signal.SIGKILL)
    yield


@kind("worker")
def crash_a_worker(subject: Subject, rng: Random) -> Iterator[None]:
    if pids := subject.worker_pids(ready_only=True):
        _signal([rng.choice(pids)], rng.choice([signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS]))
    yield


@kind("worker")
def kill_a_worker_at_a_handoff(subject: Subject, rng: Random) -> Iterator[None]:
    deadline = time.monotonic() + 2.0
    while time.monotonic() < deadline:
        frame = subject.frame()
        if frame is None or frame["queue"]["handing_off"]:
            break
    yield from kill_a_worker.__wrapped__(subject, rng)  # type: ignore[attr-defined]


@kind("worker")
def kill_a_loading_worker_twice(subject: Subject, rng: Random) -> Iterator[None]:
    for _ in range(3):
        if pids := subject.worker_pids():
            _signal([max(pids)], signal.SIGKILL)
        time.sleep(rng.uniform(0.1, 0.6))
    yield


@kind("worker")
def stop_a_worker(subject: Subject, rng: Random) -> Iterator[None]:
    pids = subject.worker_pids()
    pids = [rng.choice(pids)] if pids else []
    _signal(pids, signal.SIGSTOP)
    try:
        yield
    finally:
        _signal(pids, signal.SIGCONT)


@kind("worker")
def stop_all_workers(subject: Subject, rng: Random) -> Iterator[None]:
    pids = subject.worker_pids()
    _signal(pids, signal.SIGSTOP)
    try:
        yield
    finally:
        _signal(pids, signal.SIGCONT)


@kind("daemon")
def stop_the_daemon(subject: Subject, rng: Random) -> Iterator[None]:
    pids = [subject.daemon.pid]
    _signal(pids, signal.SIGSTOP)
    try:
        yield
    finally:
        _signal(pids, signal.SIGCONT)


@kind("daemon")
def kill_the_daemon_and_its_keeper(subject: Subject, rng: Random) -> Iterator[None]:
    subject.kill()
    yield


@kind("daemon")
def kill_the_daemon_under_its_keeper(subject: Subject, rng: Random) -> Iterator[None]:
    subject.end_under_its_keeper(signal.SIGKILL)
    yield


@kind("daemon")
def restart_the_daemon_on_purpose(subject: Subject, rng: Random) -> Iterator[None]:
    subject.end_under_its_keeper(signal.SIGUSR2)
    yield


@kind("daemon")
def kill_the_daemon_and_the_next(subject: Subject, rng: Random) -> Iterator[None]:
    subject.kill(again=True)
    yield


@kind("daemon")
def restart_the_daemon(subject: Subject, rng: Random) -> Iterator[None]:
    subject.restart()
    yield


@kind("machine")
def busy_cores(subject: Subject, rng: Random) -> Iterator[None]:
    command = [sys.executable, "-c", "while True: pass"]
    hogs = [subprocess.Popen(command) for _ in range(2)]
    try:
        yield
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()


# operators


@kind("daemon")
def drain_and_resume(subject: Subject, rng: Random) -> Iterator[None]:
    subject.tell("/v1/penstock/drain")
    try:
        yield
    finally:
        subject.tell_later("/v1/penstock/resume")


@kind("operator")
def many_reloads(subject: Subject, rng: Random) -> Iterator[None]:
    for _ in range(20):
        _signal([subject.daemon.pid], signal.SIGHUP)
        time.sleep(0.02)
    yield


@kind("operator")
def many_role_changes(subject: Subject, rng: Random) -> Iterator[None]:
    before = (subject.frame() or {"roles": "elastic"})["roles"]
    for _ in range(10):
        roles = rng.choice(["elastic", "static", "colocated"])
        change = {"roles": roles, "slo_ttft_ms": rng.choice([0, 50000])}
        if not subject.tell("/v1/penstock/roles", change):
            break  # it is stopped, and its keeper would end it before the last one
    try:
        yield
    finally:
        subject.tell_later("/v1/penstock/roles", {"roles": before, "slo_ttft_ms": 0})


@kind("operator")
def many_readers_of_the_log(subject: Subject, rng: Random) -> Iterator[None]:
    paths = ["log?limit=1000", "usage", "events?limit=1000", "recording", "stream", "state"]
    with ThreadPoolExecutor(12) as pool:
        for _ in range(24):
            manner = Manner(leaves_after=rng.choice([0, 2000, 200_000]))
            path = f"/v1/penstock/{rng.choice(paths)}"
            pool.submit(ask, subject.door, path, method="GET", manner=manner, silence_s=4.0)
    yield


@kind("operator")
def a_bundle(subject: Subject, rng: Random) -> Iterator[None]:
    write_bundle(subject, subject.folder / f"bundle-{rng.randrange(10**6)}.tar.gz")
    yield


def write_bundle(subject: Subject, path: Path) -> None:
    """Write what a report of a problem needs."""
    command = [sys.executable, "-m", "appliance.cli", "doctor", "--bundle", str(path)]
    command += ["--host", str(subject.daemon.socket)]
    with contextlib.suppress(subprocess.TimeoutExpired):
        env = subject.daemon.env | {"PENSTOCK_STATE_DIR": str(subject.state.folder)}
        subprocess.run(command, env=env, capture_output=True, timeout=60, check=False)


# clients


def _stream_and_leave(subject: Subject, seed: int) -> None:
    rng = Random(seed)
    manner = Manner(leaves_after=rng.choice([0, 0, 300, 3000]))
    body = long_body(rng, num_facts=rng.choice([5, 60]))
    ask(rng.choice(subject.doors), "/v1/completions", body, manner=manner, silence_s=10.0)


@kind("clients")
def a_storm_of_disconnects(subject: Subject, rng: Random) -> Iterator[None]:
    with ThreadPoolExecutor(24) as pool:
        for _ in range(48):
            pool.submit(_stream_and_leave, subject, rng.getrandbits(32))
    yield


@kind("clients")
def a_full_pool_that_is_cancelled(subject: Subject, rng: Random) -> Iterator[None]:
    rids = [f"fill-{rng.getrandbits(48)}" for _ in range(16)]
    with ThreadPoolExecutor(16) as pool:
        for rid in rids:
            body = long_body(rng)
            pool.submit(ask, subject.door, "/v1/completions", body, rid=rid, silence_s=10.0)
        time.sleep(rng.uniform(0.2, 2.0))
        live = ask(subject.door, "/v1/requests", method="GET", silence_s=8.0)
        rows = live.json()["data"] if live.status == 200 and live.is_whole else []
        # the ids are the daemon's; those with so many tokens to come are only these
        for row in rows:
            if row["phase"] != "finished" and row["max_tokens"] == 400:
                subject.tell(f"/v1/requests/{row['id']}/cancel")
    yield


@kind("clients")
def readers_that_do_not_read(subject: Subject, rng: Random) -> Iterator[None]:
    with _held() as opened:
        for _ in range(12):
            with contextlib.suppress(OSError):
                connection = subject.door.connect()
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
                opened.append(connection)
                body = long_body(rng, num_facts=3)
                connection.sendall(subject.door.request("POST", "/v1/completions", body, None))
        yield


@kind("clients")
def senders_that_hesitate(subject: Subject, rng: Random) -> Iterator[None]:
    with _held() as opened:
        for _ in range(40):
            door = rng.choice(subject.doors)
            with contextlib.suppress(OSError):
                opened.append(connection := door.connect())
                data = door.request("POST", "/v1/completions", long_body(rng), None)
                connection.sendall(data[: rng.randrange(len(data))])
        yield


@kind("clients")
def many_idle_connections(subject: Subject, rng: Random) -> Iterator[None]:
    with _held() as opened:
        for _ in range(200):
            with contextlib.suppress(OSError):
                opened.append(rng.choice(subject.doors).connect(2.0))
        yield


@contextlib.contextmanager
def _held() -> Iterator[list[socket.socket]]:
    """Keep connections open, and reset them at the end."""
    opened: list[socket.socket] = []
    try:
        yield opened
    finally:
        for connection in opened:
            reset(connection)


@kind("clients")
def garbage_at_both_doors(subject: Subject, rng: Random) -> Iterator[None]:
    head = f"Host: localhost\r\nAuthorization: Bearer {subject.tcp.key}\r\n"
    targets = [Target(str(subject.door.address), "Host: localhost\r\n")]
    targets.append(Target(subject.tcp.address, head))  # type: ignore[arg-type]

    async def send() -> None:
        seeds = [rng.getrandbits(64) for _ in range(60)]
        attacks = (attack(own := Random(seed), own.choice(targets)) for seed in seeds)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(15):
                await asyncio.gather(*attacks)

    asyncio.run(send())
    yield


# what is between daemon and worker


def _can_take_descriptors(_: Subject) -> bool:
    return os.geteuid() == 0 and hasattr(os, "pidfd_open")


@kind("worker", _can_take_descriptors)
def garbage_from_a_worker(subject: Subject, rng: Random) -> Iterator[None]:
    if pids := subject.worker_pids(ready_only=True):
        with contextlib.suppress(OSError, ValueError, IndexError), _channel(rng.choice(pids)) as fd:
            os.write(fd, rng.randbytes(rng.choice([1, 4, 60, 3000])))
    yield


@kind("worker", _can_take_descriptors)
def a_flipped_bit_in_a_message(subject: Subject, rng: Random) -> Iterator[None]:
    message = bytearray(frame(msgspec.msgpack.encode(Copied(1, 1, 1, 1, 1, is_last=True))))
    message[-1 - rng.randrange(20)] ^= 1 << rng.randrange(8)
    if pids := subject.worker_pids(ready_only=True):
        with contextlib.suppress(OSError, ValueError, IndexError), _channel(rng.choice(pids)) as fd:
            os.write(fd, message)
    yield


@contextlib.contextmanager
def _channel(pid: int) -> Iterator[int]:
    """Open a worker's end of its channel in this process."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    target = int(words[words.index(b"--channel-fd") + 1])
    process = os.pidfd_open(pid)
    try:
        fd = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, process, target, 0)
        if fd < 0:
            raise OSError(ctypes.get_errno(), "pidfd_getfd")
    finally:
        os.close(process)
    try:
        yield fd
    finally:
        os.close(fd)


# disks


def _has_disks(subject: Subject) -> bool:
    return subject.ssd.is_ours and subject.state.is_ours


def _can_freeze(subject: Subject) -> bool:
    return subject.ssd.kind == subject.state.kind == "ext4"


@kind("ssd", _has_disks)
def ssd_full(subject: Subject, rng: Random) -> Iterator[None]:
    with briefly(subject.ssd.full()):
        yield


@kind("ssd", _has_disks)
def ssd_read_only(subject: Subject, rng: Random) -> Iterator[None]:
    with briefly(subject.ssd.read_only()):
        yield


@kind("ssd", _can_freeze)
def ssd_stalled(subject: Subject, rng: Random) -> Iterator[None]:
    with briefly(subject.ssd.stalled()):
        yield


@kind("ssd")
def ssd_deleted(subject: Subject, rng: Random) -> Iterator[None]:
    for path in subject.ssd.files():
        path.unlink(missing_ok=True)
    yield


@kind("ssd")
def ssd_truncated(subject: Subject, rng: Random) -> Iterator[None]:
    for path in subject.ssd.files():
        with contextlib.suppress(OSError):
            os.truncate(path, rng.randrange(1 + path.stat().st_size))
    yield


@kind("ssd")
def ssd_flipped(subject: Subject, rng: Random) -> Iterator[None]:
    for path in subject.ssd.files():
        flip(path, rng, 200)
    yield


@kind("log", _has_disks)
def log_full(subject: Subject, rng: Random) -> Iterator[None]:
    with subject.rows_may_be_lost(only_by_a_kill=True), briefly(subject.state.full()):
        yield


@kind("log", _has_disks)
def log_read_only(subject: Subject, rng: Random) -> Iterator[None]:
    with subject.rows_may_be_lost(only_by_a_kill=True), briefly(subject.state.read_only()):
        yield


@kind("log", _can_freeze)
def log_stalled(subject: Subject, rng: Random) -> Iterator[None]:
    with briefly(subject.state.stalled()):
        yield


@kind("log")
def log_locked(subject: Subject, rng: Random) -> Iterator[None]:
    with subject.rows_may_be_lost(only_by_a_kill=True), briefly(_locked(subject.log_path)):
        yield


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    db = sqlite3.connect(path, isolation_level=None, timeout=5, check_same_thread=False)
    try:
        with contextlib.suppress(sqlite3.Error):
            db.execute("BEGIN IMMEDIATE")
        yield
    finally:
        db.close()


@kind("log")
def log_deleted(subject: Subject, rng: Random) -> Iterator[None]:
    with subject.rows_may_be_lost(only_by_a_kill=True):
        subject.move_log()
        yield


@kind("log")
def log_flipped(subject: Subject, rng: Random) -> Iterator[None]:
    with subject.rows_may_be_lost():
        subject.copy_log()
        flip(subject.log_path, rng, 300)
        yield


# limits


@contextlib.contextmanager
def _limited(pid: int, number: int, soft: int) -> Iterator[None]:
    try:
        before = resource.prlimit(pid, number)
        resource.prlimit(pid, number, (soft, before[1]))
    except (OSError, ValueError):
        yield
        return
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            resource.prlimit(pid, number, before)


def _num_fds(pid: int) -> int:
    with contextlib.suppress(OSError):
        return max((int(path.name) for path in Path(f"/proc/{pid}/fd").iterdir()), default=0) + 1
    return 1


@kind("limits")
def no_descriptors(subject: Subject, rng: Random) -> Iterator[None]:
    pid = subject.daemon.pid
    with _limited(pid, resource.RLIMIT_NOFILE, _num_fds(pid) + rng.randrange(3)):
        yield


@kind("limits")
def no_descriptors_at_workers(subject: Subject, rng: Random) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for pid in subject.worker_pids():
            stack.enter_context(_limited(pid, resource.RLIMIT_NOFILE, _num_fds(pid)))
        yield


def _address_space(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
    return 1 << 40


@kind("limits")
def no_memory_at_workers(subject: Subject, rng: Random) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for pid in subject.worker_pids():
            room = _address_space(pid) + rng.choice([0, 1 << 20, 8 << 20])
            stack.enter_context(_limited(pid, resource.RLIMIT_AS, room))
        yield


@kind("limits")
def no_memory_at_the_daemon(subject: Subject, rng: Random) -> Iterator[None]:
    pid = subject.daemon.pid
    subject.may_end += 1
    try:
        room = _address_space(pid) + rng.choice([1 << 20, 8 << 20])
        with _limited(pid, resource.RLIMIT_AS, room):
            yield
    finally:
        subject.may_end -= 1


def _can_limit_threads(_: Subject) -> bool:
    return os.access(PIDS, os.W_OK) and os.geteuid() == 0


@kind("limits", _can_limit_threads)
def no_threads(subject: Subject, rng: Random) -> Iterator[None]:
    group = PIDS / f"faults-{os.getpid()}-{threading.get_ident()}"
    daemon_pid = subject.daemon.pid
    group.mkdir()
    try:
        for pid in [daemon_pid, *subject.worker_pids()]:
            with contextlib.suppress(OSError):
                (group / "cgroup.procs").write_text(str(pid))
        (group / "pids.max").write_text((group / "pids.current").read_text())
        yield
    finally:
        (group / "pids.max").write_text("max")
        while left := (group / "cgroup.procs").read_text().split():
            for pid in left:
                with contextlib.suppress(OSError):
                    (PIDS / "cgroup.procs").write_text(pid)
        group.rmdir()
