"""Track which sequences and commands use each KV block, and derive each block's state.

Owns: references (the sequences' tables that contain a block) and unanswered commands, for all
pools, and with the index of each pool the hashes of full blocks. A block's state is not stored: it
follows from the three. Where layers have sliding windows, a block may have window blocks
(`engine.cache.window_blocks`), which share its state until no table needs them.
Invariants: a block has as many references as tables that contain it, and as many commands as name
it; it is in the free list exactly if it has neither, and no hash; block 0 is padding and is never
allocated. A block with a hash is full and is never written.
Never: moves bytes, knows requests or clocks. A timer may start an abort, never a free.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

from engine.cache.hashes import Hash, PrefixChain, border_of, record_hashes
from engine.cache.prefix_index import PrefixIndex
from engine.cache.published_blocks import Published, PublishedBlocks
from engine.cache.window_blocks import NO_SPAN, NO_WINDOWS, WHOLE, Span, WindowBlocks, Windows
from engine.errors import InvariantViolated

Owner = int
"""A sequence's id."""

CommandKey = tuple[str, int, int]
"""("admit", seq_id, generation) or ("copy", copy_id, 0)."""


MIN_RECORDS = 2
"""A running sequence has two records: a step reads one and writes the other."""


SNAPSHOT_SHARE = 0.25
"""The largest share of a pool's blocks for snapshots; what saves the least is dropped first."""


class BlockState(StrEnum):
    """The state of a block by references, unanswered commands and hash."""

    FREE = "free"
    """No references, commands or hash: it can be allocated."""
    CACHED = "cached"
    """Only a hash: it can be found, and it can be allocated."""
    RESERVED = "reserved"
    """References without a command: kept for later writes."""
    ACTIVE = "active"
    """References and a command: a worker may read and write it."""
    DRAINING = "draining"
    """Commands without a reference: unneeded, but a worker may still touch it."""


def _nobody(_: Hash) -> None:
    """Ignore evicted blocks: the default callback."""


