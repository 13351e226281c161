"""The ledger: who owns every KV block of every pool, and which commands may still touch it.

Owns: block states, owners, block tables and unanswered commands, for all pools.
Called by: the router and its ring, on the daemon's loop; telemetry reads its counts.
Invariants: every block is in one state with one owner; counts add up to the pool; no block
becomes FREE while a command naming it is unanswered (until then it is DRAINING); block 0 is
padding and is never allocated.
Never: moves bytes, knows requests or clocks. A timer may start an abort, never a free.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

from engine.errors import InvariantViolated

Owner = int | str
"""A sequence id, or the name of the worker that was granted a ring slot."""

CommandKey = tuple[str, int, int]
"""("admit", seq_id, generation), ("load", load_id, 0) or ("grant", slot, 0)."""


class BlockState(IntEnum):
    """FREE → RESERVED → ACTIVE → (DRAINING →) FREE. CACHED and QUARANTINED hold no owner's work."""

    FREE = 0
    RESERVED = 1
    ACTIVE = 2
    CACHED = 3
    DRAINING = 4
    QUARANTINED = 5


class BlockPool:
    """The books of one pool: ids 1 to num_blocks - 1, in the order they became free."""

    def __init__(self, name: str, num_blocks: int, block_size: int) -> None:
        self.name = name
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.free_block_ids = deque(range(1, num_blocks))
        self.states = [BlockState.FREE] * num_blocks
        self.owners: list[Owner | None] = [None] * num_blocks
        self.num_commands = [0] * num_blocks
        """Unanswered commands that name the block."""
        self.counts = dict.fromkeys(BlockState, 0)
        self.counts[BlockState.FREE] = self.capacity

    @property
    def capacity(self) -> int:
        """Blocks that can be allocated."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now."""
        return len(self.free_block_ids)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def set_state(self, block_id: int, state: BlockState, owner: Owner | None) -> None:
        """Move one block to a state; the only place where states and counts change."""
        self.counts[self.states[block_id]] -= 1
        self.counts[state] += 1
        self.states[block_id] = state
        self.owners[block_id] = owner
        if state is BlockState.FREE:
            self.free_block_ids.append(block_id)

    def check_invariants(self) -> None:
        """Recount everything; raise InvariantViolated with the numbers."""
        recount = dict.fromkeys(BlockState, 0)
        for block_id in range(1, self.num_blocks):
            state = self.states[block_id]
            recount[state] += 1
            if state is BlockState.FREE:
                if self.owners[block_id] is not None or self.num_commands[block_id]:
                    raise InvariantViolated(
                        f"block {block_id} is free but owned by {self.owners[block_id]!r} or named "
                        f"by {self.num_commands[block_id]} commands",
                        where=self.name,
                    )
            elif state in (BlockState.RESERVED, BlockState.ACTIVE, BlockState.DRAINING) and (
                self.owners[block_id] is None
            ):
                raise InvariantViolated(f"block {block_id} has no owner", where=self.name)
            if state is BlockState.DRAINING and not self.num_commands[block_id]:
                raise InvariantViolated(f"block {block_id} drains for nothing", where=self.name)
        free = set(self.free_block_ids)
        if recount != self.counts or len(free) != len(self.free_block_ids):
            raise InvariantViolated(f"counts {self.counts} but {recount} found", where=self.name)
        if len(free) != recount[BlockState.FREE] or 0 in free:
            raise InvariantViolated("the free list does not equal the free blocks", where=self.name)


@dataclass(frozen=True, slots=True)
class _Command:
    worker: str
    blocks: tuple[tuple[str, tuple[int, ...]], ...]


