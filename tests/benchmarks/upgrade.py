"""Upgrade a daemon in place under streams of every API, and compare every reply.

usage: python -m tests.benchmarks.upgrade OLD.whl NEW.whl MODEL [--kill-worker] [-- OPTIONS]

Installs the old wheel into a folder, serves MODEL from it, begins a stream of each kind. Then it
puts the new wheel in that folder's place, asks for a restart (`penstock restart`'s signal), and
reads all replies to their ends. Last it stops the new daemon, whose keeper is still the old one.
Exit code 1 if a reply differs from the undisturbed one or has not exactly one row, or if the keeper
does not end with 0. Log-probabilities may differ by 1e-4: two versions may add them up in another
order, and a reply may have some of each.

With --kill-worker a worker of the old daemon is killed between the new wheel and the restart. There
are three controls: the same kill without an upgrade, of the old daemon before and of the new one
after, each beside its own undisturbed replies; and the new daemon's undisturbed replies beside the
old one's. A reply that differs there too differs by the kill, or by the version.

A wheel of another commit: `git archive COMMIT | tar x -C FOLDER`, then `PENSTOCK_BUILD_KERNELS=all
pip wheel --no-deps FOLDER`. Minutes, for it compiles the kernels twice: no part of the suite.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from tests.benchmarks.daemon_deaths import Stream, num_rows
from tests.daemons import Daemon
from tests.test_daemon_death import BODIES, said


def install(wheel: Path, site: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target"]
    subprocess.run([*command, site, wheel], check=True)


def modules_run(daemon: Daemon) -> set[str]:
    """List what the daemon's workers were started as."""
    lines = [one.cmdline() for one in psutil.Process(daemon.pid).children(recursive=True)]
    return {line[line.index("-m") + 1] for line in lines if "-m" in line}


def kill_worker(daemon: Daemon) -> None:
    name = daemon.state()["workers"][-1]["name"]
    os.kill(pid := daemon.worker_pid(name), signal.SIGKILL)
    daemon.wait_for(lambda: daemon.worker_pid(name) != pid and daemon.is_ready())


def upgrade(daemon: Daemon, site: Path, new: Path, *, has_killed: bool) -> None:
    site.rename(site.with_name("old"))
    new.rename(site)
    pid = daemon.pid
    if has_killed:
        kill_worker(daemon)
        print("the old daemon's worker runs again, started as", *modules_run(daemon))
    os.kill(pid, signal.SIGUSR2)


def agrees(one: object, other: object) -> bool:
    """Compare what two clients have read, numbers with a tolerance."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(agrees(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(agrees, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-4, abs_tol=1e-4)
    return one == other


class Comparison:
    """Streams of each kind, and those that read otherwise when something happens to them."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.num_asked, self.is_equal = 0, True
        self.calm = self.undisturbed()

    def undisturbed(self) -> dict[str, object]:
        self.num_asked += len(BODIES)
        return {name: said(Stream(self.daemon, name).read().received) for name in BODIES}

    def begin_anew(self) -> None:
        """Compare with this version's replies from now on; say which are other than before."""
        before, self.calm = self.calm, self.undisturbed()
        changed = [name for name in BODIES if not agrees(before[name], self.calm[name])]
        print(f"undisturbed replies that the new version changes: {changed or 'none'}")

    def disturb(self, about: str, act: Callable[[], None]) -> None:
        """Begin the streams, let it happen, read all to their ends, and compare."""
        streams = [Stream(self.daemon, name) for name in BODIES]
        with ThreadPoolExecutor(len(streams)) as pool:
            ends = [pool.submit(one.read) for one in streams]
            self.daemon.wait_for(lambda: all(one.has_begun for one in streams))
            num_open = sum(not one.has_ended for one in streams)
            act()
            for end in ends:
                end.result()
        self.num_asked += len(streams)
        wrong = [one.name for one in streams if not agrees(said(one.received), self.calm[one.name])]
        self.is_equal &= not wrong
        print(f"{about}: {len(streams)} streams, {num_open} open, wrong: {wrong or 'none'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("--kill-worker", action="store_true")
    args, options = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="upgrade-") as folder:
        site, new = Path(folder) / "site", Path(folder) / "new"
        install(args.old, site)
        install(args.new, new)
        env = {"PYTHONPATH": str(site), "PYTHONSAFEPATH": "1"}
        options = [each for each in options if each != "--"]
        daemon = Daemon(Path(folder) / "d", *options, model=args.model.resolve(), env=env)
        daemon.wait_ready()
        compared = Comparison(daemon)
        before, started_as = daemon.pid, modules_run(daemon)
        if args.kill_worker:
            compared.disturb("old, its worker killed", lambda: kill_worker(daemon))
        compared.disturb("upgrade", lambda: upgrade(daemon, site, new, has_killed=args.kill_worker))
        daemon.wait_for(lambda: daemon.pid not in (before, daemon.process.pid))
        daemon.wait_ready()
        print(f"started as {sorted(started_as)} before, {sorted(modules_run(daemon))} after")
        if args.kill_worker:
            compared.begin_anew()
            compared.disturb("new, its worker killed", lambda: kill_worker(daemon))
        daemon.wait_for(lambda: num_rows(daemon)[0] >= compared.num_asked)
        rows, num_ids = num_rows(daemon)
        print(f"{rows} rows of {num_ids} requests, {compared.num_asked} asked")
        daemon.assert_all_free()
        status = daemon.stop()
        print(f"the old keeper ended with {status}")
    sys.exit(not compared.is_equal or not rows == num_ids == compared.num_asked or status != 0)


if __name__ == "__main__":
    main()
