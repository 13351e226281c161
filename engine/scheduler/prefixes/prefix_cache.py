"""Find, reserve, publish and release cached prefixes, and decide which sequences wait for one.

Full blocks that are computed get a hash, and stay after their sequence, until they are needed. A
sequence that begins with the same tokens refers to them and computes the rest. Its hit ends before
the block of its last token, which it computes into a block of its own. So no sequence writes a
block that another can find.

Invariants: a hit was computed from the same tokens, by the same model, for a user that shares it; a
sequence waits only for one that is on a worker, and that computes more of the prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial
from time import perf_counter_ns

from engine.scheduler.cache.hashes import Hash
from engine.scheduler.cache.ledger import Ledger
from engine.scheduler.cache.prefix_misses import CacheMiss, PrefixMisses
from engine.scheduler.cache.topology import PREFILL, Topology
from engine.scheduler.cache.window_blocks import Span
from engine.scheduler.offload.loads import WantedBlocks
from engine.scheduler.offload.offload_tiers import OffloadTiers
from engine.scheduler.prefixes.cache_contents import CacheContents
from engine.scheduler.prefixes.prefix_copies import PrefixCopies, PrefixLookup, longest
from engine.scheduler.prefixes.sequence_records import SequenceRecords
from engine.scheduler.queue.queue import PromptsAhead
from engine.scheduler.sequences.sequence import Counters, On, Paused, RouteStage, Sequence


class PrefixCache:
    """The prefix cache of one router: hits, publication of full blocks, prefixes under way.

    Args:
        topology: workers and pools.
        ledger: the blocks.
        counters: what is counted.
        fetches: blocks on their way to queued prompts.
        max_num_batched_tokens: of prompts, in a worker's step.
        misses: of all models of a daemon; None: of this one alone.
    """

    def __init__(
        self,
        topology: Topology,
        ledger: Ledger,
        counters: Counters,
        fetches: PrefixCopies,
        max_num_batched_tokens: int,
        misses: PrefixMisses | None = None,
    ) -> None:
        self._topology = topology
        self._ledger = ledger
        self._counters = counters
        self._fetches = fetches
        self._max_step_tokens = max_num_batched_tokens
        self._pools = list(dict.fromkeys(worker.pool for worker in topology.workers))
        self.contents = CacheContents(ledger.pools)
        self._misses = misses or PrefixMisses()
        self.records = SequenceRecords(ledger)
        for books in ledger.pools.values():
            books.on_forget = self._forgotten
        self.tiers = OffloadTiers()
        """Blocks that are kept in DRAM and on disk."""

    def _forgotten(self, block_hash: Hash) -> None:
        self.contents.forgotten(block_hash)
        if not any(books.index.has_hash(block_hash) for books in self._ledger.pools.values()):
            self._misses.evicted(block_hash)

    def unloaded(self) -> None:
        """Remember all cached blocks as evicted, since their pools go with the model."""
        for books in self._ledger.pools.values():
            for block_hash in books.index.hashes():
                self._misses.evicted(block_hash)

    # Before a sequence is placed

    def hits(self, sequence: Sequence) -> dict[str, int]:
        """Positions by pool that are probably computed there, and need not be again."""
        if sequence.prefix is None:
            return {}
        began_ns, hits = perf_counter_ns(), {}
        for name in self._pools:
            kv_pool = self._ledger.pools[name]
            hashes = sequence.prefix.hashes[: self._most(sequence, kv_pool.block_size)]
            if kv_pool.windows.num_each:
                num_blocks = kv_pool.border(kv_pool.index.blocks(hashes))
            else:
                num_blocks = kv_pool.index.num_hit(hashes)
            if kv_pool.record_blocks:
                num_blocks = self.records.border(sequence, kv_pool, hashes[:num_blocks])
            if num_blocks:
                hits[name] = num_blocks * kv_pool.block_size
        if not sequence.stages:  # it has not been placed yet
            sequence.num_cached_tokens = max(hits.values(), default=0)
        self._counters.prefix_cache_ns += perf_counter_ns() - began_ns
        return hits

    def fetch(
        self,
        sequence: Sequence,
        worker: str,
        hits: Mapping[str, int],
        open_workers: Collection[str],
    ) -> bool:
        """Fetch blocks that only other pools hold, if copying is cheaper than computing.

        Args:
            sequence: is about to be placed.
            worker: would compute its prompt.
            hits: positions by pool that are probably computed there.
            open_workers: take work.

        Returns:
            True: it waits for the fetch.
        """
        lookup = self._elsewhere(sequence, worker, hits, open_workers)
        if lookup is None or sequence.prefix is None:
            return False
        return self._fetches.begin(sequence, sequence.prefix, lookup)

    def _elsewhere(
        self,
        sequence: Sequence,
        worker: str,
        hits: Mapping[str, int],
        open_workers: Collection[str],
    ) -> PrefixLookup | None:
        """Find a pool with more of its prefix than the worker's own pool."""
        pool = self._topology.pool_of(worker)
        if max(hits.values(), default=0) <= hits.get(pool, 0):
            return None
        links = [
            link
            for link in self._topology.links_to(pool)
            if all(hop.worker in open_workers for hop in link.hops)
        ]
        lookup = longest(self.find(sequence, hits), links, worker, pool)
        if lookup is None or not self._ledger.pools[pool].record_blocks:
            return lookup
        assert sequence.prefix is not None
        hashes, source = sequence.prefix.hashes[: len(lookup.there)], lookup.link.from_pool
        here = self._ledger.pools[pool].index.blocks(hashes)
        snapshot = self._ledger.pools[source].index.snapshots[hashes[-1]]
        return replace(lookup, here=here, snapshot=snapshot)

    def num_available(
        self, sequence: Sequence, hits: Mapping[str, int], num_free: Mapping[str, int]
    ) -> dict[str, int]:
        """Count the blocks by pool that it may have: free ones and shared ones."""
        num_available = dict(num_free)
        for name, blocks in self.find(sequence, hits).items():
            kv_pool = self._ledger.pools[name]
            span = kv_pool.windows.span(len(blocks) * kv_pool.block_size)
            num_available[name] += kv_pool.new_cost(0, len(blocks), span)
            num_available[name] -= kv_pool.found_cost(blocks, span)
        for name, num_blocks in self.records.room(sequence, hits).items():
            num_available[name] -= num_blocks
        return num_available

    def tokens_until(
        self, sequence: Sequence, hits: Mapping[str, int], ahead: PromptsAhead
    ) -> Callable[[str], int]:
        """Make a function of the prompt tokens that a worker computes until the sequence's end."""

        def num_tokens(worker: str) -> int:
            left = sequence.num_tokens - hits.get(self._topology.pool_of(worker), 0)
            return ahead.num_tokens(sequence, worker) + left

        return num_tokens

    def is_coming(
        self, sequence: Sequence, ahead: PromptsAhead, open_workers: Collection[str]
    ) -> bool:
        """Say whether waiting for more of its prefix is cheaper than computing it."""
        is_restored = self.is_restored(sequence, open_workers)
        return is_restored or self.leader(sequence, ahead) is not None

    def leader(self, sequence: Sequence, ahead: PromptsAhead) -> Sequence | None:
        """Find a running sequence with more of this prompt, if waiting for it is cheaper.

        Waiting delays this one until the other's step ends. Computing the prefix twice delays all
        other sequences by the common tokens, which counts as its cost.

        Args:
            sequence: is in the queue.
            ahead: prompts on workers, including prompts ahead of the other.
        """
        chain = sequence.prefix
        if chain is None or not chain.hashes:
            return None
        others = [
            o for o in ahead.sequences if o.prefix and o.prefix.hashes[:1] == chain.hashes[:1]
        ]
        if not others:
            return None
        hits = self.hits(sequence)
        until = self.tokens_until(sequence, hits, ahead)
        alone = min(map(until, self._topology.playing(PREFILL)))
        worth_it = (o for o in others if self._is_worth_it(sequence, o, hits, ahead, alone))
        return next(worth_it, None)

    def is_restored(self, sequence: Sequence, open_workers: Collection[str]) -> bool:
        """Say whether blocks of it are on their way from a tier to its worker's pool.

        That worker prefills; if no prefill worker is up, any worker computes prompts.

        Args:
            sequence: has no blocks.
            open_workers: take work.
        """
        if not self.tiers or sequence.prefix is None or sequence.prefix.scope.is_secret:
            return False
        if not self.tiers.has_decided(sequence.seq_id):
            hits, kv_pool = self.hits(sequence), self._ledger.pools
            prefilling = [name for name in self._topology.playing(PREFILL) if name in open_workers]
            at = {name: self._topology.pool_of(name) for name in prefilling or sorted(open_workers)}
            if not at:
                return False
            worker = max(at, key=lambda name: (hits.get(at[name], 0), kv_pool[at[name]].num_free))
            most = self._most(sequence, kv_pool[at[worker]].block_size)
            if not self.records.has_room(sequence, kv_pool[at[worker]]):
                most = 0  # a snapshot would not fit beside it
            lookup = self._elsewhere(sequence, worker, hits, open_workers)
            fetch_ms = partial(self._fetches.expected_ms, lookup) if lookup else None
            wanted = (sequence.seq_id, at[worker], sequence.prefix, most, sequence.owner, fetch_ms)
            self.tiers.decide(WantedBlocks(*wanted))
        return self.tiers.loading(sequence.seq_id) is not None

    def waits_for_restore(self, sequence: Sequence, open_workers: Collection[str]) -> bool:
        """Say whether its blocks from before a pause are on their way from a tier."""
        return isinstance(sequence.where, Paused) and self.is_restored(sequence, open_workers)

    def release_preempted(self, sequence: Sequence) -> None:
        """Release a preempted sequence's blocks; store full ones first if that is cheaper."""
        chain, computed_in = sequence.prefix, sequence.computed_in
        if self.tiers and chain and not chain.scope.is_secret and computed_in:
            pool, life = computed_in
            kv_pool = self._ledger.pools[pool]
            index, hashes = kv_pool.index, chain.hashes[: sequence.num_published_blocks]
            if kv_pool.record_blocks:
                hashes = hashes[: index.border(hashes)]
            blocks = index.blocks(hashes)
            is_whole = not any(map(kv_pool.windows.are_missing, blocks))
            if life == kv_pool.life and len(blocks) == len(hashes) > 0 and is_whole:
                num_tokens = len(hashes) * kv_pool.block_size
                self.tiers.preempted(pool, index.with_snapshot(hashes), num_tokens)
        self._ledger.release_all(sequence.seq_id)

    def forget(self, sequence: Sequence) -> None:
        """Forget a sequence that ended or was placed, so waits for nothing."""
        self._fetches.forget(sequence)
        if (restored := self.tiers.end_wait(sequence.seq_id)) is None:
            return
        sequence.restore_reason = restored.words
        if restored.elapsed_ns:
            sequence.stamps.restored(restored.elapsed_ns)
        if not sequence.stages:  # a prompt that comes for the first time
            num_tokens = min(restored.num_tokens, sequence.num_cached_tokens)
            sequence.num_restored_tokens = num_tokens

    def _is_worth_it(
        self,
        sequence: Sequence,
        other: Sequence,
        hits: Mapping[str, int],
        ahead: PromptsAhead,
        alone: int,
    ) -> bool:
        """Say whether a sequence should wait for another's prefix.

        Args:
            sequence: would wait.
            other: begins alike.
            hits: what the sequence has without it.
            ahead: prompts on workers.
            alone: prompt tokens that are computed until its end if it does not wait.
        """
        where, computed = other.where, other.num_computed_tokens
        if not isinstance(where, On) or sequence.prefix is None or other.prefix is None:
            return False
        kv_pool = self._ledger.pools[self._topology.pool_of(where.stage.worker)]
        size = kv_pool.block_size
        num_common = sequence.prefix.num_common(other.prefix)
        common = min(num_common, self._most(sequence, size)) * size
        if kv_pool.record_blocks:  # it continues where the other leaves a snapshot
            borders = [b for b in other.snapshots_at if computed < b <= common]
            common = max(borders, default=0)
        gain = common - max(hits.get(kv_pool.name, 0), computed)
        left = other.num_prefill_tokens_left
        if gain <= 0 or left <= 0:
            return False
        chunk = other.max_chunk_tokens or self._max_step_tokens
        in_steps = min(-(-(common - computed) // chunk) * chunk, left)
        before = max(ahead.num_tokens(other, where.stage.worker) - left, 0)
        return before + in_steps + sequence.num_tokens - common < alone + gain

    def reserve(
        self, sequence: Sequence, stages: tuple[RouteStage, ...], needed: Mapping[str, int]
    ) -> bool:
        """Take a route's blocks, cached and new ones; False: too few are free.

        Args:
            sequence: has no blocks.
            stages: of the route.
            needed: blocks by pool.
        """
        found = self.find(sequence, needed)
        first = self._topology.pool_of(stages[0].worker)
        kept = self.records.needed(sequence, needed, found, first)
        spans = self.spans(sequence, needed, first, len(found.get(first, ())))
        if not self._ledger.reserve(
            sequence.seq_id, needed, found, records=kept.new, snapshots=kept.found, spans=spans
        ):
            return False
        if sequence.prefix is not None and not sequence.stages:
            kv_pool = self._ledger.pools[self._topology.pool_of(stages[0].worker)]
            sequence.num_cached_tokens = len(found.get(kv_pool.name, ())) * kv_pool.block_size
            self._counters.prefix_cache_queries += sequence.num_prompt_tokens
            self._counters.prefix_cache_hits += sequence.num_cached_tokens
            self._counters.prefix_cache_ns += sequence.prefix.took_ns
            self._explain(sequence)
            if self.tiers and not sequence.prefix.scope.is_secret:
                num_found, hashes = len(found.get(kv_pool.name, ())), sequence.prefix.hashes
                used = kv_pool.index.with_snapshot(hashes[:num_found])
                self.tiers.placed(used, hashes[num_found:])
        self.forget(sequence)
        return True

    def spans(
        self, sequence: Sequence, pools: Iterable[str], first: str, num_found: int
    ) -> dict[str, Span]:
        """Return where new tables need window blocks.

        Args:
            sequence: is about to get the tables.
            pools: of the tables.
            first: the pool that it continues in; all known tokens are computed before the others.
            num_found: blocks that are computed there.
        """
        spans = {}
        for name in pools:
            kv_pool = self._ledger.pools[name]
            num_found_tokens = num_found * kv_pool.block_size
            num_tokens = num_found_tokens if name == first else sequence.num_tokens
            spans[name] = kv_pool.windows.span(num_tokens)
        return spans

    def _explain(self, sequence: Sequence) -> None:
        assert sequence.prefix is not None
        if sequence.sampling.prompt_logprobs is not None:
            sequence.cache_miss = CacheMiss("token 0: prompt_logprobs")
            return
        tokens, num_cached = sequence.prompt_token_ids, sequence.num_cached_tokens
        sequence.cache_miss = self._misses.explain(
            sequence.owner, sequence.prefix, tokens, num_cached
        )
        most = self._most(sequence, self.contents.block_size)
        following = sequence.prefix.hashes[num_cached // self.contents.block_size : most][:1]
        for kv_pool in self._ledger.pools.values():
            if any(map(kv_pool.index.has_hash, following)):
                if kv_pool.record_blocks:
                    sequence.cache_miss = CacheMiss(f"token {num_cached}: no snapshot")
                elif kv_pool.windows.num_each:
                    sequence.cache_miss = CacheMiss(f"token {num_cached}: window evicted")

    def find(self, sequence: Sequence, pools: Iterable[str]) -> dict[str, list[int]]:
        """Blocks that its table would begin with, by pool."""
        if sequence.prefix is None:
            return {}
        began_ns, found = perf_counter_ns(), {}
        for name in pools:
            kv_pool = self._ledger.pools[name]
            hashes = sequence.prefix.hashes[: self._most(sequence, kv_pool.block_size)]
            blocks = kv_pool.index.blocks(hashes)
            if kv_pool.record_blocks:
                blocks = blocks[: self.records.border(sequence, kv_pool, hashes[: len(blocks)])]
            blocks = blocks[: kv_pool.border(blocks)]
            if blocks:
                found[name] = blocks
        self._counters.prefix_cache_ns += perf_counter_ns() - began_ns
        return found

    # While it runs

    def begin_at(self, sequence: Sequence, pool: str) -> bool:
        """Find where it continues in a pool, and make the blocks that it writes its own.

        Leading blocks with a hash are computed. Later blocks that it computed before, and computes
        again, may be shared: they are exchanged for new ones.

        Returns:
            False: too few blocks are free for the exchange; it cannot be admitted yet.
        """
        kv_pool, size = self._ledger.pools[pool], self._ledger.pools[pool].block_size
        here = (pool, kv_pool.life)
        if sequence.computed_in != here:
            sequence.forget_computed()
            sequence.moved_to(here)
        sequence.num_published_blocks = 0
        there = self._ledger.num_hashed(sequence.seq_id, pool, self._most(sequence, size))
        if kv_pool.record_blocks:
            self.records.begin_at(sequence, kv_pool, there)
        else:
            sequence.num_computed_tokens = max(sequence.num_computed_tokens, there * size)
        num_computed = sequence.num_computed_tokens
        span = kv_pool.windows.span(num_computed)
        return self._ledger.renew(sequence.seq_id, pool, num_computed // size, span)

    def publish(self, sequence: Sequence) -> None:
        """Let others find the full blocks that are computed where it is, those not known yet."""
        chain = sequence.prefix
        if chain is None or sequence.computed_in is None:
            return
        pool, life = sequence.computed_in
        size, first = self._ledger.pools[pool].block_size, sequence.num_published_blocks
        if life != self._ledger.pools[pool].life:  # it was computed, and is lost
            return
        num_full = sequence.num_computed_tokens // size
        if num_full <= first:
            return
        began_ns = perf_counter_ns()
        if len(chain) < num_full:
            chain.grow(sequence.tokens_between(chain.num_tokens, num_full * size))
        self._ledger.publish(sequence.seq_id, pool, chain, range(first, num_full), sequence.owner)
        for block_hash in chain.hashes[first:num_full]:
            self._misses.stored(block_hash)
        self.contents.stored(sequence, range(first, num_full))
        sequence.num_published_blocks = num_full
        snapshot = self.records.publish_border(sequence, self._ledger.pools[pool])
        if self.tiers and not chain.scope.is_secret:
            self.tiers.computed(chain.hashes[first:num_full] + snapshot)
        self._counters.prefix_cache_ns += perf_counter_ns() - began_ns

    def advanced(self, sequence: Sequence, released: str | None) -> None:
        """Publish what a step has computed; when its worker is done with it, its last border too.

        Args:
            sequence: that the step was of.
            released: why the worker released it; None: it has not.
        """
        self.publish(sequence)
        self.records.advanced(sequence)
        if self._ledger.has_windows and sequence.computed_in is not None:
            pool, num_computed = sequence.computed_in[0], sequence.num_computed_tokens
            self._ledger.pass_windows(sequence.seq_id, pool, num_computed)
        if released not in ("ended", "preempted"):
            return
        snapshot = self.records.keep_last(sequence)
        if snapshot and self.tiers and sequence.prefix and not sequence.prefix.scope.is_secret:
            self.tiers.computed(snapshot)

    def _most(self, sequence: Sequence, block_size: int) -> int:
        """Blocks at most that a hit may have: not that of the last token.

        Where prompt tokens are reported on, each has to be computed.
        """
        if sequence.sampling.prompt_logprobs is not None:
            return 0
        return (sequence.num_tokens - 1) // block_size
