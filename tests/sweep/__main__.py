"""Kill each process at each event of each scenario, and look whether any client notices.

python -m tests.sweep                     # everything
python -m tests.sweep shm --every 5       # one scenario, each fifth event
python -m tests.sweep shm --at 57 --fault decode   # one run again, as a failure says
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import logging
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from multiprocessing.pool import Pool
from pathlib import Path
from typing import NamedTuple

from tests.checkpoints import make_checkpoint
from tests.sweep.machine import DAEMON, DISK_FAULTS, LOADING, WORKERS, Call, Machine, Outcome
from tests.sweep.replies import Said, read
from tests.sweep.scenarios import SCENARIOS
from tests.sweep.virtual_loop import Process

STOPS_S = (0.3, 3, 60, 900)
DAEMON_STOPS_S = (0.002, 0.02, 0.3, 60)
"""The shortest: workers are a few steps ahead of it, and their messages cross with its commands."""
WORKER_STOPS_S = (0.005, 0.3)
"""So short that the worker is not killed: what it goes on with may have been given to others."""
LATE_BEATS = (1, 4)
"""Beats of a starved worker that come late: it is slow, and keeps its place."""
EVENTS_PER_OTHER = 3
"""At each third event all workers die, at each third the daemon is stopped, and so on."""
MOST_TRIED = 40
"""Events at which faults are tried again when a failure is shrunk."""
RUNS_OF_A_CHILD, AT_ONCE = 32, 4
"""A killed daemon's files stay open in the process that simulated it."""
RUN_S = 60
"""CPU seconds of a run, at most: a stopped or starved sweep fails nothing."""


class Fault(NamedTuple):
    """What happens before which event: a worker is killed, stopped or starved, or a disk fails."""

    at: int
    what: str
    """What is killed: a worker, the daemon or all workers; `NAME:SECONDS` if it is stopped instead,
    `NAME~BEATS` if other programs make so many beats late; or what the disk does."""


class Run(NamedTuple):
    """One run, and what repeats it."""

    scenario: str
    seed: int
    faults: tuple[Fault, ...] = ()
    calls: tuple[str, ...] = ()
    """The scenario's calls that are made; empty: all."""

    def __str__(self) -> str:
        faults = "".join(f" --at {each.at} --fault {each.what}" for each in self.faults)
        calls = f" --calls {','.join(self.calls)!r}" if self.calls else ""
        return f"python -m tests.sweep {self.scenario!r} --seed {self.seed}{faults}{calls}"

    @property
    def undisturbed(self) -> Run:
        return self._replace(faults=())


@dataclass(slots=True)
class Seen:
    """What a run showed, small enough to be sent between processes."""

    run: Run
    said: dict[str, tuple[object, ...]] = field(default_factory=dict)
    statuses: dict[str, int] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    rows: list[tuple[str, int, int, str]] = field(default_factory=list)
    num_at_ready: int = 0
    num_events: int = 0
    num_faults: int = 0
    num_started: int = 0
    workers: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    cpu_s: float = 0.0

    @property
    def kills_daemon(self) -> bool:
        return any(fault.what == DAEMON for fault in self.run.faults)


def model_folder(family: str) -> Path:
    """Make a tiny checkpoint once, of which the daemon reads shape and tokenizer."""
    folder = Path(tempfile.gettempdir()) / f"penstock-sweep-models-{os.getuid()}" / family
    if not folder.exists():
        folder.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as made:
            make_checkpoint(Path(made) / family, family, max_position_embeddings=2048)
            with contextlib.suppress(OSError):  # another process has made it meanwhile
                (Path(made) / family).rename(folder)
    return folder


