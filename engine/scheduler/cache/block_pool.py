"""Keep the blocks of one pool: count their uses, derive their states, hand out free blocks.

A block's state is not stored: it follows from the tables and unanswered commands that name it, and
its hash. Window blocks share it until no table needs them.

Invariants: a block is in the free list exactly if no table, command or hash names it; block 0 is
padding and is never allocated. A block with a hash is full and is never written.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from enum import StrEnum

from engine.errors import InvariantViolated
from engine.scheduler.cache.hashes import Hash, border_of, record_hashes
from engine.scheduler.cache.prefix_index import PrefixIndex
from engine.scheduler.cache.published_blocks import Published, PublishedBlocks
from engine.scheduler.cache.window_blocks import NO_WINDOWS, WHOLE, Span, WindowBlocks, Windows

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

    def allocate(self, count: int, span: Span = WHOLE, first: int = 0) -> list[int]:
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
                self.remove_hash(self.index.choose())
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
                self.remove_hash(known)
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
                self.remove_hash(block_id)

    def remove_hash(self, block_id: int) -> None:
        """Remove a block's hash; with a part of a snapshot, the hashes of the other parts."""
        border = self.index.border_of(block_id)
        for each in [block_id] if border is None else list(self.index.snapshots[border]):
            self._forget(each)

    def _forget(self, block_id: int) -> None:
        before = self.state(block_id)
        if before is BlockState.CACHED:
            self._move(block_id, before, BlockState.FREE)
        self.on_forget(self.index.remove(block_id))

    def publish_snapshot(self, record: list[int], border: Hash, user: str) -> bool:
        """Let others find a record in use, unless snapshots have their share of the pool.

        It is the record at a border, and is never written again.
        """
        index, most = self.index, int(self.capacity * SNAPSHOT_SHARE)
        while (len(index.snapshots) + 1) * len(record) > most:
            if not (dropped := index.cheapest_snapshot()):
                return False
            self.remove_hash(dropped[0])
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
