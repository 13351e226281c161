"""Serve connections with uvicorn inside the daemon's loop, and hand them over at a restart.

Invariant: a client that connects is served, or told at once to come back, never left waiting. On
TCP connections without a key are evicted first, the oldest first, then all that have sent nothing
for SILENT_S or are idle. An evicted client is told so.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import socket
import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from typing import cast

import uvicorn
from starlette.applications import Starlette

from appliance.api.core.appliance import Appliance
from appliance.daemon.process.limits import max_connections
from appliance.daemon.requests.request import Peer, Role
from appliance.daemon.survival.keeper_channel import has_keeper
from appliance.daemon.survival.kept_replies import LeftReply
from appliance.http.access import AccessPolicy, Credentials, credentials_of, program_of
from appliance.http.bursts import Bursts
from appliance.http.connection import ClientLimits, ClientProtocol
from appliance.http.gate import MAX_HEAD_BYTES, Gate
from appliance.http.listeners import Acceptor, ListenerCloser
from appliance.http.rejected_connections import RejectedConnections, too_many_connections
from engine.errors import RequestError

_LOG = logging.getLogger(__name__)
NUM_RESERVED = 16
"""Connections reserved for operators, so that they can always end others."""
SHARE_OF_ONE = 0.75
"""Maximum share of the connections per user (TCP clients count as one).

