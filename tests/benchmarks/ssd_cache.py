"""What the SSD cache gains, and what it costs those who decode meanwhile.

usage: python -m tests.benchmarks.ssd_cache WHAT [WHAT ...] [--model FOLDER] [--rounds 3] ...

WHAT:
restart [--length 4000]; gaps [--prompts 200]; ladder [--seconds 20]; trace [--kind agents|mooncake]
copies; decisions; counted; throttled; flips: one after the other, as many as are named

restart: a pool of little more than two prompts. One is computed, asked for again (from the pool,
and stored), pushed out of the pool by two others, asked for (from the disk); then the daemon is
killed with SIGKILL, and its successor is asked (from the disk, after a restart). Another one with a
DRAM cache alone is asked likewise. The disk is read by O_DIRECT: no page cache.

gaps: a client streams tokens while another asks once more for prompts that are in the pool, so
that little is computed and their blocks are stored all the time. Daemons without the cache, with
it, and without it again take turns; the two without it are the band within which nothing is shown.

ladder: clients whose KV needs twice the pool, so that sequences are preempted; tokens a second with
the cache, without it (a victim is computed again), without it where only so many clients are served
as surely fit (the others are refused, and ask again 50 ms later), and the first two again.

trace: conversations that take turns, all beginning alike, or prompts about documents of which some
are asked about often, in a pool of a tenth of what they have in all (but of the longest prompt); of
the prompts' tokens, those found without the caches, with each of --tiers, without them again, and
by a cache without end. --scale shortens the prompts.

copies: loads and stores beside plain reads and writes by O_DIRECT of as many bytes, in turns.
decisions: what the tier takes of the daemon's loop for a prompt of 4,000 tokens.
counted: the same, counted inside a daemon whose prompts leave the pool and come back, beside the
time in which it computed.
throttled: a disk that reads 20 times slower than it did at start; regret beside what all took.
flips: a random byte of a slab is changed, the block read, and the byte mended, 10,000 times.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import json
import mmap
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from queue import Queue

from appliance.models.names import STARTER_FOLDER
from engine.cache.blocks import BlockPool, Ledger
from engine.cache.hashes import PrefixHasher
from engine.cache.topology import SSD
from engine.checkpoint.checkpoint import Checkpoint
from engine.offload import disk as disk_module
from engine.offload.disk import Disk, probe
from engine.offload.index import RecordPlace, SlabIndex
from engine.offload.jobs import Context, CopyJob, GrowJob
from engine.offload.load_costs import Costs
from engine.offload.loads import WantedBlocks
from engine.offload.slab_files import DamagedError, RecordBuffer, Slabs
from engine.offload.tier import Tier
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


def ladder(options: argparse.Namespace) -> None:
    num_clients = options.clients
    num_prompt, num_output = options.prompt_tokens, options.output_tokens
    memory = kv_memory(options, num_clients * (num_prompt + num_output) // 2)
    found: dict[str, list] = {}

    def measure(daemon: Daemon, number: int, num_taken: int) -> float:
        end_s, done = time.monotonic() + options.seconds, []
        taken = threading.Semaphore(num_taken)

        def ask(client: int) -> None:
            for turn in itertools.count():
                while not taken.acquire(blocking=False):  # refused: it comes again
                    time.sleep(0.05)
                if time.monotonic() >= end_s:
                    taken.release()
                    return
                prompt = fresh(num_prompt, 10_000 * number + 100 * client + turn)
                for event in daemon.stream(prompt, max_tokens=num_output, ignore_eos=True):
                    now_s = time.monotonic()
                    done.append((now_s, sum(len(c["token_ids"]) for c in event["choices"])))
                taken.release()

        threads = [threading.Thread(target=ask, args=(n,)) for n in range(num_clients)]
        began_s = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(n for _, n in done) / (time.monotonic() - began_s)

    arms = {
        "recompute only": (OFF, num_clients),
        "ladder": (TIERS[options.tiers[0]], num_clients),
        "refuse only": (OFF, num_clients // 2),
        "recompute only again": (OFF, num_clients),
        "ladder again": (TIERS[options.tiers[0]], num_clients),
    }
    longest = str(num_prompt + num_output + 72)
    settings = (*memory, "--roles", options.roles, "--max-model-len", longest)
    for number in range(options.rounds):
        for arm, (cache, num_taken) in arms.items():
            with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                daemon = Daemon(Path(folder), *cache, *settings, model=options.model)
                daemon.wait_ready()
                value = measure(daemon, number, num_taken)
                found.setdefault(arm, []).append(value)
                count = daemon.fresh_state()["totals"].get("preemptions")
                print(f"round {number}, {arm}: {value:.1f}, {count} preemptions", flush=True)
                daemon.kill()
    for of in ("recompute only", "refuse only"):
        ratios(found, of, "tokens/s")


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


def make_tier(slabs: Slabs, disk, num_blocks: int, compute_ms: float) -> Tier:
    timers: list = []
    context = Context(
        Ledger([BlockPool("kv", num_blocks + 1, BLOCK_SIZE)]),
        SSD,
        SlabIndex(),
        disk,
        slabs.block_bytes,
        now_ns=time.monotonic_ns,
        now_s=lambda: int(time.time()),
        later=lambda s, call: timers.append((time.monotonic() + s, call)),
        tell=lambda *event: print(event),
    )
    tier = Tier(
        context, slabs.max_places, Costs(probe(slabs)), lambda _, n, before: compute_ms * n,
        changed=lambda: None,
    )  # fmt: skip
    tier.timers = timers  # type: ignore[attr-defined]
    return tier


class NoDisk:
    write_share = 1.0

    def reach(self, pool) -> str:
        return SSD

    def begin(self, job) -> None: ...


def decisions(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        slabs = Slabs(Path(folder) / "kv", 4096, bytes(32), 1 << 28, reserve_bytes=0)
        slabs.open()
        tier = make_tier(slabs, NoDisk(), 100_000, 0.0)
        index = tier.index
        index.add_slab(0, 13_000)
        hasher, times = PrefixHasher(bytes(32), b"", BLOCK_SIZE), []
        for number in range(400):
            chain = hasher.chain(fresh(4001, number % 150))
            if number < 150:
                for block_hash in chain.hashes:
                    index.end_store(index.begin_store(block_hash, 1), is_written=True)
            began_ns = time.perf_counter_ns()
            tier.decide(WantedBlocks(number, "kv", chain, len(chain), "ana"))
            tier.is_loading(number)
            tier.forget(number)
            tier.placed(chain.hashes, len(chain))
            tier.computed(chain.hashes)
            times.append((time.perf_counter_ns() - began_ns) / 1e3)
        ranked = sorted(times)
        print(
            f"decide, forget, placed, computed of 62 blocks: median {ranked[200]:.0f} us, "
            f"99th of 100 {ranked[395]:.0f} us"
        )


class CountedDaemon(Daemon):
    """Its router's calls of the tiers are timed."""

    program = ("-m", "tests.benchmarks.ssd_cache", "serve-counted")


