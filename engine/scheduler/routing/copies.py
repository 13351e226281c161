"""Track blocks that are being copied between pools.

A sequence whose stages lie in two pools has a transfer: its prompt's blocks go over the hops of the
link between them, each hop made by one worker. A hop's copies are sent as early as can be: with the
admit that is to fill the blocks, for the worker starts each block when it is full. So a handoff has
little left to do when the prompt is done. A staging buffer is small: its slots go first to blocks
that are computed, and only half of them wait for blocks that are not. A fetch is a transfer of
computed blocks for the next prompt that asks: it has tables of its own, and is over when a worker
of its link dies.

Invariant: blocks are sent and arrive in order, on every hop; a slot is its sequence's until the
block has left it; blocks of a pool whose life has ended do not count as arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Protocol

from engine.errors import InvariantViolated
from engine.scheduler.cache.ledger import CommandKey, Ledger, Owner
from engine.scheduler.cache.topology import Hop, Link, Topology
from engine.scheduler.routing.links import _NEWEST_SHARE, Links
from engine.scheduler.sequences.sequence import Moving, On, Sequence
from engine.wire.messages import Command, Copied, Copy, FilledBy

Send = Callable[[str, Command], None]


@dataclass(slots=True)
class _Transfer:
    owner: Owner
    """Owner of the tables that it copies between."""
    sequence: Sequence | None
    """The moving sequence; None: it is a fetch."""
    link: Link
    num_blocks: int
    """The number of blocks, including its record, which comes last."""
    num_record_blocks: int
    target_life: int
    sent: list[int]
    """Blocks sent on each hop, counted from the first."""
    done: list[int]
    """Blocks that arrived over each hop, counted from the first."""
    first_whole: int = 0
    """The first block that is copied with its window blocks; earlier ones are behind the window."""
    slots: dict[int, int] = field(default_factory=dict)
    """Slots between two hops, by the block's index."""
    error: str | None = None


@dataclass(slots=True)
class _OpenCopy:
    """A copy that is not answered to its end."""

    owner: Owner
    hop: Hop
    number: int
    """Of the hop."""
    pairs: list[tuple[int, int]]
    """Those still to come."""
    transfer: _Transfer | None
    """None: what arrives is of no use any more."""
    target_life: int
    """Life of the target pool when the copy was sent."""


class TierCopies(Protocol):
    """Copies that workers make for the tiers below the pools; their numbers are negative."""

    def copied(self, report: Copied) -> None:
        """Handle a worker's report of copied blocks, or of a failure."""

    def worker_died(self, worker: str) -> None:
        """Take in that a worker is dead, whose commands have been reaped."""


