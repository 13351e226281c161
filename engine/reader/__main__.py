"""Read strangers' text for the daemon, a job at a time, with limits of time and memory.

Each job comes with a socket for its text and its answer. Jobs that clients' texts may make long
run in a fork each, beside all others and behind the machine's other work: a flood of them costs the
steps that are being computed no core.
Invariant: no job outlives its limits; the process ends with the daemon's end of its channel.
Never: reads a file but in a fork for a model's, or keeps anything of a job but compiled templates.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import marshal
import os
import resource
import select
import signal
import socket
import sys
from typing import Any

from engine.errors import CheckpointError, Unavailable, Unreadable
from engine.reader.jobs import JOBS
from engine.reader.limits import BYTES_PER_BYTE, BYTES_PER_TOKENIZER_BYTE, limit_memory
from engine.text.answers import FORKED, MODEL, YIELDING, Answer, send_answer
from engine.text.grammar import json_grammar, validate

MEMORY_BYTES = 1 << 30
"""Maximum of addresses, of which a compiler's stack takes 256 MiB."""
FORK_MEMORY_BYTES, MODEL_MEMORY_BYTES = 3 << 28, 1 << 31
CPU_S, FORK_CPU_S, MODEL_CPU_S = 5.0, 2.0, 20.0
"""Maximum of a job: many times what the longest texts take that can be served."""
PR_SET_PDEATHSIG = 1
FAILED = os.EX_SOFTWARE
"""Exit code of an error that no job should cause."""
FORK_NICE = 10
SHORT_BYTES, SHORT_CPU_S = 2048, 0.005
"""What a fork may read and compute before it yields: enough for most texts."""
MIN_TRIM_BYTES, OWN_PAGES_BYTES = 128 << 10, 64 << 10
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # as malloc.h numbers them


def main() -> None:
    """Take jobs until the daemon closes the channel that the command line names."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the daemon drains, and needs this process for it
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    most = MODEL_MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MODEL_MEMORY_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (min(MEMORY_BYTES, most), most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _keep_small()
    _be_killed_first()
    validate(json_grammar())  # forks then find the compiler's tables made
    gc.freeze()  # and share their pages
    _quieten()
    Forks(socket.socket(fileno=int(sys.argv[1]))).run()


def _quieten() -> None:
    """Keep the compiler's own messages, which hold clients' texts, out of the daemon's log."""
    sys.stderr = os.fdopen(os.dup(2), "w")
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 2)


def _keep_small() -> None:
    """Give large buffers back to the system when they are freed."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # another C library
        return
    mallopt(_MMAP_THRESHOLD, OWN_PAGES_BYTES)
    mallopt(_TRIM_THRESHOLD, MIN_TRIM_BYTES)


def _be_killed_first(score: int = 800) -> None:
    """Let the kernel end this process before workers where a machine's memory is used up."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write(str(score))


