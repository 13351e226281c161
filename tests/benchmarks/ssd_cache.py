"""Measure what the SSD and DRAM caches gain, and what they cost users who stream meanwhile.

usage: python -m tests.benchmarks.ssd_cache WHAT [WHAT ...] [--model FOLDER] [--rounds 3] ...

WHAT, one after the other:
restart [--length 4000]; gaps [--prompts 200]; trace [--kind agents|mooncake]; copies

restart: a pool of little more than two prompts. One is computed, asked for again (from the pool,
and stored), pushed out of the pool by two others, asked for (from the disk); then the daemon is
killed with SIGKILL, and its successor is asked (from the disk, after a restart). A daemon with a
DRAM cache alone is asked in the same order. The disk is read by O_DIRECT: no page cache.

gaps: a client streams tokens while another asks again for prompts in the pool, so that little is
computed and blocks are stored all the time. Daemons without the cache, with it, and without it
again take turns; the two without it are the band within which nothing is shown.

trace: conversations in turns that begin alike, or prompts about documents of which some are asked
about often, in a pool of a tenth of all of them; the prompts' tokens that are found without the
caches, with each of --tiers, without them again, and by a cache without end. --scale shortens the
prompts.

copies: loads and stores beside plain reads and writes by O_DIRECT of as many bytes, in turns.
"""

from __future__ import annotations

import argparse
import itertools
import mmap
import os
import random
import statistics
import tempfile
import threading
import time
from pathlib import Path
from queue import Queue

from appliance.models.names import STARTER_FOLDER
from engine.cache.hashes import PrefixHasher
from engine.checkpoint.checkpoint import Checkpoint
from engine.offload.disk import Disk
from engine.offload.index import SlabIndex
from engine.offload.jobs import CopyJob, GrowJob
from engine.offload.slab_files import Slabs
from engine.wire.messages import Copy
from tests.daemons import Daemon

BLOCK_SIZE = 64
CACHE = ("--ssd-cache", "8GiB")
TIERS = {
    "ssd": CACHE,
    "dram": ("--ssd-cache", "off", "--dram-cache", "4GiB"),
    "both": (*CACHE, "--dram-cache", "4GiB"),
}
OFF = ("--ssd-cache", "off")
BLOCK_BYTES = 1_474_560  # of the 135M shape: 30 layers, 3 heads of 64, bfloat16


def fresh(length: int, seed: int, vocab: int = 300) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(10, vocab) for _ in range(length)]


