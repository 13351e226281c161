"""Keep the daemon's listening sockets, and start it again after a crash, as systemd does.

Without a service manager `penstock serve` is the keeper, and the daemon is its child. The keeper
speaks systemd's protocols, so the daemon has one way for both: FDSTORE messages give descriptors to
the keeper, LISTEN_FDS gives them to the next daemon, and a daemon without WATCHDOG=1 for
WATCHDOG_S is killed. The messages come through a socketpair, so no other process can send any.
Invariant: signals and exit codes pass as if there were one process, and the daemon never outlives
its keeper. A daemon that was never ready is not started again.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import fcntl
import logging
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

# neither the daemon nor its settings: the keeper outlives every fault of both
from appliance.daemon.process import log_lines
from appliance.daemon.process.core_dumps import forbid_core_dumps
from appliance.daemon.survival.keeper_channel import REPLY
from engine.errors import ConfigError
from engine.system.python_child import start_over
from engine.system.signals import signal_name

MAX_FAILED = 5
"""Maximum crashes in a row of daemons that were not ready."""
RESTART_STATUS = 75
"""Exit status of a daemon that wants to be started again (EX_TEMPFAIL)."""
CHECK_S = 60.0
"""Maximum time to check the settings of the next daemon."""
LEFT_S = 10.0
"""Maximum seconds to wait for the end of a dead daemon's workers."""
WATCHDOG_S, WATCHDOG_PARTS = 60, 12
"""Maximum silence of a ready daemon, counted in parts: a keeper that was stopped counts one."""
ABORT_S = 10
"""Time for the stacks of a silent daemon before SIGKILL."""
NUM_OWN_FDS = 64
"""Descriptors of the keeper for all that is not kept."""
FIRST_PASSED_FD = 3
"""The constant SD_LISTEN_FDS_START."""
ENDED_BY = "DAEMON_ENDED_BY"
"""Variable of a daemon that is started again: how the one before ended, a signal or `restart`."""
_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36
_POLL_S = 0.01
_ENDING = (signal.SIGINT, signal.SIGTERM)
_PASSED_ON = (*_ENDING, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_MAX_FDS = 253


def keep_daemon(end_replies: Callable[[dict[str, list[int]]], None]) -> None:
    """Return in the process that is to be the daemon: a child, unless a manager keeps this one.

    Args:
        end_replies: ends replies that no daemon continues; takes their descriptors by name.
    """
    started_by_manager = (os.environ.get(name) for name in ("LISTEN_PID", "SYSTEMD_EXEC_PID"))
    if str(os.getpid()) in started_by_manager or "NOTIFY_SOCKET" in os.environ:
        return
    if (status := _Keeper(end_replies).run()) is not None:
        _end_as(status)


def check_next(command: list[str]) -> None:
    """Check the settings as the next daemon will read them, perhaps as a newer version.

    Args:
        command: of this daemon.

    Raises:
        ConfigError: it would not start.
    """
    own = ("LISTEN_", "NOTIFY_", "WATCHDOG_")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    checked = subprocess.run(
        [*command, "--check-config"],
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        timeout=CHECK_S,
        check=False,
    )
    if checked.returncode:
        found = checked.stderr.decode(errors="replace").partition("\n")[0]
        raise ConfigError(
            "a new daemon would not start", where=found.removeprefix(log_lines.PREFIX)
        )


class _Keeper:
    """One `penstock serve`, through all its daemons."""

    def __init__(self, end_replies: Callable[[dict[str, list[int]]], None]) -> None:
        forbid_core_dumps()  # it holds prompts, too
        self._tell_clients = end_replies
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._max_kept = max((limit - NUM_OWN_FDS) // 2, 0)  # a new daemon has each of them twice
        self._kept: list[tuple[str, int]] = []
        """Name and descriptor."""
        self._pid = 0
        """The daemon; 0: none runs."""
        self._ended_by = 0
        """The first signal that asked for the end; 0: none."""
        self._is_ready, self._num_failed = False, MAX_FAILED
        self._held = list[int]()
        """Signals for a daemon that continues replies, until it can take them."""
        self._takes_signals = True
        self._prctl = ctypes.CDLL(None).prctl
        self._prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self._handlers = {each: signal.signal(each, self._pass_on) for each in _PASSED_ON}
        self._handlers[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, self._pause)

    def run(self) -> int | None:
        """Start daemons until one was the last; return its wait status, or None in a daemon."""
        is_restart, last_end = False, ""
        while True:
            if self._fork():
                if is_restart:  # a new interpreter, perhaps of a newer version
                    os.environ[ENDED_BY] = last_end
                    self._exec()
                return None
            self._prctl(_PR_SET_NAME, b"penstock-keeper")
            status = self._watch()
            number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
            is_wanted = not number and os.WEXITSTATUS(status) == RESTART_STATUS
            if number or is_wanted:
                self._end_workers()
            is_over = number in (0, *_PASSED_ON) and not is_wanted
            if is_over and is_restart and status and not self._is_ready:
                _tell(f"The next daemon ended with {os.WEXITSTATUS(status)}; not started again")
            if is_over or (self._ended_by and not self._has_replies):
                self._end_replies()
                return 0 if is_wanted else status  # 0: it was told to end while it handed over
            self._num_failed = 0 if self._is_ready or is_wanted else self._num_failed + 1
            is_restart, self._is_ready = self._num_failed < MAX_FAILED, False
            last_end = "restart" if is_wanted else signal_name(number)
            if not is_wanted:
                about = "starting it again" if is_restart else "not started again"
                _tell(f"The daemon was killed by {last_end}; {about}")
            if not is_restart:
                self._end_replies()
                return status

    def _fork(self) -> bool:
        """Start a daemon; return True in its process."""
        keeper = os.getpid()
        signal.pthread_sigmask(signal.SIG_BLOCK, self._handlers)
        ended_by = self._ended_by
        self._channel, daemons = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._pid = os.fork()
        if self._pid == 0:
            self._prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != keeper:
                os._exit(1)
            os.setpgid(0, 0)  # a signal to the group comes once, from the keeper
            signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # the group is in the background
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            self._channel.close()
            os.environ["NOTIFY_FD"] = f"{os.getpid()}:{daemons.detach()}"
            os.environ["FDSTORE"] = str(self._max_kept)
            os.environ["WATCHDOG_PID"] = str(os.getpid())
            os.environ["WATCHDOG_USEC"] = str(WATCHDOG_S * 1_000_000)
        else:
            daemons.close()
            self._held = [ended_by] if ended_by else []
            self._takes_signals = not self._has_replies
            self._send_held()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._handlers)
        return self._pid == 0

    def _exec(self) -> None:
        """Become a new interpreter, with the kept descriptors from FIRST_PASSED_FD on."""
        above = FIRST_PASSED_FD + len(self._kept)
        channel = fcntl.fcntl(int(os.environ["NOTIFY_FD"].partition(":")[2]), fcntl.F_DUPFD, above)
        os.environ["NOTIFY_FD"] = f"{os.getpid()}:{channel}"
        copies = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for _, fd in self._kept]
        for number, fd in enumerate(copies, FIRST_PASSED_FD):
            os.dup2(fd, number)
        os.environ["LISTEN_PID"] = str(os.getpid())
        os.environ["LISTEN_FDS"] = str(len(copies))
        os.environ["LISTEN_FDNAMES"] = ":".join(name for name, _ in self._kept)
        start_over()

    def _watch(self) -> int:
        """Take what the daemon sends until it ends; return its wait status."""
        poll, ended = select.poll(), os.pidfd_open(self._pid)
        poll.register(self._channel, select.POLLIN)
        poll.register(ended, select.POLLIN)
        self._num_silent, self._is_watched = 0, False
        while True:
            found = dict(poll.poll(1000 * WATCHDOG_S // WATCHDOG_PARTS))
            self._reap_orphans()
            if self._channel.fileno() in found:
                if not self._take():
                    poll.unregister(self._channel)
            elif found:
                break
            elif self._is_watched:
                self._num_silent += 1
                self._end_silent()
        self._channel.close()
        os.close(ended)
        status = os.waitpid(self._pid, 0)[1]
        self._last_pid, self._pid = self._pid, 0
        return status

    def _reap_orphans(self) -> None:
        """Reap ended processes whose parent, a process of the daemon, has died."""
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        while (ended := os.waitid(os.P_ALL, 0, options)) and ended.si_pid != self._pid:
            os.waitpid(ended.si_pid, 0)

    def _end_silent(self) -> None:
        """Kill a daemon whose loop has not turned for too long, with its stacks in the log."""
        if self._num_silent == WATCHDOG_PARTS:
            _tell(f"The daemon has been silent for {WATCHDOG_S} s; ending it")
            _send(self._pid, signal.SIGABRT)
            _send(self._pid, signal.SIGCONT)
        elif self._num_silent * WATCHDOG_S >= WATCHDOG_PARTS * (WATCHDOG_S + ABORT_S):
            _send(self._pid, signal.SIGKILL)

    def _take(self) -> bool:
        """Take one message; one of another process is dropped. False: no more can come."""
        room = socket.CMSG_SPACE(struct.calcsize("3i")) + socket.CMSG_SPACE(4 * _MAX_FDS)
        data, parts, flags, _ = self._channel.recvmsg(4096, room, socket.MSG_CMSG_CLOEXEC)
        fds, sender = array.array("i"), 0
        for _, kind, value in parts:
            if kind == socket.SCM_RIGHTS:
                fds.frombytes(value)
            else:
                sender = struct.unpack_from("i", value)[0]
        lines = data.decode(errors="replace").split("\n") if sender == self._pid else []
        fields = dict(line.partition("=")[::2] for line in lines)
        name, given = fields.get("FDNAME", ""), list(fds)
        if flags & socket.MSG_CTRUNC:
            _tell("The keeper has no descriptor left; a crash would end a reply")
        elif "FDSTORE" in fields:
            self._kept += [(name, fd) for fd in given]
            given = []
        elif "FDSTOREREMOVE" in fields:
            given += [fd for kept, fd in self._kept if kept == name]
            self._kept = [each for each in self._kept if each[0] != name]
        for fd in given:
            os.close(fd)
        if "STATUS" in fields:
            self._takes_signals = True
            self._send_held()
        self._is_ready |= fields.get("READY") == "1"
        if "READY" in fields or "STOPPING" in fields:
            self._is_watched = "STOPPING" not in fields
        if "WATCHDOG" in fields:
            self._num_silent = 0
        return bool(data)

    def _end_workers(self) -> None:
        """End what the dead daemon left, and wait: the next one needs its memory and cores."""
        end_s = time.monotonic() + LEFT_S
        _send(-self._last_pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while time.monotonic() < end_s:
                if os.waitpid(-self._last_pid, os.WNOHANG)[0] == 0:
                    time.sleep(_POLL_S)

    def _end_replies(self) -> None:
        """Tell clients of unfinished replies that no daemon continues them."""
        kept: dict[str, list[int]] = {}
        for name, fd in self._kept:
            if name.startswith(REPLY):
                kept.setdefault(name, []).append(fd)
        if kept:
            try:
                self._tell_clients(kept)
            except (ImportError, AttributeError, TypeError, OSError) as error:  # a newer version
                _tell(f"{len(kept)} replies end without an error event: {error!r}")

    def _pass_on(self, number: int, _: FrameType | None) -> None:
        if number in _ENDING:
            self._takes_signals |= bool(self._ended_by)  # the second one cannot wait
            self._ended_by = self._ended_by or number
        self._held.append(number)
        self._send_held()

    @property
    def _has_replies(self) -> bool:
        """Whether the next daemon is to continue replies."""
        return any(name.startswith(REPLY) for name, _ in self._kept)

    def _send_held(self) -> None:
        while self._takes_signals and self._held:
            _send(self._pid, self._held.pop(0))

    def _pause(self, *_: object) -> None:
        """Stop with the daemon, as Ctrl-Z asks, and go on with it."""
        _send(-self._pid, signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        _send(-self._pid, signal.SIGCONT)


def _send(pid: int, number: int) -> None:
    """Send a signal to a process or, negative, to a group; 0: none runs."""
    with contextlib.suppress(ProcessLookupError):
        if pid:
            os.kill(pid, number)


def _tell(text: str) -> None:
    line = log_lines.lines(text, logging.ERROR, to_journal=log_lines.is_journal())
    with contextlib.suppress(OSError):  # its reader has gone, or its disk is full
        os.write(2, f"{line}\n".encode())


def _end_as(status: int) -> NoReturn:
    """End this process as that one has ended."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 128 - code)  # the first process of a container survives that
