"""Read strangers' text for the daemon, a job at a time, with limits of time and memory.

Each job comes with a socket for its text and its answer. Jobs that clients' texts may make long
run in a fork each, beside all others and behind the machine's other work: a flood of them costs the
steps that are being computed no core. Short ones run one after another in a fork that stays: ending
it costs the next job a fork, where ending this process would cost all a start.
Invariant: no job outlives its limits; the process ends with the daemon's end of its channel.
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
from engine.reader.jobs import JOBS, compiled
from engine.reader.limits import (
    BYTES_PER_BYTE,
    BYTES_PER_TOKENIZER_BYTE,
    limit_memory,
    limit_memory_of_text,
)
from engine.text.answers import Answer, How, send_answer
from engine.text.grammar import json_grammar, validate

MEMORY_BYTES = 1 << 30
"""Maximum of addresses, of which a compiler's stack takes 256 MiB."""
FORK_MEMORY_BYTES, MODEL_MEMORY_BYTES = 3 << 28, 1 << 31
CPU_S, FORK_CPU_S, MODEL_CPU_S, TEXT_CPU_S = 5.0, 2.0, 20.0, 1.0
"""Maximum of a job: many times what the longest texts take that can be served."""
CHAT_CPU_S = 0.15
"""Maximum while other chats wait; one that takes longer is rendered again, in a fork of its own."""
CHAT_CPU_S_PER_BYTE, MAX_CHAT_CPU_S = 1e-4, 20.0
"""What its length adds to the 2 s there: some templates look at all messages for each message."""
TEXT_CPU_S_PER_BYTE = 1e-5
"""Ten times what tokenizers take on a slow core."""
SHORT_TEXT_CPU_S, SHORT_TEXT_CPU_S_PER_BYTE = 0.15, 2.5e-6
"""Maximum while other texts wait; one that takes longer begins again, in a fork of its own."""
PR_SET_PDEATHSIG, NO_SIGNAL = 1, 0
UNKNOWN = 1000
"""Exit code of a fork that did not end at its last text."""
FAILED = os.EX_SOFTWARE
"""Exit code of an error that no job should cause."""
FORK_NICE = 10
SHORT_BYTES, SHORT_CPU_S = 2048, 0.005
"""What a fork may read and compute before it yields: enough for most texts."""
MIN_TRIM_BYTES, OWN_PAGES_BYTES = 128 << 10, 64 << 10
TEXTS_TRIM_BYTES, TEXTS_OWN_PAGES_BYTES = 32 << 20, 8 << 20
"""A process that tokenizes keeps its pages, which the next text takes again."""
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
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads would not survive a fork
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


def _keep_small(trim_bytes: int = MIN_TRIM_BYTES, own_pages_bytes: int = OWN_PAGES_BYTES) -> None:
    """Give large buffers back to the system when they are freed."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # another C library
        return
    mallopt(_MMAP_THRESHOLD, own_pages_bytes)
    mallopt(_TRIM_THRESHOLD, trim_bytes)


def _be_killed_first() -> None:
    """Let the kernel end this process before workers where a machine's memory is used up."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("800")