def kv_memory(options: argparse.Namespace, num_tokens: int) -> tuple[str, ...]:
    """Settings for a pool of so many tokens."""
    config = Checkpoint.open(options.model or STARTER_FOLDER).config
    blocks = -(-num_tokens // BLOCK_SIZE) + 1
    dtype = "float32" if options.model is None else "bfloat16"
    return "--kv-memory", str(blocks * config.kv_block_bytes(BLOCK_SIZE, dtype)), "--dtype", dtype


def ttft_ms(daemon: Daemon, prompt: list[int]) -> float:
    began_s, first_s = time.monotonic(), None
    for event in daemon.stream(prompt, max_tokens=4, ignore_eos=True):
        if first_s is None and any(choice["token_ids"] for choice in event["choices"]):
            first_s = time.monotonic()
    assert first_s is not None, "no token"
    return (first_s - began_s) * 1e3


def ssd(daemon: Daemon) -> dict:
    return daemon.state()["ssd"]


def wait_on(daemon: Daemon) -> Daemon:
    daemon.wait_ready()
    daemon.wait_for(lambda: ssd(daemon)["state"] != "opening")
    return daemon


def wait_settled(daemon: Daemon) -> None:
    """Until nothing is stored any more."""
    last, count = None, 0
    while count < 5:
        now = ssd(daemon)["stored_blocks"]
        last, count = now, count + 1 if now == last else 0
        time.sleep(0.2)


def ratios(found: dict[str, list[float]], of: str, unit: str = "ms") -> None:
    for kind, values in found.items():
        shares = [a / b for a, b in zip(values, found[of], strict=True)]
        print(
            f"{kind:>24}: {statistics.median(values):9.2f} {unit} "
            f"({min(values):.2f} to {max(values):.2f}); of {of} "
            f"{statistics.median(shares):.4f} ({min(shares):.4f} to {max(shares):.4f})",
            flush=True,
        )


def restart(options: argparse.Namespace) -> None:
    length, found = options.length, {}
    memory = kv_memory(options, 2 * length + 640)
    settings = (*CACHE, *memory, "--roles", options.roles, "--max-model-len", str(length + 64))
    for number in range(options.rounds):
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            daemon = wait_on(Daemon(Path(folder), *settings, model=options.model))
            asked = fresh(length, number)
            for seed in range(3):
                daemon.complete(fresh(300, 500 + seed), max_tokens=4, ignore_eos=True)
            row = {"computed": ttft_ms(daemon, asked), "pool": ttft_ms(daemon, asked)}
            wait_settled(daemon)
            for seed, name in enumerate(("the next computed", "and one more")):
                row[name] = ttft_ms(daemon, fresh(length, 900 + 10 * number + seed))
            row["SSD"] = ttft_ms(daemon, asked)
            before = daemon.wait_for(lambda d=daemon: d.log_rows()[0])
            daemon.kill()
            daemon = wait_on(Daemon(Path(folder), *settings, model=options.model))
            daemon.complete(fresh(300, 700), max_tokens=4, ignore_eos=True)
            row["SSD after kill -9"] = ttft_ms(daemon, asked)
            rows = [before, daemon.log_rows()[0]]
            daemon.kill()
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            arena = (*OFF, "--dram-cache", "4GiB")
            daemon = Daemon(Path(folder), *arena, *settings[2:], model=options.model).wait_ready()
            for _ in range(2):
                daemon.complete(asked, max_tokens=4, ignore_eos=True)
            for seed in range(2):
                daemon.complete(fresh(length, 900 + 10 * number + seed), max_tokens=1)
            row["DRAM"] = ttft_ms(daemon, asked)
            for logged in (*rows, daemon.log_rows()[0]):
                names = ("prompt_tokens", "cached_tokens", "restored_tokens", "restore_reason")
                print({name: logged[name] for name in names}, flush=True)
            daemon.kill()
            for kind, value in row.items():
                found.setdefault(kind, []).append(value)
    ratios(found, "computed")


def gaps_of(daemon: Daemon, seed: int, options: argparse.Namespace) -> list[float]:
    """Between tokens of a stream while prompts are asked for that were computed before it."""
    prompts = [fresh(1000, seed + n) for n in range(options.prompts)]
    for prompt in prompts:
        daemon.complete(prompt, max_tokens=1, ignore_eos=True)
    is_over = threading.Event()

    def ask() -> None:
        for prompt in prompts:
            if is_over.is_set():
                return
            daemon.complete(prompt, max_tokens=1, ignore_eos=True)
            time.sleep(0.02)

    asking, times = threading.Thread(target=ask), []
    for event in daemon.stream(fresh(64, seed), max_tokens=options.tokens, ignore_eos=True):
        if any(choice["token_ids"] for choice in event["choices"]):
            times.append(time.monotonic())
            if len(times) == 1:
                asking.start()
    is_over.set()
    asking.join()
    return [(b - a) * 1e3 for a, b in itertools.pairwise(times)]


SAID = ("stored_blocks", "loaded_blocks", "loads", "declined_loads", "regret_ms")


def in_turns(options: argparse.Namespace, settings: tuple[str, ...], measure) -> dict:
    """What is measured of daemons without the caches, with each of --tiers, and without again."""
    found: dict[str, list] = {}
    for number in range(options.rounds):
        for arm in ("off", *options.tiers, "off again"):
            with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                cache = TIERS.get(arm, OFF)
                daemon = wait_on(Daemon(Path(folder), *cache, *settings, model=options.model))
                value = measure(daemon, number)
                found.setdefault(arm, []).append(value)
                frames = {name: daemon.fresh_state()[name] for name in ("dram", "ssd")}
                said = {
                    name: {key: round(frame[key]) for key in SAID}
                    for name, frame in frames.items()
                    if frame is not None and frame["stored_blocks"]
                }
                print(f"round {number}, {arm}: {value} {said or ''}", flush=True)
                daemon.kill()
    return found


def gaps(options: argparse.Namespace) -> None:
    def measure(daemon: Daemon, number: int) -> tuple[float, float]:
        ranked = sorted(gaps_of(daemon, 1000 * (number + 1), options))
        return ranked[len(ranked) // 2], ranked[int(len(ranked) * 0.99)]

    memory = kv_memory(options, 1024 * (options.prompts + 4))
    found = in_turns(options, ("--roles", options.roles, *memory), measure)
    for place, name in enumerate(("p50", "p99")):
        print(name)
        ratios({arm: [each[place] for each in values] for arm, values in found.items()}, "off")


def agents(num_talks: int, num_turns: int, scale: float) -> list[list[int]]:
    """Conversations that take turns, all beginning alike."""
    num_shared, num_own, num_more = (int(n * scale) for n in (320, 320, 192))
    talks = [fresh(num_shared, 7) + fresh(num_own, 100 + n) for n in range(num_talks)]
    return [
        talks[n] + [t for i in range(turn) for t in fresh(num_more, 1000 + 50 * n + i)]
        for turn in range(num_turns)
        for n in range(num_talks)
    ]


def mooncake(num_prompts: int, scale: float) -> list[list[int]]:
    """Few beginnings that many share, documents asked about as often as their rank says, and ends.

    As in the trace that Mooncake's authors published: most blocks are used once, few very often.
    """
    rng, prompts = random.Random(11), []
    weights = [1 / (rank + 1) for rank in range(num_prompts // 2)]
    for number in range(num_prompts):
        document = rng.choices(range(len(weights)), weights)[0]
        start = fresh(int(192 * scale), 20 + document % 3)
        middle = fresh(int((256 + 128 * (document % 7)) * scale), 300 + document)
        end = fresh(int(rng.randrange(40, 200) * scale), 5000 + number)
        prompts.append(start + middle + end)
    return prompts


def trace(options: argparse.Namespace) -> None:
    size, scale = options.size, options.scale
    is_agents = options.kind == "agents"
    prompts = agents(size, size // 2 + 1, scale) if is_agents else mooncake(12 * size, scale)
    seen: set[bytes] = set()
    hasher, endless = PrefixHasher(bytes(32), b"", BLOCK_SIZE), 0
    for prompt in prompts:
        hashes = hasher.chain(prompt).hashes[: (len(prompt) - 1) // BLOCK_SIZE]
        endless += sum(block_hash in seen for block_hash in hashes) * BLOCK_SIZE
        seen.update(hashes)
    total, longest = sum(map(len, prompts)), max(map(len, prompts))
    working_set = len(seen) * BLOCK_SIZE
    print(f"{options.kind}: {len(prompts)} prompts, {total} tokens, {working_set} in all")
    print(f"a cache without end finds {endless / total:.3f}")

    def measure(daemon: Daemon, number: int) -> float:
        began_s = time.monotonic()
        for prompt in prompts:
            daemon.complete(prompt, max_tokens=1, ignore_eos=True)
        took_s = time.monotonic() - began_s
        rows = daemon.log_rows()
        cached = sum(row["cached_tokens"] for row in rows)
        restored = sum(row["restored_tokens"] for row in rows)
        print(f"hit {cached / total:.3f}, of it from a tier {restored / total:.3f}, {took_s:.1f} s")
        return took_s

    settings = (*kv_memory(options, max(working_set // 10, longest + 64)), "--roles", options.roles)
    settings = (*settings, "--max-model-len", str(longest + 32))
    ratios(in_turns(options, settings, measure), "off", "s")


class Files:
    """A pool in a memfd, slabs and a disk, with the last places' blocks stored."""

    def __init__(self, folder: Path, num_blocks: int, block_bytes: int = BLOCK_BYTES) -> None:
        self.num_blocks, self.block_bytes = num_blocks, block_bytes
        self.pool = os.memfd_create("pool")
        for n in range(num_blocks + 1):
            os.pwrite(self.pool, random.Random(n).randbytes(block_bytes), n * block_bytes)
        self.slabs = Slabs(folder, block_bytes, bytes(32), 4 << 30, reserve_bytes=0)
        self.slabs.open()
        self.index, self.reports = SlabIndex(), Queue()
        self.disk = Disk(self.slabs, {"kv": self.pool}, self.reports.put, write_share=1)
        while self.index.num_free < num_blocks:
            self.disk.begin(GrowJob())
            head = self.reports.get().made
            self.index.add_slab(head.number, head.num_records)

    def store(self) -> None:
        names = [n.to_bytes(16, "big") for n in range(self.num_blocks)]
        for first in range(0, self.num_blocks, 4):
            part = range(first, min(first + 4, self.num_blocks))
            entries = [self.index.begin_store(names[n], 1) for n in part]
            copy = Copy(first, "kv", "ssd", [(n + 1, i) for i, n in enumerate(part)], None)
            self.disk.begin(CopyJob(life=1, copy=copy, entries=entries))
        self.collect(lambda job: [self.index.end_store(e, is_written=True) for e in job.entries])

    def load(self) -> None:
        for first in range(0, self.num_blocks, 4):
            part = range(first, min(first + 4, self.num_blocks))
            entries = [self.index.begin_load(n.to_bytes(16, "big")) for n in part]
            copy = Copy(first, "ssd", "kv", [(i, n + 1) for i, n in enumerate(part)], None)
            self.disk.begin(CopyJob(life=1, copy=copy, entries=entries))
        self.collect(lambda job: [self.index.end_load(entry) for entry in job.entries])

    def collect(self, end) -> None:
        for _ in range(0, self.num_blocks, 4):
            job = self.reports.get()
            assert job.error is None, job.error
            end(job)


def plain(path: Path, files: Files, num_threads: int, *, write: bool, through: bool) -> None:
    """As many bytes by O_DIRECT, by so many threads; through: from the pool, or to it, as well."""
    fd = os.open(path, (os.O_RDWR if write else os.O_RDONLY) | os.O_DIRECT)
    size = files.slabs._record_bytes

    def run(first: int) -> None:
        buffer = mmap.mmap(-1, size)
        for n in range(first, files.num_blocks, num_threads):
            if write and through:
                os.preadv(files.pool, [buffer], (n + 1) * files.block_bytes)
            call = os.pwritev if write else os.preadv
            assert call(fd, [buffer], n * size) == size
            if through and not write:
                os.pwritev(files.pool, [buffer], (n + 1) * files.block_bytes)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.close(fd)


def copies(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        files = Files(Path(folder) / "kv", 96)
        files.store()
        size = files.slabs._record_bytes
        beside = Path(folder) / "beside"
        with beside.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, 96 * size)
        found: dict[str, list[float]] = {}
        arms = {
            "plain read": lambda: plain(beside, files, 2, write=False, through=False),
            "plain copy from disk": lambda: plain(beside, files, 2, write=False, through=True),
            "loads": files.load,
            "plain write": lambda: plain(beside, files, 1, write=True, through=False),
            "plain copy to disk": lambda: plain(beside, files, 1, write=True, through=True),
            "stores": lambda: [refill(files), files.store()],
        }
        for number in range(options.rounds + 1):
            for arm, run in arms.items():
                began_s = time.monotonic()
                run()
                mb_per_s = files.num_blocks * size / 1e6 / (time.monotonic() - began_s)
                if number:  # the first round is for files and pages to be there
                    found.setdefault(arm, []).append(mb_per_s)
        for names in (list(arms)[:3], list(arms)[3:]):
            for of in names[:2]:
                ratios({arm: found[arm] for arm in names}, of, "MB/s")
        assert files.disk.close(5)


def refill(files: Files) -> None:
    """All places are free again."""
    for slab, num_records in list(files.index._slabs.items()):
        files.index.remove_slab(slab)
        files.index.add_slab(slab, num_records)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    by_name = {kind.__name__: kind for kind in (restart, gaps, trace, copies)}
    parser.add_argument("what", nargs="+", choices=list(by_name), metavar="WHAT")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--folder", type=Path, help="of the caches; on a disk, not in memory")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--length", type=int, default=4000)
    parser.add_argument("--roles", default="static")
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--tiers", choices=list(TIERS), nargs="+", default=["ssd"])
    parser.add_argument("--kind", choices=["agents", "mooncake"], default="agents")
    parser.add_argument("--size", type=int, default=10, help="of a trace")
    parser.add_argument("--scale", type=float, default=1.0, help="of a trace's prompts")
    options = parser.parse_args()
    for what in options.what:
        print(f"{what}, {options.model or 'the starter model'}:", flush=True)
        by_name[what](options)


if __name__ == "__main__":
    main()
