"""Run the daemon that suffers: start it, kill it, start it again on the same files, look at it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sqlite3
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from appliance.daemon.process.stacks import stacks
from engine.errors import PenstockError
from tests.benchmarks.hostile import Held
from tests.daemons import STEP_BY_STEP, Daemon, is_alive, make_keys
from tests.faults.disks import Disk
from tests.faults.wire import Door, ask, get

LOOK_S = 0.5
START_S = 90.0
DRAIN_S = 20.0
DEATH_S = 30.0
MiB = 1 << 20


class Subject:
    """One daemon's files, and the process that serves them at the moment."""

    def __init__(self, folder: Path, options: list[str], *, may_mount: bool) -> None:
        self.folder = folder
        self.state = Disk(folder / "state", 64 * MiB, may_mount=may_mount)
        # the cache leaves a GiB of its disk free
        self.ssd = Disk(folder / "ssd", 1200 * MiB, may_mount=may_mount)
        path, keys = make_keys(folder, laptop="user", boss="operator")
        self.keys = list(keys.values())
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._options = [
            *STEP_BY_STEP,
            "--listen",
            f"127.0.0.1:{port}",
            "--api-keys",
            str(path),
            *options,
        ]
        self._options += ["--state-dir", str(self.state.folder), "--exact", "bitwise"]
        self._options += ["--ssd-dir", str(self.ssd.folder), "--ssd-cache", "64MiB"]
        self.door = Door(str(folder / "d" / "p.sock"))
        self.tcp = Door(("127.0.0.1", port), keys["laptop"])
        self.doors = [self.door, self.door, self.tcp]
        self.problems: list[str] = []
        self.may_end = 0
        """Of faults at work: those that may end the daemon."""
        self.num_own_ends = 0
        self._orders: list[tuple[str, Any]] = []
        self._ends: list[list[float]] = []
        self._successions: list[list[float]] = []
        self._stops: list[list[float]] = []
        self._excused: list[list[float]] = []
        self._damaged: int | None = None
        self._num_kept = 0
        self._lock, self._is_over = threading.RLock(), threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self.frames_path = folder / "frames.jsonl"
        self._num_lives = 0
        self._pid, self._seen_s = 0, 0.0
        """The daemon's process, and when it was last seen."""
        self.daemon = self._started()

    # its life

    def _started(self) -> Daemon:
        """Start it, again and again like a service manager, while its disk does not let it.

        One that never starts is a problem; with another log the rest can still be seen.
        """
        deadline, has_moved_log = time.monotonic() + START_S, False
        while True:
            stderr = self.folder / "d" / "stderr.txt"
            if stderr.exists():
                stderr.rename(self.folder / f"stderr-{self._num_lives}.txt")
            self._num_lives += 1
            daemon = Daemon(self.folder / "d", *self._options)
            try:
                daemon.wait_ready()
                self._pid, self._seen_s = daemon.pid, time.monotonic()
                return daemon
            except AssertionError as error:
                daemon.kill()
                if time.monotonic() > deadline:
                    if has_moved_log:
                        raise
                    self.problems.append(f"no start in {START_S:.0f} s: {error}")
                    self.move_log()
                    deadline, has_moved_log = time.monotonic() + START_S, True
                print(f"  a start failed: {str(error)[-300:]}", flush=True)
                time.sleep(0.5)

    def kill(self, *, again: bool = False) -> None:
        """Kill the daemon and start it again; once more in the middle of that if so wished."""
        with self._lock:
            self._kill()
            if again:
                early = Daemon(self.folder / "d", *self._options)
                time.sleep(1.0)
                early.kill()
            self._start()

    def end_under_its_keeper(self, number: signal.Signals) -> None:
        """End the daemon alone: its keeper starts the next one, which continues the replies."""
        with self._lock:
            pids, pid = self.worker_pids(), self.daemon.pid
            self._successions.append([time.monotonic(), float("inf")])
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
            deadline = time.monotonic() + START_S
            while is_alive(pid) and time.monotonic() < deadline:
                time.sleep(0.02)
            self._see_end_of(pids)
            while is_alive(pid) or not self.is_ready():
                if time.monotonic() > deadline:
                    self.problems.append(f"its keeper started no other: {self.describe()}")
                    break
                time.sleep(0.1)
            self._pid = self.daemon.pid
            self._seen_s = self._successions[-1][1] = time.monotonic()

    def _kill(self) -> None:
        pids = self.worker_pids()
        self._ends.append([time.monotonic(), float("inf")])
        self.daemon.kill()
        self._see_end_of(pids)

    def _see_end_of(self, pids: list[int]) -> None:
        """Wait until the workers of a killed daemon have ended, too."""
        deadline = time.monotonic() + DEATH_S
        while left := [pid for pid in pids if is_alive(pid)]:
            for pid in left:  # a stopped one hears of nothing
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGCONT)
            if time.monotonic() > deadline:
                self.problems.append(f"workers {left} outlived the daemon")
                break
            time.sleep(0.02)

    def _start(self) -> None:
        self.daemon = self._started()
        self._ends[-1][1] = time.monotonic()

    def restart(self) -> None:
        """Stop it as a service manager does, and start it again."""
        with self._lock:
            self._stops.append([time.monotonic(), float("inf")])
            process = self.daemon.process
            for patience_s in (DRAIN_S, 10.0):
                process.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(patience_s)
                    break
                self._ends.append([time.monotonic(), float("inf")])
            self.daemon.kill()
            if "rows were not written" in self.daemon.stderr:
                self._ends.append([self._stops[-1][0], float("inf")])
            self.daemon = self._started()
            now_s = time.monotonic()
            for span in (*self._stops, *self._ends):
                span[1] = min(span[1], now_s)

    def _watch(self) -> None:
        """Keep frames, and note daemons that end by themselves."""
        while not self._is_over.wait(LOOK_S):
            if self._lock.acquire(blocking=False):
                try:
                    with contextlib.suppress(psutil.Error):  # it ends at this moment
                        self._look_at_end()
                finally:
                    self._lock.release()
            self._look_at_log()
            frame = get(self.door, "/v1/penstock/state")
            if frame is None:
                continue
            with self.frames_path.open("a") as file:
                file.write(json.dumps(frame) + "\n")

    def _look_at_end(self) -> None:
        """Start the keeper again if that has ended, too."""
        code, now_s = self.daemon.process.poll(), time.monotonic()
        if self._is_over.is_set():
            return
        if code is None and (pid := self.daemon.pid) in (self._pid, self.daemon.process.pid):
            self._seen_s = now_s if pid == self._pid else self._seen_s
            return
        self.num_own_ends += 1
        if not self.may_end:
            self.problems.append(f"the daemon ended ({code}): {self.daemon.stderr[-2000:]}")
        self._ends.append([self._seen_s, float("inf")])
        if code is None:
            self._pid, self._ends[-1][1] = pid, now_s
        else:
            self._start()

    def watch(self) -> None:
        self._watcher.start()

    def end(self) -> None:
        """Stop for good."""
        self._is_over.set()
        self._watcher.join()
        code = self.daemon.stop(60)
        if code:
            self.problems.append(f"the last stop ended with {code}")

    def close(self) -> None:
        """Unmount its disks."""
        for disk in (self.state, self.ssd):
            disk.close()

    def has_ended_in(self, begin_s: float, end_s: float) -> bool:
        """Say whether replies may have been cut between two times."""
        return any(begin_s <= to_s and from_s <= end_s for from_s, to_s in [*self._ends])

    def has_stopped_in(self, begin_s: float, end_s: float) -> bool:
        """Say whether requests that were not accepted yet may have been cut."""
        stops = [*self._stops, *self._ends, *self._successions]
        return any(begin_s <= to_s and from_s <= end_s for from_s, to_s in stops)

    # its log

    @property
    def log_path(self) -> Path:
        return self.state.folder / "requests.db"

    def move_log(self) -> None:
        """Take the log away under the daemon, which goes on writing until it notices."""
        kept = self.state.folder / "kept"
        kept.mkdir(exist_ok=True)
        self._num_kept += 1
        for suffix in ("", "-wal", "-shm"):
            with contextlib.suppress(OSError):
                old = self.log_path.with_name(f"requests.db{suffix}")
                old.rename(kept / f"{self._num_kept}.db{suffix}")

    def copy_log(self) -> None:
        """Keep the rows of a log that will be damaged."""
        self._num_kept += 1
        with contextlib.suppress(sqlite3.Error):
            source = sqlite3.connect(self.log_path)
            target = sqlite3.connect(self.folder / f"copied-{self._num_kept}.db")
            source.backup(target)
            source.close()
            target.close()

    def log_files(self) -> list[Path]:
        """List every file that rows were written to, and copies of them."""
        moved = self.state.folder.glob("kept/*.db")
        set_aside = (
            path
            for path in self.state.folder.glob("requests.db.*")
            if not path.name.endswith(("-wal", "-shm"))
        )
        return [self.log_path, *moved, *set_aside, *self.folder.glob("copied-*.db")]

    @contextlib.contextmanager
    def rows_may_be_lost(self, *, only_by_a_kill: bool = False) -> Iterator[None]:
        """Excuse requests without a row for a while, as documented; until the file is another."""
        span = [time.monotonic() - 1.0, float("inf")]
        inode = self._log_inode()
        yield
        if only_by_a_kill:
            span[1] = time.monotonic() + 2.0
            ends = [*self._ends, *self._successions]
            if not any(span[0] <= from_s <= span[1] for from_s, _ in ends):
                return
        else:
            self._damaged = inode
        self._excused.append(span)

    def _log_inode(self) -> int | None:
        with contextlib.suppress(OSError):
            return self.log_path.stat().st_ino
        return None

    def _look_at_log(self) -> None:
        """End the excuse for a damaged log once it has been replaced."""
        if self._damaged is not None and self._log_inode() not in (None, self._damaged):
            self._damaged = None
            for span in self._excused:
                span[1] = min(span[1], time.monotonic() + 2.0)

    def is_excused(self, began_s: float, ended_s: float) -> bool:
        return any(from_s <= ended_s and began_s <= to_s for from_s, to_s in self._excused)

    # what it shows

    def frame(self) -> dict[str, Any] | None:
        """Read its state; None: it does not answer."""
        return get(self.door, "/v1/penstock/state")

    def worker_pids(self, *, ready_only: bool = False) -> list[int]:
        """List its workers, by their parent: also those of a daemon that does not answer."""
        if ready_only:
            frame = self.frame() or {"workers": []}
            return [w["pid"] for w in frame["workers"] if w["state"] == "ready" and w["pid"]]
        with contextlib.suppress(psutil.Error):
            return [child.pid for child in psutil.Process(self.daemon.pid).children()]
        return []

    def is_ready(self) -> bool:
        """Say whether it and all its workers are ready."""
        frame = self.frame()
        return bool(frame) and all(worker["state"] == "ready" for worker in frame["workers"])

    def tell(self, path: str, body: Any = None, method: str = "POST") -> int:
        """Give an operator's order; the status."""
        return ask(self.door, path, body, method=method, silence_s=8.0).status

    def tell_later(self, path: str, body: Any = None) -> None:
        """Give an order once no other fault keeps the daemon from taking it."""
        self._orders.append((path, body))

    def tell_orders(self) -> None:
        """Give the orders that were put off, each until it is taken."""
        deadline = time.monotonic() + START_S
        while self._orders:
            if self.tell(*self._orders[0]) == 200:
                self._orders.pop(0)
            elif time.monotonic() > deadline:
                self.problems.append(f"{self._orders.pop(0)} was not taken: {self.describe()}")
            else:
                time.sleep(0.1)

    def held(self) -> dict[str, Held]:
        """Read what each process holds."""
        frame = self.daemon.fresh_state()
        pids = {"daemon": frame["pid"]} | {w["name"]: w["pid"] for w in frame["workers"]}
        return {name: Held.of(pid) for name, pid in pids.items()}

    def shared_bytes(self) -> int:
        """Add up the anonymous shared memory that the daemon has open."""
        sizes = {}
        for link in Path(f"/proc/{self.daemon.pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if "memfd:" in os.readlink(link):
                    status = link.stat()
                    sizes[status.st_ino] = status.st_size
        return sum(sizes.values())

    def describe(self) -> str:
        """Show what the daemon and its workers do, and what they have said last."""
        with contextlib.suppress(PenstockError, OSError):
            return f"{self.daemon.stderr[-2000:]}\n{stacks(self.state.folder)}"
        return self.daemon.stderr[-2000:]

    def stderr_texts(self) -> dict[str, str]:
        """Read the journals of all its lives."""
        paths = [*sorted(self.folder.glob("stderr-*.txt")), self.daemon.stderr_path]
        return {path.name: path.read_text(errors="replace") for path in paths if path.exists()}


def rows_of(paths: list[Path]) -> Counter[str]:
    """Count rows by the client's id over log files; the most in any one of them counts.

    A row whose ids a flipped bit has changed is another request's, never a second one.
    """
    counts: Counter[str] = Counter()
    for path in paths:
        found: dict[int, tuple[str, str]] = {}
        for order in ("ASC", "DESC"):  # a damaged one is read from both ends
            with contextlib.suppress(sqlite3.Error, UnicodeDecodeError):  # also in its messages
                db = sqlite3.connect(path)
                db.text_factory = lambda text: text.decode(errors="replace")
                query = "SELECT rowid, client_rid, rid FROM requests WHERE client_rid LIKE 'soak-%'"
                for number, *ids in db.execute(f"{query} ORDER BY rowid {order}"):
                    found[number] = (ids[0], ids[1])
                db.close()
        of_file: Counter[str] = Counter()
        for (client_rid, _), count in Counter(found.values()).items():
            of_file[client_rid] = max(of_file[client_rid], count)
        counts |= of_file
    return counts
