"""Slow work gets threads fairly; pieces of work end when the test says so."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace

import pytest
from starlette.requests import ClientDisconnect, Request

from appliance.api.core import fair_threads
from appliance.api.core.fair_threads import TURN_S, Turns
from appliance.api.core.wire import Arrival
from appliance.daemon.requests.request import Peer
from engine.errors import QueueFull, RequestError, Unavailable
from tests.worlds.daemon_parts import until

Started = asyncio.Task[str]


async def _write_part(part: bytes) -> None:
    """Nothing is streamed here."""


class Client:
    """A peer's request, and its connection."""

    def __init__(self, name: str) -> None:
        self._gone = asyncio.Event()
        scope = {"type": "http", "headers": []}
        Arrival(_write_part, Peer(key=name)).put_into(scope)
        self.http = Request(scope, self._receive)

    def hang_up(self) -> None:
        self._gone.set()

    async def _receive(self) -> dict[str, str]:
        await self._gone.wait()
        return {"type": "http.disconnect"}


class Desk:
    """One thread, whose pieces of work wait for `go`."""

    def __init__(self, *, num_at_once: int = 1, num_each: int | None = None) -> None:
        self.turns = Turns(
            "desk", num_at_once, num_each=num_each, max_waiting=4, max_waiting_each=2
        )
        self.begun: list[str] = []
        self._gates: dict[str, threading.Event] = {}
        self._tasks: list[Started] = []

    async def ask(self, what: str, client: Client | None = None) -> Started:
        """Begin, or wait; `what` begins with the peer's name."""
        client = client or Client(what[0])
        self._gates[what] = threading.Event()
        task = asyncio.create_task(self.turns.run(client.http, self._work(what)))
        self._tasks.append(task)
        for _ in range(3):  # up to where it waits
            await asyncio.sleep(0)
        return task

    def go(self, what: str) -> None:
        self._gates[what].set()

    async def finish(self) -> None:
        for gate in self._gates.values():
            gate.set()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _work(self, what: str) -> Callable[[], str]:
        def work() -> str:
            self.begun.append(what)
            assert self._gates[what].wait(120)
            if what.endswith("!"):
                raise RequestError("it is refused")
            return what

        return work


