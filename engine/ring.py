"""The shm transport's ring: one more pool in the ledger, whose slots carry blocks between pools.

Owns: which stored blocks wait for a load, which loads are under way, and the grants of free slots.
Called by: the router only.
Invariant: a slot is granted to the prefill worker, or owned by the sequence whose block is in it,
or free; a block is loaded exactly once per completed transfer, after it was stored.
Never: moves bytes; workers never signal each other.

Slots are granted ahead. The prefill worker stores finished blocks into them and says so in its
step's message; the ring answers with Load commands to the decode worker, whose Loaded frees them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from engine.blocks import Ledger
from engine.errors import InvariantViolated
from engine.messages import Command, GrantSlots, Load, Loaded, Stored
from engine.sequence import Sequence


@dataclass(slots=True)
class _Transfer:
    sequence: Sequence
    num_stored: int = 0
    num_loaded: int = 0
    waiting: list[Stored] = field(default_factory=list)
    """Stored, and not named by an unanswered Load."""


@dataclass(frozen=True, slots=True)
class _PendingLoad:
    seq_id: int
    blocks: list[Stored]


class Ring:
    """Slots between the prefill pool and the decode pool."""

    def __init__(
        self,
        ledger: Ledger,
        *,
        pool: str,
        prefill_worker: str,
        decode_worker: str,
        decode_pool: str,
    ) -> None:
        self.pool = pool
        self._ledger = ledger
        self._prefill_worker = prefill_worker
        self._decode_worker = decode_worker
        self._decode_pool = decode_pool
        self._transfers: dict[int, _Transfer] = {}
        self._loads: dict[int, _PendingLoad] = {}
        self._next_load_id = 1
        self._arrived: list[Sequence] = []

    def num_stored(self, sequence: Sequence) -> int:
        """Blocks of it that have left the prefill pool, from the first on."""
        transfer = self._transfers.get(sequence.seq_id)
        return transfer.num_stored if transfer else 0

    def is_stored(self, sequence: Sequence) -> bool:
        """True if the prefill worker has nothing left to store of it."""
        return self.num_stored(sequence) >= self._num_blocks(sequence)

    def has_arrived(self, sequence: Sequence) -> bool:
        """True if all its blocks are in the decode pool."""
        transfer = self._transfers.get(sequence.seq_id)
        return transfer is not None and transfer.num_loaded >= self._num_blocks(sequence)

    def _num_blocks(self, sequence: Sequence) -> int:
        return self._ledger.pools[self._decode_pool].num_blocks_for(sequence.num_prompt_tokens)

    def stored(self, worker: str, sequence: Sequence | None, blocks: list[Stored]) -> None:
        """The prefill worker has filled slots; None: for a sequence that has ended meanwhile."""
        for block in blocks:
            if not self._ledger.close_command(("grant", block.slot, 0)):
                raise InvariantViolated(f"slot {block.slot} was not granted", where=worker)
            if sequence is None:
                self._ledger.release(worker, self.pool, [block.slot])
                continue
            self._ledger.refer(sequence.seq_id, self.pool, [block.slot])
            self._ledger.release(worker, self.pool, [block.slot])
            transfer = self._transfers.setdefault(sequence.seq_id, _Transfer(sequence))
            transfer.num_stored = block.block_index + 1
            transfer.waiting.append(block)

    def loaded(self, report: Loaded) -> bool:
        """A Load is complete; False if it is not one that is under way."""
        load = self._loads.pop(report.load_id, None)
        if load is None or not self._ledger.close_command(("load", report.load_id, 0)):
            return False
        transfer = self._transfers.get(load.seq_id)
        if transfer is not None:
            slots = [block.slot for block in load.blocks]
            self._ledger.release(load.seq_id, self.pool, slots)
            transfer.num_loaded += len(slots)
            transfer.sequence.handoff_bytes += report.num_bytes
            if self.has_arrived(transfer.sequence):
                self._arrived.append(transfer.sequence)
        return True

    def take_arrived(self) -> list[Sequence]:
        """Sequences whose last block has arrived since the last call; to be admitted."""
        arrived, self._arrived = self._arrived, []
        return arrived

    def pump(self, ready_workers: set[str], send: Callable[[str, Command], None]) -> None:
        """Send what can be sent: loads of stored blocks, grants of free slots."""
        if self._decode_worker in ready_workers:
            for seq_id, transfer in self._transfers.items():
                if transfer.waiting:
                    self._load(seq_id, transfer, send)
        num_free = self._ledger.pools[self.pool].num_free
        if self._prefill_worker in ready_workers and num_free:
            self._ledger.reserve(self._prefill_worker, {self.pool: num_free})
            slots = self._ledger.table(self._prefill_worker, self.pool)[-num_free:]
            for slot in slots:
                key = ("grant", slot, 0)
                self._ledger.open_command(key, self._prefill_worker, {self.pool: [slot]})
            send(self._prefill_worker, GrantSlots(slots))

    def _load(self, seq_id: int, transfer: _Transfer, send: Callable[[str, Command], None]) -> None:
        table = self._ledger.table(seq_id, self._decode_pool)
        slots = [block.slot for block in transfer.waiting]
        block_ids = [table[block.block_index] for block in transfer.waiting]
        load_id = self._next_load_id
        self._next_load_id += 1
        self._loads[load_id] = _PendingLoad(seq_id, transfer.waiting)
        transfer.waiting = []
        blocks = {self.pool: slots, self._decode_pool: block_ids}
        self._ledger.open_command(("load", load_id, 0), self._decode_worker, blocks)
        send(self._decode_worker, Load(load_id, slots, block_ids))

    def worker_died(self, worker: str) -> None:
        """Its commands have been reaped: take back its grants, or its loads to send them again."""
        if worker == self._prefill_worker:
            self._ledger.release(worker, self.pool)
        if worker == self._decode_worker:
            for load in self._loads.values():
                transfer = self._transfers.get(load.seq_id)
                if transfer is not None:
                    transfer.waiting = sorted(
                        transfer.waiting + load.blocks, key=lambda block: block.block_index
                    )
            self._loads.clear()

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended; the ledger drains its slots."""
        self._transfers.pop(sequence.seq_id, None)

    def give_up(self, sequence: Sequence) -> None:
        """The rest of its blocks will not be stored: those that were are not needed, either."""
        self.forget(sequence)
        self._ledger.release(sequence.seq_id, self.pool)

    def check_invariants(self) -> None:
        """Raise InvariantViolated unless every occupied slot has exactly one use."""
        for seq_id, transfer in self._transfers.items():
            used = [block.slot for block in transfer.waiting]
            for load in self._loads.values():
                if load.seq_id == seq_id:
                    used += [block.slot for block in load.blocks]
            if sorted(used) != sorted(self._ledger.table(seq_id, self.pool)):
                raise InvariantViolated(
                    f"sequence {seq_id} uses slots {used} but owns "
                    f"{self._ledger.table(seq_id, self.pool)}",
                    where=self.pool,
                )
