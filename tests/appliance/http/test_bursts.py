"""Requests of a burst begin one in each pass of the loop, with rests while replies are streamed."""

from __future__ import annotations

import asyncio

from appliance.http.bursts import Bursts, Streams


async def begun_by_pass(owners: list[str]) -> list[list[str]]:
    """The owners of the requests that began in each pass of the loop, all having come at once."""
    bursts, passes = Bursts(Streams()), [[]]

    async def request(owner):
        await bursts.begin(owner)
        passes[-1].append(owner)

    tasks = [asyncio.ensure_future(request(owner)) for owner in owners]
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        passes.append([])
    return [each for each in passes if each]


def test_each_request_of_a_burst_has_a_pass_of_the_loop_of_its_own():
    assert asyncio.run(begun_by_pass(["a"] * 50)) == [["a"]] * 50


def test_owners_take_turns():
    assert asyncio.run(begun_by_pass(["a"] * 5 + ["b"] * 2)) == [
        *(["a"], ["a"], ["b"], ["a"], ["b"]),
        *(["a"], ["a"]),
    ]


def test_a_lone_request_begins_without_waiting():
    async def begins_at_once():
        bursts = Bursts(Streams())
        for _ in range(3):
            waiting = bursts.begin("a")
            try:
                waiting.send(None)
            except StopIteration:
                await asyncio.sleep(0)
                await asyncio.sleep(0)
            else:
                return False
        return True

    assert asyncio.run(begins_at_once())


def test_a_cancelled_request_holds_up_no_other():
    async def the_rest():
        bursts, begun = Bursts(Streams()), []

        async def request(number):
            await bursts.begin("a")
            begun.append(number)

        tasks = [asyncio.ensure_future(request(number)) for number in range(4)]
        await asyncio.sleep(0)
        tasks[1].cancel()
        tasks[3].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return begun

    assert asyncio.run(the_rest()) == [0, 2]


async def spacing(monkeypatch, *, is_streaming: bool) -> float:
    """The time between two requests that come at once, while beginning one takes 4 ms."""
    loop, streams = asyncio.get_running_loop(), Streams()
    bursts, begun_s = Bursts(streams), []
    now_s = 0.0
    monkeypatch.setattr(loop, "time", lambda: now_s)
    monkeypatch.setattr(loop, "call_later", lambda rest_s, then: rests.append((rest_s, then)))
    rests = []
    if is_streaming:
        streams.wrote()

    async def request():
        nonlocal now_s
        await bursts.begin("a")
        begun_s.append(now_s)
        now_s += 0.004

    tasks = [asyncio.ensure_future(request()) for _ in range(2)]
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        if rests:
            rest_s, then = rests.pop()
            now_s += rest_s
            then()
    return begun_s[1] - begun_s[0]


async def test_while_replies_are_streamed_the_loop_rests_as_long_as_a_request_took(monkeypatch):
    assert await spacing(monkeypatch, is_streaming=True) == 0.008


async def test_without_streams_nothing_rests(monkeypatch):
    assert await spacing(monkeypatch, is_streaming=False) == 0.004
