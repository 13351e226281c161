"""Copy cached blocks, and a snapshot, from one KV pool to where a queued prompt needs them.

Invariant: a block is published when its copy is answered, in the life of both pools in which the
fetch began; each block is fetched once, however many wait for it; a prompt asks for one fetch
each time that it is placed, and waits only while all that make it take work.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from engine.scheduler.cache.hashes import Hash, PrefixChain
from engine.scheduler.cache.ledger import Ledger, Owner
from engine.scheduler.cache.topology import Link
from engine.scheduler.cache.window_blocks import Span
from engine.scheduler.routing.copies import Copies
from engine.scheduler.sequences.sequence import Counters, Sequence

OVERHEAD_MS = 1.0
"""Overhead of a fetch: messages, and the wait for the copying threads."""

PredictMs = Callable[[str, int, int], float | None]
"""A worker's time for a number of prompt tokens after another number; None: unknown."""


@dataclass(frozen=True, slots=True)
class PrefixLookup:
    """How much of a prompt is cached, in which pools."""

    worker: str
    """The worker that would compute the missing rest."""
    here: list[int]
    """Blocks in its pool, from the first on."""
    there: list[int]
    """Blocks where the link begins; more of them."""
    link: Link
    num_known: int
    """Leading blocks that need no computing without a fetch."""
    snapshot: list[int] = field(default_factory=list)
    """The blocks of the record behind those there; empty: the model keeps no recurrent states."""


@dataclass(slots=True)
class _Fetch:
    link: Link
    chain: PrefixChain
    user: str
    lives: tuple[int, int]
    """Lives of both pools when the fetch began."""
    num_published: int
    """Blocks that can be found where it goes, from the first on."""
    border: Hash | None
    """The border of the snapshot that comes last; None: none comes."""