class BlockPool:
    """The blocks of one pool, ids 1 to num_blocks - 1: their states, references and free list."""

    def __init__(
        self,
        name: str,
        num_blocks: int,
        block_size: int,
        record_blocks: int = 0,
        windows: Windows = NO_WINDOWS,
    ) -> None:
        self.name = name
        self.windows = WindowBlocks(windows, num_blocks, block_size)
        """The window blocks of blocks."""
        self.record_blocks = record_blocks
        """Blocks of one record; 0: the model keeps no recurrent states."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.life = 1
        """Grows when the memory is lost with its contents; block ids stay."""
        self.free_block_ids = deque(range(1, num_blocks))
        self.num_references = [0] * num_blocks
        """Tables that contain the block."""
        self.num_commands = [0] * num_blocks
        """Unanswered commands that name the block."""
        self.num_stuck = 0
        """Blocks that an overdue disk may still touch; when they become free is unknown."""
        self.index = PrefixIndex(name)
        self.on_forget: Callable[[Hash], None] = _nobody
        """Called with each hash that leaves the pool."""
        self.counts = dict.fromkeys(BlockState, 0)
        self.counts[BlockState.FREE] = self.capacity

    @property
    def capacity(self) -> int:
        return self.num_blocks - 1

    @property
    def kv_capacity(self) -> int:
        """Blocks that one sequence can have for keys and values, beside its records."""
        capacity, windows = self.capacity - MIN_RECORDS * self.record_blocks, self.windows
        num_windows = windows.num_each * windows.most_places
        return max(capacity // (1 + windows.num_each), capacity - num_windows)

    def max_cost(self, num_blocks: int) -> int:
        """Count the blocks at most that a table of this length takes, with its window blocks."""
        return num_blocks + self.windows.num_each * min(num_blocks, self.windows.most_places)

    @property
    def num_free(self) -> int:
        """The number of free blocks, including cached and spare ones."""
        return len(self.free_block_ids) + self.counts[BlockState.CACHED]

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def state(self, block_id: int) -> BlockState:
        """Derive a block's state from its references, commands and hash."""
        if self.num_references[block_id]:
            return BlockState.ACTIVE if self.num_commands[block_id] else BlockState.RESERVED
        if self.num_commands[block_id]:
            return BlockState.DRAINING
        return BlockState.CACHED if block_id in self.index else BlockState.FREE

    def count(self, block_id: int, *, references: int = 0, commands: int = 0) -> None:
        """Add to a block's references and commands; the only place where either changes.

        The first user of a free block must take it out of the free list.
        """
        before = self.state(block_id)
        self.num_references[block_id] += references
        self.num_commands[block_id] += commands
        after = self.state(block_id)
        if after is not before:
            self._move(block_id, before, after)

    def _move(self, block_id: int, before: BlockState, after: BlockState) -> None:
        self.counts[before] -= 1
        self.counts[after] += 1
        num_windows = len(self.windows.of(block_id))
        if num_windows:
            is_spare = block_id in self.windows.spare
            self.counts[BlockState.CACHED if is_spare else before] -= num_windows
            if after is BlockState.FREE:
                self.counts[after] += num_windows
                self.free_block_ids.extendleft(self.windows.take_from(block_id))
            else:
                self.counts[BlockState.CACHED if is_spare else after] += num_windows
        if before is BlockState.CACHED:
            self.index.taken(block_id)
        if after is BlockState.CACHED:
            self.index.released(block_id)
        elif after is BlockState.FREE:
            self.free_block_ids.appendleft(block_id)  # its memory exists already

    def take(self, count: int, span: Span = WHOLE, first: int = 0) -> list[int]:
        """Allocate blocks: free ones, else spare window blocks, else cached ones.

        Args:
            count: of blocks, without their window blocks.
            span: the places of their table that get window blocks.
            first: the place of the first of them.
        """
        blocks = self._allocate(count)
        if self.windows.num_each:
            for index, block_id in enumerate(blocks, first):
                if span.has(index):
                    self.windows.give(block_id, self._allocate(self.windows.num_each))
        return blocks

    def _allocate(self, count: int) -> list[int]:
        while len(self.free_block_ids) < count:
            if self.windows.spare:
                self.drop_windows(next(iter(self.windows.spare)))
            else:
                self.index.num_evicted += 1
                self.forget(self.index.choose())
        # in order, so that blocks that lie side by side are copied in one call
        return sorted(self.free_block_ids.popleft() for _ in range(count))

    def give_windows(self, block_id: int) -> None:
        """Allocate window blocks for a block in use that has none; its step will write them."""
        window_blocks = self._allocate(self.windows.num_each)
        self.windows.give(block_id, window_blocks)
        self.counts[BlockState.FREE] -= len(window_blocks)
        self.counts[self.state(block_id)] += len(window_blocks)

    def drop_windows(self, block_id: int) -> None:
        """Free a block's window blocks, which no table needs."""
        state = BlockState.CACHED if block_id in self.windows.spare else self.state(block_id)
        window_blocks = self.windows.take_from(block_id)
        self.counts[state] -= len(window_blocks)
        self.counts[BlockState.FREE] += len(window_blocks)
        self.free_block_ids.extendleft(window_blocks)

    def need_windows(self, block_id: int, count: int) -> None:
        """Add to the tables and copies that need a block's window blocks.

        Window blocks without any are spare while another table has the block. Window blocks of a
        cached block stay as long as it does.
        """
        windows = self.windows
        windows.num_needing[block_id] += count
        num_each = len(windows.of(block_id))
        if not num_each:
            return
        is_spare = not windows.num_needing[block_id] and self.num_references[block_id] > 0
        if is_spare == (block_id in windows.spare):
            return
        if not is_spare and not windows.num_needing[block_id]:
            return  # spare before, and cached since
        state, change = self.state(block_id), num_each if is_spare else -num_each
        self.counts[BlockState.CACHED] += change
        self.counts[state] -= change
        windows.set_spare(block_id, is_spare=is_spare)

    def found_cost(self, blocks: list[int], span: Span) -> int:
        """Count the free blocks that are free no more once a table begins with found ones."""
        cost = 0
        for index, block_id in enumerate(blocks):
            is_cached = self.state(block_id) is BlockState.CACHED
            cost += is_cached
            if self.windows.num_each and span.has(index):
                num_there = len(self.windows.of(block_id))
                is_free = is_cached or block_id in self.windows.spare
                cost += num_there * is_free
        return cost

    def new_cost(self, first: int, end: int, span: Span) -> int:
        """Count the blocks that new ones of a table from place `first` to `end` take."""
        return max(end - first, 0) + self.windows.num_each * span.num_within(first, end)

    def publish(self, block_id: int, block_hash: Hash, parent: Hash, user: str) -> bool:
        """Give a hash to a full block; a known one without its window blocks loses the hash."""
        known = self.index.block_of(block_hash)
        if known not in (None, block_id) and block_id not in self.index:
            assert known is not None
            if self.windows.are_missing(known) and not self.windows.are_missing(block_id):
                self.forget(known)
        return self.index.publish(block_id, block_hash, parent, user)

    def shared_places(self, table: list[int], first: int) -> list[int]:
        """List the places of a table, from `first` on, whose blocks others have or can find."""
        return [
            i
            for i in range(first, len(table))
            if table[i] in self.index or self.num_references[table[i]] > 1
        ]

    def border(self, blocks: list[int]) -> int:
        """Count a chain's leading blocks up to the last place with all window blocks before it."""
        return self.windows.border(blocks)

    def lose(self) -> None:
        """Begin a new life after the memory was lost, without any hashes."""
        self.life += 1
        for block_id in range(1, self.num_blocks):
            if block_id in self.index:
                self.forget(block_id)

    def forget(self, block_id: int) -> None:
        """Remove a block's hash; with a part of a snapshot, the hashes of the other parts."""
        border = self.index.border_of(block_id)
        for each in [block_id] if border is None else list(self.index.snapshots[border]):
            self._forget(each)

    def _forget(self, block_id: int) -> None:
        before = self.state(block_id)
        if before is BlockState.CACHED:
            self._move(block_id, before, BlockState.FREE)
        self.on_forget(self.index.forget(block_id))

    def publish_snapshot(self, record: list[int], border: Hash, user: str) -> bool:
        """Let others find a record in use, unless snapshots have their share of the pool.

        It is the record at a border, and is never written again.
        """
        index, most = self.index, int(self.capacity * SNAPSHOT_SHARE)
        while (len(index.snapshots) + 1) * len(record) > most:
            if not (dropped := index.cheapest_snapshot()):
                return False
            self.forget(dropped[0])
        return index.publish_snapshot(record, border, user)

    def adopt(self, published: PublishedBlocks) -> int:
        """Find a dead daemon's blocks again, and record this one's; return how many are found.

        Parts of a snapshot that lacks others stay free.

        Args:
            published: the record of this pool's memory, in which nothing was allocated yet.

        Raises:
            Damaged: the record cannot be read; no block is found then.
        """
        found = published.read()
        taken, snapshots = {each.block_id for each in found}, dict[Hash, list[Published]]()
        self.free_block_ids = deque(b for b in self.free_block_ids if b not in taken)
        for each in found:
            self.count(each.block_id, references=1)
            if (border := border_of(each.hash)) is not None:
                snapshots.setdefault(border, []).append(each)
            else:
                self.index.publish(each.block_id, each.hash, each.parent, each.user)
        for border, parts in snapshots.items():
            places = {each.hash: each.block_id for each in parts}
            names = record_hashes(border, self.record_blocks)
            record = [places[name] for name in names if name in places]
            if len(record) == self.record_blocks:
                self.index.publish_snapshot(record, border, parts[0].user)
        for each in found:
            self.count(each.block_id, references=-1)
            if each.block_id not in self.index:
                published.remove(each.block_id)
        self.index.published = published
        return len(self.index)

    def check_invariants(self) -> None:
        """Recount everything; raise InvariantViolated with the numbers."""
        of_windows = self.windows.owners()
        states = [
            self._state_of_window(of_windows[block_id])
            if block_id in of_windows
            else self.state(block_id)
            for block_id in range(1, self.num_blocks)
        ]
        recount = Counter(states)
        if any(self.counts[state] != recount[state] for state in BlockState):
            raise InvariantViolated(f"counts {self.counts}, {recount} found", where=self.name)
        free = {b for b, state in enumerate(states, 1) if state is BlockState.FREE}
        if len(self.free_block_ids) != len(free) or free != set(self.free_block_ids):
            raise InvariantViolated("the free list does not equal the free blocks", where=self.name)
        cached = {b for b, state in enumerate(states, 1) if state is BlockState.CACHED}
        self.index.check_invariants(cached - of_windows.keys())
        for block_id in of_windows:
            if self.num_references[block_id] or self.num_commands[block_id]:
                raise InvariantViolated(f"window block {block_id} is in a table", where=self.name)

    def _state_of_window(self, block_id: int) -> BlockState:
        return BlockState.CACHED if block_id in self.windows.spare else self.state(block_id)


