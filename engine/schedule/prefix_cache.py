"""The prefix cache: what of a sequence is computed already, in its pool or copied from another.

Full blocks that are computed get a hash, and stay when their sequence is gone, until their room is
needed. A sequence that begins with the same tokens refers to them and computes the rest; it ends
its hit before the block of its last token, which it computes into a block of its own: so nobody
writes a block that another can find.

Owns: copies from other pools under way, each with block tables of its own; what the caches of all
pools hold by tokens, and the last changes of that, for who chooses among several appliances.
Invariants: what is found was computed from the same tokens, by the same model, for somebody who may
share it; a sequence waits only for one that is on a worker, and has further to go than itself.
Never: chooses a way through the workers; ends or admits a sequence.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from time import perf_counter_ns
from typing import NamedTuple

from engine.cache.blocks import BlockPool, BlockState, Ledger, Owner
from engine.cache.places import PREFILL, Link, Places
from engine.cache.prefix_index import Hash, PrefixChain
from engine.schedule.copies import Copies
from engine.schedule.queue import PromptsAhead
from engine.schedule.sequence import Counters, Leg, On, Paused, Sequence
from engine.tiers.loads import WantedBlocks
from engine.tiers.tier import Tiers

# Blocks of queued prompts brought from another pool to where they would be computed again.
# After a turn only the pool where it was decoded has the answer. A prompt that goes on from it and
# is about to be placed waits until those blocks have been copied, where that is predicted to take
# less than computing them. Where they arrive they are cached like any others, and admission finds
# them.
# Invariants: a block is published when its copy is answered, in the life of both pools in which the
# fetch began; each block is fetched once, however many wait for it; a prompt asks for one fetch
# each time that it is placed, and waits only while all that make it take work.
# Never: chooses a way; ends or admits a sequence.


OVERHEAD_MS = 1.0
"""Of a fetch, however small: messages, and the wait for the threads that copy."""

PredictMs = Callable[[str, int, int], float | None]
"""For a worker's computing so many tokens of a prompt after so many; None: unknown."""


@dataclass(frozen=True, slots=True)
class PrefixLookup:
    """How much of a prompt is cached, in which pools."""

    worker: str
    """That would compute what is not there."""
    here: list[int]
    """Blocks in its pool, from the first on."""
    there: list[int]
    """Blocks where the link begins; more of them."""
    link: Link


@dataclass(slots=True)
class _Fetch:
    link: Link
    chain: PrefixChain
    user: str
    lives: tuple[int, int]
    """Of the pools, when it began."""
    num_published: int
    """Blocks that can be found where it goes, from the first on."""


