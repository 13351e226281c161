"""Track which sequences and commands use each KV block, and derive each block's state.

Owns: references (the sequences' tables that contain a block) and unanswered commands, for all
pools, and with the index of each pool the hashes of full blocks. A block's state is not stored: it
follows from the three.
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

from engine.cache.hashes import Hash, PrefixChain
from engine.cache.prefix_index import PrefixIndex
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

    def __init__(self, name: str, num_blocks: int, block_size: int, record_blocks: int = 0) -> None:
        self.name = name
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
        return self.capacity - MIN_RECORDS * self.record_blocks

    @property
    def num_free(self) -> int:
        """The number of free blocks, including evictable cached ones."""
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
        if before is BlockState.CACHED:
            self.index.taken(block_id)
        if after is BlockState.CACHED:
            self.index.released(block_id)
        elif after is BlockState.FREE:
            self.free_block_ids.appendleft(block_id)  # its memory exists already

    def take(self, count: int) -> list[int]:
        """Allocate free blocks, then cached ones, which lose their hashes; enough must exist."""
        while len(self.free_block_ids) < count:
            self.index.num_evicted += 1
            self.forget(self.index.choose())
        # in order, so that blocks that lie side by side are copied in one call
        return sorted(self.free_block_ids.popleft() for _ in range(count))

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

    def check_invariants(self) -> None:
        """Recount everything; raise InvariantViolated with the numbers."""
        states = [self.state(block_id) for block_id in range(1, self.num_blocks)]
        recount = Counter(states)
        if any(self.counts[state] != recount[state] for state in BlockState):
            raise InvariantViolated(f"counts {self.counts}, {recount} found", where=self.name)
        free = {b for b, state in enumerate(states, 1) if state is BlockState.FREE}
        if len(self.free_block_ids) != len(free) or free != set(self.free_block_ids):
            raise InvariantViolated("the free list does not equal the free blocks", where=self.name)
        cached = {b for b, state in enumerate(states, 1) if state is BlockState.CACHED}
        self.index.check_invariants(cached)


@dataclass(slots=True)
class _Command:
    worker: str
    blocks: dict[str, list[int]] = field(default_factory=dict)
    """Unanswered blocks by pool."""


class Ledger:
    """Keep the books of all blocks: pools, sequences' tables, unanswered commands."""

    def __init__(self, pools: Iterable[BlockPool]) -> None:
        self.pools = {pool.name: pool for pool in pools}
        self._tables: dict[tuple[Owner, str], list[int]] = {}
        self._records: dict[tuple[Owner, str], list[list[int]]] = {}
        self._commands: dict[CommandKey, _Command] = {}

    def resize(self, pool: str, num_blocks: int) -> int:
        """Learn how many blocks a pool has, none of which may have been taken; its tokens."""
        kv_pool = self.pools[pool]
        if num_blocks != kv_pool.num_blocks:
            if kv_pool.num_free != kv_pool.capacity:
                raise InvariantViolated("a pool in use cannot change its size", where=pool)
            on_forget = kv_pool.on_forget
            shape = (num_blocks, kv_pool.block_size, kv_pool.record_blocks)
            kv_pool = self.pools[pool] = BlockPool(pool, *shape)
            kv_pool.on_forget = on_forget
        return kv_pool.kv_capacity * kv_pool.block_size

    # References

    def table(self, owner: Owner, pool: str) -> list[int]:
        """Return the owner's blocks in a pool, in order; empty if none. Do not modify."""
        return self._tables.get((owner, pool), [])

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
            sizes[pool][owner] = len(table) + sum(map(len, self.records(owner, pool)))
        return sizes

    def reserve(
        self,
        owner: Owner,
        wants: Mapping[str, int],
        found: Mapping[str, list[int]] = MappingProxyType({}),
        *,
        records: Mapping[str, int] = MappingProxyType({}),
        snapshots: Mapping[str, list[int]] = MappingProxyType({}),
    ) -> bool:
        """Take blocks in every named pool, or in none; True if taken.

        Args:
            owner: of the tables.
            wants: number of blocks by pool, including the found ones.
            found: by pool, hashed blocks that the tables begin with.
            records: number of new records by pool, for owners that have none there.
            snapshots: by pool, the blocks of a found record, which becomes the first.
        """
        for name, count in wants.items():
            kv_pool, there = self.pools[name], found.get(name, [])
            kept = [*there, *snapshots.get(name, [])]
            num_evictable = sum(kv_pool.state(b) is BlockState.CACHED for b in kept)
            num_new = count - len(there) + records.get(name, 0) * kv_pool.record_blocks
            if kv_pool.num_free - num_evictable < num_new:
                return False
        for name, count in wants.items():
            kv_pool, there = self.pools[name], found.get(name, [])
            if name in snapshots:
                self._add_record(owner, name, snapshots[name])
            self.refer(owner, name, there)
            self.refer(owner, name, kv_pool.take(max(count - len(there), 0)))
            for _ in range(records.get(name, 0)):
                self._add_record(owner, name, kv_pool.take(kv_pool.record_blocks))
        return True

    def _add_record(self, owner: Owner, pool: str, block_ids: list[int]) -> None:
        self._records.setdefault((owner, pool), []).append(list(block_ids))
        for block_id in block_ids:
            self.pools[pool].count(block_id, references=1)

    def refer(self, owner: Owner, pool: str, block_ids: list[int]) -> None:
        """Add blocks to the owner's table; other tables may have them, too."""
        if block_ids:
            self._tables.setdefault((owner, pool), []).extend(block_ids)
            for block_id in block_ids:
                self.pools[pool].count(block_id, references=1)

    def release(self, owner: Owner, pool: str, block_ids: Iterable[int] | None = None) -> None:
        """Release the owner's blocks (None: all); they are free now, or draining while named."""
        if block_ids is None:
            records = self._records.pop((owner, pool), [])
            leaving = [b for r in records for b in r] + self._tables.pop((owner, pool), [])
        else:
            leaving, table = list(block_ids), self._tables[owner, pool]
            for block_id in leaving:
                table.remove(block_id)
            if not table:
                del self._tables[owner, pool]
        for block_id in reversed(leaving):  # of what is cached then, a tail is the older
            self.pools[pool].count(block_id, references=-1)

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
        table, index = self.table(owner, pool), self.pools[pool].index
        for i in indices:
            index.publish(table[i], chain.hashes[i], chain.parent(i), user)

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

    def num_hashed(self, owner: Owner, pool: str) -> int:
        """Count the leading blocks of the owner's table with a hash: they are computed."""
        index, count = self.pools[pool].index, 0
        for block_id in self.table(owner, pool):
            if block_id not in index:
                break
            count += 1
        return count

    def renew(self, owner: Owner, pool: str, first: int) -> bool:
        """Replace shared blocks of the table from block `first` on by own ones, for writing.

        Blocks that have a hash, or are in other tables, are exchanged for free ones.

        Returns:
            False: too few are free; nothing has changed.
        """
        kv_pool, table = self.pools[pool], self.table(owner, pool)
        shared = [
            i
            for i in range(first, len(table))
            if table[i] in kv_pool.index or kv_pool.num_references[table[i]] > 1
        ]
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
        commands = {name: Counter[int]() for name in self.pools}
        for owner, name in {*self._tables, *self._records}:
            table = self.table(owner, name)
            references[name].update(table)
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
