"""Record which sequences and commands use which KV blocks, in all pools.

A timer may start an abort, never a free.

Invariants: a block has as many references as tables that contain it, and as many commands as name
it; it is in the free list exactly if it has neither, and no hash.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from engine.errors import InvariantViolated
from engine.scheduler.cache.block_pool import BlockPool
from engine.scheduler.cache.hashes import PrefixChain
from engine.scheduler.cache.window_blocks import NO_SPAN, WHOLE, Span

Owner = int
"""A sequence's id."""

CommandKey = tuple[str, int, int]
"""("admit", seq_id, generation) or ("copy", copy_id, 0)."""


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
            self.refer(owner, name, kv_pool.allocate(num_new, self.span(owner, name), first))
            for _ in range(records.get(name, 0)):
                self._add_record(owner, name, kv_pool.allocate(kv_pool.record_blocks))
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
        self.refer(owner, pool, kv_pool.allocate(count, span, length))
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
        for i, block_id in zip(shared, kv_pool.allocate(len(shared)), strict=True):
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
            left, (table[i],) = table[i], kv_pool.allocate(1, span, i)
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
