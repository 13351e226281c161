"""Have strangers' text read by a process of its own, with limits of time and memory.

Templates, schemas, patterns and grammars are programs that others wrote, and a model's files may
claim anything. Read here, they would hold the interpreter's lock, and with it the loop, or fill the
memory; so `engine/reader`, which is started once, reads them.
Invariant: a job that takes too much fails alone; one that is ended from outside is done again once;
a grammar's, or a slow chat's, ends when its client leaves.
"""

from __future__ import annotations

import contextlib
import json
import marshal
import os
import select
import signal
import socket
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from engine.errors import CheckpointError, Overran, TooSlow, Unavailable, Unreadable
from engine.system.priority import lower_priority
from engine.system.python_child import python_command
from engine.system.signals import signal_name
from engine.system.threads import helped_by, is_runnable, process_time_s
from engine.text.answers import Answer, How, receive_answer

PROGRAM = python_command("-m", "engine.reader")
TEXT_JOBS = frozenset(("encode", "encode_each", "spans", "decode"))
_JOB_NAMES = {
    **dict.fromkeys(("render", "takes_tools"), "a chat template"),
    **dict.fromkeys(TEXT_JOBS, "a text to tokenize"),
}
YIELDING_S = 0.5
"""How long a job may wait for idle cores; then it is late."""
LONGEST_S = 60.0
"""Many times what a job may compute: a process that has not answered is stopped or starved."""
MODEL_JOBS = frozenset(
    ("checkpoint", "config", "text_model", "weight_names", "tokenizer", "expressions")
)
_ENVIRONMENT = ("PATH", "LANG", "LC_ALL", "LC_TIME", "TZ", "LD_LIBRARY_PATH")
_PYTHON = ("PYTHONHOME", "PYTHONPATH", "PYTHONSAFEPATH", "PYTHONDONTWRITEBYTECODE")
"""All of it that the process gets: no keys and no tokens."""
_RETRY_MS = 1000
UNKNOWN = 1000
R = TypeVar("R")
_CAUSES = {
    -signal.SIGPROF: "time",
    -signal.SIGABRT: "memory",
    -signal.SIGSEGV: "stack",
    os.EX_SOFTWARE: "error",
}
"""What a text takes too much of, by the exit code of its process; others are no text's doing."""


class Ended(Exception):
    """The process ended before it answered.

    Args:
        exit_code: UNKNOWN: only a fork of it has ended.
    """

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


class Late(Exception):
    """A job has found no idle core in time, or others have waited long enough for it."""


class Left(Exception):
    """A job's client waits for it no longer."""


class Asker:
    """A client that waits for its chat and grammars to be read.

    Args:
        is_late: its jobs took long: they get forks of their own, and a share of busy cores.
    """

    def __init__(self, *, is_late: bool = False) -> None:
        self.is_late = is_late
        self._leaving = threading.Lock()
        self._has_left = False
        self._job: socket.socket | None = None

    def do(self, work: Callable[[], R]) -> R:
        """Do a piece of work in this thread, whose jobs are this client's."""
        _HERE.asker = self
        try:
            return work()
        finally:
            _HERE.asker = None

    def leave(self) -> None:
        """End the job that runs, and refuse further ones; for any thread."""
        with self._leaving:
            self._has_left = True
            if self._job is not None:
                self._job.shutdown(socket.SHUT_RDWR)  # the reader then ends the fork

    @contextlib.contextmanager
    def awaits(self, job: socket.socket) -> Iterator[None]:
        """Wait for a job's answer.

        Raises:
            Left: the client leaves, or has left.
        """
        with self._leaving:
            if self._has_left:
                raise Left
            self._job = job
        try:
            yield
        except OSError as error:
            if self._has_left:
                raise Left from error
            raise
        finally:
            with self._leaving:
                self._job = None


class _Here(threading.local):
    """What this thread works for."""

    asker: Asker | None = None


_HERE = _Here()


