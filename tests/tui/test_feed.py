"""The feed against a fake daemon on a real socket."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import msgspec
import pytest

from tests.tui import frames
from tests.tui.daemon import FakeDaemon
from tui import feed


@pytest.fixture
def socket_path(tmp_path):
    return tmp_path / "penstock.sock"


async def lost(awaitable) -> feed.FeedLost:
    with pytest.raises(feed.FeedLost) as caught:
        await awaitable
    return caught.value


async def test_frames_arrive_one_by_one(socket_path):
    async with (
        FakeDaemon(socket_path) as daemon,
        aclosing(feed.stream_frames(str(socket_path))) as got,
    ):
        daemon.send(frames.idle(1))
        assert (await anext(got)).seq == 1
        daemon.send(frames.busy(2))
        assert (await anext(got)).num_requests == 30


async def test_a_frame_may_come_in_pieces(socket_path):
    line = msgspec.json.encode(frames.busy(7)) + b"\n"
    async with FakeDaemon(socket_path) as daemon:
        for start in range(0, len(line), 1000):
            daemon.send(line[start : start + 1000])
        assert await feed.first_frame(str(socket_path)) == frames.busy(7)


async def test_no_socket_is_said(socket_path):
    loss = await lost(feed.first_frame(str(socket_path)))
    assert (loss.is_absent, "no such socket" in str(loss)) == (True, True)


async def test_a_socket_without_a_listener_is_said(socket_path):
    daemon = FakeDaemon(socket_path)
    await daemon.start()
    await daemon.die()
    loss = await lost(feed.first_frame(str(socket_path)))
    assert (loss.is_absent, "not running" in str(loss)) == (True, True)


async def test_a_death_inside_a_stream_is_said(socket_path):
    async with (
        FakeDaemon(socket_path) as daemon,
        aclosing(feed.stream_frames(str(socket_path))) as got,
    ):
        daemon.send(frames.idle())
        await anext(got)
        await daemon.die()
        assert "the daemon" in str(await lost(anext(got)))


async def test_a_silent_daemon_is_given_up(socket_path, monkeypatch):
    monkeypatch.setattr(feed, "SILENCE_S", 0.05)
    async with FakeDaemon(socket_path):
        assert "silent" in str(await lost(feed.first_frame(str(socket_path))))


@pytest.mark.parametrize("reply", [b"SSH-2.0-x\r\n\r\n", b"HTTP/1.1 101 Other\r\n\r\n", b""])
async def test_somebody_elses_socket_is_said(socket_path, reply):
    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(reply)
        writer.close()

    async with await asyncio.start_unix_server(answer, str(socket_path)):
        assert isinstance(await lost(feed.first_frame(str(socket_path))), feed.FeedLost)


async def test_a_frame_that_cannot_be_read_is_a_loss(socket_path):
    async with FakeDaemon(socket_path) as daemon:
        daemon.send(b'{"version": 1}\n')
        assert "cannot be read" in str(await lost(feed.first_frame(str(socket_path))))


async def test_a_frame_of_another_version_is_refused_with_a_hint(socket_path):
    async with FakeDaemon(socket_path) as daemon:
        daemon.send(b'{"version": 2, "other": []}\n')
        loss = await lost(feed.first_frame(str(socket_path)))
        assert loss.word == "INCOMPATIBLE"
        assert "version 2" in str(loss)


async def test_following_tries_again_with_growing_patience(socket_path, monkeypatch):
    waits = []

    async def sleep(delay_s):
        waits.append(delay_s)
        if len(waits) == 7:
            raise asyncio.CancelledError

    monkeypatch.setattr(feed.asyncio, "sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        await feed.follow(str(socket_path), lambda frame: None, lambda loss, retry_s: None)
    assert waits == [0.5, 1.0, 2.0, 4.0, 5.0, 5.0, 5.0]


async def test_cancel_reports_what_came_of_it(socket_path):
    async with FakeDaemon(socket_path) as daemon:
        daemon.requests["cmpl-1"] = frames.request(1)
        assert await feed.cancel(str(socket_path), "cmpl-1") == "cancelled cmpl-1"
        assert daemon.cancelled == ["cmpl-1"]
        assert "had ended already" in await feed.cancel(str(socket_path), "cmpl-2")
        assert "403: not yours" in str(await lost(feed.cancel(str(socket_path), "forbidden")))


async def test_an_id_cannot_leave_its_place_in_the_path(socket_path):
    async with FakeDaemon(socket_path) as daemon:
        daemon.requests["a%2F..%2Fb%20c%0D%0A"] = frames.request(1)
        assert "cancelled" in await feed.cancel(str(socket_path), "a/../b c\r\n")


async def test_a_finished_request_can_be_fetched(socket_path):
    async with FakeDaemon(socket_path) as daemon:
        daemon.requests["cmpl-1"] = frames.request(1, "finished")
        assert (await feed.fetch_request(str(socket_path), "cmpl-1")) == frames.request(
            1, "finished"
        )
        assert await feed.fetch_request(str(socket_path), "cmpl-2") is None


async def test_the_caller_and_what_has_finished_can_be_fetched(socket_path):
    async with FakeDaemon(socket_path) as daemon:
        live, ended = frames.request(1), frames.finished(2)
        daemon.requests = {request.id: request for request in (live, ended)}
        assert await feed.fetch_finished(str(socket_path), 9) == (ended,)
        caller = await feed.fetch_caller(str(socket_path))
        assert (caller.name, caller.role, caller.is_operator) == ("ana", "operator", True)
        daemon.caller = b'{"role": 7}'
        assert "cannot be read" in str(await lost(feed.fetch_caller(str(socket_path))))


async def test_changes_say_what_has_changed(socket_path):
    async with FakeDaemon(socket_path) as daemon:
        assert "rejected" in await feed.drain(str(socket_path))
        assert "accepted" in await feed.resume(str(socket_path))
        change = {"roles": "static", "slo_ttft_ms": 500}
        assert await feed.switch_roles(str(socket_path), change) == (
            "set: roles static, slo_ttft_ms 500"
        )
        assert daemon.changes[-1] == (
            "/v1/penstock/roles",
            b'{"roles":"static","slo_ttft_ms":500}',
        )
