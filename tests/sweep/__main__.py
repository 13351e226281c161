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
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.pool import Pool
from pathlib import Path
from typing import NamedTuple

from tests.checkpoints import make_checkpoint
from tests.sweep.machine import DAEMON, DISK_FAULTS, Machine, Outcome
from tests.sweep.replies import Said, read
from tests.sweep.scenarios import SCENARIOS
from tests.sweep.virtual_loop import Process

STOPS_S = (0.3, 3, 60, 900)
RUN_S = 120
"""Real seconds of a run, at most."""


class Fault(NamedTuple):
    """What happens before which event: a worker is killed or stopped, or the disk fails once."""

    at: int
    what: str
    """The worker that is killed, `WORKER:SECONDS` for one that is stopped, or a disk's fault."""


class Run(NamedTuple):
    """One run, and what repeats it."""

    scenario: str
    seed: int
    faults: tuple[Fault, ...] = ()

    def __str__(self) -> str:
        faults = "".join(f" --at {each.at} --fault {each.what}" for each in self.faults)
        return f"python -m tests.sweep {self.scenario!r} --seed {self.seed}{faults}"


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
    workers: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def kills_daemon(self) -> bool:
        return any(fault.what == DAEMON for fault in self.run.faults)


def model_folder() -> Path:
    """Make a tiny checkpoint once, of which the daemon reads shape and tokenizer."""
    folder = Path(tempfile.gettempdir()) / f"penstock-sweep-model-{os.getuid()}"
    if not (folder / "tokenizer.json").exists():
        make_checkpoint(folder, max_position_embeddings=2048)
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
    num_files = _num_files()
    signal.alarm(RUN_S)
    try:
        machine = Machine(model_folder(), folder, run.seed, scenario.options, on_event)
        outcome = machine.run(scenario.calls())
        seen.workers = sorted({worker.name for worker in machine.workers})
        _note(seen, outcome)
        del machine, outcome
        gc.collect()
        if (left := _num_files() - num_files) > 0 and not seen.kills_daemon:
            seen.problems.append(f"{left} files were left open")
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is this run's
        seen.problems.append("".join(traceback.format_exception(error)[-4:]))
    finally:
        signal.alarm(0)
        shutil.rmtree(folder, ignore_errors=True)
    return seen


def _num_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def _note(seen: Seen, outcome: Outcome) -> None:
    if not seen.run.faults and not outcome.has_shown(SCENARIOS[seen.run.scenario].shows):
        seen.problems.append(f"no row with {SCENARIOS[seen.run.scenario].shows}")
    for name, reply in outcome.replies.items():
        said: Said = read(reply)
        seen.said[name], seen.statuses[name] = said.as_tuple(), reply.status
        seen.texts[name] = said.texts[0]
    seen.rows, seen.num_events = sorted(outcome.rows, key=repr), outcome.num_events
    seen.num_at_ready = outcome.num_at_ready
    seen.problems += outcome.problems


def differences(calm: Seen, seen: Seen) -> list[str]:
    """Compare a disturbed run with the undisturbed one; nothing may be noticed.

    A reply that its client left, or whose daemon died, is the beginning of the undisturbed one.
    """
    found = list(seen.problems)
    may_differ = SCENARIOS[seen.run.scenario].may_differ
    found += [f"{name}: {code}" for name, code in calm.statuses.items() if code != 200]
    for name, said in calm.said.items():
        is_whole = seen.said.get(name) == said
        if not is_whole and (name in may_differ or seen.kills_daemon):
            theirs, whole = seen.texts.get(name, ""), calm.texts[name]
            short, long = sorted((theirs, whole), key=len)
            if not long.startswith(short):
                found.append(f"{name}: {theirs!r} and {whole!r} begin differently")
        elif not is_whole:
            found.append(f"{name}: {seen.said.get(name)} instead of {said}")
    num_answered = sum(status == 200 for status in seen.statuses.values())
    if seen.kills_daemon:
        if not num_answered <= len(seen.rows) <= len(calm.rows):
            found.append(f"{len(seen.rows)} rows for {num_answered} replies")
    elif len(seen.rows) != len(calm.rows):
        found.append(f"{len(seen.rows)} rows instead of {len(calm.rows)}")
    elif not may_differ and seen.rows != calm.rows:
        found.append(f"rows {seen.rows} instead of {calm.rows}")
    return found