def execute(run: Run) -> Seen:
    """Do one run in this process."""
    scenario = SCENARIOS[run.scenario]
    seen, faults = Seen(run), sorted(run.faults)

    def on_event(machine: Machine, number: int, _: Process) -> None:
        while faults and faults[0].at <= number:
            seen.num_faults += machine.suffer(faults.pop(0).what)

    shm = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="sweep-", dir=shm if shm.is_dir() else None))
    num_files, began_s = _num_files(), time.process_time()
    signal.setitimer(signal.ITIMER_PROF, RUN_S, 1)  # again, in case that some code catches it
    try:
        models = [model_folder(family) for family in scenario.models]
        machine = Machine(models, folder, run.seed, scenario.options, on_event)
        machine.is_checked = not faults  # until the first one it is the undisturbed run
        outcome = machine.run(calls_of(run))
        seen.workers = sorted({worker.name for worker in machine.workers})
        _note(seen, outcome)
        del machine, outcome
        gc.collect()
        if (left := _num_files() - num_files) > 0 and not seen.kills_daemon:
            seen.problems.append(f"{left} files were left open")
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is this run's
        seen.problems.append("".join(traceback.format_exception(error)[-4:]))
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        shutil.rmtree(folder, ignore_errors=True)
    seen.cpu_s = time.process_time() - began_s
    return seen


def calls_of(run: Run) -> list[Call]:
    """Return the calls of a run; one that waits for a call that is left out waits for none."""
    calls = [
        call for call in SCENARIOS[run.scenario].calls() if not run.calls or call.name in run.calls
    ]
    names = {call.name for call in calls}
    return [replace(call, after=call.after if call.after in names else None) for call in calls]


def _num_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def _note(seen: Seen, outcome: Outcome) -> None:
    run, wanted = seen.run, SCENARIOS[seen.run.scenario].shows
    if not (run.faults or run.calls or outcome.has_shown(wanted)):
        seen.problems.append(f"no row with {wanted}")
    for name, reply in outcome.replies.items():
        said: Said = read(reply)
        seen.said[name], seen.statuses[name] = said.as_tuple(), reply.status
        seen.texts[name] = said.texts[0]
    seen.rows, seen.num_events = sorted(outcome.rows, key=repr), outcome.num_events
    seen.num_at_ready, seen.num_started = outcome.num_at_ready, outcome.num_started
    seen.problems += outcome.problems


def differences(calm: Seen, seen: Seen) -> list[str]:
    """Compare a disturbed run with the undisturbed one; nothing may be noticed.

    A reply that its client left is the beginning of the undisturbed one.
    """
    found = list(seen.problems)
    may_differ = SCENARIOS[seen.run.scenario].may_differ
    found += [f"{name}: {code}" for name, code in calm.statuses.items() if code != 200]
    for name, said in calm.said.items():
        is_whole = seen.said.get(name) == said
        if not is_whole and name in may_differ:
            theirs, whole = seen.texts.get(name, ""), calm.texts[name]
            short, long = sorted((theirs, whole), key=len)
            if not long.startswith(short):
                found.append(f"{name}: {theirs!r} and {whole!r} begin differently")
        elif not is_whole:
            found.append(f"{name}: {seen.said.get(name)} instead of {said}")
    is_only_starved = all("~" in fault.what for fault in seen.run.faults)
    if is_only_starved and seen.num_started != calm.num_started:
        found.append(f"{seen.num_started} workers were started instead of {calm.num_started}")
    return found + _wrong_rows(calm, seen, may_differ)


def _wrong_rows(calm: Seen, seen: Seen, may_differ: frozenset[str]) -> list[str]:
    """Compare the log's rows; a client that was told to come again has one for each time."""
    rows = [row for row in seen.rows if row[1] != LOADING]
    if len(rows) != len(calm.rows):
        return [f"{len(rows)} rows instead of {len(calm.rows)}"]
    if not may_differ and rows != calm.rows:
        return [f"rows {rows} instead of {calm.rows}"]
    return []