class Ledger:
    """All pools, all tables, all unanswered commands."""

    def __init__(self, pools: Iterable[BlockPool]) -> None:
        self.pools = {pool.name: pool for pool in pools}
        self._tables: dict[tuple[Owner, str], list[int]] = {}
        self._commands: dict[CommandKey, _Command] = {}

    def resize(self, pool: str, num_blocks: int) -> int:
        """Learn how many blocks a pool has, none of which may have been taken; its tokens."""
        books = self.pools[pool]
        if num_blocks != books.num_blocks:
            if books.num_free != books.capacity:
                raise InvariantViolated("a pool in use cannot change its size", where=pool)
            books = self.pools[pool] = BlockPool(pool, num_blocks, books.block_size)
        return books.capacity * books.block_size

    def table(self, owner: Owner, pool: str) -> list[int]:
        """The owner's blocks in a pool, in order; empty if it owns none. Do not modify."""
        return self._tables.get((owner, pool), [])

    def reserve(self, owner: Owner, wants: dict[str, int]) -> bool:
        """Take blocks in every named pool, or in none; True if taken.

        Args:
            owner: who will own them; must own nothing in these pools yet.
            wants: number of blocks by pool.
        """
        if any(self.pools[pool].num_free < count for pool, count in wants.items()):
            return False
        for name, count in wants.items():
            pool = self.pools[name]
            block_ids = [pool.free_block_ids.popleft() for _ in range(count)]
            for block_id in block_ids:
                pool.set_state(block_id, BlockState.RESERVED, owner)
            self._tables.setdefault((owner, name), []).extend(block_ids)
        return True

    def activate(self, owner: Owner, pool: str) -> None:
        """The owner's reserved blocks are about to be written."""
        books = self.pools[pool]
        for block_id in self.table(owner, pool):
            if books.states[block_id] is BlockState.RESERVED:
                books.set_state(block_id, BlockState.ACTIVE, owner)

    def transfer(self, pool: str, block_id: int, old: Owner, new: Owner) -> None:
        """Give one block to another owner, as ACTIVE: a stored ring slot becomes the sequence's."""
        self._tables[old, pool].remove(block_id)
        self._tables.setdefault((new, pool), []).append(block_id)
        self.pools[pool].set_state(block_id, BlockState.ACTIVE, new)

    def open_command(self, key: CommandKey, worker: str, blocks: dict[str, list[int]]) -> None:
        """A command naming these blocks was sent to a worker and is unanswered from now on."""
        if key in self._commands:
            raise InvariantViolated(f"command {key} is open already", where=worker)
        self._commands[key] = _Command(worker, tuple((p, tuple(ids)) for p, ids in blocks.items()))
        for pool, block_ids in blocks.items():
            num_commands = self.pools[pool].num_commands
            for block_id in block_ids:
                num_commands[block_id] += 1

    def unanswered(self, worker: str) -> list[CommandKey]:
        """Commands to a worker that are open."""
        return [key for key, command in self._commands.items() if command.worker == worker]

    def close_command(self, key: CommandKey) -> bool:
        """The worker has answered, after its last touch; False if no such command is open."""
        command = self._commands.pop(key, None)
        if command is None:
            return False
        for name, block_ids in command.blocks:
            pool = self.pools[name]
            for block_id in block_ids:
                pool.num_commands[block_id] -= 1
                if not pool.num_commands[block_id] and (
                    pool.states[block_id] is BlockState.DRAINING
                ):
                    pool.set_state(block_id, BlockState.FREE, None)
        return True

    def is_open(self, key: CommandKey) -> bool:
        """True while the command is unanswered."""
        return key in self._commands

    def reap(self, worker: str) -> list[CommandKey]:
        """The worker is dead and its channel read to the end: its commands have ended."""
        keys = self.unanswered(worker)
        for key in keys:
            self.close_command(key)
        return keys

    def release(self, owner: Owner, pool: str, block_ids: Iterable[int] | None = None) -> None:
        """The owner is done with these blocks (None: all); FREE now, or DRAINING while named."""
        table = self._tables.get((owner, pool), [])
        leaving = list(table) if block_ids is None else list(block_ids)
        books = self.pools[pool]
        for block_id in leaving:
            if books.num_commands[block_id]:
                books.set_state(block_id, BlockState.DRAINING, owner)
            else:
                books.set_state(block_id, BlockState.FREE, None)
        if block_ids is None:
            self._tables.pop((owner, pool), None)
        else:
            for block_id in leaving:
                table.remove(block_id)
            if not table:
                self._tables.pop((owner, pool), None)

    def release_all(self, owner: Owner) -> None:
        """The owner is done with its blocks in every pool."""
        for name in self.pools:
            self.release(owner, name)

    @property
    def is_idle(self) -> bool:
        """True when no sequence owns blocks and no admit or load is unanswered."""
        return all(isinstance(owner, str) for owner, _ in self._tables) and all(
            key[0] == "grant" for key in self._commands
        )

    def check_invariants(self) -> None:
        """Raise InvariantViolated unless tables, owners, commands and counts agree."""
        for pool in self.pools.values():
            pool.check_invariants()
        seen: set[tuple[str, int]] = set()
        for (owner, name), table in self._tables.items():
            pool = self.pools[name]
            for block_id in table:
                if (name, block_id) in seen:
                    raise InvariantViolated(f"block {block_id} is in two tables", where=name)
                seen.add((name, block_id))
                if pool.owners[block_id] != owner:
                    raise InvariantViolated(
                        f"block {block_id} is in the table of {owner!r} but owned by "
                        f"{pool.owners[block_id]!r}",
                        where=name,
                    )
                if pool.states[block_id] not in (BlockState.RESERVED, BlockState.ACTIVE):
                    raise InvariantViolated(
                        f"block {block_id} is in a table and {pool.states[block_id].name}",
                        where=name,
                    )
        self._check_commands(seen)

    def _check_commands(self, in_tables: set[tuple[str, int]]) -> None:
        named = {name: [0] * pool.num_blocks for name, pool in self.pools.items()}
        for command in self._commands.values():
            for name, block_ids in command.blocks:
                for block_id in block_ids:
                    named[name][block_id] += 1
        for name, pool in self.pools.items():
            if named[name] != pool.num_commands:
                raise InvariantViolated("commands and their counts differ", where=name)
            for block_id in range(1, pool.num_blocks):
                held = pool.states[block_id] in (BlockState.RESERVED, BlockState.ACTIVE)
                if held != ((name, block_id) in in_tables):
                    raise InvariantViolated(f"block {block_id} is held by no table", where=name)