@pytest.fixture
async def desk() -> AsyncIterator[Desk]:
    desk = Desk()
    yield desk
    await desk.finish()
    assert desk.turns.num_waiting == 0
    free = desk.turns.run(Client("z").http, lambda: "free")
    assert await asyncio.wait_for(free, 30) == "free"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, in seconds, which stands until a test moves it."""
    now = [0.0]
    monkeypatch.setattr(fair_threads, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


async def test_the_result_and_the_error_of_the_work_are_the_callers() -> None:
    turns = Turns("desk", 1)
    assert await turns.run(Client("a").http, lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        await turns.run(Client("a").http, lambda: 1 // 0)
    assert await turns.run(Client("a").http, lambda: 4) == 4


@pytest.mark.usefixtures("clock")
async def test_peers_are_served_in_turn_and_each_in_its_order(desk: Desk) -> None:
    for what in ("a0", "a1", "a2", "b1", "b2"):
        await desk.ask(what)
    await desk.finish()
    assert desk.begun == ["a0", "a1", "b1", "a2", "b2"]


async def test_a_peer_that_waits_for_much_is_refused_and_others_are_not(desk: Desk) -> None:
    for what in ("a0", "a1", "a2"):
        await desk.ask(what)
    with pytest.raises(QueueFull) as refusal:
        await (await desk.ask("a3"))
    assert (refusal.value.code, refusal.value.retry_after_ms) == ("user_quota", 1000)
    b1 = await desk.ask("b1")
    await desk.finish()
    assert await b1 == "b1"


async def test_everybody_is_refused_when_too_much_waits(desk: Desk) -> None:
    for what in ("a0", "a1", "a2", "b1", "b2"):
        await desk.ask(what)
    with pytest.raises(Unavailable) as refusal:
        await (await desk.ask("c1"))
    assert (refusal.value.status, refusal.value.code) == (503, "busy")


async def test_who_hangs_up_leaves_the_line_at_once(desk: Desk) -> None:
    await desk.ask("a0")
    client = Client("a")
    waiting = await desk.ask("a1", client)
    assert desk.turns.num_waiting == 1
    client.hang_up()
    with pytest.raises(ClientDisconnect):
        await waiting
    assert desk.turns.num_waiting == 0
    await desk.finish()
    assert desk.begun == ["a0"]


async def test_a_turn_that_comes_too_late_is_the_next_ones(desk: Desk) -> None:
    await desk.ask("a0")
    late = await desk.ask("b1")
    after = await desk.ask("c1")
    desk.go("a0")
    while desk.turns.num_waiting == 2:  # noqa: ASYNC110 - cancelled before it learns of its turn
        await asyncio.sleep(0)
    late.cancel()
    desk.go("c1")
    assert await asyncio.wait_for(after, 30) == "c1"
    assert desk.begun == ["a0", "c1"]


async def test_a_thread_whose_client_is_gone_is_not_given_to_another(desk: Desk) -> None:
    first = await desk.ask("a0")
    await until(lambda: desk.begun == ["a0"])
    first.cancel()
    second = await desk.ask("b1")
    assert desk.turns.num_waiting == 1
    desk.go("a0")
    desk.go("b1")
    assert await second == "b1"


async def test_a_turn_keeps_its_thread_for_the_next_piece_of_work(desk: Desk) -> None:
    with desk.turns.turn(Client("a").http) as turn:
        assert await turn.run(lambda: 1) == 1
        waiting = await desk.ask("b1")
        assert await turn.run(lambda: 2) == 2
        assert desk.begun == []
        assert desk.turns.num_waiting == 1
    desk.go("b1")
    assert await waiting == "b1"


async def test_a_turn_that_goes_to_other_threads_leaves_its_own_to_others(desk: Desk) -> None:
    with desk.turns.turn(Client("a").http) as turn:
        assert await turn.run(lambda: 1) == 1
        turn.go_to(Turns("other", 1))
        b1 = await desk.ask("b1")
        desk.go("b1")
        assert await asyncio.wait_for(b1, 30) == "b1"
        assert await turn.run(lambda: 2) == 2


async def test_work_whose_client_leaves_is_ended_if_it_can_be(desk: Desk) -> None:
    client, gate, begun = Client("a"), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        assert gate.wait(120)
        raise RequestError("its client has left")

    async def work_on() -> None:
        with desk.turns.turn(client.http) as turn:
            await turn.run(work, gate.set)

    working = asyncio.create_task(work_on())
    await until(begun.is_set)
    client.hang_up()
    with pytest.raises(ClientDisconnect):
        await asyncio.wait_for(working, 30)
    with desk.turns.turn(Client("b").http) as turn:
        assert await turn.run(lambda: "done", gate.clear) == "done"
        assert gate.is_set()


async def test_a_turn_that_is_refused_when_it_comes_begins_nothing(desk: Desk) -> None:
    begun: list[str] = []

    def refuse() -> None:
        raise QueueFull("nothing waits any more", code="queue_full", retry_after_ms=1)

    with (
        pytest.raises(QueueFull),
        desk.turns.turn(Client("a").http, refuse) as turn,
    ):
        await turn.run(lambda: begun.append("a1"))
    waiting = await desk.ask("b1")
    desk.go("b1")
    assert (await waiting, begun) == ("b1", [])


async def test_work_is_done_where_no_thread_can_be_started(monkeypatch):
    def refuse(_):
        raise RuntimeError("can't start new thread")

    turns = Turns("desk", 2)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    for number in range(3):  # a turn that is not given back would be missing at the third
        assert await turns.run(Client("a").http, lambda number=number: number) == number


@pytest.mark.parametrize("first", ["a1", "a1!"])
async def test_a_peer_whose_work_took_long_waits_for_those_whose_work_did_not(
    desk: Desk, first: str
) -> None:
    for what in (first, "a2", "b1", "b2"):
        await desk.ask(what)
    await asyncio.sleep(8 * TURN_S)
    await desk.finish()
    assert desk.begun == [first, "b1", "b2", "a2"]


async def test_a_peer_that_comes_anew_is_next(desk: Desk, clock: list[float]) -> None:
    for what in ("a0", "a1", "b1", "b2"):
        await desk.ask(what)
    for begun, what in ((["a0"], "a0"), (["a0", "b1"], "b1"), (["a0", "b1", "a1"], "c1")):
        await until(lambda begun=begun: desk.begun == begun)  # type: ignore[misc]
        clock[0] += 1.0
        if what == "c1":
            await desk.ask(what)
        desk.go(what)
    await desk.finish()
    assert desk.begun == ["a0", "b1", "a1", "c1", "b2"]


async def test_a_peer_leaves_a_thread_to_others() -> None:
    desk = Desk(num_at_once=3, num_each=2)
    for what in ("a0", "a1", "a2", "a3"):
        await desk.ask(what)
    b1 = await desk.ask("b1")
    desk.go("b1")
    assert await asyncio.wait_for(b1, 30) == "b1"
    assert (sorted(desk.begun), desk.turns.num_waiting) == (["a0", "a1", "b1"], 2)
    desk.go("a0")
    await until(lambda: "a2" in desk.begun)
    assert desk.turns.num_waiting == 1
    await desk.finish()
    assert sorted(desk.begun) == ["a0", "a1", "a2", "a3", "b1"]