def plans(calm: Seen, every: int, num_drawn: int) -> Iterator[Run]:
    """Plan each process's death at each event, some other faults at some, and pairs by seed."""
    name, seed = calm.run.scenario, calm.run.seed
    first, last = calm.num_at_ready + 1, calm.num_events
    for at, worker in itertools.product(range(first, last + 1, every), [*calm.workers, DAEMON]):
        yield Run(name, seed, (Fault(at, worker),))
    drawn = random.Random(f"{name} {seed}")
    daemon_stops = [f"{DAEMON}:{stop_s}" for stop_s in DAEMON_STOPS_S]
    worker_stops = [f"{worker}:{stop_s}" for worker in calm.workers for stop_s in WORKER_STOPS_S]
    starved = [f"{worker}~{count}" for worker in calm.workers for count in LATE_BEATS]
    disk = DISK_FAULTS if "ssd_cache" in SCENARIOS[name].options else ()
    others = [[WORKERS], daemon_stops, worker_stops, starved, disk]
    for offset, kinds in enumerate(filter(None, others)):
        for at in range(first + offset, last + 1, every * EVENTS_PER_OTHER):
            yield Run(name, seed, (Fault(at, drawn.choice(kinds)),))
    stops = [f"{worker}:{stop_s}" for worker in calm.workers for stop_s in STOPS_S]
    for _ in range(num_drawn):
        at = drawn.randint(first, last)
        what = drawn.choice([*calm.workers * 3, *stops, *starved, *disk * 2])
        second = Fault(at + drawn.randint(0, 40), drawn.choice([*calm.workers, *disk]))
        yield Run(name, seed, (Fault(at, what), second))


def sweep(args: argparse.Namespace) -> int:
    """Run all; print a line for each scenario and failure; return the number of failures."""
    num_failures = num_runs = 0
    names = args.scenario or list(SCENARIOS)
    for family in sorted({family for name in names for family in SCENARIOS[name].models}):
        model_folder(family)
    _warm_up(names[0])
    with _pool(args.jobs) as pool:
        for name in names:
            # of a size of its own: a pool that replaces its only process has none to count
            calm, same = pool.map(execute, [Run(name, args.seed)] * 2, chunksize=1)
            problems = differences(calm, calm) + differences(calm, same)
            if problems or calm.num_events != same.num_events:
                print(f"{calm.run}: undisturbed: {problems or 'two runs differ'}", flush=True)
                num_failures += 1
                if args.first:
                    break
                continue
            runs = list(plans(calm, args.every, args.drawn))
            random.Random(f"{name} {args.seed}").shuffle(runs)
            runs = runs[: args.sample]
            num_done, num_bad = _sweep_one(pool, calm, runs, ends_at_first=args.first)
            num_runs, num_failures = num_runs + num_done, num_failures + num_bad
            if num_failures and args.first:
                break
    print(f"{num_runs} runs, {num_failures} failures")
    return num_failures


def _sweep_one(pool: Pool, calm: Seen, runs: list[Run], *, ends_at_first: bool) -> tuple[int, int]:
    """Do the disturbed runs of one scenario; return how many were done, and how many failed."""
    began_s, num_done, num_faults, num_bad, cpu_s = time.monotonic(), 0, 0, 0, 0.0
    for seen in pool.imap_unordered(execute, runs, chunksize=AT_ONCE):
        num_done += 1
        num_faults, cpu_s = num_faults + seen.num_faults, cpu_s + seen.cpu_s
        if found := differences(calm, seen):
            num_bad += 1
            print(f"{seen.run}\n    {found[0][:1500]}", flush=True)
            if num_bad == 1 and not ends_at_first:
                smallest, found = shrink(pool, seen.run, found)
                print(f"smallest: {smallest}\n    {found[0][:1500]}", flush=True)
            if ends_at_first:
                break
    print(
        f"{calm.run.scenario}: {calm.num_events - calm.num_at_ready} events, "
        f"{len(calm.workers) + 1} processes, {num_done} runs, {num_faults} faults, "
        f"{num_bad} failures, {cpu_s:.0f} CPU s, {time.monotonic() - began_s:.0f} s",
        flush=True,
    )
    return num_done, num_bad