class Forks:
    """Take jobs from a channel, and tell of forks that ended without an answer."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._running: dict[int, tuple[int, list[socket.socket]]] = {}
        """Each fork's process and its sockets, by a pipe held until its end."""
        self._askers: dict[int, int] = {}
        """Each fork's process, by the socket whose end tells that no answer is wanted."""
        self._texts: socket.socket | None = None
        """The channel of the fork that tokenizes short texts."""
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
                kind, fds, _flags, _address = socket.recv_fds(self._control, 16, 2)
                if not fds:
                    return
                sockets = [socket.socket(fileno=each) for each in fds]
                if kind == How.HERE:
                    _do_here(sockets[0], kind)
                elif kind == How.TEXT:
                    self._pass_on(sockets[0])
                else:
                    self._fork(sockets, kind)

    def _pass_on(self, job: socket.socket) -> None:
        """Give a text to the fork for these; its last one tells of a fork that ended at it."""
        if self._texts is None:
            self._texts, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
            ended, held = os.pipe()
            if (pid := os.fork()) == 0:
                self._forget()
                job.close()
                os.close(ended)
                _do_each(theirs, How.TEXT)
                os._exit(os.EX_OK)
            os.close(held)
            theirs.close()
            self._texts_ended = ended
            self._running[ended] = pid, []
            self._poll.register(ended, select.POLLIN)
        last = self._running[self._texts_ended][1]
        for each in last:
            each.close()
        last[:] = [job]
        with contextlib.suppress(OSError):  # it has just ended, and is seen to next
            socket.send_fds(self._texts, [How.TEXT], [job.fileno()])

    def _fork(self, sockets: list[socket.socket], kind: bytes) -> None:
        job = sockets[0]
        ended, held = os.pipe()
        try:
            pid = os.fork()
        except OSError as error:
            os.close(ended)
            os.close(held)
            _tell(job, Answer.BUSY, f"no process is left for it: {error.strerror}")
            for each in sockets:
                each.close()
            return
        if pid == 0:
            if kind == How.MODEL:
                self._read_model(*sockets)
            elif kind == How.CHAT:
                ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
                self._forget()
                _do_each(sockets[1], How.CHAT)
            else:
                if kind in (How.LONG_TEXT, How.FORKED):  # it is waited for as long as it computes
                    _tell(job, Answer.BEGUN, str(os.getpid()))
                if kind != How.LONG_TEXT:
                    os.nice(FORK_NICE)
                    resource.setrlimit(resource.RLIMIT_AS, (FORK_MEMORY_BYTES, FORK_MEMORY_BYTES))
                _limited(job, kind)
            os._exit(os.EX_OK)
        os.close(held)
        self._running[ended] = pid, sockets
        self._poll.register(ended, select.POLLIN)
        self._askers[sockets[-1].fileno()] = pid
        self._poll.register(sockets[-1], 0)  # tells only that the daemon has closed its end

    def _read_model(self, job: socket.socket, kept: socket.socket | None = None) -> None:
        """Read a model's files, whose disk may hang, which nothing but an end from outside ends.

        Args:
            kept: takes further jobs with what was read.
        """
        prctl = ctypes.CDLL(None).prctl
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        _tell(job, Answer.BEGUN, str(os.getpid()))
        gc.disable()  # it would look at all that a header holds again and again
        if _limited(job, How.MODEL) == Answer.DONE and kept is not None:
            job.close()
            self._forget()
            _keep_small(TEXTS_TRIM_BYTES, TEXTS_OWN_PAGES_BYTES)
            prctl(PR_SET_PDEATHSIG, NO_SIGNAL)  # another reader may come, for the same daemon
            Forks(kept).run()

    def _forget(self) -> None:
        """Close what was inherited: others wait for the end of these."""
        self._control.close()
        if self._texts is not None:
            self._texts.close()
        for ended, (_pid, sockets) in self._running.items():
            os.close(ended)
            for each in sockets:
                each.close()

    def _abandon(self, asker: int) -> None:
        """End a fork whose answer is not awaited any more."""
        self._poll.unregister(asker)
        os.kill(self._askers.pop(asker), signal.SIGKILL)

    def _reap(self, ended: int) -> None:
        self._poll.unregister(ended)
        os.close(ended)
        pid, sockets = self._running.pop(ended)
        if self._askers.pop(sockets[-1].fileno(), None) is not None:
            self._poll.unregister(sockets[-1])
        exit_code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if self._texts is not None and ended == self._texts_ended:
            self._texts.close()
            self._texts, exit_code = None, exit_code or UNKNOWN
        for each in sockets:
            with each:
                if exit_code:
                    _tell(each, Answer.ENDED, str(exit_code))


def _yield_cores(*_: object) -> None:
    """Compute only where a core is idle from now on, in each thread: a compiler has its own."""
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):
            os.sched_setscheduler(int(thread), os.SCHED_IDLE, os.sched_param(0))


