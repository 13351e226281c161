"""Join a Dynamo cluster as a worker, through the daemon's own socket.

Invariant: a client gets every token once, also when a request continues at another worker after a
failure. While the daemon drains, is down or silent, the router does not choose it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Protocol

import msgspec

from appliance.dynamo.completion_requests import CompletionBody, Prompts, completion_body
from appliance.dynamo.daemon_http import DaemonExchange, get
from appliance.dynamo.kv_events import Json, KvEventPublisher, KvEvents
from appliance.dynamo.outputs import LostError, output_of, raise_error
from appliance.dynamo.served_model import ServedModel, served_model, used_blocks
from engine.errors import PenstockError

SILENCE_S = 5.0
"""Maximum seconds without a frame; they come each second."""
RETRY_S = 0.5
LEAVE_S = 1.0
"""Seconds until the router has noticed that this worker left."""
PEERS_S = 1.0
"""Maximum seconds to wait for other adapters to note a prompt."""

log = logging.getLogger("penstock.dynamo")


class RequestContext(Protocol):
    """Dynamo's context of one request: its id, and whether it was cancelled."""

    def id(self) -> str:
        """Return the request's id, which stays unchanged when it comes again."""

    def on_stop(self, call: Callable[[], None]) -> Callable[[], None]:
        """Call something when the request is cancelled; return a function that undoes this."""


class Runtime(KvEventPublisher, Protocol):
    """The parts of Dynamo that the adapter needs."""

    async def register(self, served: ServedModel) -> None:
        """Tell frontends of the model, and serve requests from now on."""

    async def join(self) -> None:
        """Let the router choose this worker."""

    async def leave(self) -> None:
        """Stop the router from choosing this worker."""

    async def tell_peers(self, request_id: str, num_tokens: int) -> None:
        """Let other adapters know how long a request's prompt is."""

    def load(self, used_blocks: int) -> None:
        """Let the router know how full it is."""