class PrefixCopies:
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
        """The fetch that each sequence waits for, by seq_id."""
        self._asked: set[int] = set()
        """Sequences that have had their fetch, or need none, and are not placed yet."""
        self._last_owner = 0

    def is_awaited(self, sequence: Sequence) -> bool:
        """Say whether a sequence waits for blocks on their way."""
        return self._awaited.get(sequence.seq_id) in self._fetches

    def forget(self, sequence: Sequence) -> None:
        """Forget a sequence that was placed or has ended."""
        self._awaited.pop(sequence.seq_id, None)
        self._asked.discard(sequence.seq_id)

    def begin(self, sequence: Sequence, chain: PrefixChain, lookup: PrefixLookup) -> bool:
        """Have the blocks copied that are only there, if that is cheaper than computing them.

        Returns:
            True: the sequence is to wait for them, or for another's fetch of them.
        """
        link, first = lookup.link, len(lookup.here)
        border = chain.hashes[len(lookup.there) - 1] if lookup.snapshot else None
        for owner, fetch in self._fetches.items():
            is_coming = border is not None and fetch.border == border
            if border is None and first >= fetch.num_published:
                is_coming = fetch.chain.hashes[first : first + 1] == [chain.hashes[first]]
            if is_coming and fetch.link.to_pool == link.to_pool:
                self._awaited[sequence.seq_id] = owner
                return True
        if sequence.seq_id in self._asked or not self._is_worth_it(lookup):
            return False
        self._last_owner -= 1  # sequences' ids are positive
        owner, pools = self._last_owner, self._ledger.pools
        wants = dict.fromkeys((link.from_pool, link.to_pool), len(lookup.there))
        found = {link.from_pool: lookup.there, link.to_pool: lookup.here}
        records, snapshots = {}, {}
        if border is not None:
            records, snapshots = {link.to_pool: 1}, {link.from_pool: lookup.snapshot}
        spans = self._spans(lookup)
        if not self._ledger.reserve(
            owner, wants, found, records=records, snapshots=snapshots, spans=spans
        ):
            return False
        lives = pools[link.from_pool].life, pools[link.to_pool].life
        self._fetches[owner] = _Fetch(link, chain, sequence.owner, lives, first, border)
        self._copies.fetch(owner, link, first)
        self._awaited[sequence.seq_id] = owner
        self._asked.add(sequence.seq_id)
        return True

    def _spans(self, lookup: PrefixLookup) -> dict[str, Span]:
        """Return where both tables need window blocks: of the last window before their end."""
        spans = {}
        for name in (lookup.link.from_pool, lookup.link.to_pool):
            kv_pool = self._ledger.pools[name]
            first = kv_pool.windows.num_behind(len(lookup.there) * kv_pool.block_size)
            spans[name] = Span(first, len(lookup.there))
        return spans

    def _is_worth_it(self, lookup: PrefixLookup) -> bool:
        size = self._ledger.pools[lookup.link.to_pool].block_size
        first, end = lookup.num_known, len(lookup.there)
        fetch_ms = self.expected_ms(lookup, first, end)
        compute_ms = self.predict_ms(lookup.worker, (end - first) * size, first * size)
        return fetch_ms is not None and (compute_ms is None or fetch_ms < compute_ms)

    def expected_ms(self, lookup: PrefixLookup, first: int, end: int) -> float | None:
        """Predict the time for these positions of a prompt, fetched as far as they exist.

        Later positions are computed. None: unknown, or no block of them exists.
        """
        size = self._ledger.pools[lookup.link.to_pool].block_size
        middle = min(len(lookup.there), end)
        if middle <= first:
            return None
        num_copied = max(middle - max(first, len(lookup.here)), 0)
        copy_ms = self._copies.expected_ms(lookup.link, num_copied * size)
        compute_ms: float | None = 0.0
        if end > middle:
            compute_ms = self.predict_ms(lookup.worker, (end - middle) * size, middle * size)
        return None if copy_ms is None or compute_ms is None else OVERHEAD_MS + copy_ms + compute_ms

    def end_arrived(self, open_workers: Collection[str]) -> None:
        """Publish what has come; end what is complete, or will not be."""
        for owner, fetch in list(self._fetches.items()):
            link, pools = fetch.link, self._ledger.pools
            is_there = fetch.lives == (pools[link.from_pool].life, pools[link.to_pool].life)
            num_there, has_more = self._copies.fetched(owner)
            if is_there:
                self._publish(owner, fetch, num_there)
                if not has_more and fetch.border is not None:
                    self._publish_snapshot(owner, fetch, num_there)
            makers = {hop.worker for hop in link.hops}
            if not (is_there and has_more and makers <= set(open_workers)):
                del self._fetches[owner]
                self._copies.drop(owner)
                self._ledger.release_all(owner)

    def _publish(self, owner: Owner, fetch: _Fetch, num_there: int) -> None:
        kv_pool = self._ledger.pools[fetch.link.to_pool]
        end = min(num_there, len(self._ledger.table(owner, kv_pool.name)))
        if end > fetch.num_published:
            fetched = range(fetch.num_published, end)
            self._ledger.publish(owner, kv_pool.name, fetch.chain, fetched, fetch.user)
            self._counters.prefix_cache_fetches += len(fetched) * kv_pool.block_size
            fetch.num_published = end

    def _publish_snapshot(self, owner: Owner, fetch: _Fetch, num_there: int) -> None:
        """Let prompts find the fetched snapshot if all of it has come."""
        kv_pool = self._ledger.pools[fetch.link.to_pool]
        (record,) = self._ledger.records(owner, kv_pool.name)
        if fetch.border and num_there == fetch.num_published + len(record):
            kv_pool.publish_snapshot(record, fetch.border, fetch.user)

    @property
    def owners(self) -> set[Owner]:
        """Return the owners of the tables into which fetches copy."""
        return set(self._fetches)


def longest(
    found: Mapping[str, list[int]], links: Collection[Link], worker: str, pool: str
) -> PrefixLookup | None:
    """Choose the link whose source has most of a prompt, if that is more than its target has.

    Args:
        found: the prompt's blocks by pool.
        links: to the pool, from others.
        worker: would compute the missing rest.
        pool: the worker's.
    """
    here = found.get(pool, [])
    best = max(links, key=lambda link: len(found.get(link.from_pool, ())), default=None)
    if best is None or len(there := found.get(best.from_pool, [])) <= len(here):
        return None
    return PrefixLookup(worker, here, there, best, len(here))