class Fetches:
    """Copies of prefix blocks from other pools that prompts wait for.

    Args:
        ledger: the blocks.
        copies: makes the copies, and knows what they take.
        counters: what is counted.
        predict_ms: what computing takes.
    """

    def __init__(
        self, ledger: Ledger, copies: Copies, counters: Counters, predict_ms: PredictMs
    ) -> None:
        self._ledger = ledger
        self._copies = copies
        self._counters = counters
        self.predict_ms = predict_ms
        self._fetches: dict[Owner, _Fetch] = {}
        self._awaited: dict[int, Owner] = {}
        """By seq_id, what it waits for."""
        self._asked: set[int] = set()
        """Sequences that have had their fetch, or need none, and are not placed yet."""
        self._last_owner = 0

    def is_awaited(self, sequence: Sequence) -> bool:
        """True while blocks are on their way that a sequence waits for."""
        return self._awaited.get(sequence.seq_id) in self._fetches

    def forget(self, sequence: Sequence) -> None:
        """It has been placed, or has ended."""
        self._awaited.pop(sequence.seq_id, None)
        self._asked.discard(sequence.seq_id)

    def begin(self, sequence: Sequence, chain: PrefixChain, lookup: PrefixLookup) -> bool:
        """Have the blocks copied that are only there, if that is cheaper than computing them.

        Returns:
            True: the sequence is to wait for them, or for another's fetch of them.
        """
        link, first = lookup.link, len(lookup.here)
        following = chain.hashes[first]
        for owner, fetch in self._fetches.items():
            is_coming = fetch.chain.hashes[first : first + 1] == [following]
            if is_coming and fetch.link.to_pool == link.to_pool and first >= fetch.num_published:
                self._awaited[sequence.seq_id] = owner
                return True
        if sequence.seq_id in self._asked or not self._is_worth_it(lookup):
            return False
        self._last_owner -= 1  # sequences' ids are positive
        owner, pools = self._last_owner, self._ledger.pools
        wants = dict.fromkeys((link.from_pool, link.to_pool), len(lookup.there))
        found = {link.from_pool: lookup.there, link.to_pool: lookup.here}
        if not self._ledger.reserve(owner, wants, found):
            return False
        lives = pools[link.from_pool].life, pools[link.to_pool].life
        self._fetches[owner] = _Fetch(link, chain, sequence.owner, lives, first)
        self._copies.fetch(owner, link, first)
        self._awaited[sequence.seq_id] = owner
        self._asked.add(sequence.seq_id)
        return True

    def _is_worth_it(self, lookup: PrefixLookup) -> bool:
        size = self._ledger.pools[lookup.link.to_pool].block_size
        first, end = len(lookup.here), len(lookup.there)
        fetch_ms = self.expected_ms(lookup, first, end)
        compute_ms = self.predict_ms(lookup.worker, (end - first) * size, first * size)
        return fetch_ms is not None and (compute_ms is None or fetch_ms < compute_ms)

    def expected_ms(self, lookup: PrefixLookup, first: int, end: int) -> float | None:
        """What blocks at these places of a prompt take, fetched as far as they are there.

        Those behind them are computed. None: it is not known, or none of them is there.
        """
        size = self._ledger.pools[lookup.link.to_pool].block_size
        middle = min(len(lookup.there), end)
        if middle <= first:
            return None
        copy_ms = self._copies.expected_ms(lookup.link, (middle - first) * size)
        compute_ms: float | None = 0.0
        if end > middle:
            compute_ms = self.predict_ms(lookup.worker, (end - middle) * size, middle * size)
        return None if copy_ms is None or compute_ms is None else OVERHEAD_MS + copy_ms + compute_ms

    def settle(self, open_workers: Collection[str]) -> None:
        """Publish what has come; end what is complete, or will not be."""
        for owner, fetch in list(self._fetches.items()):
            link, pools = fetch.link, self._ledger.pools
            is_there = fetch.lives == (pools[link.from_pool].life, pools[link.to_pool].life)
            num_there, has_more = self._copies.fetched(owner)
            if is_there and num_there > fetch.num_published:
                places = range(fetch.num_published, num_there)
                self._ledger.publish(owner, link.to_pool, fetch.chain, places, fetch.user)
                size = pools[link.to_pool].block_size
                self._counters.prefix_cache_fetches += len(places) * size
                fetch.num_published = num_there
            makers = {hop.worker for hop in link.hops}
            if not (is_there and has_more and makers <= set(open_workers)):
                del self._fetches[owner]
                self._copies.forget(owner)
                self._ledger.release_all(owner)

    @property
    def owners(self) -> set[Owner]:
        """Who holds the tables that fetches have taken blocks into."""
        return set(self._fetches)


def longest(
    found: Mapping[str, list[int]], links: Collection[Link], worker: str, pool: str
) -> PrefixLookup | None:
    """The link whose beginning has most of a prompt, if that is more than its end has.

    Args:
        found: the prompt's blocks by pool.
        links: to the pool, from others.
        worker: that would compute what is missing.
        pool: where it would.
    """
    here = found.get(pool, [])
    best = max(links, key=lambda link: len(found.get(link.from_pool, ())), default=None)
    if best is None or len(there := found.get(best.from_pool, [])) <= len(here):
        return None
    return PrefixLookup(worker, here, there, best)


# --------------------------------------------------------------------------------------------------


# What the prefix cache holds by tokens, and how that changes: for who chooses among appliances.
# Invariant: a block is told as stored once, and as removed when no pool has it any more.
# Never: tells of prompts with a client's secret; knows who listens, or keeps what nobody can find.


MAX_CHANGES = 1 << 14
"""That are kept for who listens; who is further behind begins anew."""


class Block(NamedTuple):
    """A full block that can be found."""

    block_id: int
    """Of its content, 64 bits with a sign: the same for the same tokens after the same tokens."""
    parent_id: int | None
    """Of the block before it; None: it begins a prompt."""
    place: int
    """How many blocks are before it."""
    root: Hash
    """What its chain begins with: who may share it."""
    token_ids: array[int]


