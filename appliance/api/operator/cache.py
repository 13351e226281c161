"""Serve the prefix cache's contents to routers and metrics to Prometheus; count HTTP replies.

Invariant: a reader of all lines knows what its own prompts would find in memory.
Invariant: labels are of a fixed set, whatever clients send.
Never: tells of prompts that have a secret.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator
from itertools import groupby

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from appliance.api.core.wire import appliance_of, is_known, require, streamed
from appliance.daemon.requests.request import Role
from appliance.json.lines import encode_line
from appliance.observe.metrics.exposition import MEDIA_TYPE, exposition
from appliance.observe.metrics.metric_family import MetricFamily, counter
from engine.errors import RequestError
from engine.scheduler.cache.hashes import Hash
from engine.scheduler.prefixes.cache_contents import Block, CacheContents, ContentsChange

LOOK_INTERVAL_S = 0.05
MAX_LINE_BLOCKS = 256


def cache_routes() -> list[Route]:
    """List the cache's route."""
    return [Route("/v1/penstock/cache", cache)]


async def cache(http: Request) -> Response:
    """Send all entries, then each change, until either side leaves.

    It ends when another model is served. Prompts are in it, so it is for operators.
    """
    peer, appliance = require(http, Role.OPERATOR), appliance_of(http)
    contents = appliance.cache_contents
    if contents is None or appliance.hasher is None:
        raise RequestError(
            "the prefix cache is off, or not there yet",
            code="no_prefix_cache",
            status=409,
            hint="serve with prefix_cache on",
        )
    lines = _lines(http, contents, appliance.hasher.scope(user=peer.name).root)
    return streamed(lines, "application/x-ndjson")


async def _lines(http: Request, contents: CacheContents, root: Hash) -> AsyncIterator[bytes]:
    if http.method == "HEAD":
        return
    stopping: asyncio.Event = http.app.state.stopping
    told: int | None = None
    while not stopping.is_set() and is_known(http):
        if appliance_of(http).cache_contents is not contents:
            return
        changes = None if told is None else contents.changes(told, root)
        told = contents.num_changes
        if changes is None:
            blocks = contents.blocks(root)  # all of one moment, however slowly they are read
            yield _line({"cleared": True, "block_size": contents.block_size})
            for line in _stored(blocks):
                yield line
        else:
            for line in _of(changes):
                yield line
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stopping.wait(), LOOK_INTERVAL_S)


def _of(changes: Iterable[ContentsChange]) -> Iterator[bytes]:
    for is_stored, group in groupby(changes, key=lambda change: change.is_stored):
        blocks = [change.block for change in group]
        if is_stored:
            yield from _stored(blocks)
        else:
            yield _line({"removed": [block.block_id for block in blocks]})


def _stored(blocks: list[Block]) -> Iterator[bytes]:
    for start in range(0, len(blocks), MAX_LINE_BLOCKS):
        told = [
            {"id": one.block_id, "parent": one.parent_id, "token_ids": one.token_ids.tolist()}
            for one in blocks[start : start + MAX_LINE_BLOCKS]
        ]
        yield _line({"stored": told})


def _line(value: object) -> bytes:
    return encode_line(value) + b"\n"


PROBES = ("/health", "/ready", "/metrics")
_METHODS = ("GET", "HEAD", "POST", "DELETE", "OPTIONS")


class HttpCounts:
    """Replies since the daemon started."""

    def __init__(self) -> None:
        self._replies: Counter[tuple[str, str, str]] = Counter()
        self._seconds: defaultdict[tuple[str, str], float] = defaultdict(float)

    def count(self, path: str | None, method: str, status: int, seconds: float) -> None:
        """Count a reply that has been sent whole, or that lost its client.

        Args:
            path: of the route; None: there was none.
            method: as the client wrote it.
        """
        if path in PROBES:
            return
        handler, method = path or "none", method if method in _METHODS else "other"
        self._replies[handler, method, f"{status // 100}xx"] += 1
        self._seconds[handler, method] += seconds

    def families(self) -> Iterator[MetricFamily]:
        """Yield metrics under vLLM's names, which most dashboards know."""
        yield counter(
            "http_requests_total",
            "Replies, except to probes.",
            [
                ({"handler": handler, "method": method, "status": status}, number)
                for (handler, method, status), number in self._replies.items()
            ],
        )
        totals: Counter[tuple[str, str]] = Counter()
        for (handler, method, _), number in self._replies.items():
            totals[handler, method] += number
        yield MetricFamily(
            "summary",
            "http_request_duration_seconds",
            "To the end of the reply.",
            summaries=[
                ({"handler": handler, "method": method}, number, self._seconds[handler, method])
                for (handler, method), number in totals.items()
            ],
        )


async def metrics(http: Request) -> Response:
    """Write all metrics as Prometheus reads them."""
    readings = appliance_of(http).readings()
    http_counts: HttpCounts = http.app.state.http_counts
    body = b""
    for part in exposition(readings.frame, readings.histograms, http_counts.families()):
        body += part
        await asyncio.sleep(0)  # all of it takes milliseconds, in which streams would stand still
    return Response(body, media_type=MEDIA_TYPE)