Also the maximum share of TCP connections per key."""
GIVEN_UP_AT_ONCE = 8
"""Idle connections to close at once when no descriptor is left."""
CUT_AT_ONCE = 16
"""Slow clients to cut off at one look: thousands may be late at the same moment."""
MAX_UNREAD_BYTES = 256 << 20
"""Maximum of replies that clients have not read, of all connections together."""
MIN_UNREAD_BYTES = 64 << 10
"""Less of a connection does not count: a stream may be a little behind."""
STRAGGLER_S = 2.0
"""Seconds for one more request on a connection open before a stop."""
SILENT_S = 0.25
"""Seconds for the first byte of a new connection once a restart accepts no more."""
STRAGGLER_CHECK_S = 0.02
REFUSAL_S = 0.1
"""Seconds for a refusal at a stop to be sent."""
TICK_S = 0.1
HANDSHAKE_S = 5.0
"""Maximum seconds of a TLS handshake."""


class ApiServer:
    """Serve an application on bound sockets until stopped."""

    def __init__(
        self,
        app: Starlette,
        listeners: Sequence[socket.socket],
        policy: AccessPolicy | None = None,
        limits: ClientLimits | None = None,
        *,
        inherited: Sequence[socket.socket] = (),
        is_restart: bool = False,
    ) -> None:
        """Take the listeners over; nothing is accepted before start().

        Args:
            app: ends its endless replies once `app.state.stopping` is set.
            listeners: of the Unix socket and TCP.
            policy: without one only root and the daemon's user are known.
            limits: shorter ones for tests.
            inherited: the listeners that another daemon will continue to serve.
            is_restart: clients wait on the listeners of a daemon that has died.
        """
        self._app = app
        self._listeners = listeners
        self._inherited, self._is_restart = inherited, is_restart
        self._closers = [
            ListenerCloser(listener, is_inherited=listener in inherited) for listener in listeners
        ]
        self._gate = Gate(app, policy or AccessPolicy(), self._on_refused)
        self._bursts = Bursts(self._gate.bursts.streams)
        self._limits = limits or ClientLimits()
        self._config = uvicorn.Config(
            self._gate,
            http=ClientProtocol,
            ws="none",
            lifespan="off",
            loop="none",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,  # any client can send X-Forwarded-Proto
            timeout_keep_alive=cast(int, self._limits.idle_s),
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        )
        self._server = _Server(self._config, on_tick=self._look_at_all)
        self._acceptors: dict[socket.socket, Acceptor] = {}
        self._arriving: set[asyncio.Task[None]] = set()
        self._task: asyncio.Task[None] | None = None
        self._turned_away: RejectedConnections

    def _on_refused(self, peer: Peer, error: RequestError) -> None:
        appliance: Appliance = self._app.state.appliance
        appliance.refused(peer, error)

    @property
    def policy(self) -> AccessPolicy:
        """The access policy; a new one applies from the next request on, on all connections."""
        return self._gate.policy

    @policy.setter
    def policy(self, policy: AccessPolicy) -> None:
        self._gate.policy = policy

    def open(self) -> None:
        """Admit the requests that wait for the model to load."""
        self._gate.is_open.set()

    async def start(self) -> None:
        """Return when connections are accepted.

        On inherited listeners, and after a restart, a POST waits for open(), so that clients do not
        notice it. Otherwise the API tells them to retry.
        """
        if not self._inherited and not self._is_restart:
            self.open()
        self._turned_away = RejectedConnections(lambda: self.policy.max_connections)
        # Uvicorn gets no sockets: its accepting knows no limits.
        self._task = asyncio.create_task(self._server.serve(sockets=[]))
        started = asyncio.create_task(self._server.has_started.wait())
        await asyncio.wait({self._task, started}, return_when=asyncio.FIRST_COMPLETED)
        started.cancel()
        if self._task.done():
            self._task.result()
        self._acceptors = {
            each: Acceptor(each, self._on_connection, self._give_up_idle)
            for each in self._listeners
        }

    def take_up(self, left: LeftReply) -> None:
        """Continue the reply to a dead daemon's request."""
        peer = left.journal.head.credentials if left.journal.head else None
        program = None if peer is None else program_of(left.client, peer[2], peer[0])
        who = None if peer is None else Credentials(*peer[:3], frozenset(peer[3]), program)
        self._serve_on(left.client, who, left)

    async def has_taken_up(self) -> None:
        """Wait until a dead daemon's requests are admitted or refused, at most STRAGGLER_S."""
        await self._wait_until(
            lambda: not self._arriving and not any(one.is_taken_up for one in self._connections),
            STRAGGLER_S,
        )

    async def _wait_until(self, is_so: Callable[[], bool], most_s: float) -> bool:
        """Wait until something is so; False: it was not within `most_s`."""
        until_s = time.monotonic() + most_s
        while not is_so():
            if time.monotonic() >= until_s:
                return False
            await asyncio.sleep(STRAGGLER_CHECK_S)
        return True

    async def hand_over(
        self, listeners: Sequence[socket.socket], silent_s: float = STRAGGLER_S
    ) -> None:
        """Stop accepting on listeners that the next daemon serves.

        Open connections are closed with their current reply, or after the next request's if it
        comes within STRAGGLER_S. Without such listeners nothing happens, since no other process
        would answer.
        """
        if not listeners:
            return
        for listener in listeners:
            if (acceptor := self._acceptors.pop(listener, None)) is not None:
                acceptor.close()
        if self._arriving:
            await asyncio.wait(self._arriving)
        await self._retire(self._connections, silent_s)

    async def hand_over_all(self) -> None:
        """Have the next daemon serve all listeners; wait for what it cannot continue.

        That is what is not accepted yet, which takes milliseconds, and replies over TLS; at most
        STRAGGLER_S. New clients wait from then on, so idle ones get their time before it.
        """
        await self._retire(frozenset(self._connections), STRAGGLER_S)
        await self.hand_over(self._listeners, SILENT_S)
        await self.has_kept_alone()

    async def _retire(self, connections: Collection[ClientProtocol], silent_s: float) -> None:
        """Close connections with their current or next reply; idle ones after STRAGGLER_S.

        Args:
            silent_s: how long a client that has sent nothing is waited for.
        """
        close = (b"connection", b"close")
        if close not in self._config.encoded_headers:
            self._config.encoded_headers.append(close)  # uvicorn's next headers, once a second
            self._server.server_state.default_headers.append(close)
        begun_s = time.monotonic()
        while stragglers := [
            one for one in connections if one in self._connections and not one.retire()
        ]:
            waited_s = time.monotonic() - begun_s
            for straggler in stragglers:
                if waited_s >= (silent_s if straggler.is_silent else STRAGGLER_S):
                    straggler.shutdown()
            if waited_s >= STRAGGLER_S:
                return
            await asyncio.sleep(STRAGGLER_CHECK_S)

    async def has_kept_alone(self) -> None:
        """Wait until the next daemon can continue all open connections, at most STRAGGLER_S."""
        await self._wait_until(lambda: all(one.is_kept for one in self._connections), STRAGGLER_S)

    async def stop(self, grace_s: float) -> None:
        """Stop accepting, end the frame streams, let replies end, then cut off the rest."""
        for acceptor in self._acceptors.values():
            acceptor.close()
        for closer in self._closers:
            closer.close()
        if self._arriving:
            await asyncio.wait(self._arriving)
        if self._task is not None:
            self._app.state.stopping.set()
            self.open()  # requests that wait for the model are answered by the application
            self._turned_away.close()
            self._server.must_stop.set()
            await self._task
            await self._end_connections(grace_s)

    async def _end_connections(self, grace_s: float) -> None:
        """Let replies end within the grace period, then cut off the rest."""
        state = self._server.server_state
        for connection in list(self._connections):
            connection.shutdown()
        if not await self._wait_until(lambda: not (state.connections or state.tasks), grace_s):
            await self._cut()

    async def _cut(self) -> None:
        """Refuse what has not come whole, and cancel all other requests with their children."""
        state = self._server.server_state
        for connection in list(self._connections):
            connection.cut_unfinished()
        await asyncio.sleep(REFUSAL_S)
        if state.tasks:
            _LOG.warning("stopping: %d unfinished requests are cut off", len(state.tasks))
        for task in state.tasks:
            task.cancel()
        for connection in list(self._connections):
            connection.transport.abort()
        if state.tasks:
            await asyncio.wait(state.tasks)

    @property
    def _connections(self) -> set[ClientProtocol]:
        return cast("set[ClientProtocol]", self._server.server_state.connections)

    def _look_at_all(self) -> None:
        now, num_cut = time.monotonic(), 0
        for connection in list(self._connections):
            num_cut += connection.look(now, may_cut=num_cut < CUT_AT_ONCE)
        self._cut_unread()
        self._turned_away.look()

    def _cut_unread(self) -> None:
        """Cut the largest connections of the caller with most while too much is unread.

        A small body may ask for a large reply, and a client that reads a little of it each second
        is not cut for being slow.
        """
        unread = {each: each.num_unread for each in self._connections}
        unread = {each: size for each, size in unread.items() if size >= MIN_UNREAD_BYTES}
        while sum(unread.values()) > MAX_UNREAD_BYTES:
            held: Counter[Hashable] = Counter()
            for each, size in unread.items():
                held[each.caller] += size
            caller, _ = held.most_common(1)[0]
            own = [each for each in unread if each.caller == caller]
            largest = max(own, key=unread.__getitem__)
            largest.hang_up()
            del unread[largest]

    def _on_connection(self, connection: socket.socket) -> None:
        who = credentials_of(connection)
        if not self._has_room(who):
            is_encrypted = who is None and self.policy.tls is not None
            turn_away = self._turned_away.drop if is_encrypted else self._turned_away.tell
            turn_away(connection, self._name(who))
            return
        self._serve_on(connection, who)

    def _serve_on(
        self, connection: socket.socket, who: Credentials | None, left: LeftReply | None = None
    ) -> None:
        state = self._server.server_state
        is_encrypted = who is None and self.policy.tls is not None  # the session dies with us
        protocol = ClientProtocol(
            self._config,
            state,
            self._limits,
            who,
            self._check_key,
            self._bursts,
            keeps=has_keeper() and not is_encrypted,
            left=left,
        )
        state.connections.add(protocol)  # it counts before its transport is there
        task = asyncio.create_task(self._open(connection, protocol))
        self._arriving.add(task)
        task.add_done_callback(self._arriving.discard)

    async def _open(self, connection: socket.socket, protocol: ClientProtocol) -> None:
        loop = asyncio.get_running_loop()
        is_plain = protocol.credentials is not None or protocol.is_left
        tls = None if is_plain else self.policy.tls
        patience_s = None if tls is None else HANDSHAKE_S
        if tls is not None:
            protocol.shakes_hands(connection)
        try:
            await loop.connect_accepted_socket(
                lambda: protocol, connection, ssl=tls, ssl_handshake_timeout=patience_s
            )
        except OSError:  # it is gone already, or does not speak TLS
            self._server.server_state.connections.discard(protocol)

    def _has_room(self, who: Credentials | None) -> bool:
        """Say whether one more connection may enter, evicting another if needed."""
        everybody = self._connections
        limit = max_connections(self.policy.max_connections + NUM_RESERVED)
        if who is None or self.policy.peer_of(who).role is not Role.OPERATOR:
            limit = max(limit - NUM_RESERVED, 1)
            uid = _uid(who)
            most = _share(limit)
            if len(everybody) >= most:  # otherwise no user exceeds the share
                same = [each for each in everybody if _uid(each.credentials) == uid]
                if len(same) >= most:
                    return self._make_room(same)
        return len(everybody) < limit or self._make_room(everybody)

    def _name(self, who: Credentials | None) -> str:
        return "TCP" if who is None else self.policy.peer_of(who).name

    def _make_room(self, connections: Iterable[ClientProtocol]) -> bool:
        """Evict the connection that has been evictable longest; False: none is."""
        spare = [
            (since, connection)
            for connection in connections
            if (since := connection.spare_since) is not None
        ]
        if spare:
            oldest = min(spare, key=lambda pair: pair[0])[1]
            is_told = oldest.give_way(too_many_connections(self.policy.max_connections))
            self._turned_away.count(self._name(oldest.credentials), is_told=is_told)
        return bool(spare)

    def _give_up_idle(self) -> None:
        """Close some idle connections, the oldest first: no descriptor is left."""
        for _ in range(GIVEN_UP_AT_ONCE):
            self._make_room(self._connections)

    def _check_key(self, name: str) -> None:
        """Raise Unavailable if one more connection would be too many for one key."""
        same = [connection for connection in self._connections if connection.key == name]
        most = _share(_share(self.policy.max_connections))
        if len(same) >= most and not self._make_room(same):
            raise too_many_connections(self.policy.max_connections)


class _Server(uvicorn.Server):
    """A uvicorn server without signal handlers, whose connections ApiServer ends."""

    def __init__(self, config: uvicorn.Config, on_tick: Callable[[], None]) -> None:
        super().__init__(config)
        self.has_started = asyncio.Event()
        self.must_stop = asyncio.Event()
        self._on_tick = on_tick

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self.has_started.set()

    async def main_loop(self) -> None:
        """Tick until `must_stop` is set: uvicorn's own loop would see that up to a tick later."""
        for counter in itertools.count():
            self._on_tick()
            await self.on_tick(counter)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self.must_stop.wait()
                    return

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Leave the connections open."""


def _uid(who: Credentials | None) -> int | None:
    """Return the user's id; None: TCP, where all clients count as one."""
    return None if who is None else who.uid


def _share(limit: int) -> int:
    return math.ceil(limit * SHARE_OF_ONE)
