"""Tell Dynamo's router which blocks the prefix cache holds.

Invariant: the router knows of a block as long as the daemon has it, and always knows its parent.
"""

from __future__ import annotations

from typing import Any, Protocol

Json = dict[str, Any]


class KvEventPublisher(Protocol):
    """Publish block events to Dynamo, which hashes the tokens for its router."""

    def stored(self, token_ids: list[int], block_ids: list[int], parent_id: int | None) -> None:
        """Announce new blocks in a row, each the parent of the next."""

    def removed(self, block_ids: list[int]) -> None:
        """Announce that these blocks are gone."""


class KvEvents:
    """Announce the changes of one daemon's prefix cache to Dynamo's router."""

    def __init__(self, publisher: KvEventPublisher) -> None:
        self._publisher = publisher
        self._known: dict[int, int | None] = {}
        """Parents by block."""

    def __len__(self) -> int:
        return len(self._known)

    def read(self, line: Json) -> None:
        """Take in one line of the daemon's /v1/penstock/cache."""
        if line.get("cleared"):
            self.forget_all()
        self._stored(line.get("stored") or [])
        if gone := [one for one in line.get("removed") or [] if one in self._known]:
            for one in gone:
                del self._known[one]
            self._publisher.removed(gone)

    def forget_all(self) -> None:
        """Withdraw all blocks: the daemon has ended or restarts."""
        if self._known:
            self._publisher.removed(list(reversed(self._known)))
            self._known.clear()

    def _stored(self, blocks: list[Json]) -> None:
        """Announce new blocks; blocks in a row are announced together."""
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
