"""Limit how much may wait, and tell the refused when to come back.

Invariant: an owner waits with at most OWNER_SHARE times the room left, except for a first single
sequence.
"""

from __future__ import annotations

import math

from engine.errors import InvariantViolated, QueueFull, RequestError

OWNER_SHARE = 3
PACE_WINDOW_S = 30.0
"""Time with a waiting sequence over which the pace is computed."""
FIRST_WINDOWS_S = (2.0, 10.0)
"""The same of first tokens: how fast they come changes as soon as more is decoded beside them."""
KEPT_SHARE = 0.3
"""Share of the TTFT target kept back, because admitted prompts slow down later ones."""
UNKNOWN_RETRY_MS = 5_000
"""When to come back while nothing has left yet."""
MIN_RETRY_MS = 1_000
MAX_RETRY_MS = 120_000
"""A longer time OpenAI's client does not keep to."""


class WaitingLimit:
    """How much of one kind (sequences, tokens, bytes) may wait: in all, and of each owner."""

    def __init__(self, unit: str, limit: int, least: int = 0) -> None:
        self.unit = unit
        """Plural, as messages name it."""
        self.limit = limit
        self.total = 0
        self.pace = QueueRate(least=least)
        self.first_tokens = tuple(map(QueueRate, FIRST_WINDOWS_S))
        """How fast prompts get theirs, in time that one was waited for."""
        self.assumed_ms = 0.0
        """Time for one unit while no pace is known; 0: unknown."""
        self._held: dict[str, int] = {}

    @property
    def num_owners(self) -> int:
        return len(self._held)

    @property
    def max_per_request(self) -> int:
        """The most that one request of several sequences may bring: an owner's alone."""
        return OWNER_SHARE * self.limit // (1 + OWNER_SHARE)

    def held(self, owner: str) -> int:
        return self._held.get(owner, 0)

    def enter(self, owner: str, amount: int) -> None:
        """Count what an owner has put into the queue."""
        self.total += amount
        self._held[owner] = self.held(owner) + amount

    def leave(self, owner: str, amount: int) -> None:
        """Count what an owner no longer has in the queue."""
        self.total -= amount
        self._held[owner] -= amount
        if not self._held[owner]:
            del self._held[owner]

    def check(self, owner: str, wanted: int, *, is_single: bool) -> None:
        """Refuse a request for which there is no room.

        Args:
            wanted: how much a request brings.
            is_single: it is one sequence. An owner's first may take all that is left, and in an
                empty queue it may have any size: what can be served can also wait.

        Raises:
            QueueFull: the queue is full, for all or for this owner.
            RequestError: the request is larger than the queue.
        """
        free, held = self.limit - self.total, self.held(owner)
        if is_single and not held and (wanted <= free or not self.total):
            return
        most = self.max_per_request
        if wanted > most and not is_single:
            raise RequestError(
                f"the prompts of one request are limited to {most} {self.unit}; these are {wanted}",
                code="invalid_value",
                param="prompt",
                hint="send them in several requests",
            )
        if wanted > free:
            raise QueueFull(
                f"{self.total} {self.unit} are waiting, the limit is {self.limit}; "
                f"this request has {wanted}",
                retry_after_ms=self.pace.retry_ms(min(wanted - free, self.total)),
            )
        # What the owner may add so that it has at most OWNER_SHARE times what is left after that.
        share = max((OWNER_SHARE * free - held) // (1 + OWNER_SHARE), 0)
        if wanted > share:
            raise QueueFull(
                f"{held} of your {self.unit} are waiting, your share allows {share} more; this "
                f"request has {wanted}",
                code="user_quota",
                # Owners take turns: its own leave at its share of the pace.
                retry_after_ms=self.pace.retry_ms((wanted - share) * max(self.num_owners, 1)),
            )

    def ahead_of(self, owner: str, wanted: int, share: float, behind: int = 0) -> float:
        """Compute what leaves before an owner's last addition, if nothing else comes.

        Owners take turns, so others' queues count only as far as its own is long, by its share.

        Args:
            behind: how much of the owner's own comes later: longer prompts.
        """
        own = self.held(owner) - behind + wanted
        return min(own / share, self.total - behind + wanted) - wanted

    def check_wait(
        self, owner: str, wanted: int, max_wait_ms: float, share: float, behind: int = 0
    ) -> None:
        """Refuse a request that would wait too long at the queue's pace.

        Args:
            behind: as in ahead_of().

        Raises:
            QueueFull: with the time after which it would wait no longer than that.
        """
        # it has its turn when it leaves
        leaving = self.ahead_of(owner, wanted, share, behind) + wanted
        wait_ms = self.pace.wait_ms(leaving)
        if wait_ms is None:
            wait_ms = leaving * self.assumed_ms
        if wait_ms <= max_wait_ms or not self.total:
            return
        excess = math.ceil(leaving * (1 - max_wait_ms / wait_ms))
        raise QueueFull(
            f"expected wait {wait_ms / 1e3:.0f} s exceeds the limit of {max_wait_ms / 1e3:g} s; "
            f"{self.total} {self.unit} are waiting",
            code="would_wait_too_long",
            retry_after_ms=self.pace.retry_ms(excess),
        )

    def check_first(
        self, owner: str, wanted: int, target_ms: float, share: float, ahead: int
    ) -> None:
        """Refuse a request whose first token would come too late at the pace of first tokens.

        That pace falls while admitted sequences decode. So it is computed over a short time and a
        longer one, the slower counts, and a part of the target is kept back. A request that needs
        most of the target alone is admitted while little is ahead.

        Args:
            wanted: how much a request brings.
            share: the owner's, of the turns.
            ahead: how much has had its turn, and no token yet.

        Raises:
            QueueFull: with the time after which it would come in time.
        """
        ahead_ms = self.first_ms(self.ahead_of(owner, wanted, share) + ahead)
        own_ms = self.first_ms(wanted)
        left_ms = target_ms * (1 - KEPT_SHARE) - min(own_ms, target_ms / 2)
        if ahead_ms <= left_ms:
            return
        raise QueueFull(
            f"expected TTFT {(ahead_ms + own_ms) / 1e3:.1f} s is too close to the target of "
            f"{target_ms / 1e3:g} s; {self.total + ahead} "
            f"{self.unit} are ahead",
            code="would_wait_too_long",
            retry_after_ms=retry_after_ms(ahead_ms - left_ms),
        )

    def first_ms(self, amount: float) -> float:
        """Predict the time until `amount` has had its first token."""
        known = [pace.wait_ms(amount) for pace in self.first_tokens]
        return max((n for n in known if n is not None), default=amount * self.assumed_ms)

    def check_invariants(self) -> None:
        """Raise InvariantViolated unless the owners' parts add up."""
        if self.total != sum(self._held.values()) or any(n <= 0 for n in self._held.values()):
            raise InvariantViolated(
                f"{self.total} {self.unit} wait, by owner {self._held}", where="queue"
            )


class QueueRate:
    """The recent pace of a queue: what left it, over the time in which any sequence waited.

    Args:
        window_s: how far back it looks.
        least: assume that this much leaves next, while nothing has left; 0: then no pace is known.
    """

    def __init__(self, window_s: float = PACE_WINDOW_S, least: int = 0) -> None:
        self._window_s = window_s
        self._least = least
        self._amount = 0.0
        self._waited_s = 0.0
        self._at_ns = 0

    def advance(self, now_ns: int, *, is_waited: bool) -> None:
        """Time has passed since the last call, and there was a queue or there was none."""
        if is_waited:
            kept = math.exp(-(now_ns - self._at_ns) / 1e9 / self._window_s)
            self._amount *= kept
            self._waited_s = self._waited_s * kept + self._window_s * (1 - kept)
        self._at_ns = now_ns

    def count(self, amount: int) -> None:
        """Count what has left after waiting."""
        self._amount += amount

    def wait_ms(self, amount: float) -> float | None:
        """Predict the time until `amount` has left; None: nothing has left yet."""
        left = self._amount or self._least
        if not left or not self._waited_s:
            return None
        return 1e3 * amount * self._waited_s / left

    def retry_ms(self, amount: int) -> int:
        """Choose when to retry, within limits that clients keep to."""
        estimate_ms = self.wait_ms(amount)
        if estimate_ms is None:
            return UNKNOWN_RETRY_MS
        return retry_after_ms(estimate_ms)


def retry_after_ms(wait_ms: float) -> int:
    """Limit a retry time to values that clients keep to."""
    return math.ceil(min(max(wait_ms, MIN_RETRY_MS), MAX_RETRY_MS))
