"""GET /v1/penstock/cache: what the prefix cache holds by tokens, and each change of that.

For routers that choose among several appliances the one that has most of a prompt. A line each:
`{"cleared": true, "block_size": N}` first, and whenever what was told before is void;
`{"stored": [{"id", "parent", "token_ids"}, ...]}`, each block after the one before it; `{"removed":
[id, ...]}`.
Owns: the lines, and how often changes are looked for.
Invariant: who reads all lines knows what the asker's own prompts would find in memory.
Never: tells of what the asker's own prompts would not find, or of prompts with a secret.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Iterator
from itertools import groupby

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from appliance.api.authority import is_known, require
from appliance.api.wire import appliance_of
from appliance.request import Role
from engine.cache.prefix_hashes import Hash
from engine.errors import RequestError
from engine.schedule.cache_contents import Block, CacheContents, ContentsChange

LOOK_INTERVAL_S = 0.05
MAX_LINE_BLOCKS = 256


def cache_routes() -> list[Route]:
    """The one of the cache."""
    return [Route("/v1/penstock/cache", cache)]


async def cache(http: Request) -> Response:
    """All that is there, and then each change, until either side leaves.

    It ends when another model is served. Prompts are in it, so it is for operators.
    """
    peer, appliance = require(http, Role.OPERATOR), appliance_of(http)
    contents = appliance.cache_contents
    chain = None if contents is None else appliance.hash_prompt([], None, peer.name)
    if contents is None or chain is None:
        raise RequestError(
            "the prefix cache is off, or not there yet",
            code="no_prefix_cache",
            status=409,
            hint="serve with --prefix-cache on",
        )
    lines = _lines(http, contents, chain.root)
    return StreamingResponse(
        lines, media_type="application/x-ndjson", headers={"cache-control": "no-store"}
    )


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
    return msgspec.json.encode(value) + b"\n"
