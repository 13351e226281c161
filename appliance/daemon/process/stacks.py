"""Show the stacks of the daemon and its workers, even when they hang.

Invariant: only a process that waits for the signal receives it; a silent process is shown as the
kernel sees it. A stack names functions and lines, never a value.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from pathlib import Path

from engine.errors import ConfigError, PenstockError
from engine.system.own_files import open_file, open_own

SIGNAL = signal.SIGUSR1
FILE_NAME = "stacks"
PATIENCE_S = 2.0
"""Maximum seconds to wait for an answer, which normally takes milliseconds."""
_SETTLED_S = 0.3
_POLL_S = 0.02


def wait_for_signal(state_dir: Path) -> int:
    """Write this process's stacks to the file at each SIGNAL; return the open file.

    Raises:
        ConfigError: the file cannot be written.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    path = state_dir / FILE_NAME
    try:
        fd = open_own(path, flags)
    except OSError as error:
        about = f"cannot write stacks: {error.strerror}"
        raise ConfigError(about, where=str(path), hint="remove what is in its place") from error
    faulthandler.register(SIGNAL, fd, all_threads=True)
    return fd


def daemon_pid(state_dir: Path) -> int | None:
    """Return the pid of the daemon that holds the folder; None: no daemon."""
    try:
        with open(open_file(state_dir / "lock", os.O_RDONLY), "rb") as lock:
            pid = int(lock.read(20).split()[0])
    except (OSError, ValueError, IndexError):
        return None
    return pid if _field(pid, "Name") is not None else None


def stacks(state_dir: Path) -> str:
    """Return the stacks of the daemon and of its workers, each under its process's name.

    Raises:
        PenstockError: no daemon runs, or its processes are another user's.
    """
    daemon = daemon_pid(state_dir)
    if daemon is None:
        raise PenstockError("no daemon runs on this state folder", where=str(state_dir))
    parts = []
    for pid in [daemon, *_children(daemon)]:
        state = _field(pid, "State") or "gone"
        parts.append(f"== {_field(pid, 'Name')}, pid {pid}, {state}\n{_stacks_of(pid, state_dir)}")
    return "\n".join(parts)


def _stacks_of(pid: int, state_dir: Path) -> str:
    path = state_dir / FILE_NAME
    caught = int(_field(pid, "SigCgt") or "0", 16)
    if not caught >> (SIGNAL - 1) & 1:
        return f"it does not wait for {SIGNAL.name}\n{_threads(pid)}"
    before = path.stat().st_size
    try:
        os.kill(pid, SIGNAL)
    except ProcessLookupError:
        return "it is gone\n"
    except PermissionError as error:
        hint = "run it as the user of the daemon, or as root"
        raise PenstockError(
            "not allowed to ask for its stacks", where=f"pid {pid}", hint=hint
        ) from error
    said = _answer(path, before)
    return said or f"no answer within {PATIENCE_S:g} s\n{_threads(pid)}"


def _answer(path: Path, before: int) -> str:
    """Return what is written after `before`, once it stops growing."""
    now = time.monotonic()
    deadline, settled_at, size = now + PATIENCE_S, now + PATIENCE_S, before
    while (now := time.monotonic()) < min(deadline, settled_at):
        time.sleep(_POLL_S)
        if (grown := path.stat().st_size) != size:
            size, settled_at = grown, now + _SETTLED_S
    with open(open_file(path, os.O_RDONLY), "rb") as file:
        file.seek(before)
        return file.read(size - before).decode(errors="replace")


def _threads(pid: int) -> str:
    """Describe each thread as the kernel does: its name, its state, its place in the kernel."""
    lines = []
    for task in sorted(Path(f"/proc/{pid}/task").glob("*")):
        try:
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
            name, where = (task / "comm").read_text().strip(), (task / "wchan").read_text()
        except OSError:
            continue
        lines.append(f"  thread {task.name} {name}: state {state}, in {where or '-'}\n")
    return "".join(lines)


def _children(pid: int) -> list[int]:
    processes = (int(each.name) for each in Path("/proc").glob("[0-9]*"))
    return sorted(each for each in processes if _field(each, "PPid") == str(pid))


def _field(pid: int, name: str) -> str | None:
    """Return a line of /proc/PID/status; None: the process has ended."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    fields = dict(line.partition(":\t")[::2] for line in text.splitlines())
    return fields.get(name)