def plans(calm: Seen, every: int, num_drawn: int) -> Iterator[Run]:
    """Kill each worker at each event; then two kills, stops and faults of the disk by seed."""
    name, seed = calm.run.scenario, calm.run.seed
    first, last = calm.num_at_ready + 1, calm.num_events
    for at, worker in itertools.product(range(first, last + 1, every), [*calm.workers, DAEMON]):
        yield Run(name, seed, (Fault(at, worker),))
    drawn = random.Random(f"{name} {seed}")
    stops = [f"{worker}:{stop_s}" for worker in calm.workers for stop_s in STOPS_S]
    disk = DISK_FAULTS if "ssd_cache" in SCENARIOS[name].options else ()
    for _ in range(num_drawn):
        at = drawn.randint(first, last)
        what = drawn.choice([*calm.workers * 3, *stops, *disk * 2])
        second = Fault(at + drawn.randint(0, 40), drawn.choice([*calm.workers, *disk]))
        yield Run(name, seed, (Fault(at, what), second))


def sweep(args: argparse.Namespace) -> int:
    """Run all; print a line for each scenario and failure; return the number of failures."""
    num_failures = num_runs = 0
    model_folder()
    with _pool(args.jobs) as pool:
        for name in args.scenario or SCENARIOS:
            calm, same = pool.map(execute, [Run(name, args.seed)] * 2)
            problems = differences(calm, calm) + differences(calm, same)
            if problems or calm.num_events != same.num_events:
                print(f"{calm.run}: undisturbed: {problems or 'two runs differ'}", flush=True)
                num_failures += 1
                continue
            runs = list(plans(calm, args.every, args.drawn))
            if args.sample is not None:
                runs = random.Random(f"{name} {args.seed}").sample(runs, args.sample)
            num_runs += len(runs)
            num_failures += _sweep_one(pool, calm, runs, ends_at_first=args.first)
            if num_failures and args.first:
                break
    print(f"{num_runs} runs, {num_failures} failures")
    return num_failures


def _sweep_one(pool: Pool, calm: Seen, runs: list[Run], *, ends_at_first: bool) -> int:
    """Do all disturbed runs of one scenario; return how many showed something."""
    began_s, num_faults, num_bad = time.monotonic(), 0, 0
    for seen in pool.imap_unordered(execute, runs, chunksize=4):
        num_faults += seen.num_faults
        if found := differences(calm, seen):
            num_bad += 1
            print(f"{seen.run}\n    {found[0][:1500]}", flush=True)
            if ends_at_first:
                break
    print(
        f"{calm.run.scenario}: {calm.num_events - calm.num_at_ready} events, "
        f"{len(calm.workers)} workers, {len(runs)} runs, {num_faults} faults, "
        f"{num_bad} failures, {time.monotonic() - began_s:.0f} s",
        flush=True,
    )
    return num_bad


@contextlib.contextmanager
def _pool(num_jobs: int) -> Iterator[Pool]:
    fork = multiprocessing.get_context("fork")
    with fork.Pool(num_jobs, _begin, maxtasksperchild=40) as pool:
        yield pool


def _begin() -> None:
    logging.disable(logging.CRITICAL)
    sys.unraisablehook = lambda _: None  # tasks of killed processes are dropped at the end
    signal.signal(signal.SIGALRM, _too_long)


def _too_long(*_: object) -> None:
    raise AssertionError(f"it took {RUN_S} real seconds")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("scenario", nargs="*", help=", ".join(SCENARIOS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--every", type=int, default=1, help="of the events, each Nth")
    parser.add_argument("--drawn", type=int, default=40, help="runs with two faults, by seed")
    parser.add_argument("--sample", type=int, help="only so many runs, by seed")
    parser.add_argument("--first", action="store_true", help="end with the first failure")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--at", type=int, action="append", default=[])
    parser.add_argument("--fault", action="append", default=[])
    args = parser.parse_args()
    if args.at:
        calm = execute(Run(args.scenario[0], args.seed))
        faults = tuple(map(Fault, args.at, args.fault))
        logging.basicConfig(level=logging.INFO)
        found = differences(calm, execute(Run(args.scenario[0], args.seed, faults)))
        print("\n".join(found) or "nothing differs")
        return bool(found)
    return bool(sweep(args))


if __name__ == "__main__":
    sys.exit(main())