class ContentsChange(NamedTuple):
    """A block has come or gone."""

    is_stored: bool
    block: Block


class CacheContents:
    """What all pools of a router hold by token ids, and how that changes.

    Args:
        pools: by name.
    """

    def __init__(self, pools: Mapping[str, BlockPool]) -> None:
        self._pools = pools
        self._blocks: dict[Hash, Block] = {}
        self._changes: deque[ContentsChange] = deque(maxlen=MAX_CHANGES)
        self.num_changes = 0
        """Since the start: a place in the row of changes."""
        for books in pools.values():
            books.on_forget = self.forgotten

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return next(iter(self._pools.values())).block_size

    def stored(self, sequence: Sequence, places: range) -> None:
        """Blocks of a sequence can be found from now on, or could be before."""
        chain = sequence.prefix
        if chain is None or chain.is_secret:
            return
        for place in places:
            block_hash = chain.hashes[place]
            if block_hash in self._blocks or not self._is_found(block_hash):
                continue
            start = place * self.block_size
            block = self._blocks[block_hash] = Block(
                block_id=_id_of(block_hash),
                parent_id=_id_of(chain.hashes[place - 1]) if place else None,
                place=place,
                root=chain.root,
                token_ids=array("I", sequence.tokens_between(start, start + self.block_size)),
            )
            self._tell(ContentsChange(True, block))

    def forgotten(self, block_hash: Hash) -> None:
        """A pool has it no more."""
        if block_hash in self._blocks and not self._is_found(block_hash):
            self._tell(ContentsChange(False, self._blocks.pop(block_hash)))

    def blocks(self, root: Hash) -> list[Block]:
        """All that whoever has this root can find now, each after those before it."""
        mine = (block for block in self._blocks.values() if block.root == root)
        return sorted(mine, key=lambda block: block.place)

    def changes(self, since: int, root: Hash) -> list[ContentsChange] | None:
        """What has changed of that after so many changes; None: that is too long ago."""
        num_new = self.num_changes - since
        if num_new > len(self._changes):
            return None
        newest = [self._changes[-back] for back in range(num_new, 0, -1)]
        return [change for change in newest if change.block.root == root]

    def _is_found(self, block_hash: Hash) -> bool:
        return any(books.index.has_hash(block_hash) for books in self._pools.values())

    def _tell(self, change: ContentsChange) -> None:
        self._changes.append(change)
        self.num_changes += 1


def _id_of(block_hash: Hash) -> int:
    return int.from_bytes(block_hash[:8], "little", signed=True)


# --------------------------------------------------------------------------------------------------


