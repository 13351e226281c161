"""Do everything to a real daemon that a machine can, for minutes, while clients check its answers.

python -m tests.faults --minutes 30 --seed 1
python -m tests.faults --minutes 10 --transport peer
python -m tests.faults --minutes 10 --roles 2x2
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from random import Random

import httpx

from tests.benchmarks.hostile import Held
from tests.faults.clients import BAD, Clients
from tests.faults.kinds import KINDS, Kind, write_bundle
from tests.faults.questions import answer_of, make_questions, simple_question
from tests.faults.secrets import find_secrets
from tests.faults.subject import MiB, Subject, rows_of
from tests.faults.wire import ask
from tests.sweep.replies import read

MAX_RECOVERY_S = 120.0
MAX_HELD_S = 3.0
MAX_REST_S = 0.5
PAIRED = 0.8
"""Of the faults, those with another one within."""
MAX_GROWTH_BYTES = 64 * MiB
SPARE = 10
"""Descriptors and threads that come and go by themselves."""
SHORTAGES = ("can't start new thread", "MemoryError", "Cannot allocate memory")
"""A worker that ends of one says where; it is restarted."""
NUM_SHOWN = 20
OWN_MOUNTS = "--own-mounts"


@dataclasses.dataclass(slots=True)
class Wounds:
    """How often each kind was done, and how long it took to recover from it."""

    counts: Counter[str] = dataclasses.field(default_factory=Counter)
    serves_s: dict[str, list[float]] = dataclasses.field(default_factory=lambda: defaultdict(list))
    ready_s: dict[str, list[float]] = dataclasses.field(default_factory=lambda: defaultdict(list))


class Soak:
    """One run: faults one after the other, mostly two at once."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.rng, self.order = Random(options.seed), Random(options.seed)
        args = ["--kv-memory", "96MiB", "--transport", options.transport]
        args += ["--roles", "elastic"]
        if "x" in options.roles:
            args += ["--place", f"{options.roles} forced"]
        self.subject = Subject(folder, args, may_mount=options.own_mounts)
        self.options = options
        self.probe = simple_question()
        self.questions = make_questions(options.seed, options.questions)
        self.wounds = Wounds()
        self.possible = [kind for kind in KINDS if kind.is_possible(self.subject)]

    def run(self) -> list[str]:
        """Do it, print the table, and return the problems."""
        subject = self.subject
        for question in (self.probe, *self.questions):
            question.record(subject.door)
        if subject.ssd.is_ours:
            subject.daemon.wait_for(lambda: subject.daemon.state()["ssd"]["state"] == "on")
        before, shared = subject.held(), subject.shared_bytes()
        subject.watch()
        clients = Clients(subject, self.questions, self.options.clients, self.options.seed)
        clients.start()
        until_s = time.monotonic() + 60 * self.options.minutes
        for kinds in self._plan():
            if time.monotonic() > until_s:
                break
            self._hurt(kinds)
        num_stuck = clients.stop(MAX_RECOVERY_S + 60)
        if num_stuck:
            subject.problems.append(f"{num_stuck} clients still wait for their replies")
        try:
            subject.daemon.assert_all_free()
        except (AssertionError, httpx.HTTPError) as error:
            subject.problems.append(f"not all is free at the end: {error}: {subject.describe()}")
            subject.kill()
        write_bundle(subject, subject.folder / "bundle.tar.gz")
        after = subject.held(), subject.shared_bytes()
        subject.end()
        return self._report(clients, (before, shared), after)

    def _plan(self):
        """Draw every kind once in an order of its own, and again; most come in pairs."""
        while True:
            for kind in self.order.sample(self.possible, len(self.possible)):
                others = [other for other in self.possible if other.touches != kind.touches]
                pair = others and self.order.random() < PAIRED
                yield [kind, self.order.choice(others)] if pair else [kind]

    def _hurt(self, kinds: list[Kind]) -> None:
        """Do faults for a while, one within the other, and wait for what they hurt to serve."""
        names = [kind.name for kind in kinds]
        if self.options.verbose:
            print(f"{time.strftime('%H:%M:%S')} {' + '.join(names)}", flush=True)
        with contextlib.ExitStack() as stack:
            for kind in kinds:
                stack.enter_context(kind.hurt(self.subject, self.rng))
            time.sleep(self.rng.uniform(0.1, MAX_HELD_S))
        began_s = time.monotonic()
        self.subject.tell_orders()
        for name in names:
            self.wounds.counts[name] += 1
        for condition, times in (
            (self._serves, self.wounds.serves_s),
            (self.subject.is_ready, self.wounds.ready_s),
        ):
            while not condition():
                if time.monotonic() - began_s > MAX_RECOVERY_S:
                    what = condition.__name__.strip("_")
                    about = f"not {what} {MAX_RECOVERY_S:.0f} s after {names}"
                    self.subject.problems.append(f"{about}: {self.subject.describe()}")
                    self.subject.kill()  # so that the rest can be seen
                    break
                time.sleep(0.1)
            for name in names:
                times[name].append(time.monotonic() - began_s)
        time.sleep(self.rng.uniform(0, MAX_REST_S))

    def _serves(self) -> bool:
        reply = ask(self.subject.door, self.probe.path, self.probe.body, silence_s=10.0)
        return reply.status == 200 and answer_of(read(reply)) == self.probe.right

    # the end

    def _report(self, clients: Clients, before, after) -> list[str]:
        subject = self.subject
        problems = [*subject.problems]
        rows = rows_of(subject.log_files())
        doubled = [rid for rid, count in rows.items() if count > 1]
        accepted = [outcome for outcome in clients.outcomes if outcome.is_accepted]
        without = [o for o in accepted if o.rid not in rows]
        excused = [o for o in without if subject.is_excused(o.began_s, o.ended_s)]
        counts = Counter({**dict.fromkeys(BAD, 0), **clients.counts()})
        counts["without a row"] = len(without) - len(excused)
        counts["doubled rows"] = len(doubled)
        problems += [o.about for o in clients.outcomes if o.verdict in BAD]
        problems += [f"{o.rid} has no row ({o.verdict})" for o in without if o not in excused]
        problems += [f"{rid} has several rows" for rid in doubled]
        problems += self._growth(before, after)
        problems += self._journal_problems()
        self._print_table(counts, len(clients.outcomes), len(excused), before, after)
        problems += find_secrets(subject, self.questions)
        return problems

    def _growth(self, before, after) -> list[str]:
        problems = []
        for name, was in before[0].items():
            now: Held = after[0][name]
            if now.rss_bytes > was.rss_bytes + MAX_GROWTH_BYTES:
                grown = (now.rss_bytes - was.rss_bytes) / MiB
                problems.append(f"{name} has grown by {grown:.0f} MiB")
            if now.num_fds > was.num_fds + SPARE:
                problems.append(f"{name} has {now.num_fds} descriptors, before {was.num_fds}")
            if now.num_threads > was.num_threads + SPARE:
                problems.append(f"{name} has {now.num_threads} threads, before {was.num_threads}")
        if after[1] > before[1]:
            problems.append(f"{after[1]} bytes of shared memory, before {before[1]}")
        return problems

    def _journal_problems(self) -> list[str]:
        found = []
        for name, text in self.subject.stderr_texts().items():
            lines = text.splitlines()
            for number, line in enumerate(lines):
                shown = lines[number : number + 60]
                is_shortage = any(what in text for what in SHORTAGES for text in shown)
                if line.startswith("Traceback") and not is_shortage:
                    found.append(f"{name}:{number + 1}: " + "\n    ".join(shown))
                if "invariant.violated" in line:
                    found.append(f"{name}:{number + 1}: {line}")
        return found

    def _print_table(self, counts, num_requests, num_excused, before, after) -> None:
        heads = [f"{head:>12}" for head in ("serves p50", "worst s", "ready p50", "worst s")]
        print(f"\n{'fault':34}{'count':>6}{''.join(heads)}")
        for kind in KINDS:
            if kind not in self.possible:
                print(f"{kind.name:34}{'skipped: not permitted here':>32}")
                continue
            line = f"{kind.name:34}{self.wounds.counts[kind.name]:6}"
            for times in (self.wounds.serves_s[kind.name], self.wounds.ready_s[kind.name]):
                if times:
                    line += f"{statistics.median(times):12.1f}{max(times):12.1f}"
            print(line)
        print(f"\n{sum(self.wounds.counts.values())} faults; {num_requests} requests:")
        print(", ".join(f"{name} {count}" for name, count in sorted(counts.items())))
        print(f"rows lost as documented {num_excused}; ends of its own {self.subject.num_own_ends}")
        for name, was in before[0].items():
            now = after[0][name]
            print(
                f"{name:10} RSS {was.rss_bytes / MiB:.0f} -> {now.rss_bytes / MiB:.0f} MiB, "
                f"descriptors {was.num_fds} -> {now.num_fds}, "
                f"threads {was.num_threads} -> {now.num_threads}"
            )
        print(f"shared memory {before[1] / MiB:.0f} -> {after[1] / MiB:.0f} MiB")