def serve_counted() -> None:
    """A daemon that writes what its tiers have taken into a file when it ends.

    Where a tier calls the router, as when blocks have come, what that does is the router's time.
    """
    from appliance.cli.main import main as penstock
    from engine.offload.tier import OffloadTiers
    from engine.schedule.router import Router

    taken, owners, since_ns = {"calls": 0, "ms": 0.0}, [False], time.perf_counter_ns()

    def owned(call, *, by_tier: bool):
        def count(*args, **options):
            begin(by_tier)
            try:
                return call(*args, **options)
            finally:
                end()

        return count

    def settle() -> None:
        nonlocal since_ns
        now_ns = time.perf_counter_ns()
        if owners[-1]:
            taken["ms"] += (now_ns - since_ns) / 1e6
        since_ns = now_ns

    def begin(by_tier: bool) -> None:
        settle()
        taken["calls"] += by_tier and not owners[-1]
        owners.append(by_tier)

    def end() -> None:
        settle()
        owners.pop()

    for made in (OffloadTiers, Tier):
        for name, call in inspect.getmembers(made, inspect.isfunction):
            if not name.startswith("_") and name != "would_find":
                setattr(made, name, owned(call, by_tier=True))
    Router.dispatch = owned(Router.dispatch, by_tier=False)
    sys.argv = ["penstock", *sys.argv[2:]]
    try:
        penstock()
    finally:
        Path(os.environ["COUNTED"]).write_text(json.dumps(taken))