class Reader:
    """Start the process with the first job, and again when it has ended; for any thread."""

    def __init__(self, program: tuple[str, ...] = PROGRAM) -> None:
        self._program = program
        self._starting, self._one_at_a_time = threading.Lock(), threading.Lock()
        self._one_late_at_a_time = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._chats: tuple[socket.socket, socket.socket] | None = None
        """The channel of the fork that renders chats, and what tells of its end."""
        self._owner = 0
        self.num_restarts = 0
        self.failures: Counter[str] = Counter()
        """Jobs without a result, by why: `time`, `memory`, `stack`, `ended`, `error`."""
        self.tell: Callable[[str], object] = lambda _sentence: None
        """Takes a sentence on each of these and each restart, in any thread."""

    @property
    def pid(self) -> int | None:
        """The process; None: it has not been started."""
        return None if self._process is None else self._process.pid

    def read(self, job: str, *args: Any) -> str:
        """Do a job of engine/reader/jobs.py; blocks, so call it in a thread.

        Args:
            args: None, booleans, numbers, texts, and lists, tuples and dictionaries of them.

        Raises:
            Unreadable: with the reason, for the text's author.
            Overran: it would take too long or too much memory.
            Unavailable: the process cannot be started, or is ended from outside.
            Late: it takes long, and its asker is not late yet.
            Left: its asker has left.
        """
        try:
            body = marshal.dumps((job, args))
        except ValueError as error:
            raise Unreadable("it is nested too deeply") from error
        asker = _HERE.asker
        if job == "takes_tools":
            return self._in_turn(job, body, How.HERE)
        try:
            if job == "render" and (asker is None or not asker.is_late):
                return self._in_turn(job, body, How.CHAT)
            if asker is not None and not asker.is_late:
                return self._done(job, body, How.YIELDING).decode()
        except Late:
            if asker is not None:
                raise
        with self._one_late_at_a_time:  # two would take cores from one step in turns
            return self._done(job, body, How.FORKED).decode()

    def _in_turn(self, job: str, body: bytes, how: bytes) -> str:
        """Do a job when the ones before it are done."""
        with self._one_at_a_time:
            return self._done(job, body, how).decode()

    def read_model(
        self, job: str, path: bytes, *args: Any, kept: socket.socket | None = None
    ) -> bytes:
        """Do a job on a model's files.

        Args:
            kept: takes further jobs with what was read, until the other end is closed.

        Raises:
            CheckpointError: it cannot be served.
            Overran: as read(), or its disk hangs.
            Unavailable: as read().
        """
        return self._done(job, marshal.dumps((job, (path, *args))), How.MODEL, kept)

    def _done(self, job: str, body: bytes, how: bytes, kept: socket.socket | None = None) -> bytes:
        return self.retried(job, lambda: self._read(job, body, how, kept))

    def retried(self, job: str, read: Callable[[], bytes]) -> bytes:
        """Have a job done, and once more if its process is ended from outside.

        Raises:
            Overran: its text ends the process.
            Unavailable: something else does.
        """
        for _attempt in range(2):
            try:
                return read()
            except Ended as ended:
                if (why := _CAUSES.get(ended.exit_code)) is not None:
                    raise self._overran(job, why) from ended
                if ended.exit_code != 0:  # as it ends after a job that took too much memory
                    self.failures["ended"] += 1
        about = "the process that reads such texts was ended twice"
        raise Unavailable(about, code="busy", retry_after_ms=_RETRY_MS)

    def _overran(self, job: str, why: str) -> Overran:
        self.failures[why] += 1
        doing = "rendering" if job == "render" else "reading it"
        doing = "tokenizing" if job in TEXT_JOBS - {"decode"} else doing
        about = f"{doing} failed" if why == "error" else f"{doing} takes too much {why}"
        what = _JOB_NAMES.get(job, "a grammar")
        what = f"{what} was given up, and its request refused"
        self.tell(f"{'a model was given up' if job in MODEL_JOBS else what}: {about}")
        return TooSlow(about) if why == "time" else Overran(about)

    def _read(self, job: str, body: bytes, how: bytes, kept: socket.socket | None) -> bytes:
        process, control = self.start()
        try:
            with helped_by(process.pid):  # it starts, and forks
                if how == How.CHAT:
                    answer, result = self._ask_chats(control, body)
                else:
                    answer, result = ask(control, how, body, kept)
        except TimeoutError as error:
            if how == How.YIELDING:
                raise Late from error
            process.kill()
            raise Ended(UNKNOWN) from error
        except OSError as error:
            raise Ended(_exit_code(process)) from error
        return self.result(job, answer, result, how)

    def _ask_chats(self, control: socket.socket, body: bytes) -> tuple[Answer, bytes]:
        """Have a chat rendered by the fork for these, which is started first; one at a time."""
        if (chats := self._chats) is None:
            chats = self._chats = _begin_chats(control)
        channel, end = chats
        try:
            return ask(channel, How.CHAT, body)
        except OSError as error:
            try:
                if isinstance(error, TimeoutError):
                    raise
                return receive_answer(end)
            finally:
                self._end_chats()

    def _end_chats(self) -> None:
        for each in self._chats or ():
            each.close()
        self._chats = None

    def result(self, job: str, answer: Answer, result: bytes, how: bytes) -> bytes:
        """Return what was answered, or raise it.

        Raises:
            CheckpointError, Unreadable, Overran, Unavailable: as read() and read_model().
            Ended: the job's process has ended.
            Late: others have waited long enough for it.
        """
        if answer == Answer.DONE:
            return result
        text = result.decode()
        if how in (How.CHAT, How.TEXT) and answer == Answer.ENDED and int(text) == -signal.SIGPROF:
            raise Late
        match answer:
            case Answer.REFUSED:
                what, where, hint = json.loads(text)
                raise CheckpointError(what, where=where, hint=hint)
            case Answer.UNREADABLE:
                raise Unreadable(text)
            case Answer.OVERRAN:
                raise self._overran(job, text)
            case Answer.BUSY:
                raise Unavailable(text, code="busy", retry_after_ms=_RETRY_MS)
        raise Ended(int(text))

    def start(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        """Start the process unless it runs.

        Raises:
            Unavailable: it cannot be started.
        """
        with self._starting:
            if self._owner != os.getpid():  # the other process is of a fork's parent
                self._process, self._control, self._owner = None, None, os.getpid()
                self._end_chats()
            process, control = self._process, self._control
            if process is not None and control is not None:
                if (exit_code := process.poll()) is None:
                    return process, control
                control.close()
                self._end_chats()
                self.num_restarts += 1
                self.tell(f"the process that reads templates and grammars {_ended(exit_code)}")
            ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
            ours.settimeout(LONGEST_S)
            try:
                with theirs:
                    process = subprocess.Popen(
                        [*self._program, str(theirs.fileno())],
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        pass_fds=[theirs.fileno()],
                        env=_environment(),
                    )
                    lower_priority(0, process.pid)
            except OSError as error:
                ours.close()
                about = f"the process that reads such texts does not start: {error.strerror}"
                raise Unavailable(about, code="busy", retry_after_ms=_RETRY_MS) from error
            self._process, self._control = process, ours
            return process, ours

    def close(self) -> None:
        """End the process; a later job starts another."""
        with self._starting:
            if self._owner == os.getpid() and self._process is not None and self._control:
                self._control.close()
                self._process.kill()
                self._process.wait()
            self._process = self._control = None
            self._end_chats()


def ask(
    control: socket.socket,
    how: bytes,
    body: bytes,
    kept: socket.socket | None = None,
) -> tuple[Answer, bytes]:
    """Send a job to a process, and receive its answer.

    Raises:
        TimeoutError: no answer comes in time.
        OSError: the process has ended.
        Overran: its disk does not answer.
        Left: its asker has.
    """
    ours, theirs = socket.socketpair()
    is_apart = how in (How.YIELDING, How.FORKED, How.LONG_TEXT)  # the rest wait in turn
    asker = _HERE.asker if is_apart else None
    with ours, theirs, asker.awaits(ours) if asker else contextlib.nullcontext():
        ours.settimeout(YIELDING_S if how == How.YIELDING else LONGEST_S)
        fds = [theirs.fileno()] if kept is None else [theirs.fileno(), kept.fileno()]
        socket.send_fds(control, [how], fds)
        theirs.close()
        with contextlib.suppress(ConnectionError):  # what has answered already reads no more
            ours.sendall(body)
        ours.shutdown(socket.SHUT_WR)
        answer, result = receive_answer(ours)
        return _of_helper(ours, int(result)) if answer == Answer.BEGUN else (answer, result)


def _begin_chats(control: socket.socket) -> tuple[socket.socket, socket.socket]:
    """Start the fork that renders chats: its channel, and the socket that tells of its end."""
    channel, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    end, their_end = socket.socketpair()
    for each in (channel, end):
        each.settimeout(LONGEST_S)
    with theirs, their_end:
        try:
            socket.send_fds(control, [How.CHAT], [their_end.fileno(), theirs.fileno()])
        except OSError:
            channel.close()
            end.close()
            raise
    return channel, end


def _of_helper(job: socket.socket, pid: int) -> tuple[Answer, bytes]:
    """Receive the answer of a process for as long as that computes, or waits for a core.

    Raises:
        Overran: it does not for LONGEST_S, as the disk hangs.
    """
    poll, used_s = select.poll(), None
    poll.register(job, select.POLLIN)
    with helped_by(pid):
        while not poll.poll(1e3 * LONGEST_S):
            before_s, used_s = used_s, process_time_s(pid)
            if used_s == before_s and not is_runnable(pid):  # it is ended when its socket is closed
                raise Overran(f"its disk does not answer for {LONGEST_S:g} s")
    return receive_answer(job)


def _environment() -> dict[str, str]:
    return {name: os.environ[name] for name in (*_ENVIRONMENT, *_PYTHON) if name in os.environ}


def _ended(exit_code: int) -> str:
    how = f"was ended by {signal_name(-exit_code)}" if exit_code < 0 else "ended"
    return f"{how}; it is started again"


def _exit_code(process: subprocess.Popen[bytes]) -> int:
    """Return the exit code of a process that hung up; UNKNOWN: only its part has ended."""
    try:
        return process.wait(1.0)
    except subprocess.TimeoutExpired:
        return UNKNOWN


def asker_here() -> Asker | None:
    """Return the client that this thread works for; None: its work cannot begin again."""
    return _HERE.asker


READER = Reader()
"""This process's."""
