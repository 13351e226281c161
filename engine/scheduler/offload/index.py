"""Map block hashes to places in a store's slabs, and choose which records are evicted.

Invariants: a place has at most one record; a place being read or written is not given away; a
record can be found from when it is written until it is dropped. Deleting has two phases: out of the
index at once, and reusable when its last reader is done.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from engine.errors import InvariantViolated
from engine.scheduler.cache.hashes import Hash, border_of
from engine.scheduler.cache.snapshot_worths import NOTHING, Saved, SnapshotWorths
from engine.scheduler.offload.records import RecordHead

HIGH_WATERMARK = 0.95
"""Eviction begins when more than this share of all places is taken..."""
LOW_WATERMARK = 0.90
"""...and ends at this share."""
SNAPSHOT_SHARE = 0.5
"""The largest share of all places for snapshots; those go first that save the least computing."""


class RecordPlace(NamedTuple):
    """The place of a record: its slab, and its number in it."""

    slab: int
    record: int


@dataclass(slots=True, eq=False)
class IndexEntry:
    """A record that exists, or is being written."""

    block_hash: bytes
    place: RecordPlace
    number: int
    stored_at_s: int
    saved: Saved = NOTHING
    """What its snapshot saves, if it is a block of one."""
    num_readers: int = 0
    is_written: bool = False
    is_used: bool = False
    """Whether it was stored, loaded or touched since the start."""
    is_dropped: bool = False
    """Out of the index; its place is free after its last reader."""


class SlabIndex:
    """Map hashes to places in slabs, and choose free places and evictions.

    Args:
        max_age_s: older records expire; None: no limit.
    """

    def __init__(self, max_age_s: int | None = None) -> None:
        self.max_age_s = max_age_s
        self._entries: OrderedDict[bytes, IndexEntry] = OrderedDict()
        """Entries by hash, the least recently used first."""
        self._snapshots: dict[Hash, set[bytes]] = {}
        """Hashes of snapshots' blocks by border."""
        self.worths = SnapshotWorths()
        """What each of them saves."""
        self._busy: dict[RecordPlace, IndexEntry] = {}
        """Entries being read or written, including dropped ones."""
        self._free: deque[RecordPlace] = deque()
        self._residue: dict[RecordPlace, int] = {}
        """Free places with old bytes, and when those bytes were stored."""
        self._slabs: dict[int, int] = {}
        """Numbers of places by slab."""
        self._damaged: set[RecordPlace] = set()
        """Places with damaged data, until they are erased or overwritten."""
        self._last_number = 0
        self.num_evicted = self.num_expired = self.num_damaged = 0

    def __len__(self) -> int:
        return sum(entry.is_written for entry in self._entries.values())

    @property
    def hashes(self) -> list[bytes]:
        """List the hashes of loadable blocks, the least recently used first."""
        return [each.block_hash for each in self._entries.values() if each.is_written]

    @property
    def num_places(self) -> int:
        """Places for blocks in all slabs, free or taken."""
        return sum(self._slabs.values())

    @property
    def num_free(self) -> int:
        """The number of places for the next records."""
        return len(self._free)

    @property
    def unused_since_s(self) -> int | None:
        """When the next block to evict was stored; None: it was used since the start."""
        first = next(iter(self._entries.values()), None)
        return None if first is None or first.is_used else first.stored_at_s

    # Slabs

    def add_slab(
        self, slab: int, num_records: int, found: Iterable[tuple[int, RecordHead]] = ()
    ) -> None:
        """Add the places of a new slab to the index.

        Args:
            found: records that it has, by their number in it.
        """
        self._slabs[slab] = num_records
        heads = dict(found)
        for index in range(num_records):
            place, head = RecordPlace(slab, index), heads.get(index)
            if head is None:
                self._free.append(place)
            else:
                self._adopt(place, head)

    def _adopt(self, place: RecordPlace, head: RecordHead) -> None:
        """Add a record from before the start; of two of one block, the newer counts."""
        self._last_number = max(self._last_number, head.number)
        other = self._entries.get(head.block_hash)
        if other is not None and other.number > head.number:
            self._free.append(place)
            self._residue[place] = head.stored_at_s
            return
        if other is not None:
            self.drop(other.block_hash)
        entry = IndexEntry(head.block_hash, place, head.number, head.stored_at_s, head.saved)
        entry.is_written = True
        self._add(entry)

    def _add(self, entry: IndexEntry) -> None:
        self._entries[entry.block_hash] = entry
        if (border := border_of(entry.block_hash)) is not None:
            if border not in self._snapshots:
                self.worths.add(border, entry.saved)
            self._snapshots.setdefault(border, set()).add(entry.block_hash)

    def order_by_age(self) -> None:
        """Order the records by their time of storing, once all slabs are added."""
        ordered = sorted(self._entries.values(), key=lambda entry: entry.number)
        self._entries.clear()
        self._snapshots.clear()
        self.worths = SnapshotWorths()
        for entry in ordered:
            self._add(entry)

    def remove_slab(self, slab: int) -> None:
        """Remove a deleted slab and its records."""
        self._slabs.pop(slab, None)
        for entry in [e for e in self._entries.values() if e.place.slab == slab]:
            self.drop(entry.block_hash)
        self._free = deque(place for place in self._free if place.slab != slab)
        self._residue = {p: at for p, at in self._residue.items() if p.slab != slab}

    def newest_s(self, slab: int) -> int:
        """Return when the newest record of a slab was stored; 0: it has none."""
        times = (e.stored_at_s for e in self._entries.values() if e.place.slab == slab)
        return max(times, default=0)

    def keep_finished(self, now_s: int) -> None:
        """Keep only finished records: all readers and writers have ended, or never will.

        Used records count as stored now, so that ages of several models can be compared.
        """
        for place, entry in list(self._busy.items()):
            entry.num_readers = 0
            del self._busy[place]
            if entry.is_dropped:
                self._release(entry)
            elif not entry.is_written:
                self.drop(entry.block_hash)
        for entry in self._entries.values():
            entry.stored_at_s = now_s if entry.is_used else entry.stored_at_s
            entry.is_used = False

    # What is there

    def __contains__(self, block_hash: bytes) -> bool:
        """Say whether a block could be loaded."""
        entry = self._entries.get(block_hash)
        return entry is not None and entry.is_written

    def is_known(self, block_hash: bytes) -> bool:
        return block_hash in self._entries

    def num_leading(self, hashes: Iterable[bytes]) -> int:
        """Count a chain's stored blocks, from the first on without a gap."""
        count = 0
        for block_hash in hashes:
            if block_hash not in self:
                break
            count += 1
        return count

    def touch(self, hashes: list[bytes]) -> None:
        """Mark a chain as used, so that its tail is evicted before its head."""
        for block_hash in reversed(hashes):
            if block_hash in self._entries:
                self._entries.move_to_end(block_hash)
                self._entries[block_hash].is_used = True
                if (border := border_of(block_hash)) is not None:
                    self.worths.use(border)

    # Reading and writing

    def begin_store(
        self, block_hash: bytes, now_s: int, saved: Saved = NOTHING
    ) -> IndexEntry | None:
        """Choose a place to write a block to; None: it is known, or no place is free."""
        if block_hash in self._entries or not self._free:
            return None
        place = self._free.popleft()
        self._last_number += 1
        entry = IndexEntry(block_hash, place, self._last_number, now_s, saved, is_used=True)
        self._residue.pop(place, None)
        self._damaged.discard(place)
        self._busy[place] = entry
        self._add(entry)
        return entry

    def end_store(self, entry: IndexEntry, *, is_written: bool) -> None:
        del self._busy[entry.place]
        if entry.is_dropped:
            self._release(entry)
        elif is_written:
            entry.is_written = True
        else:
            self.drop(entry.block_hash)

    def begin_load(self, block_hash: bytes) -> IndexEntry | None:
        """Find where to read a block; None: not stored. The place stays until end_load()."""
        entry = self._entries.get(block_hash)
        if entry is None or not entry.is_written:
            return None
        entry.num_readers += 1
        entry.is_used = True
        self._busy[entry.place] = entry
        return entry

    def end_load(self, entry: IndexEntry, *, is_sound: bool = True) -> None:
        """End one load of a record; a damaged record is dropped and counted."""
        if not is_sound and not entry.is_dropped:
            self.num_damaged += 1
            self._damaged.add(entry.place)
            self.drop(entry.block_hash)
        entry.num_readers -= 1
        if not entry.num_readers:
            del self._busy[entry.place]
            if entry.is_dropped:
                self._release(entry)

    # Deleting

    def drop(self, block_hash: bytes) -> None:
        """Remove a block from the index; its place is free after its last reader or writer."""
        entry = self._entries.pop(block_hash)
        if (border := border_of(block_hash)) is not None:
            self._snapshots[border].remove(block_hash)
            if not self._snapshots[border]:
                del self._snapshots[border]
                self.worths.remove(border)
        entry.is_dropped = True
        if entry.place not in self._busy:
            self._release(entry)

    def drop_known(self, hashes: Iterable[bytes]) -> None:
        """Remove blocks from the index that are in it."""
        for block_hash in hashes:
            if block_hash in self._entries:
                self.drop(block_hash)

    def _release(self, entry: IndexEntry) -> None:
        if entry.place.slab in self._slabs:
            self._free.append(entry.place)
            self._residue[entry.place] = entry.stored_at_s

    def evict(self, num_places: int) -> int:
        """Drop the least recently used blocks above the high watermark; return how many.

        Snapshots beyond their share are dropped before, each whole.
        """
        in_snapshots, num_dropped = sum(map(len, self._snapshots.values())), 0
        while in_snapshots - num_dropped > SNAPSHOT_SHARE * num_places:
            border = self.worths.cheapest(self._snapshots)
            assert border is not None
            num_dropped += len(self._snapshots[border])
            self.drop_known(list(self._snapshots[border]))
        self.num_evicted += num_dropped
        return num_dropped + self._evict_oldest(num_places)

    def _evict_oldest(self, num_places: int) -> int:
        taken = len(self._entries)
        if taken <= HIGH_WATERMARK * num_places:
            return 0
        excess = taken - int(LOW_WATERMARK * num_places)
        idle = (e.block_hash for e in self._entries.values() if e.place not in self._busy)
        victims = [block_hash for block_hash, _ in zip(idle, range(excess), strict=False)]
        for block_hash in victims:
            self.drop(block_hash)
        self.num_evicted += len(victims)
        return len(victims)

    def oldest_s(self, now_s: int) -> int | None:
        """Return the time before which blocks are too old; None: no limit."""
        return None if self.max_age_s is None else now_s - self.max_age_s

    def expire(self, now_s: int) -> list[RecordPlace]:
        """Drop records that are too old; return free places whose old bytes must be erased.

        Each place is returned once, and not reused before erased() confirms it.
        """
        if self.max_age_s is None:
            return []
        oldest_s = self.oldest_s(now_s) or 0
        old = [e.block_hash for e in self._entries.values() if e.stored_at_s < oldest_s]
        for block_hash in old:
            self.drop(block_hash)
        self.num_expired += len(old)
        return self._take({p for p, at in self._residue.items() if at < oldest_s})

    def damaged(self) -> list[RecordPlace]:
        """Return damaged free places, to be erased as with expire()."""
        return self._take({place for place in self._damaged if place in self._residue})

    def clear(self) -> list[RecordPlace]:
        """Drop everything; return free places with old bytes, as expire() does."""
        for block_hash in list(self._entries):
            self.drop(block_hash)
        return self._take(set(self._residue))

    def _take(self, places: set[RecordPlace]) -> list[RecordPlace]:
        """Take free places with old bytes out of use."""
        self._damaged -= places
        for place in places:
            del self._residue[place]
        self._free = deque(place for place in self._free if place not in places)
        return sorted(places)

    def erased(self, places: Iterable[RecordPlace]) -> None:
        """Free erased places."""
        self._free.extend(place for place in places if place.slab in self._slabs)

    def not_erased(self, places: Iterable[RecordPlace]) -> None:
        """Free places that could not be erased; they are erased later unless reused."""
        there = [place for place in places if place.slab in self._slabs]
        self._free.extend(there)
        self._residue.update(dict.fromkeys(there, 0))

    def check_invariants(self, being_erased: Iterable[RecordPlace] = ()) -> None:
        """Raise InvariantViolated unless every place is once in use, free, or being erased."""
        in_snapshots = {each for hashes in self._snapshots.values() for each in hashes}
        if in_snapshots != {each for each in self._entries if border_of(each) is not None}:
            raise InvariantViolated("snapshots are not what the index has of them", where="ssd")
        if {border for border, _ in self.worths.items()} != self._snapshots.keys():
            raise InvariantViolated("what snapshots save does not agree with them", where="ssd")
        seen: list[RecordPlace] = [entry.place for entry in self._entries.values()]
        seen += [place for place, e in self._busy.items() if e.is_dropped]
        seen += [*self._free, *being_erased]
        seen = [place for place in seen if place.slab in self._slabs]
        if len(set(seen)) != len(seen) or len(seen) != self.num_places:
            raise InvariantViolated(
                f"{self.num_places} places, {len(set(seen))} of {len(seen)} accounted for",
                where="ssd",
            )
