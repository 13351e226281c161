"""Tell Dynamo's router which blocks the prefix cache holds.

Owns: the blocks that the router has been told of.
Invariant: the router knows of a block as long as the daemon has it, and of none whose parent it
does not know.
Never: reads a socket.
"""

from __future__ import annotations

from typing import Any, Protocol

Json = dict[str, Any]


class KvEventPublisher(Protocol):
    """Where to tell it: Dynamo's, which makes the router's own hashes of the tokens."""

    def stored(self, token_ids: list[int], block_ids: list[int], parent_id: int | None) -> None:
        """A row of blocks, each after the one before it, has come."""

    def removed(self, block_ids: list[int]) -> None:
        """Tell the router that these blocks are gone."""


class KvEvents:
    """What one daemon's prefix cache holds, told to Dynamo's router as it changes.

    Args:
        publisher: is told.
    """

    def __init__(self, publisher: KvEventPublisher) -> None:
        self._publisher = publisher
        self._known: dict[int, int | None] = {}
        """Parents by block."""

    def __len__(self) -> int:
        return len(self._known)

    def read(self, line: Json) -> None:
        """One line of the daemon's /v1/penstock/cache."""
        if line.get("cleared"):
            self.forget_all()
        self._stored(line.get("stored") or [])
        if gone := [one for one in line.get("removed") or [] if one in self._known]:
            for one in gone:
                del self._known[one]
            self._publisher.removed(gone)

    def forget_all(self) -> None:
        """The daemon is gone, or begins anew: the router is to know nothing of it."""
        if self._known:
            self._publisher.removed(list(reversed(self._known)))
            self._known.clear()

    def _stored(self, blocks: list[Json]) -> None:
        """Rows of blocks that follow each other are told together."""
        row: list[Json] = []
        for block in blocks:
            if row and block["parent"] != row[-1]["id"]:
                self._tell(row)
                row = []
            if block["parent"] is None or block["parent"] in self._known:
                row.append(block)
                self._known[block["id"]] = block["parent"]
        self._tell(row)

    def _tell(self, row: list[Json]) -> None:
        if row:
            token_ids = [token_id for block in row for token_id in block["token_ids"]]
            block_ids = [block["id"] for block in row]
            self._publisher.stored(token_ids, block_ids, row[0]["parent"])
