"""Wrap the parts of Dynamo 1.6 that the adapter needs.

Invariant: its types stay in this file.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
from collections.abc import AsyncIterator, Callable
from importlib import metadata
from typing import TYPE_CHECKING, Any, NamedTuple

from appliance.dynamo.completion_requests import UnsupportedRequest
from appliance.dynamo.outputs import LostError
from engine.errors import ConfigError

if TYPE_CHECKING:
    from appliance.dynamo.served_model import ServedModel
    from appliance.dynamo.worker import Adapter

PACKAGE, VERSION = "ai-dynamo-runtime", "1.6.1"
INSTALL = f"pip install '{PACKAGE}=={VERSION}'"
PEERS_ENDPOINT = "prompts"

Json = dict[str, Any]
log = logging.getLogger("penstock.dynamo")


class DynamoNames(NamedTuple):
    """The adapter's names in Dynamo, and the discovery backend."""

    namespace: str = "penstock"
    component: str = "worker"
    endpoint: str = "generate"
    discovery: str = "file"
    """`file` (a folder, DYN_FILE_KV), `etcd` or `kubernetes`."""
    model_name: str | None = None
    """The model's name for clients; None: the daemon's."""


def missing() -> str | None:
    """Name the package that the adapter lacks; None: complete."""
    try:
        found = metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        return f"{PACKAGE} is not installed"
    if found != VERSION:
        return f"{PACKAGE} is {found}; the adapter was made for {VERSION}"
    return None


class DynamoRuntime:
    """Register the adapter with Dynamo: its endpoint, its KV events, its load.

    Raises:
        ConfigError: its wheels are missing or of another version.
    """

    def __init__(self, names: DynamoNames) -> None:
        if (what := missing()) is not None:
            raise ConfigError(what, where="penstock worker --dynamo", hint=INSTALL)
        self._names = names
        self._llm: Any = importlib.import_module("dynamo.llm")
        self._errors: Any = importlib.import_module("dynamo.llm.exceptions")
        runtime: Any = importlib.import_module("dynamo.runtime")
        loop = asyncio.get_running_loop()
        self._runtime = runtime.DistributedRuntime(loop, names.discovery, "tcp", event_plane="zmq")
        path = f"{names.namespace}.{names.component}"
        self._endpoint = self._runtime.endpoint(f"{path}.{names.endpoint}")
        self._peers = self._runtime.endpoint(f"{path}.{PEERS_ENDPOINT}")
        self._tasks: list[asyncio.Task[Any]] = []
        self._client: Any = None
        self._events: Any = None
        self._metrics: Any = None
        self.adapter: Adapter
        """Serves the requests; set before register()."""

    async def register(self, served: ServedModel) -> None:
        llm = self._llm
        about = llm.ModelRuntimeConfig()
        about.context_length = served.max_model_len
        about.total_kv_blocks = served.num_blocks
        about.tool_call_parser = served.tool_parser
        about.reasoning_parser = served.reasoning_parser
        about.enable_local_indexer = True
        about.kv_event_publishing_enabled = True
        self._events = llm.KvEventPublisher(
            endpoint=self._endpoint, kv_block_size=served.block_size, enable_local_indexer=True
        )
        self._block_size = served.block_size
        self._metrics = llm.WorkerMetricsPublisher()
        await self._metrics.create_endpoint(self._endpoint)
        self._client = await self._peers.client()
        self._tasks.append(asyncio.ensure_future(self._peers.serve_endpoint(self._peer)))
        await llm.register_model(
            llm.ModelInput.Tokens,
            llm.ModelType.Chat | llm.ModelType.Completions,
            self._endpoint,
            str(served.folder),
            self._names.model_name or served.model_id,
            worker_type=llm.WorkerType.Aggregated,
            kv_cache_block_size=served.block_size,
            runtime_config=about,
            ignore_weights=True,
        )
        self._tasks.append(asyncio.ensure_future(self._endpoint.serve_endpoint(self._generate)))

    async def join(self) -> None:
        await self._endpoint.register_endpoint_instance()

    async def leave(self) -> None:
        await self._endpoint.unregister_endpoint_instance()

    async def tell_peers(self, request_id: str, num_tokens: int) -> None:
        me = self._peers.connection_id()
        told = {"request_id": request_id, "num_tokens": num_tokens}
        others = [one for one in self._client.instance_ids() if one != me]
        await asyncio.gather(*(self._tell(one, told) for one in others))

    def load(self, used_blocks: int) -> None:
        if self._metrics is not None:
            self._metrics.publish(None, used_blocks, used_blocks)

    def stored(self, token_ids: list[int], block_ids: list[int], parent_id: int | None) -> None:
        sizes = [self._block_size] * len(block_ids)
        self._events.publish_stored(token_ids, sizes, block_ids, parent_id)

    def removed(self, block_ids: list[int]) -> None:
        self._events.publish_removed(block_ids)

    def close(self) -> None:
        """Withdraw from Dynamo, so that its router sends nothing more."""
        self._runtime.shutdown()

    async def _tell(self, peer: int, told: Json) -> None:
        # an adapter that ended meanwhile will not take the request over
        with contextlib.suppress(Exception):
            async for _ in await self._client.direct(told, peer):
                pass

    async def _peer(self, told: Json, _context: Any = None) -> AsyncIterator[Json]:
        self.adapter.peer_told(told["request_id"], told["num_tokens"])
        yield {}

    async def _generate(self, request: Json, context: Any) -> AsyncIterator[Json]:
        try:
            async for output in self.adapter.generate(request, _RequestContext(context)):
                yield output
        except UnsupportedRequest as refusal:
            raise self._errors.InvalidArgument(str(refusal)) from refusal
        except LostError as error:
            if context.is_stopped():
                return  # the client has left
            raise self._errors.Disconnected(str(error)) from error


class _RequestContext:
    """Dynamo's context of one request."""

    def __init__(self, context: Any) -> None:
        self._context = context

    def id(self) -> str:
        """Return the request's id, which stays unchanged when it moves."""
        return str(self._context.id())

    def on_stop(self, call: Callable[[], None]) -> Callable[[], None]:
        """Call something when it is cancelled."""
        stopped = asyncio.ensure_future(self._context.async_killed_or_stopped())

        def on_done(future: asyncio.Future[bool]) -> None:
            if not future.cancelled():
                call()

        stopped.add_done_callback(on_done)

        def undo() -> None:
            stopped.cancel()

        return undo
