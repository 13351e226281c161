"""Leave a model alone that failed to load, longer after each failure in a row.

A try stops the served model until it is loaded again: clients must not have one whenever they ask.

Invariant: a model that was served, or whose files have changed, has no failure.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from appliance.observe.frame.protocol import FailedModelFrame, iso_time
from engine.errors import Unavailable

CHECK_REST_S = 30.0
"""Pause after files that cannot be served: no model was stopped for them.

While they are checked no other model can be swapped in."""
MIN_REST_S, MAX_REST_S = 60.0, 1800.0
"""Pause after the first failed swap, and the longest: it doubles from failure to failure."""
LOOK_S = 1.0
"""Longest time that a request waits to learn whether the files have changed."""


async def never_changed(_: str) -> bool:
    """Say that a model's files are as they were."""
    return False


class _Failure(NamedTuple):
    about: str
    until_s: float
    """When the model may be tried again."""
    num_swaps: int
    """Failed swaps in a row."""


class FailedModels:
    """The models that failed since they were last served.

    Args:
        has_changed: says whether a model's files have changed since it failed.
        now_s: the clock; None: the monotonic one.
    """

    def __init__(
        self,
        has_changed: Callable[[str], Awaitable[bool]] = never_changed,
        now_s: Callable[[], float] | None = None,
    ) -> None:
        self._has_changed, self._now_s = has_changed, now_s or time.monotonic
        self._failures: dict[str, _Failure] = {}

    def add(self, name: str, about: str, *, has_stopped_served: bool) -> Unavailable:
        """Note a failure; return the error of requests that wait for the model.

        Args:
            has_stopped_served: whether the served model was stopped for the try.
        """
        before = self._failures.get(name)
        num_swaps = (0 if before is None else before.num_swaps) + has_stopped_served
        rest_s = CHECK_REST_S
        if has_stopped_served:
            rest_s = min(MIN_REST_S * 2 ** min(num_swaps - 1, 30), MAX_REST_S)
        self._failures[name] = _Failure(about, self._now_s() + rest_s, num_swaps)
        return _cannot(name, about, rest_s)

    def forget(self, name: str) -> None:
        """Forget a model's failures: it is served."""
        self._failures.pop(name, None)

    def rest_s(self, name: str) -> float:
        """Return the seconds until a model may be tried; 0: now."""
        failure = self._failures.get(name)
        return 0.0 if failure is None else max(failure.until_s - self._now_s(), 0.0)

    async def look(self, name: str) -> None:
        """Forget a model's failures if its files have changed."""
        if not self.rest_s(name):
            return
        try:
            has_changed = await asyncio.wait_for(self._has_changed(name), LOOK_S)
        except TimeoutError:
            return
        if has_changed:
            self.forget(name)

    def check(self, name: str) -> None:
        """Refuse a model that is to be left alone.

        Raises:
            Unavailable: it is, with its reason and the time.
        """
        if rest_s := self.rest_s(name):
            raise _cannot(name, self._failures[name].about, rest_s)

    def frames(self) -> list[FailedModelFrame]:
        """List the models that are left alone, for a frame."""
        return [
            FailedModelFrame(name, failure.about, iso_time(time.time() + rest_s))
            for name, failure in self._failures.items()
            if (rest_s := self.rest_s(name))
        ]


def _cannot(name: str, about: str, rest_s: float) -> Unavailable:
    what, after_ms = f"{name} cannot be served: {about}", math.ceil(rest_s) * 1000
    return Unavailable(what, code="swap_failed", retry_after_ms=after_ms)