class PrefixCache:
    """The prefix cache of one router: hits, publication of full blocks, prefixes under way.

    Args:
        places: workers and pools.
        ledger: the blocks.
        counters: what is counted.
        fetches: blocks on their way to queued prompts.
        max_step_tokens: of prompts, in a worker's step.
    """

    def __init__(
        self,
        places: Places,
        ledger: Ledger,
        counters: Counters,
        fetches: Fetches,
        max_step_tokens: int,
    ) -> None:
        self._places = places
        self._ledger = ledger
        self._counters = counters
        self._fetches = fetches
        self._max_step_tokens = max_step_tokens
        self._pools = list(dict.fromkeys(worker.pool for worker in places.workers))
        self.contents = CacheContents(ledger.pools)
        self.tiers = Tiers()
        """Blocks that are kept in DRAM and on disk."""

    # Before a sequence is placed

    def hits(self, sequence: Sequence) -> dict[str, int]:
        """Positions by pool that are probably computed there, and need not be again."""
        if sequence.prefix is None:
            return {}
        began_ns, hits = perf_counter_ns(), {}
        for name in self._pools:
            books = self._ledger.pools[name]
            hashes = sequence.prefix.hashes[: self._most(sequence, books.block_size)]
            if num_blocks := books.index.num_hit(hashes):
                hits[name] = num_blocks * books.block_size
        if not sequence.legs:  # it has not been placed yet
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
        """Have what only other pools hold copied to where it would be computed, if that is cheaper.

        Args:
            sequence: is about to be placed.
            worker: that would compute its prompt.
            hits: positions by pool that are probably computed there.
            open_workers: those that take work.

        Returns:
            True: it waits for that.
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
        """What another pool holds of it beyond what is where it would be computed."""
        pool = self._places.pool_of(worker)
        if max(hits.values(), default=0) <= hits.get(pool, 0):
            return None
        links = [
            link
            for link in self._places.links_to(pool)
            if all(hop.worker in open_workers for hop in link.hops)
        ]
        return longest(self.find(sequence, hits), links, worker, pool)

    def room(
        self, sequence: Sequence, hits: Mapping[str, int], spare: Mapping[str, int]
    ) -> dict[str, int]:
        """Blocks by pool that it may have: those to spare, and those that others use now."""
        room = dict(spare)
        for name, blocks in self.find(sequence, hits).items():
            books = self._ledger.pools[name]
            room[name] += sum(books.state(b) is not BlockState.CACHED for b in blocks)
        return room

    def tokens_until(
        self, sequence: Sequence, hits: Mapping[str, int], ahead: PromptsAhead
    ) -> Callable[[str], int]:
        """What a worker would have to compute until the sequence is: before it, and of it."""

        def num_tokens(worker: str) -> int:
            left = sequence.num_tokens - hits.get(self._places.pool_of(worker), 0)
            return ahead.num_tokens(sequence, worker) + left

        return num_tokens

    def is_coming(
        self, sequence: Sequence, ahead: PromptsAhead, open_workers: Collection[str]
    ) -> bool:
        """True if more of its prompt is about to be there, and it is cheaper to wait for that."""
        is_restored = self.is_restored(sequence, open_workers)
        return is_restored or self.leader(sequence, ahead) is not None

    def leader(self, sequence: Sequence, ahead: PromptsAhead) -> Sequence | None:
        """Another sequence under way with more of this prompt, if waiting for it is cheaper.

        Waiting delays this one until the other's step is made. Computing it twice makes everybody
        else wait for as many tokens as the two have in common, and so that counts as its cost.

        Args:
            sequence: is in the queue.
            ahead: prompts on workers, also those that are ahead of the other.
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
        alone = min(map(until, self._places.playing(PREFILL)))
        worth_it = (o for o in others if self._is_worth_it(sequence, o, hits, ahead, alone))
        return next(worth_it, None)

    def is_restored(self, sequence: Sequence, open_workers: Collection[str]) -> bool:
        """True while blocks of it come from a tier to where it would be computed.

        That is at one of those who prefill, or where none of them is there at any: who decodes
        computes prompts then.

        Args:
            sequence: has no blocks.
            open_workers: those that take work.
        """
        if not self.tiers or sequence.prefix is None or sequence.prefix.is_secret:
            return False
        if not self.tiers.has_decided(sequence.seq_id):
            hits, books = self.hits(sequence), self._ledger.pools
            prefilling = [name for name in self._places.playing(PREFILL) if name in open_workers]
            at = {name: self._places.pool_of(name) for name in prefilling or sorted(open_workers)}
            if not at:
                return False
            worker = max(at, key=lambda name: (hits.get(at[name], 0), books[at[name]].num_free))
            most = self._most(sequence, books[at[worker]].block_size)
            lookup = self._elsewhere(sequence, worker, hits, open_workers)
            fetch_ms = partial(self._fetches.expected_ms, lookup) if lookup else None
            wanted = (sequence.seq_id, at[worker], sequence.prefix, most, sequence.owner, fetch_ms)
            self.tiers.decide(WantedBlocks(*wanted))
        return self.tiers.loading(sequence.seq_id) is not None

    def comes_back(self, sequence: Sequence, open_workers: Collection[str]) -> bool:
        """True while blocks that it had before a pause come from a tier."""
        return isinstance(sequence.where, Paused) and self.is_restored(sequence, open_workers)

    def take_away(self, sequence: Sequence) -> None:
        """Others need its blocks; those that are full are stored first where that is cheaper."""
        chain, computed_in = sequence.prefix, sequence.computed_in
        if self.tiers and chain and not chain.is_secret and computed_in:
            pool, life = computed_in
            books, hashes = self._ledger.pools[pool], chain.hashes[: sequence.num_published_blocks]
            if life == books.life and len(books.index.blocks(hashes)) == len(hashes):
                self.tiers.preempted(pool, hashes)
        self._ledger.release_all(sequence.seq_id)

    def forget(self, sequence: Sequence) -> None:
        """It has ended, or was placed, and waits for nothing."""
        self._fetches.forget(sequence)
        if (restored := self.tiers.forget(sequence.seq_id)) is None:
            return
        sequence.restore_reason = restored.words
        if restored.elapsed_ns:
            sequence.stamps.restored(restored.elapsed_ns)
        if not sequence.legs:  # a prompt that comes for the first time
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
        """True if a sequence should wait for what another computes.

        Args:
            sequence: would wait.
            other: begins alike.
            hits: what the sequence has without it.
            ahead: prompts on workers.
            alone: prompt tokens that are computed until the sequence is if it does not wait.
        """
        where, computed = other.where, other.num_computed_tokens
        if not isinstance(where, On) or sequence.prefix is None or other.prefix is None:
            return False
        books = self._ledger.pools[self._places.pool_of(where.leg.worker)]
        size = books.block_size
        num_common = sequence.prefix.num_common(other.prefix)
        common = min(num_common, self._most(sequence, size)) * size
        gain = common - max(hits.get(books.name, 0), computed)
        left = other.num_prompt_tokens - computed
        if gain <= 0 or left <= 0:
            return False
        chunk = other.max_chunk_tokens or self._max_step_tokens
        in_steps = min(-(-(common - computed) // chunk) * chunk, left)
        before = max(ahead.num_tokens(other, where.leg.worker) - left, 0)
        return before + in_steps + sequence.num_tokens - common < alone + gain

    def reserve(self, sequence: Sequence, legs: tuple[Leg, ...], needed: Mapping[str, int]) -> bool:
        """Take the blocks of a way, those that are there and new ones; False if too few are free.

        Args:
            sequence: has no blocks.
            legs: of the way.
            needed: blocks by pool.
        """
        found = self.find(sequence, needed)
        if not self._ledger.reserve(sequence.seq_id, needed, found):
            return False
        if sequence.prefix is not None and not sequence.legs:
            books = self._ledger.pools[self._places.pool_of(legs[0].worker)]
            sequence.num_cached_tokens = len(found.get(books.name, ())) * books.block_size
            self._counters.prefix_cache_queries += sequence.num_prompt_tokens
            self._counters.prefix_cache_hits += sequence.num_cached_tokens
            self._counters.prefix_cache_ns += sequence.prefix.took_ns
            if self.tiers and not sequence.prefix.is_secret:
                num_found = len(found.get(books.name, ()))
                self.tiers.placed(sequence.prefix.hashes, num_found)
        self.forget(sequence)
        return True

    def find(self, sequence: Sequence, pools: Iterable[str]) -> dict[str, list[int]]:
        """Blocks that its table would begin with, by pool."""
        if sequence.prefix is None:
            return {}
        began_ns, found = perf_counter_ns(), {}
        for name in pools:
            books = self._ledger.pools[name]
            hashes = sequence.prefix.hashes[: self._most(sequence, books.block_size)]
            if blocks := books.index.blocks(hashes):
                found[name] = blocks
        self._counters.prefix_cache_ns += perf_counter_ns() - began_ns
        return found

    # While it runs

    def settle(self, sequence: Sequence, pool: str) -> bool:
        """See from where it goes on in a pool, and that it writes what nobody else knows.

        Blocks that its table begins with and that have a hash are computed. Of those after them
        that it had computed before and computes again, others may know some: these are exchanged.

        Returns:
            False: there is no room for that exchange now; it cannot be admitted yet.
        """
        books, size = self._ledger.pools[pool], self._ledger.pools[pool].block_size
        here = (pool, books.life)
        if sequence.computed_in != here:
            sequence.forget_computed()
            sequence.computed_in = here
        sequence.num_published_blocks = 0
        there = min(self._ledger.num_hashed(sequence.seq_id, pool), self._most(sequence, size))
        sequence.num_computed_tokens = max(sequence.num_computed_tokens, there * size)
        return self._ledger.renew(sequence.seq_id, pool, sequence.num_computed_tokens // size)

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
        self.contents.stored(sequence, range(first, num_full))
        sequence.num_published_blocks = num_full
        if self.tiers and not chain.is_secret:
            self.tiers.computed(chain.hashes[first:num_full])
        self._counters.prefix_cache_ns += perf_counter_ns() - began_ns

    def _most(self, sequence: Sequence, block_size: int) -> int:
        """Blocks at most that a hit may have: not that of the last token.

        Where prompt tokens are reported on, each has to be computed.
        """
        if sequence.sampling.prompt_logprobs is not None:
            return 0
        return (sequence.num_tokens - 1) // block_size