@dataclass(slots=True)
class _Command:
    worker: str
    blocks: dict[str, list[int]] = field(default_factory=dict)
    """Unanswered blocks by pool."""


class Ledger:
    """Keep the books of all blocks: pools, sequences' tables, unanswered commands."""

    def __init__(self, pools: Iterable[BlockPool]) -> None:
        self.pools = {pool.name: pool for pool in pools}
        self.has_windows = any(pool.windows.num_each for pool in self.pools.values())
        """Whether blocks have window blocks."""
        self._tables: dict[tuple[Owner, str], list[int]] = {}
        self._spans: dict[tuple[Owner, str], Span] = {}
        """The places of a table whose window blocks its sequence needs; all if not named."""
        self._records: dict[tuple[Owner, str], list[list[int]]] = {}
        self._commands: dict[CommandKey, _Command] = {}

    def resize(self, pool: str, num_blocks: int) -> int:
        """Learn how many blocks a pool has, none of which may have been taken; its tokens."""
        kv_pool = self.pools[pool]
        if num_blocks != kv_pool.num_blocks:
            if kv_pool.num_free != kv_pool.capacity:
                raise InvariantViolated("a pool in use cannot change its size", where=pool)
            on_forget = kv_pool.on_forget
            shape = (num_blocks, kv_pool.block_size, kv_pool.record_blocks, kv_pool.windows.shape)
            kv_pool = self.pools[pool] = BlockPool(pool, *shape)
            kv_pool.on_forget = on_forget
        return kv_pool.kv_capacity * kv_pool.block_size

    # References

    def table(self, owner: Owner, pool: str) -> list[int]:
        """Return the owner's blocks in a pool, in order; empty if none. Do not modify."""
        return self._tables.get((owner, pool), [])

    def span(self, owner: Owner, pool: str) -> Span:
        """Return the places of the owner's table whose window blocks it needs."""
        return self._spans.get((owner, pool), WHOLE)

    def window_tables(self, owner: Owner, pool: str) -> list[list[int]]:
        """Return the owner's window blocks by group, 0 where it needs none."""
        kv_pool, span = self.pools[pool], self.span(owner, pool)
        return kv_pool.windows.tables(self.table(owner, pool), span)

    def records(self, owner: Owner, pool: str) -> list[list[int]]:
        """Return the blocks of each of the owner's records in a pool. Do not modify."""
        return self._records.get((owner, pool), [])

    def num_records(self, pool: str) -> int:
        """Count the records that owners hold in a pool."""
        records = (each for (_, name), each in self._records.items() if name == pool)
        return sum(bool(record) for each in records for record in each)

    def table_sizes(self) -> dict[str, dict[Owner, int]]:
        """Count each owner's blocks by pool, including its records."""
        sizes: dict[str, dict[Owner, int]] = {name: {} for name in self.pools}
        for (owner, pool), table in self._tables.items():
            num_own = self.pools[pool].new_cost(0, len(table), self.span(owner, pool))
            sizes[pool][owner] = num_own + sum(map(len, self.records(owner, pool)))
        return sizes

    def reserve(
        self,
        owner: Owner,
        wants: Mapping[str, int],
        found: Mapping[str, list[int]] = MappingProxyType({}),
        *,
        records: Mapping[str, int] = MappingProxyType({}),
        snapshots: Mapping[str, list[int]] = MappingProxyType({}),
        spans: Mapping[str, Span] = MappingProxyType({}),
    ) -> bool:
        """Take blocks in every named pool, or in none; True if taken.

        Args:
            owner: of the tables.
            wants: number of blocks by pool, including the found ones.
            found: by pool, hashed blocks that the tables begin with.
            records: number of new records by pool, for owners that have none there.
            snapshots: by pool, the blocks of a found record, which becomes the first.
            spans: by pool, the places of a new table whose window blocks it needs; else all.
        """
        places = {name: len(self.table(owner, name)) for name in wants}
        for name, count in wants.items():
            kv_pool, there = self.pools[name], found.get(name, [])
            span = spans.get(name) or self.span(owner, name)
            first, end = places[name] + len(there), places[name] + count
            cost = kv_pool.found_cost(there, span) + kv_pool.new_cost(first, end, span)
            cost += kv_pool.found_cost(snapshots.get(name, []), NO_SPAN)
            cost += records.get(name, 0) * kv_pool.record_blocks
            if kv_pool.num_free < cost:
                return False
        for name, count in wants.items():
            kv_pool, there = self.pools[name], found.get(name, [])
            if name in spans and kv_pool.windows.num_each:
                self._spans[owner, name] = spans[name]
            if name in snapshots:
                self._add_record(owner, name, snapshots[name])
            self.refer(owner, name, there)
            first = places[name] + len(there)
            num_new = max(count - len(there), 0)
            self.refer(owner, name, kv_pool.take(num_new, self.span(owner, name), first))
            for _ in range(records.get(name, 0)):
                self._add_record(owner, name, kv_pool.take(kv_pool.record_blocks))
        return True

    def _add_record(self, owner: Owner, pool: str, block_ids: list[int]) -> None:
        self._records.setdefault((owner, pool), []).append(list(block_ids))
        for block_id in block_ids:
            self.pools[pool].count(block_id, references=1)

    def refer(self, owner: Owner, pool: str, block_ids: list[int]) -> None:
        """Add blocks to the owner's table; other tables may have them, too."""
        if not block_ids:
            return
        kv_pool, table = self.pools[pool], self._tables.setdefault((owner, pool), [])
        first, span = len(table), self.span(owner, pool)
        table.extend(block_ids)
        for index, block_id in enumerate(block_ids, first):
            kv_pool.count(block_id, references=1)
            if kv_pool.windows.num_each:
                kv_pool.need_windows(block_id, int(span.has(index)))

    def release(self, owner: Owner, pool: str, block_ids: Iterable[int] | None = None) -> None:
        """Release the owner's blocks (None: all); they are free now, or draining while named."""
        kv_pool, needed = self.pools[pool], list[int]()
        if block_ids is None:
            records = self._records.pop((owner, pool), [])
            table = self._tables.pop((owner, pool), [])
            leaving = [b for r in records for b in r] + table
            span = self._spans.pop((owner, pool), WHOLE)
            if kv_pool.windows.num_each:
                needed = span.of(table)
        else:
            leaving, table = list(block_ids), self._tables[owner, pool]
            for block_id in leaving:
                table.remove(block_id)
            if not table:
                del self._tables[owner, pool]
            if kv_pool.windows.num_each:
                needed = leaving
        for block_id in reversed(leaving):  # of what is cached then, a tail is the older
            kv_pool.count(block_id, references=-1)
        for block_id in needed:
            kv_pool.need_windows(block_id, -1)

    def publish(
        self, owner: Owner, pool: str, chain: PrefixChain, indices: range, user: str
    ) -> None:
        """Publish full, computed blocks of the owner's table, so that they can be found.

        The first block with a hash keeps it; another block with equal content gets none.

        Args:
            owner: of the table.
            pool: of the blocks.
            chain: the hashes of its blocks.
            indices: of the blocks in the table.
            user: that the blocks count for.
        """
        table, kv_pool = self.table(owner, pool), self.pools[pool]
        for i in indices:
            kv_pool.publish(table[i], chain.hashes[i], chain.parent(i), user)

    def drop_record(self, owner: Owner, pool: str, number: int, key: CommandKey) -> None:
        """Release one record that a worker has finished with; its place stays, empty.

        Args:
            owner: of the record.
            pool: where it is.
            number: its place among the owner's.
            key: of the command that named it; the command may have ended.
        """
        records = self._records[owner, pool]
        leaving, records[number] = records[number], []
        if self.is_open(key):
            self.answer_part(key, {pool: leaving})
        for block_id in reversed(leaving):
            self.pools[pool].count(block_id, references=-1)

    def num_hashed(self, owner: Owner, pool: str, most: int | None = None) -> int:
        """Count the leading blocks of the owner's table with a hash: they are computed.

        Args:
            owner: of the table.
            pool: of the blocks.
            most: blocks to count; with window blocks, a sequence could continue behind them.
        """
        index, table = self.pools[pool].index, self.table(owner, pool)
        count = next((i for i, b in enumerate(table) if b not in index), len(table))
        return count if most is None else self.pools[pool].border(table[: min(count, most)])

    def pass_windows(self, owner: Owner, pool: str, num_tokens: int) -> None:
        """Give up window blocks that a sequence with these computed tokens does not read again."""
        kv_pool, before = self.pools[pool], self.span(owner, pool)
        first = kv_pool.windows.num_behind(num_tokens)
        if first <= before.first or not self.table(owner, pool):
            return
        self._spans[owner, pool] = Span(first, before.end)
        for block_id in self.table(owner, pool)[before.first : min(first, before.end)]:
            kv_pool.need_windows(block_id, -1)

    def grow(self, owner: Owner, pool: str, count: int, span: Span) -> bool:
        """Take blocks for the end of a table, and window blocks for its span; or none.

        Args:
            owner: of the table.
            pool: of the blocks.
            count: new blocks.
            span: places whose window blocks it needs; it begins where the present one does.

        Returns:
            False: too few are free.
        """
        kv_pool, table, before = self.pools[pool], self.table(owner, pool), self.span(owner, pool)
        if not kv_pool.windows.num_each:
            return self.reserve(owner, {pool: count})
        length, end = len(table), max(span.end, before.end)
        span = Span(before.first, end)
        cost = kv_pool.new_cost(length, length + count, span)
        cost += kv_pool.windows.num_each * Span(before.end, end).num_within(0, length)
        if kv_pool.num_free < cost:
            return False
        self._spans[owner, pool] = span
        for block_id in table[before.end : end]:
            kv_pool.need_windows(block_id, 1)
            if kv_pool.windows.are_missing(block_id):
                kv_pool.give_windows(block_id)
        self.refer(owner, pool, kv_pool.take(count, span, length))
        return True

    def renew(self, owner: Owner, pool: str, first: int, span: Span | None = None) -> bool:
        """Replace shared blocks of the table from block `first` on by own ones, for writing.

        Blocks that have a hash, or are in other tables, are exchanged for free ones.

        Args:
            owner: of the table.
            pool: of the blocks.
            first: place of the first block that is written.
            span: the places whose window blocks it needs from now on; None: as before.

        Returns:
            False: too few are free; nothing has changed.
        """
        kv_pool, table = self.pools[pool], self.table(owner, pool)
        if kv_pool.windows.num_each:
            return self._renew_windows(owner, kv_pool, first, span or self.span(owner, pool))
        shared = kv_pool.shared_places(table, first)
        if not shared:
            return True
        left = [table[i] for i in shared]
        if kv_pool.num_free < len(shared):
            return False
        for i, block_id in zip(shared, kv_pool.take(len(shared)), strict=True):
            table[i] = block_id
            kv_pool.count(block_id, references=1)
        for block_id in reversed(left):
            kv_pool.count(block_id, references=-1)
        return True

    def _renew_windows(self, owner: Owner, kv_pool: BlockPool, first: int, span: Span) -> bool:
        """Do what renew() does where blocks have window blocks."""
        table, before = self.table(owner, kv_pool.name), self.span(owner, kv_pool.name)
        windows, num_each = kv_pool.windows, kv_pool.windows.num_each
        shared = set(kv_pool.shared_places(table, first))
        needed = [i for i in range(len(table)) if span.has(i)]
        bare = [i for i in needed if i not in shared and windows.are_missing(table[i])]
        if bare and bare[0] < first:
            what = f"window blocks of computed block {table[bare[0]]} are gone"
            raise InvariantViolated(what, where=kv_pool.name)
        again = [i for i in needed if i not in shared and table[i] in windows.spare]
        num_whole = sum(span.has(i) for i in shared) + len(bare) + len(again)
        if kv_pool.num_free < len(shared) + num_each * num_whole:
            return False
        self._spans[owner, kv_pool.name] = span
        kept = [i for i in range(len(table)) if i not in shared]
        for i in kept:  # what is needed again is not to be taken for what is missing
            kv_pool.need_windows(table[i], span.has(i) - before.has(i))
        for i in sorted(shared):
            left, (table[i],) = table[i], kv_pool.take(1, span, i)
            kv_pool.count(table[i], references=1)
            kv_pool.need_windows(table[i], int(span.has(i)))
            kv_pool.count(left, references=-1)
            kv_pool.need_windows(left, -int(before.has(i)))
        for i in bare:
            kv_pool.give_windows(table[i])
        return True

    def release_all(self, owner: Owner) -> None:
        """Release the owner's blocks in every pool."""
        for name in self.pools:
            self.release(owner, name)

    # Commands

    def open_command(self, key: CommandKey, worker: str, blocks: dict[str, list[int]]) -> None:
        """Register a command to a worker that names these blocks."""
        if key in self._commands:
            raise InvariantViolated(f"command {key} is open already", where=worker)
        self._commands[key] = _Command(worker)
        self.extend_command(key, blocks)

    def extend_command(self, key: CommandKey, blocks: dict[str, list[int]]) -> None:
        """Add blocks to an open command."""
        named = self._commands[key].blocks
        for pool, block_ids in blocks.items():
            named.setdefault(pool, []).extend(block_ids)
            for block_id in block_ids:
                self.pools[pool].count(block_id, commands=1)

    def unanswered(self, worker: str) -> list[CommandKey]:
        return [key for key, command in self._commands.items() if command.worker == worker]

    def close_command(self, key: CommandKey) -> bool:
        """Close a command after the worker's last touch; False if it is not open."""
        command = self._commands.pop(key, None)
        if command is None:
            return False
        for name, block_ids in command.blocks.items():
            for block_id in block_ids:
                self.pools[name].count(block_id, commands=-1)
        return True

    def answer_part(self, key: CommandKey, blocks: dict[str, list[int]]) -> None:
        """Release some of an open command's blocks, which the worker will not touch again."""
        named = self._commands[key].blocks
        for pool, block_ids in blocks.items():
            for block_id in block_ids:
                named[pool].remove(block_id)
                self.pools[pool].count(block_id, commands=-1)

    def is_open(self, key: CommandKey) -> bool:
        return key in self._commands

    def reap(self, worker: str) -> list[CommandKey]:
        """Close all commands of a dead worker, whose channel has been read to the end."""
        keys = self.unanswered(worker)
        for key in keys:
            self.close_command(key)
        return keys

    @property
    def is_idle(self) -> bool:
        """True when no sequence refers to a block and no command is unanswered."""
        return not self._tables and not self._records and not self._commands

    def owners(self) -> set[Owner]:
        """Return the owners of tables in any pool."""
        return {owner for owner, _ in (*self._tables, *self._records)}

    def check_invariants(self) -> None:
        """Raise InvariantViolated unless tables, commands and counts agree."""
        references = {name: Counter[int]() for name in self.pools}
        needing = {name: Counter(pool.windows.pins) for name, pool in self.pools.items()}
        commands = {name: Counter[int]() for name in self.pools}
        for owner, name in {*self._tables, *self._records}:
            table = self.table(owner, name)
            references[name].update(table)
            if self.pools[name].windows.num_each:
                span = self.span(owner, name)
                needed = span.of(table)
                needing[name].update(needed)
                if bare := [b for b in needed if self.pools[name].windows.are_missing(b)]:
                    what = f"blocks {bare} of {owner!r} have no window blocks"
                    raise InvariantViolated(what, where=name)
            records = [b for record in self._records.get((owner, name), []) for b in record]
            references[name].update(records)
            if len({*table, *records}) != len(table) + len(records):
                raise InvariantViolated(f"a block is twice in the table of {owner!r}", where=name)
        for command in self._commands.values():
            for name, block_ids in command.blocks.items():
                commands[name].update(block_ids)
        for name, pool in self.pools.items():
            pool.check_invariants()
            for what, found, counted in (
                ("references", references[name], pool.num_references),
                ("commands", commands[name], pool.num_commands),
            ):
                wrong = [b for b in range(pool.num_blocks) if found[b] != counted[b]]
                if wrong or found[0]:
                    raise InvariantViolated(f"{what} of blocks {wrong} are miscounted", where=name)
            pool.windows.check_invariants(needing[name], name)
