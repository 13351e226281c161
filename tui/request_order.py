"""Order the requests that the tables list."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from appliance.observe.frame.protocol import RequestFrame
from tui.filters import NUMBERS, Filter

SORTS: Mapping[str, Callable[[RequestFrame], float | None]] = MappingProxyType(
    {name: NUMBERS[name] for name in ("time", "in", "out", "ttft", "tpot", "blocks", "j")}
)


@dataclass(frozen=True, slots=True)
class RequestListing:
    """Order and filter of both tables."""

    sort: str = "time"
    is_reversed: bool = False
    """Whether the least comes first."""
    filter: Filter = field(default_factory=Filter)

    def sorted_by_next(self, is_metered: bool = True) -> RequestListing:
        """Sort by the next of SORTS; energy needs a meter."""
        names = [name for name in SORTS if is_metered or name != "j"]
        return replace(self, sort=names[(names.index(self.sort) + 1) % len(names)])

    def of(self, requests: Iterable[RequestFrame]) -> list[RequestFrame]:
        """List the requests that pass the filter, in order."""
        read = SORTS[self.sort]
        admitted = [request for request in requests if self.filter.admits(request)]
        known = [request for request in admitted if read(request) is not None]
        unknown = [request for request in admitted if read(request) is None]
        return [
            *sorted(known, key=lambda r: read(r) or 0.0, reverse=not self.is_reversed),
            *unknown,
        ]

    def arranged(
        self, live: Sequence[RequestFrame], finished: Iterable[RequestFrame]
    ) -> list[RequestFrame]:
        """List live requests in order, then finished ones, the newest first.

        A request in both lists is still live: the daemon is asked for them at different times.
        """
        ordered = self.of(live)
        ids = {request.id for request in live}
        ended = [request for request in finished if request.id not in ids]
        if self.sort != "time":
            return ordered + self.of(ended)
        admitted = [request for request in ended if self.filter.admits(request)]
        return ordered + (admitted[::-1] if self.is_reversed else admitted)
