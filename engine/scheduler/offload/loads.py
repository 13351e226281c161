"""Decide which blocks to load from a tier, and load them.

A prompt with its next blocks in a tier waits until they are in a pool, if loading is predicted to
beat computing. There they are cached like any others, and admission finds them. It waits at most
until a deadline. Where the model keeps recurrent states, blocks are loaded up to the last one that
has a snapshot in the tier, and the snapshot with them.

Invariants: blocks being loaded, and their predecessors in the chain, are named by an open command
until the copy is done; at most an eighth of a pool, or a block or snapshot, is being loaded; each
block is loaded once for all waiting prompts; published blocks had the right checksums, and a
snapshot is published whole or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.scheduler.cache.block_pool import BlockPool
from engine.scheduler.cache.hashes import Hash, PrefixChain, record_hashes
from engine.scheduler.offload.copy_deadlines import Context
from engine.scheduler.offload.jobs import CopyJob
from engine.scheduler.offload.load_costs import Costs
from engine.wire.messages import Copy

POOL_SHARE = 8
"""Largest share of a pool's blocks that waits for loads: 1 / POOL_SHARE."""
JOB_BYTES = 8 << 20
"""Approximate bytes of a job; a load is divided so that several threads work."""

PredictMs = Callable[[str, int, int], float | None]
"""Predicts computing some tokens after others, in a pool; None: unknown."""


class WantedBlocks(NamedTuple):
    """The blocks that one queued prompt needs from a tier."""

    seq_id: int
    pool: str
    """The pool of its prefill."""
    chain: PrefixChain
    num_useful: int
    """Blocks that a hit may have, without the last token's block."""
    user: str
    """The user that the blocks count for."""
    fetch_ms: Callable[[int, int], float | None] | None = None
    """Predicts bringing a range of blocks without the tier, from another pool if possible; None:
    unknown or impossible."""


class Restored(NamedTuple):
    """The decision about a prompt's stored blocks, and its outcome."""

    num_tokens: int
    """Tokens that were loaded."""
    elapsed_ns: int
    """Time that it waited."""
    words: str
    """Decision, predictions, outcome, excess load time."""


@dataclass(slots=True, eq=False)
class _Load:
    """One prompt's running load."""

    wanted: WantedBlocks
    num_blocks: int
    num_saved_tokens: int
    """Tokens that need no computing once all of it has come."""
    predicted: str
    """The predictions in words."""
    load_ms: float
    compute_ms: float | None
    began_ns: int
    is_cut: bool
    """Whether more blocks are stored than may be loaded at once."""
    jobs: set[CopyJob] = field(default_factory=set)
    num_loaded: int = 0
    copy_ms: float = 0.0
    """Copying time of its completed jobs, without waiting."""
    tells_rate: bool = True
    """False: a block was damaged, or its copying worker died."""


class _Missing(NamedTuple):
    """A block that a prompt lacks."""

    block_hash: Hash
    parent: Hash
    border: Hash | None = None
    """The border of its snapshot; None: it holds keys and values."""


class _Target(NamedTuple):
    """A block being filled."""

    block_id: int
    block: _Missing
    user: str


class _Need(NamedTuple):
    """What a prompt could have from a tier."""

    missing: list[_Missing]
    """Blocks of the chain in order, and then a snapshot's."""
    num_here: int
    """Leading blocks in the pool."""
    num_known: int
    """Leading blocks that need no computing without a load."""
    num_blocks: int
    """Leading blocks that need no computing after the load."""