def _do_each(channel: socket.socket, kind: bytes) -> None:
    """Do one job after another, until the channel ends."""
    while fds := socket.recv_fds(channel, 16, 1)[1]:
        _do_here(socket.socket(fileno=fds[0]), kind)


def _do_here(job: socket.socket, kind: bytes) -> None:
    with job:
        if _limited(job, kind) == Answer.OVERRAN:
            os._exit(os.EX_OK)  # what the job has left behind is not known


def _limited(job: socket.socket, kind: bytes) -> Answer:
    """Do a job; the kernel ends this process when it has computed for so long."""
    body = b"".join(iter(lambda: job.recv(1 << 20), b""))
    if kind == How.YIELDING and len(body) > SHORT_BYTES:
        _yield_cores()
    elif kind == How.YIELDING:
        signal.signal(signal.SIGVTALRM, _yield_cores)
        signal.setitimer(signal.ITIMER_VIRTUAL, SHORT_CPU_S)
    signal.setitimer(signal.ITIMER_PROF, _cpu_s(kind, len(body)))
    try:
        name, args = marshal.loads(body)
    except EOFError:  # given up before all of it was sent
        os._exit(os.EX_OK)
    try:
        if kind == How.MODEL:
            limit_memory(BYTES_PER_TOKENIZER_BYTE if name == "tokenizer" else BYTES_PER_BYTE)
        elif kind in (How.TEXT, How.LONG_TEXT):
            limit_memory_of_text(len(body))
        elif kind == How.CHAT:
            with contextlib.suppress(Exception):  # raised again when it is used
                compiled(args[0])  # by a new process, which is not the chat's doing
            signal.setitimer(signal.ITIMER_PROF, CHAT_CPU_S)
        elif name == "render":
            own_s = FORK_CPU_S + len(body) * CHAT_CPU_S_PER_BYTE
            signal.setitimer(signal.ITIMER_PROF, min(own_s, MAX_CHAT_CPU_S))
        answer, result = _answered(name, args)
    except BaseException as error:  # noqa: BLE001 - it is told, and this process ends
        _report(error)
        os._exit(FAILED)
    signal.setitimer(signal.ITIMER_PROF, 0)
    if answer == Answer.OVERRAN and kind in (How.TEXT, How.CHAT):
        # tells it, once no other job can come to this process
        signal.raise_signal(signal.SIGPROF if result == "time" else signal.SIGABRT)
    _tell(job, answer, result)
    return answer


def _cpu_s(kind: bytes, num_bytes: int) -> float:
    if kind == How.TEXT:
        return SHORT_TEXT_CPU_S + num_bytes * SHORT_TEXT_CPU_S_PER_BYTE
    if kind == How.LONG_TEXT:
        return TEXT_CPU_S + num_bytes * TEXT_CPU_S_PER_BYTE
    return {How.HERE: CPU_S, How.CHAT: CPU_S, How.MODEL: MODEL_CPU_S}.get(kind, FORK_CPU_S)


def _answered(name: str, args: tuple[Any, ...]) -> tuple[Answer, str | bytes]:
    try:
        return Answer.DONE, JOBS[name](*args)
    except CheckpointError as error:
        if isinstance(error.__cause__, MemoryError):
            return Answer.OVERRAN, "memory"
        if _is_slow_match(error.__cause__):
            return Answer.OVERRAN, "time"
        return Answer.REFUSED, json.dumps([error.what, error.where, error.hint])
    except Unreadable as error:
        return Answer.UNREADABLE, error.what
    except Unavailable as error:
        return Answer.BUSY, error.what
    except RecursionError:
        return Answer.UNREADABLE, "it is nested too deeply"
    except MemoryError:
        return Answer.OVERRAN, "memory"
    except BaseException as error:
        if not _is_slow_match(error):
            raise
        return Answer.OVERRAN, "time"


def _is_slow_match(error: BaseException | None) -> bool:
    """Tell whether a tokenizer's expression was given up after ten million ways to match."""
    return "retry-limit-in-match" in str(error)


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