def counted(options: argparse.Namespace) -> None:
    """Prompts that leave a pool of a third of them and come back, one after the other."""
    prompts = [fresh(options.length // 4, n) for n in range(12)]
    memory = kv_memory(options, options.length + 640)
    settings = (*CACHE, "--dram-cache", "1GiB", *memory, "--roles", options.roles)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = Path(folder) / "counted.json"
        env = {"COUNTED": str(path)}
        daemon = wait_on(CountedDaemon(Path(folder), *settings, model=options.model, env=env))
        began_s, num_tokens = time.monotonic(), 0
        for _ in range(options.rounds):
            for prompt in prompts:
                daemon.complete(prompt, max_tokens=32, ignore_eos=True)
                num_tokens += 32
        took_ms = (time.monotonic() - began_s) * 1e3
        restored = sum(row["restored_tokens"] for row in daemon.log_rows())
        daemon.process.send_signal(signal.SIGTERM)
        daemon.process.wait(60)
        taken = json.loads(path.read_text())
        print(
            f"{options.rounds * len(prompts)} prompts of {len(prompts[0])} tokens, {restored} "
            f"tokens restored, {num_tokens} put out: {taken['calls']} calls of the tiers took "
            f"{taken['ms']:.1f} ms, of {took_ms:.0f} ms in which one prompt after the other was "
            f"computed: {taken['ms'] / took_ms:.4%}"
        )


def throttled(options: argparse.Namespace) -> None:
    """Computing is taken to need 0.6 ms a token, about what the 135M shape takes here."""
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        slabs = Slabs(Path(folder) / "kv", BLOCK_BYTES, bytes(32), 4 << 30, reserve_bytes=0)
        slabs.open()
        reports: Queue = Queue()
        pool = os.memfd_create("pool")
        os.ftruncate(pool, 801 * BLOCK_BYTES)
        disk = Disk(slabs, {"kv": pool}, reports.put, write_share=1)
        tier = make_tier(slabs, disk, 800, 0.6)
        hasher, kv_pool = PrefixHasher(bytes(32), b"", BLOCK_SIZE), tier._context.ledger.pools["kv"]
        chains = [hasher.chain(fresh(1025, n)) for n in range(30)]

        def work(until) -> None:
            while not until():
                now_s = time.monotonic()
                for timer in [timer for timer in tier.timers if timer[0] <= now_s]:
                    tier.timers.remove(timer)
                    timer[1]()
                while not reports.empty():
                    tier.done(reports.get())
                time.sleep(0.001)

        ledger = tier._context.ledger
        for n, chain in enumerate(chains):
            ledger.reserve(n, {"kv": len(chain)})
            ledger.publish(n, "kv", chain, range(len(chain)), "ana")
            ledger.release_all(n)
            tier.placed(chain.hashes, len(chain))
            work(lambda: not tier.num_pending)
        kv_pool.lose()
        read, rate = slabs.read, tier.costs.bytes_per_s / 20

        def slowly(*args) -> None:
            read(*args)
            time.sleep(BLOCK_BYTES * options.readers / rate)

        spent_ms, rng = 0.0, random.Random(2)
        for number in range(options.prompts):
            slabs.read = slowly if number >= 20 else read
            chain, began_s = rng.choice(chains), time.monotonic()
            tier.decide(WantedBlocks(number, "kv", chain, len(chain), "ana"))
            work(lambda n=number: not tier.is_loading(n))
            there = len(kv_pool.index.blocks(chain.hashes))
            tier.forget(number)
            spent_ms += (time.monotonic() - began_s) * 1e3 + (1025 - there * BLOCK_SIZE) * 0.6
            kv_pool.lose()
        costs = tier.costs
        print(
            f"{options.prompts} prompts, {costs.num_loads} loads, {costs.num_declined} declined, "
            f"{tier.counts.missed_deadlines} late; regret {costs.excess_load_ms:.0f} ms of "
            f"{spent_ms:.0f} ms: {costs.excess_load_ms / spent_ms:.4f}; all computed "
            f"{options.prompts * 1025 * 0.6:.0f} ms"
        )


def flips(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        files = Files(Path(folder) / "kv", 64, 98_304)
        files.store()
        paths = sorted((Path(folder) / "kv").glob("slab-*.kv"))
        topology = {e.place: e.block_hash for e in files.index._entries.values()}
        rng, buffer = random.Random(3), RecordBuffer(98_304)
        size, found_out, wrong = files.slabs._record_bytes, 0, 0
        for _ in range(options.flips):
            place = rng.choice(list(topology))
            fd = os.open(paths[place.slab], os.O_RDWR)
            at = 4096 + place.record * size + rng.randrange(size)
            before = os.pread(fd, 1, at)
            os.pwrite(fd, bytes([before[0] ^ rng.randrange(1, 256)]), at)
            try:
                files.slabs.read(RecordPlace(*place), topology[place], buffer)
            except DamagedError:
                found_out += 1
            else:
                n = int.from_bytes(topology[place], "big")
                wrong += bytes(buffer.block) != os.pread(files.pool, 98_304, (n + 1) * 98_304)
            os.pwrite(fd, before, at)
            os.close(fd)
        print(
            json.dumps({"flips": options.flips, "found out": found_out, "wrong blocks": wrong}),
            "(the others hit what fills a record up)",
        )
        assert files.disk.close(5)


def main() -> None:
    if sys.argv[1:2] == ["serve-counted"]:
        serve_counted()
        return
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    ways = (restart, gaps, ladder, trace, copies, decisions, counted, throttled, flips)
    by_name = {kind.__name__: kind for kind in ways}
    parser.add_argument("what", nargs="+", choices=list(by_name), metavar="WHAT")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--folder", type=Path, help="of the caches; on a disk, not in memory")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--length", type=int, default=4000)
    parser.add_argument("--roles", default="static")
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--readers", type=int, default=disk_module.NUM_READERS)
    parser.add_argument("--tiers", choices=list(TIERS), nargs="+", default=["ssd"])
    parser.add_argument("--clients", type=int, default=6, help="of the ladder")
    parser.add_argument("--prompt-tokens", type=int, default=900, help="of the ladder")
    parser.add_argument("--output-tokens", type=int, default=500, help="of the ladder")
    parser.add_argument("--kind", choices=["agents", "mooncake"], default="agents")
    parser.add_argument("--size", type=int, default=10, help="of a trace")
    parser.add_argument("--scale", type=float, default=1.0, help="of a trace's prompts")
    parser.add_argument("--flips", type=int, default=10_000)
    options = parser.parse_args()
    disk_module.NUM_READERS = options.readers
    for what in options.what:
        print(f"{what}, {options.model or 'the starter model'}:", flush=True)
        by_name[what](options)


if __name__ == "__main__":
    main()