class Loads:
    """Run the loads of one tier, and note the prompts waiting for them.

    Args:
        ended: called when a prompt stops waiting: its seq_id, whether all blocks came in time, and
            whether more are stored.
    """

    def __init__(
        self,
        context: Context,
        costs: Costs,
        predict_ms: PredictMs,
        ended: Callable[[int, bool, bool], None],
    ) -> None:
        self._context = context
        self._costs = costs
        self._predict_ms = predict_ms
        self._ended = ended
        self._loads: dict[int, _Load] = {}
        """Loads by seq_id."""
        self._restored: dict[int, Restored] = {}
        """Outcomes of finished waits that have not been collected, by seq_id."""
        self._jobs: dict[tuple[str, Hash], CopyJob] = {}
        """Jobs by pool and block."""
        self._targets: dict[CopyJob, list[_Target]] = {}

    def __contains__(self, seq_id: int) -> bool:
        """Say whether a sequence waits for blocks."""
        return seq_id in self._loads

    def __len__(self) -> int:
        return len(self._loads)

    def begin(self, wanted: WantedBlocks) -> None:
        """Load the part of a prompt's blocks that is worth it."""
        context, (seq_id, pool, chain, *_, fetch) = self._context, wanted
        kv_pool = context.ledger.pools[pool]
        need = self._need(wanted, kv_pool)
        part, fresh = self._affordable(need, kv_pool)
        if not part:
            return
        size, num_under_way = kv_pool.block_size, self._num_under_way(pool)
        num_bytes = (len(part) + num_under_way) * context.block_bytes
        load_ms = self._costs.predict_ms(num_bytes)
        # tokens before a snapshot are saved with it alone; each part has its share of them
        first, end = need.num_known, need.num_blocks
        if not kv_pool.record_blocks:
            end = first + len(part)
        compute_ms = self._predict_ms(pool, (end - first) * size, first * size)
        if compute_ms is not None and kv_pool.record_blocks:
            compute_ms *= len(part) / len(need.missing)
        predicted = f"predicted {load_ms:.1f} ms to load, recomputing {_ms(compute_ms)}"
        fetch_ms = None if fetch is None else fetch(first, end)
        if fetch_ms is not None:
            predicted += f", from another pool {fetch_ms:.1f} ms"
        is_fetched = fetch_ms is not None and fetch_ms < load_ms
        if is_fetched or not self._costs.is_worth_it(load_ms, compute_ms):
            words = f"{len(part)} blocks not loaded from {context.label}: {predicted}"
            self._note(seq_id, Restored(0, 0, words))
            return
        is_cut = len(part) < len(need.missing)
        num_saved = 0 if is_cut and kv_pool.record_blocks else (end - first) * size
        begun = load_ms, compute_ms, context.now_ns(), is_cut
        load = _Load(wanted, len(part), num_saved, predicted, *begun)
        keys = [(pool, block.block_hash) for block in part]
        load.jobs.update(self._jobs[key] for key in keys if key in self._jobs)
        here = kv_pool.index.blocks(chain.hashes[: need.num_here])
        load.jobs.update(self._begin_jobs(wanted, here, fresh))
        context.index.touch([*chain.hashes[:end], *(b.block_hash for b in part if b.border)])
        self._loads[seq_id] = load
        deadline_ms = self._costs.deadline_ms(load_ms, context.patience.load_ms)
        context.later(deadline_ms / 1e3, lambda: self._is_due(load))

    def _need(self, wanted: WantedBlocks, kv_pool: BlockPool) -> _Need:
        """Find the blocks that the tier has, or loads, and the pool has not."""
        chain, hashes = wanted.chain, wanted.chain.hashes[: wanted.num_useful]
        here = kv_pool.index.blocks(hashes)
        num_here = num_known = len(here)
        end = num_here + self._num_coming(wanted.pool, hashes[num_here:])
        missing = [_Missing(hashes[i], chain.parent(i)) for i in range(num_here, end)]
        if kv_pool.windows.num_each:
            return self._need_windows(wanted, kv_pool, here, missing)
        if not kv_pool.record_blocks:
            return _Need(missing, num_here, num_known, end)
        num_known = kv_pool.index.border(hashes[:num_here])
        for count in range(end, num_known, -1):
            border = hashes[count - 1]
            if not self._num_coming(wanted.pool, record_hashes(border, 1)):
                continue
            record = record_hashes(border, kv_pool.record_blocks)
            if self._num_coming(wanted.pool, record) == len(record):
                missing = missing[: max(count - num_here, 0)]
                missing += [_Missing(block_hash, border, border) for block_hash in record]
                return _Need(missing, min(num_here, count), num_known, count)
        return _Need([], num_here, num_known, num_known)

    def _need_windows(
        self, wanted: WantedBlocks, kv_pool: BlockPool, here: list[int], missing: list[_Missing]
    ) -> _Need:
        """Add the blocks that are here without the window blocks that a hit would need."""
        chain, num_here, num_known = wanted.chain, len(here), kv_pool.border(here)
        end = num_here + len(missing)
        first = kv_pool.windows.num_behind(end * kv_pool.block_size)
        bare = [i for i in range(first, num_here) if kv_pool.windows.are_missing(here[i])]
        if end <= num_known or self._num_coming(wanted.pool, [chain.hashes[i] for i in bare]) < len(
            bare
        ):
            return _Need([], num_here, num_known, num_known)
        again = [_Missing(chain.hashes[i], chain.parent(i)) for i in bare]
        return _Need(again + missing, num_here, num_known, end)

    def _affordable(self, need: _Need, kv_pool: BlockPool) -> tuple[list[_Missing], list[_Missing]]:
        """Cut a need to what the pool has room for; of that, find what is not under way."""
        fresh = [b for b in need.missing if (kv_pool.name, b.block_hash) not in self._jobs]
        # what is here already is not to be evicted for what is loaded
        each = kv_pool.max_cost(1)
        share = max(kv_pool.capacity // each // POOL_SHARE, kv_pool.record_blocks, 1)
        num_free = kv_pool.num_free // each - need.num_here
        room = min(share - self._num_under_way(kv_pool.name), num_free)
        if len(fresh) <= max(room, 0):
            return need.missing, fresh
        num_whole = sum(block.border is None for block in fresh)  # a snapshot is not cut
        room = min(max(room, 0), num_whole)
        return need.missing[: need.missing.index(fresh[room])], fresh[:room]

    def _num_under_way(self, pool: str) -> int:
        return sum(name == pool for name, _ in self._jobs)

    def _num_coming(self, pool: str, hashes: list[Hash]) -> int:
        """Count a chain's blocks in the tier or being loaded, without a gap."""
        for number, block_hash in enumerate(hashes):
            if block_hash not in self._context.index and (pool, block_hash) not in self._jobs:
                return number
        return len(hashes)

    def _begin_jobs(
        self, wanted: WantedBlocks, here: list[int], blocks: list[_Missing]
    ) -> list[CopyJob]:
        """Allocate blocks for missing ones, and start filling them; a snapshot is one job."""
        context, jobs = self._context, []
        ledger, pool = context.ledger, wanted.pool
        size = max(JOB_BYTES // context.block_bytes, 1)
        plain = [block for block in blocks if block.border is None]
        parts = [plain[i : i + size] for i in range(0, len(plain), size)]
        parts += [blocks[len(plain) :]] if len(plain) < len(blocks) else []
        copy_ids = [next(context.numbers) for _ in parts]
        who = context.store.reach(pool) or context.name
        for copy_id in copy_ids:  # before any block is taken: what is here must not be
            ledger.open_command(("load", copy_id, 0), who, {pool: here})
        for copy_id, part in zip(copy_ids, parts, strict=True):
            block_ids = ledger.pools[pool].allocate(len(part))
            ledger.extend_command(("load", copy_id, 0), {pool: block_ids})
            found = [context.index.begin_load(block.block_hash) for block in part]
            entries = [entry for entry in found if entry is not None]
            copy = Copy(copy_id, context.name, pool, list(enumerate(block_ids)), None)
            windows = ledger.pools[pool].windows
            beside = [list(windows.of(b)) for b in block_ids] if windows.num_each else []
            life = ledger.pools[pool].life
            job = CopyJob(copy=copy, life=life, entries=entries, windows=beside)
            pairs = zip(block_ids, part, strict=True)
            self._targets[job] = [_Target(*pair, wanted.user) for pair in pairs]
            self._jobs.update({(pool, block.block_hash): job for block in part})
            jobs.append(job)
            context.store.begin(job)
        return jobs

    def done(self, job: CopyJob) -> None:
        """Publish the blocks of a completed job."""
        if job not in self._targets:  # it was cancelled, and a thread has come to it since
            return
        context, pool, targets = self._context, job.copy.to_pool, self._targets.pop(job)
        kv_pool = context.ledger.pools[pool]
        context.answered(job)
        self._publish(kv_pool, targets, job.num_done)
        context.ledger.close_command(("load", job.copy.copy_id, 0))
        for number, (target, entry) in enumerate(zip(targets, job.entries, strict=True)):
            del self._jobs[pool, target.block.block_hash]
            context.index.end_load(entry, is_sound=not (job.is_damaged and number == job.num_done))
        if job.is_damaged and targets[0].block.border is not None:
            context.index.drop_known(target.block.block_hash for target in targets)
        context.counts.loaded_blocks += job.num_done
        if targets[0].block.border is None:
            context.counts.loaded_tokens += job.num_done * kv_pool.block_size
        for load in [load for load in self._loads.values() if job in load.jobs]:
            load.jobs.discard(job)
            load.num_loaded += job.num_done
            load.copy_ms += job.elapsed_ms
            load.tells_rate &= not (job.is_damaged or job.is_void)
            if not load.jobs:
                self._end(load, is_in_time=True)

    def _publish(self, kv_pool: BlockPool, targets: list[_Target], num_done: int) -> None:
        """Let prompts find a job's completed blocks; a snapshot only if all of it is there."""
        block_ids = [target.block_id for target in targets]
        if (border := targets[0].block.border) is None:
            for block_id, block, user in targets[:num_done]:
                kv_pool.publish(block_id, block.block_hash, block.parent, user)
        elif num_done == len(targets):
            kv_pool.publish_snapshot(block_ids, border, targets[0].user)

    def end_wait(self, seq_id: int) -> Restored | None:
        """End the wait of an admitted or ended sequence; return its outcome."""
        load = self._loads.pop(seq_id, None)
        if load is not None:
            self._void_unneeded(load.jobs)
        last = None if load is None else self._outcome(load)
        return joined(self._restored.pop(seq_id, None), last)

    def _note(self, seq_id: int, restored: Restored) -> None:
        before = self._restored.get(seq_id)
        self._restored[seq_id] = joined(before, restored) or restored

    def _outcome(self, load: _Load) -> Restored:
        pool = self._context.ledger.pools[load.wanted.pool]
        num_blocks = min(load.num_loaded, load.num_blocks)
        elapsed_ns = self._context.now_ns() - load.began_ns
        took_ms = self._took_ms(load, elapsed_ns)
        excess_load_ms = self._costs.excess_load_ms_of(bool(num_blocks), took_ms, load.compute_ms)
        words = (
            f"{num_blocks} of {load.num_blocks} blocks from {self._context.label}"
            f" in {elapsed_ns / 1e6:.1f} ms: {load.predicted}; lost {excess_load_ms:.1f} ms"
        )
        num_tokens = num_blocks * pool.block_size
        if pool.record_blocks:
            num_tokens = load.num_saved_tokens * (num_blocks == load.num_blocks)
        return Restored(num_tokens, elapsed_ns, words)

    def _took_ms(self, load: _Load, elapsed_ns: int) -> float:
        """Return a load's time, with or without the prompt's wait."""
        return elapsed_ns / 1e6 if self._context.patience.counts_waiting else load.copy_ms

    def _is_due(self, load: _Load) -> None:
        """End a load at its deadline."""
        if self._loads.get(load.wanted.seq_id) is load:
            self._context.counts.missed_deadlines += 1
            begun = load.jobs
            self._end(load, is_in_time=False)
            for job in begun & self._targets.keys():
                if job.is_void:
                    self._context.is_late(job)

    def _end(self, load: _Load, *, is_in_time: bool) -> None:
        del self._loads[load.wanted.seq_id]
        seq_id, outcome = load.wanted.seq_id, self._outcome(load)
        self._note(seq_id, outcome)
        num_bytes = min(load.num_loaded, load.num_blocks) * self._context.block_bytes
        if load.tells_rate:
            took_ms = self._took_ms(load, outcome.elapsed_ns)
            self._costs.loaded(num_bytes, took_ms, load.compute_ms)
        self._void_unneeded(load.jobs)
        has_more = load.is_cut and load.num_loaded >= load.num_blocks
        self._ended(seq_id, is_in_time, has_more)

    def _void_unneeded(self, jobs: Iterable[CopyJob]) -> None:
        needed = {job for load in self._loads.values() for job in load.jobs}
        for job in set(jobs) - needed:
            if self._context.store.cancel(job):
                self.done(job)


def joined(before: Restored | None, after: Restored | None) -> Restored | None:
    """Join several decisions about one prompt, with their reasons in one sentence."""
    if before is None or after is None:
        return after or before
    elapsed_ns = before.elapsed_ns + after.elapsed_ns
    words = f"{before.words}; {after.words}"
    return Restored(before.num_tokens + after.num_tokens, elapsed_ns, words)


def _ms(value_ms: float | None) -> str:
    return "not known" if value_ms is None else f"{value_ms:.1f} ms"