def shrink(pool: Pool, run: Run, found: list[str]) -> tuple[Run, list[str]]:
    """Leave out faults and calls while the run still fails; return what is left, and what it shows.

    Without a call the other events have other numbers, so the faults are tried at many of them.
    """
    has_shrunk = True
    while has_shrunk:
        has_shrunk = False
        for smaller in _smaller(run):
            if (failing := _failing(pool, smaller)) is not None:
                (run, found), has_shrunk = failing, True
                break
    return run, found


def _smaller(run: Run) -> Iterator[Run]:
    """Yield the run without each of its faults, then without each of its calls."""
    if len(run.faults) > 1:
        yield from (run._replace(faults=(fault,)) for fault in run.faults)
    names = tuple(call.name for call in calls_of(run))
    if len(names) > 1:
        for name in names:
            yield run._replace(calls=tuple(each for each in names if each != name))


def _failing(pool: Pool, run: Run) -> tuple[Run, list[str]] | None:
    """Find a run with these calls and kinds of faults that fails; None: none is found."""
    calm = pool.apply(execute, (run.undisturbed,))
    if found := differences(calm, calm):
        return calm.run, found
    if not run.faults:
        return None
    first, last = calm.num_at_ready + 1, calm.num_events
    step = max((last - first) // MOST_TRIED, 1)
    began_at = run.faults[0].at
    tried = [run] + [
        run._replace(faults=tuple(Fault(f.at - began_at + at, f.what) for f in run.faults))
        for at in range(first, last + 1, step)
    ]
    for seen in pool.imap(execute, tried, chunksize=AT_ONCE):
        if found := differences(calm, seen):
            return seen.run, found
    return None


@contextlib.contextmanager
def _pool(num_jobs: int) -> Iterator[Pool]:
    fork = multiprocessing.get_context("fork")
    with fork.Pool(num_jobs, _begin, maxtasksperchild=RUNS_OF_A_CHILD // AT_ONCE) as pool:
        yield pool


def _warm_up(scenario: str) -> None:
    """Import and read here, once, what all runs need."""
    logging.disable(logging.CRITICAL)
    execute(Run(scenario, 1))
    gc.collect()
    gc.freeze()


def _begin() -> None:
    logging.disable(logging.CRITICAL)
    # tasks of killed processes are dropped at the end, and a failed run leaves its log's thread
    sys.unraisablehook = threading.excepthook = lambda _: None
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGPROF, _too_long)
    gc.disable()  # it would run at times that no seed decides


def _too_long(*_: object) -> None:
    raise KeyboardInterrupt(f"it took {RUN_S} CPU seconds")  # which no callback catches


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("scenario", nargs="*", help=", ".join(SCENARIOS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--every", type=int, default=1, help="of the events, each Nth")
    parser.add_argument("--drawn", type=int, default=40, help="runs with two faults, by seed")
    parser.add_argument("--sample", type=int, help="only so many runs, by seed")
    parser.add_argument("--first", action="store_true", help="end with the first failure, as it is")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--at", type=int, action="append", default=[])
    parser.add_argument("--fault", action="append", default=[])
    parser.add_argument("--calls", help="of the scenario's calls only these, with commas")
    args = parser.parse_args()
    if args.at or args.calls:
        calls = tuple(args.calls.split(",")) if args.calls else ()
        run = Run(args.scenario[0], args.seed, tuple(map(Fault, args.at, args.fault)), calls)
        calm = execute(run.undisturbed)
        logging.basicConfig(level=logging.INFO)
        found = differences(calm, execute(run))
        print("\n".join(found) or "nothing differs")
        return bool(found)
    return bool(sweep(args))


if __name__ == "__main__":
    sys.exit(main())