class Adapter:
    """Serve Dynamo's requests with one daemon."""

    def __init__(self, socket: Path, plane: Runtime) -> None:
        self._socket = socket
        self._plane = plane
        self._contents = KvEvents(plane)
        self.prompts = Prompts()
        self._served: ServedModel | None = None
        self._is_joined = False
        self._open: set[DaemonExchange] = set()
        self._idle = asyncio.Event()  # while no reply is under way
        self._idle.set()
        self._ended = asyncio.Event()

    # The daemon's state

    async def run(self) -> None:
        """Follow the daemon through its restarts until end() is called.

        Raises:
            PenstockError: the model cannot be announced to Dynamo, or has changed.
        """
        following = asyncio.create_task(self._follow())
        ended = asyncio.create_task(self._ended.wait())
        await asyncio.wait({following, ended}, return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await following
        await self._leave("told to end")

    def end(self) -> None:
        """Leave the router; running replies continue."""
        self._ended.set()

    async def drained(self, limit_s: float) -> bool:
        """Wait for the running replies; False: some are left after this time."""
        await asyncio.sleep(LEAVE_S)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), limit_s)
        return not self._open

    async def _follow(self) -> None:
        told = ""
        while True:
            try:
                await self._follow_frames()
            except LostError as error:
                if not self._is_joined and str(error) != told:
                    log.info("waiting for the daemon: %s", error)
                told = str(error)
                await self._lost(told)
            await asyncio.sleep(RETRY_S)

    async def _follow_frames(self) -> None:
        contents: asyncio.Task[None] | None = None
        try:
            async with DaemonExchange(self._socket, SILENCE_S) as line:
                await line.ask("GET", "/v1/penstock/stream")
                async for raw in line.lines():
                    frame = msgspec.json.decode(raw)
                    if frame.get("state") in ("ready", "degraded"):
                        await self._ready(frame)
                        self._plane.load(used_blocks(frame))
                        if contents is None or contents.done():
                            contents = asyncio.create_task(self._follow_contents())
                    else:
                        await self._leave(f"the daemon is {frame.get('state')}")
            raise LostError("the daemon has ended")
        finally:
            if contents is not None:
                contents.cancel()

    async def _ready(self, frame: Json) -> None:
        if self._is_joined and self._served is not None and frame["model"] == self._served.model_id:
            return
        served = served_model(await get(self._socket, "/v1/models"), frame)
        if self._served is None:
            await self._plane.register(served)
            self._served = served
        elif served != self._served:
            raise PenstockError(
                f"the daemon now serves {served.model_id} with other settings, or another model",
                hint="restart the adapter: it announces one model to Dynamo",
            )
        if not self._is_joined:
            self._is_joined = True
            await self._plane.join()
            log.info("the router may choose this appliance: %s", served.model_id)

    async def _leave(self, why: str) -> None:
        if self._is_joined:
            self._is_joined = False
            await self._plane.leave()
            log.info("left the router: %s", why)

    async def _lost(self, why: str) -> None:
        """Hand the replies of a lost daemon to other workers, and withdraw its blocks.

        New requests are handed on, too. Only then the worker leaves: a router that is choosing it
        at that moment would otherwise get no answer.
        """
        for line in list(self._open):
            line.hang_up()
        self._contents.forget_all()
        if self._is_joined:
            await asyncio.sleep(LEAVE_S)
        await self._leave(why)

    async def _follow_contents(self) -> None:
        try:
            async with DaemonExchange(self._socket) as line:
                await line.ask("GET", "/v1/penstock/cache")
                if line.status != 200:
                    log.warning("no events of the prefix cache: %s", await line.body())
                    await asyncio.sleep(3600)
                async for raw in line.lines():
                    self._contents.read(msgspec.json.decode(raw))
        except LostError:
            pass  # the frames end with it, and say so
        finally:
            self._contents.forget_all()

    # Requests

    def peer_told(self, request_id: str, num_tokens: int) -> None:
        """Note the prompt length of a request that another adapter got."""
        self.prompts.came(request_id, num_tokens)

    async def generate(self, request: Json, asker: RequestContext) -> AsyncIterator[Json]:
        """Yield a request's outputs, the last with a finish reason.

        Raises:
            UnsupportedRequest: its client can correct it.
            LostError: another worker can serve it.
        """
        request_id, num_tokens = asker.id(), len(request["token_ids"])
        is_new = self.prompts.came(request_id, num_tokens)
        asked = self._asked(request, request_id)
        if not asked.body["max_tokens"]:
            yield {"token_ids": [], "finish_reason": "length"}
            return
        telling = asyncio.create_task(self._tell_peers(request_id, num_tokens)) if is_new else None
        line = DaemonExchange(self._socket)
        undo = asker.on_stop(line.hang_up)
        self._open.add(line)
        self._idle.clear()
        try:
            async with line:
                await line.ask("POST", "/v1/completions", asked.body)
                if line.status != 200:
                    body = await line.body()
                    raise_error((body or {}).get("error") or {})
                last: Json | None = None
                async for raw in line.lines():
                    if (output := output_of(raw)) is None:
                        continue
                    if telling is not None:  # no token is out that a peer could not go on from
                        await telling
                        telling = None
                    if last is not None:
                        last |= output  # the usage, which comes behind
                    elif "finish_reason" in output:
                        last = output
                    else:
                        yield output
                if last is None:
                    raise LostError("the daemon's reply was cut off")
                yield last
        finally:
            self._open.discard(line)
            if not self._open:
                self._idle.set()
            undo()
            if telling is not None:
                telling.cancel()

    def _asked(self, request: Json, request_id: str) -> CompletionBody:
        """Build the daemon's request for a new or continued one."""
        if self._served is None:
            raise LostError("the daemon does not answer yet")
        num_output = self.prompts.num_output(request_id, len(request["token_ids"]))
        if num_output:
            log.info("%s continues here after %d tokens", request_id, num_output)
        return completion_body(request, request_id, num_output, self._served)

    async def _tell_peers(self, request_id: str, num_tokens: int) -> None:
        try:
            async with asyncio.timeout(PEERS_S):
                await self._plane.tell_peers(request_id, num_tokens)
        except TimeoutError:
            log.warning(
                "another adapter does not answer: a failure now may not be continued exactly"
            )