class Forks:
    """Take jobs from a channel, and tell of forks that ended without an answer."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._running: dict[int, tuple[int, socket.socket]] = {}
        """Each fork's process and its job's socket, by a pipe held until its end."""
        self._askers: dict[int, int] = {}
        """Each fork's process, by its job's socket."""
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)

    def run(self) -> None:
        """Work until the channel ends."""
        while True:
            for fd, _events in self._poll.poll():
                if fd != self._control.fileno():  # which comes first: no number is used again yet
                    if fd in self._running:
                        self._reap(fd)
                    elif fd in self._askers:  # else it was just reaped
                        self._abandon(fd)
                    continue
                kind, fds, _flags, _address = socket.recv_fds(self._control, 16, 1)
                if not fds:
                    return
                job = socket.socket(fileno=fds[0])
                if kind in (YIELDING, FORKED, MODEL):
                    self._fork(job, kind)
                else:
                    with job:
                        self._do_here(job)

    def _do_here(self, job: socket.socket) -> None:
        if _limited(job, CPU_S) == Answer.OVERRAN:
            os._exit(os.EX_OK)  # what the job has left behind is not known

    def _fork(self, job: socket.socket, kind: bytes) -> None:
        ended, held = os.pipe()
        try:
            pid = os.fork()
        except OSError as error:
            os.close(ended)
            os.close(held)
            with job:
                _tell(job, Answer.BUSY, f"no process is left for it: {error.strerror}")
            return
        if pid == 0:
            if kind == MODEL:
                _read_model(job)
            else:
                os.nice(FORK_NICE)
                resource.setrlimit(resource.RLIMIT_AS, (FORK_MEMORY_BYTES, FORK_MEMORY_BYTES))
                _limited(job, FORK_CPU_S, yields=kind == YIELDING)
            os._exit(os.EX_OK)
        os.close(held)
        self._running[ended] = pid, job
        self._poll.register(ended, select.POLLIN)
        self._askers[job.fileno()] = pid
        self._poll.register(job, 0)  # tells only that the daemon has closed its end

    def _abandon(self, job_fd: int) -> None:
        """End a fork whose answer is not awaited any more."""
        self._poll.unregister(job_fd)
        os.kill(self._askers.pop(job_fd), signal.SIGKILL)

    def _reap(self, ended: int) -> None:
        self._poll.unregister(ended)
        os.close(ended)
        pid, job = self._running.pop(ended)
        if self._askers.pop(job.fileno(), None) is not None:
            self._poll.unregister(job)
        exit_code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with job:
            if exit_code:
                _tell(job, Answer.ENDED, str(exit_code))


def _yield_cores(*_: object) -> None:
    """Compute only where a core is idle from now on, in each thread: a compiler has its own."""
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):
            os.sched_setscheduler(int(thread), os.SCHED_IDLE, os.sched_param(0))


def _read_model(job: socket.socket) -> None:
    """Read a model's files, whose disk may hang, which nothing but an end from outside ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    _tell(job, Answer.BEGUN, str(os.getpid()))
    gc.disable()  # it would look at all that a header holds again and again
    _limited(job, MODEL_CPU_S, is_model=True)


def _limited(
    job: socket.socket, cpu_s: float, *, yields: bool = False, is_model: bool = False
) -> Answer:
    """Do a job; the kernel ends this process when it has computed for so long."""
    body = b"".join(iter(lambda: job.recv(1 << 20), b""))
    if yields and len(body) > SHORT_BYTES:
        _yield_cores()
    elif yields:
        signal.signal(signal.SIGVTALRM, _yield_cores)
        signal.setitimer(signal.ITIMER_VIRTUAL, SHORT_CPU_S)
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    try:
        name, args = marshal.loads(body)
    except EOFError:  # given up before all of it was sent
        os._exit(os.EX_OK)
    try:
        if is_model:
            limit_memory(BYTES_PER_TOKENIZER_BYTE if name == "tokenizer" else BYTES_PER_BYTE)
        answer, result = _answered(name, args)
    except BaseException as error:  # noqa: BLE001 - it is told, and this process ends
        _report(error)
        os._exit(FAILED)
    signal.setitimer(signal.ITIMER_PROF, 0)
    _tell(job, answer, result)
    return answer


def _answered(name: str, args: tuple[Any, ...]) -> tuple[Answer, str | bytes]:
    try:
        return Answer.DONE, JOBS[name](*args)
    except CheckpointError as error:
        if isinstance(error.__cause__, MemoryError):
            return Answer.OVERRAN, "memory"
        return Answer.REFUSED, json.dumps([error.what, error.where, error.hint])
    except Unreadable as error:
        return Answer.UNREADABLE, error.what
    except Unavailable as error:
        return Answer.BUSY, error.what
    except RecursionError:
        return Answer.UNREADABLE, "it is nested too deeply"
    except MemoryError:
        return Answer.OVERRAN, "memory"


def _report(error: BaseException) -> None:
    """Print where an error is from, without the text that may be in it."""
    where = error.__traceback__
    while where is not None and where.tb_next is not None:
        where = where.tb_next
    place = "" if where is None else f"{where.tb_frame.f_code.co_filename}:{where.tb_lineno}"
    sys.stderr.write(f"penstock: reading failed: {type(error).__name__} at {place}\n")
    sys.stderr.flush()


def _tell(job: socket.socket, answer: Answer, result: str | bytes) -> None:
    with contextlib.suppress(OSError):  # the daemon has given it up
        send_answer(job, answer, result)


if __name__ == "__main__":
    main()
