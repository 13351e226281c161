"""Count refused requests by caller and reason, in bounded memory.

Invariant: the counts add up to all refusals: what is forgotten of a caller is counted under OTHERS.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from appliance.daemon.requests.request import Peer
from appliance.daemon.requests.row import RefusalRow
from appliance.observe.frame.late_frames import RefusalFrame
from appliance.observe.frame.protocol import utc_now
from engine.errors import RequestError

MAX_KINDS = 64
MAX_FRAMES = 10
MINUTE_S, RATE_S = 60, 10
MAX_MESSAGE_CHARS = 200
OTHERS = "others"
"""Stands for callers that are forgotten."""


@dataclass(slots=True)
class _Kind:
    """The refusals of one caller for one reason."""

    user: str
    client: str
    status: int
    code: str
    message: str = ""
    number: int = 0
    num_logged: int = 0
    last_s: float = 0.0
    last_at: str = ""
    seconds: deque[tuple[int, int]] = field(default_factory=deque)
    """Refusals in each second of the last minute that had any."""

    def count(self, message: str, now_s: float) -> None:
        self.message, self.last_s, self.last_at = message, now_s, utc_now()
        self.number += 1
        second = int(now_s)
        if self.seconds and self.seconds[-1][0] == second:
            self.seconds[-1] = (second, self.seconds[-1][1] + 1)
        else:
            self.seconds.append((second, 1))
            self.drop_old(now_s)

    def drop_old(self, now_s: float) -> None:
        while self.seconds and self.seconds[0][0] <= now_s - MINUTE_S:
            self.seconds.popleft()

    def since(self, since_s: float) -> int:
        return sum(number for second, number in self.seconds if second > since_s)


class Refusals:
    """The refusals since the daemon started."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[str, str, int, str], _Kind] = {}
        """The one refused longest ago first."""
        self.num_client_errors = 0
        """Replies 4xx but 429."""

    def count(self, peer: Peer, error: RequestError, now_s: float) -> None:
        """Count a refused request of this caller."""
        self.num_client_errors += is_client_error(error.status)
        key = (peer.name, peer.program_or_host, error.status, error.code or "")
        kind = self._kinds.pop(key, None)
        if kind is None:
            kind = _Kind(peer.name, peer.client, error.status, error.code or "")
            self._make_room()
        self._kinds[key] = kind
        kind.client = peer.client
        kind.count(error.what[:MAX_MESSAGE_CHARS], now_s)

    def take_rows(self) -> list[RefusalRow]:
        """Return the refusals since the last call, for the log."""
        fresh = [kind for kind in self._kinds.values() if kind.number > kind.num_logged]
        rows = [
            RefusalRow(
                kind.last_at,
                kind.user,
                kind.client,
                kind.status,
                kind.code,
                kind.number - kind.num_logged,
            )
            for kind in fresh
        ]
        for kind in fresh:
            kind.num_logged = kind.number
        return rows

    def _make_room(self) -> None:
        """Forget the caller refused longest ago, if there are too many."""
        if len(self._kinds) < MAX_KINDS:
            return
        key = next(each for each in self._kinds if each[0] != OTHERS)
        gone = self._kinds.pop(key)
        sum_key = (OTHERS, "", gone.status, "")
        total = self._kinds.setdefault(sum_key, _Kind(OTHERS, "", gone.status, ""))
        total.number += gone.number
        total.num_logged += gone.num_logged
        total.last_s, total.last_at = gone.last_s, gone.last_at

    def frames(self, now_s: float) -> list[RefusalFrame]:
        """List the most frequent of the last minute, then the newest.

        Args:
            now_s: by any clock that does not jump, as in count().
        """
        for kind in self._kinds.values():
            kind.drop_old(now_s)
        kinds = sorted(
            self._kinds.values(),
            key=lambda kind: (kind.since(now_s - MINUTE_S), kind.last_s),
            reverse=True,
        )
        return [
            RefusalFrame(
                kind.user,
                kind.client,
                kind.status,
                kind.code,
                kind.message,
                kind.number,
                kind.since(now_s - MINUTE_S),
                kind.since(now_s - RATE_S) / RATE_S,
                kind.last_at,
            )
            for kind in kinds[:MAX_FRAMES]
        ]


def is_client_error(status: int) -> bool:
    """Say whether a refusal is for the caller's own error, not for want of room."""
    return (400 <= status < 500 and status != 429) or status == 501