def in_own_mounts(argv: list[str]) -> None:
    """Start again in a mount namespace, where this machine permits one; its mounts end with it."""
    wrapped = ["unshare", "--mount", "--propagation", "private"]
    with contextlib.suppress(OSError):
        tried = subprocess.run([*wrapped, "true"], capture_output=True, check=False)
        if tried.returncode == 0:
            command = [sys.executable, "-m", "tests.faults", *argv, OWN_MOUNTS]
            os.execvp(wrapped[0], [*wrapped, *command])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--transport", default="auto", choices=["auto", "alias", "shm", "peer"])
    parser.add_argument("--roles", default="1x1", help="how many workers of each role, as 2x2")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--questions", type=int, default=39)
    parser.add_argument("--only", default="", help="only kinds whose names have this in them")
    parser.add_argument("--keep", type=Path, help="an empty folder for everything, which stays")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument(OWN_MOUNTS, action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.own_mounts:
        in_own_mounts(sys.argv[1:])
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))  # the daemon forbids core dumps itself
    with tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as name:
        soak = Soak(options, options.keep or Path(name))
        soak.possible = [kind for kind in soak.possible if options.only in kind.name]
        try:
            problems = soak.run()
        finally:
            if soak.subject.daemon.process.poll() is None:
                soak.subject.daemon.kill()
            soak.subject.close()
    for problem in problems[:NUM_SHOWN]:
        print(f"PROBLEM: {problem}")
    if len(problems) > NUM_SHOWN:
        print(f"... and {len(problems) - NUM_SHOWN} more")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