class Copies:
    """Every copy of blocks between pools that is under way.

    Args:
        topology: their links, and which of them have slots for blocks between two hops.
    """

    def __init__(self, ledger: Ledger, topology: Topology) -> None:
        self.links = Links(topology)
        self.of_tiers: TierCopies | None = None
        """None: no tier wants a worker to copy."""
        self._ledger = ledger
        self._passing_pools = topology.passing_pools()
        self._homes = {pool.name: pool.home for pool in topology.pools}
        self._transfers: dict[Owner, _Transfer] = {}
        self._open: dict[int, _OpenCopy] = {}
        self._last_id = 0
        self._block_ms: dict[tuple[str, str], float] = {}
        """What a block took between two pools, on average; lately for the most part."""

    def expected_ms(self, link: Link, num_tokens: int) -> float | None:
        """Predict the time of copying `num_tokens` tokens' blocks; None: no copy is timed yet.

        Links are alike, so an unused one is taken to be as fast as the others.
        """
        if link.hops and not self._block_ms:
            return None
        kv_pool = self._ledger.pools[link.to_pool]
        num_blocks = kv_pool.num_blocks_for(num_tokens) + kv_pool.record_blocks
        usual_ms = sum(self._block_ms.values()) / max(len(self._block_ms), 1)
        hops = ((hop.from_pool, hop.to_pool) for hop in link.hops)
        return num_blocks * sum(self._block_ms.get(hop, usual_ms) for hop in hops)

    def begin(self, sequence: Sequence, link: Link) -> None:
        """Prepare the transfer of a placed sequence over this link; its blocks are reserved.

        Blocks of its target table that have a hash are computed already.
        """
        if link.hops:
            kv_pool = self._ledger.pools[link.to_pool]
            num_record = kv_pool.record_blocks
            num_blocks = kv_pool.num_blocks_for(sequence.num_tokens) + num_record
            there = [self._ledger.num_hashed(sequence.seq_id, link.to_pool)] * len(link.hops)
            self._transfers[sequence.seq_id] = _Transfer(
                sequence.seq_id,
                sequence,
                link,
                num_blocks,
                num_record,
                kv_pool.life,
                there,
                list(there),
                kv_pool.windows.num_behind(sequence.num_tokens),
            )

    def fetch(self, owner: Owner, link: Link, first: int) -> None:
        """Copy the blocks of an owner's table from block `first` on over a link, and its record."""
        kv_pool, there = self._ledger.pools[link.to_pool], [first] * len(link.hops)
        num_record = kv_pool.record_blocks
        num_blocks = len(self._ledger.table(owner, link.from_pool)) + num_record
        first_whole = self._ledger.span(owner, link.from_pool).first
        lives = kv_pool.life, there, list(there), first_whole
        self._transfers[owner] = _Transfer(owner, None, link, num_blocks, num_record, *lives)

    def fetched(self, owner: Owner) -> tuple[int, bool]:
        """Blocks that are where a fetch brings them, from the first on; whether more will come."""
        transfer = self._transfers[owner]
        num_there = transfer.done[-1]
        return num_there, num_there < transfer.num_blocks and transfer.error is None

    def is_under_way(self, sequence: Sequence) -> bool:
        """Say whether some of its blocks have yet to arrive."""
        transfer = self._transfers.get(sequence.seq_id)
        return transfer is not None and transfer.done[-1] < transfer.num_blocks

    def is_written(self, sequence: Sequence, pool: str) -> bool:
        """Say whether a copy may still write the sequence's blocks in a pool."""
        return any(
            copy.owner == sequence.seq_id and copy.hop.to_pool == pool
            for copy in self._open.values()
        )

    def has_left(self, sequence: Sequence) -> bool:
        """Say whether the source pool will not be read any more."""
        transfer = self._transfers.get(sequence.seq_id)
        return transfer is not None and transfer.done[0] >= transfer.num_blocks

    def num_arrived(self, sequence: Sequence, pool: str) -> int:
        """Blocks that are in this pool, if it goes there, from the first on."""
        transfer = self._transfers.get(sequence.seq_id)
        if transfer is None or transfer.link.to_pool != pool:
            return 0
        num_arrived = transfer.done[-1]
        is_whole = num_arrived == transfer.num_blocks
        if not is_whole and (transfer.num_record_blocks or transfer.first_whole):
            return 0  # without its record, or all of its window, they are no use
        return num_arrived - transfer.num_record_blocks

    def error(self, sequence: Sequence) -> str | None:
        """Why its blocks could not be copied."""
        transfer = self._transfers.get(sequence.seq_id)
        return None if transfer is None else transfer.error

    @property
    def waits_for_slots(self) -> bool:
        """True if a block has no staging slot or window blocks, and may get them later."""
        return any(
            transfer.sent[0] < transfer.num_blocks
            for transfer in self._transfers.values()
            if self._passing_pools or self._ledger.pools[transfer.link.to_pool].windows.num_each
        )

    def drop(self, owner: Owner) -> None:
        """Drop a transfer that ended, arrived or was given up; the ledger drains its blocks."""
        transfer = self._transfers.pop(owner, None)
        if transfer is not None:
            self._detach(transfer, range(len(transfer.link.hops)))
            self._drop_slots(transfer)

    # What workers cause

    def copied(self, worker: str, report: Copied) -> tuple[Sequence | None, int] | None:
        """Take in a report; the sequence, and the bytes that have arrived of it where it goes.

        The sequence is None for a fetch; nothing is returned for what is of no use any more.

        Raises:
            InvariantViolated: the worker was not told to copy that.
        """
        if report.copy_id < 0 and self.of_tiers is not None:
            self.of_tiers.copied(report)
            return None, 0
        copy = self._open.get(report.copy_id)
        if copy is None or report.num_pairs > len(copy.pairs):
            raise InvariantViolated(f"copy {report.copy_id} was not told", where=worker)
        done, copy.pairs = copy.pairs[: report.num_pairs], copy.pairs[report.num_pairs :]
        key, transfer = _key(report.copy_id), copy.transfer
        if copy.target_life == self._ledger.pools[copy.hop.to_pool].life:
            self.links.copied(copy.hop, report)  # else its pool is gone, which is no link's fault
        self._answer(key, copy.hop, done)
        if done:
            pools = copy.hop.from_pool, copy.hop.to_pool
            block_ms = (report.ended_ns - report.started_ns) / 1e6 / len(done)
            usual_ms = self._block_ms.get(pools, block_ms)
            self._block_ms[pools] = usual_ms + _NEWEST_SHARE * (block_ms - usual_ms)
        if report.is_last:
            self._ledger.close_command(key)
            del self._open[report.copy_id]
        if transfer is None:
            return None
        first = transfer.done[copy.number]
        transfer.done[copy.number] += len(done)
        if copy.hop.from_pool in self._passing_pools:
            for index in range(first, first + len(done)):
                slot = transfer.slots.pop(index)
                self._ledger.release(transfer.owner, copy.hop.from_pool, [slot])
        if report.is_last and copy.pairs:
            transfer.error = report.error
            self._resend(transfer, copy.number)
        is_there = copy.number == len(transfer.link.hops) - 1
        return transfer.sequence, report.num_bytes if is_there else 0

    def worker_died(self, worker: str) -> None:
        """Resend a dead worker's unanswered copies, after its commands are reaped."""
        if self.of_tiers is not None:
            self.of_tiers.worker_died(worker)
        for copy_id, copy in list(self._open.items()):
            if copy.hop.worker == worker:
                del self._open[copy_id]
                if copy.transfer is not None:
                    self._resend(copy.transfer, copy.number)
        for transfer in self._transfers.values():
            if transfer.sequence is None:
                if any(hop.worker == worker for hop in transfer.link.hops):
                    transfer.error = f"worker {worker} has died"
                continue
            life = self._ledger.pools[transfer.link.to_pool].life
            if life != transfer.target_life:  # what had arrived is gone
                transfer.target_life = life
                numbers = range(len(transfer.link.hops))
                self._detach(transfer, numbers)
                self._drop_slots(transfer)
                for number in numbers:
                    transfer.sent[number] = transfer.done[number] = 0
                if not self._ledger.renew(transfer.owner, transfer.link.to_pool, 0):
                    transfer.error = "no free slots for blocks that other copies lost"

    # Sending

    def pump(self, ready_workers: Collection[str], send: Send) -> None:
        """Send what can be sent: first what is computed, then ahead of what will be."""
        for is_ahead in (False, True):
            for transfer in self._transfers.values():
                for number, hop in enumerate(transfer.link.hops):
                    # into a dead worker's memory nothing goes before it is there again
                    is_there = self._homes.get(hop.to_pool) in (None, *ready_workers)
                    if hop.worker in ready_workers and is_there:
                        self._send_hop(transfer, number, hop, send, is_ahead=is_ahead)

    def _send_hop(
        self, transfer: _Transfer, number: int, hop: Hop, send: Send, *, is_ahead: bool
    ) -> None:
        sequence, first = transfer.sequence, transfer.sent[number]
        filled_by = None
        if number:
            end = transfer.done[number - 1]
        elif sequence is None or isinstance(sequence.where, Moving):
            end = transfer.num_blocks
        elif isinstance(sequence.where, On):  # at the worker that fills them, which is the hop's
            filled_by = FilledBy(sequence.seq_id, sequence.generation, first)
            num_of_kv = transfer.num_blocks - transfer.num_record_blocks
            end = num_of_kv if is_ahead else self._num_computed(transfer)
        else:
            return
        if end <= first or transfer.error is not None:
            return
        source = self._blocks(transfer, hop.from_pool)
        if sequence is not None and not number:  # later blocks have no window blocks yet
            end = min(end, self._ledger.span(transfer.owner, hop.from_pool).end)
        count = max(end - first, 0)
        if hop.to_pool in self._passing_pools:
            target = self._take_slots(transfer, hop.to_pool, first, count, is_ahead=is_ahead)
        else:
            target = self._blocks(transfer, hop.to_pool)
        pairs = [(source[i], target[i]) for i in range(first, end) if i in target]
        if not pairs:
            return
        transfer.sent[number] += len(pairs)
        self._last_id += 1
        life = self._ledger.pools[hop.to_pool].life
        blocks = {hop.from_pool: [a for a, _ in pairs], hop.to_pool: [b for _, b in pairs]}
        self._ledger.open_command(_key(self._last_id), hop.worker, blocks)
        self._open[self._last_id] = _OpenCopy(transfer.owner, hop, number, pairs, transfer, life)
        windows = self._window_pairs(transfer, hop, first, pairs)
        send(hop.worker, Copy(self._last_id, hop.from_pool, hop.to_pool, pairs, filled_by, windows))

    def _window_pairs(
        self, transfer: _Transfer, hop: Hop, first: int, pairs: list[tuple[int, int]]
    ) -> list[list[tuple[int, int]]]:
        """List the window blocks that are copied with each pair; empty: there are none."""
        source, target = (self._ledger.pools[p].windows for p in (hop.from_pool, hop.to_pool))
        if not source.num_each:
            return []
        num_thin = min(max(transfer.first_whole - first, 0), len(pairs))
        whole = [list(zip(source.of(a), target.of(b), strict=True)) for a, b in pairs[num_thin:]]
        return [[] for _ in range(num_thin)] + whole

    def _num_computed(self, transfer: _Transfer) -> int:
        """Count full blocks at the source; a partial one goes with the last chunk."""
        if transfer.sequence is None:
            return transfer.num_blocks
        block_size = self._ledger.pools[transfer.link.from_pool].block_size
        num_of_kv = transfer.num_blocks - transfer.num_record_blocks
        return min(transfer.sequence.num_computed_tokens // block_size, num_of_kv)

    def _blocks(self, transfer: _Transfer, pool: str) -> dict[int, int]:
        """Return the transfer's blocks in a pool, by index."""
        if pool in self._passing_pools:
            return transfer.slots
        num_of_kv = transfer.num_blocks - transfer.num_record_blocks
        blocks = self._ledger.table(transfer.owner, pool)[:num_of_kv]
        if transfer.num_record_blocks:
            number, sequence = 0, transfer.sequence
            if sequence is not None and pool == transfer.link.from_pool:
                number = sequence.valid_record
            blocks = blocks + self._ledger.records(transfer.owner, pool)[number]
        return dict(enumerate(blocks))

    def _take_slots(
        self, transfer: _Transfer, pool: str, first: int, count: int, *, is_ahead: bool
    ) -> dict[int, int]:
        """Take slots for `count` blocks from the first on, or fewer if too few are free."""
        kv_pool, owner = self._ledger.pools[pool], transfer.owner
        wanted = [i for i in range(first, first + count) if i not in transfer.slots]
        num_available = kv_pool.num_free // kv_pool.max_cost(1)
        if is_ahead:
            most = kv_pool.capacity // kv_pool.max_cost(1) // 2
            num_available = min(num_available, max(most - self._num_ahead(), 0))
        wanted = wanted[:num_available]
        if wanted:
            self._ledger.reserve(owner, {pool: len(wanted)})
            taken = self._ledger.table(owner, pool)[-len(wanted) :]
            transfer.slots.update(zip(wanted, taken, strict=True))
        return transfer.slots

    def _num_ahead(self) -> int:
        """Count slots that wait for blocks to be computed."""
        return sum(
            sum(index >= self._num_computed(transfer) for index in transfer.slots)
            for transfer in self._transfers.values()
            if transfer.sequence is not None and not isinstance(transfer.sequence.where, Moving)
        )

    # Books

    def _resend(self, transfer: _Transfer, number: int) -> None:
        """Mark a hop's sent but missing blocks to be sent again."""
        self._detach(transfer, [number])
        transfer.sent[number] = transfer.done[number]

    def _detach(self, transfer: _Transfer, numbers: Collection[int]) -> None:
        for copy in self._open.values():
            if copy.transfer is transfer and copy.number in numbers:
                copy.transfer = None

    def _drop_slots(self, transfer: _Transfer) -> None:
        for pool in self._passing_pools:
            self._ledger.release(transfer.owner, pool)
        transfer.slots.clear()

    def _answer(self, key: CommandKey, hop: Hop, pairs: list[tuple[int, int]]) -> None:
        blocks = {hop.from_pool: [a for a, _ in pairs], hop.to_pool: [b for _, b in pairs]}
        self._ledger.answer_part(key, blocks)

    def check_invariants(self) -> None:
        """Raise InvariantViolated unless transfers, copies and the ledger agree."""
        for copy_id in self._open:
            if not self._ledger.is_open(_key(copy_id)):
                raise InvariantViolated(f"copy {copy_id} is not open in the ledger", where="copies")
        for owner, transfer in self._transfers.items():
            limits = [transfer.num_blocks, *transfer.done]
            for done, sent, limit in zip(transfer.done, transfer.sent, limits, strict=False):
                if not done <= sent <= limit:
                    raise InvariantViolated(
                        f"of owner {owner} {sent} blocks are sent and {done} there, of {limit}",
                        where=transfer.link.to_pool,
                    )
            held = [b for pool in self._passing_pools for b in self._ledger.table(owner, pool)]
            if sorted(held) != sorted(transfer.slots.values()):
                raise InvariantViolated(
                    f"owner {owner} has slots {held}, used are {transfer.slots}", where="ring"
                )


def _key(copy_id: int) -> CommandKey:
    return ("copy", copy_id, 0)
