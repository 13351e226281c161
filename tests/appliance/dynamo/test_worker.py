"""The adapter between a real server on a socket and a Dynamo that only remembers."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses

import msgspec
import pytest

from appliance.dynamo import worker
from appliance.dynamo.completion_requests import UnsupportedRequest
from appliance.dynamo.outputs import LostError
from appliance.dynamo.worker import Adapter
from engine.errors import PenstockError, Unavailable
from engine.text.tokenizer import Tokenizer
from tests.appliance.api_server import serving
from tests.tiny_tokenizers import byte_level
from tests.tui.frames import idle, pool
from tests.worlds.daemon_parts import FakeAppliance, until


class Plane:
    """Remembers what Dynamo would be told."""

    def __init__(self) -> None:
        self.registered = []
        self.calls: list[str] = []
        self.is_joined = False
        self.peers: list[tuple[str, int]] = []
        self.loads: list[int] = []
        self.peers_answer = asyncio.Event()
        self.peers_answer.set()

    async def register(self, served):
        self.registered.append(served)

    async def join(self):
        self.is_joined = True
        self.calls.append("join")

    async def leave(self):
        self.is_joined = False
        self.calls.append("leave")

    async def tell_peers(self, request_id, num_tokens):
        await self.peers_answer.wait()
        self.peers.append((request_id, num_tokens))

    def load(self, used_blocks):
        self.loads.append(used_blocks)

    def stored(self, token_ids, block_ids, parent_id):
        raise AssertionError("the cache is off")

    removed = stored


class Asker:
    """Dynamo's context."""

    def __init__(self, request_id="r1"):
        self.request_id = request_id
        self.stop = lambda: None

    def id(self):
        return self.request_id

    def on_stop(self, call):
        self.stop = call
        return lambda: None


class Daemon(FakeAppliance):
    """Serves a folder's model, and makes frames when it is told to."""

    def __init__(self, folder):
        super().__init__(Tokenizer(byte_level()))
        self.model = dataclasses.replace(self.model, folder=str(folder))
        self.state = "ready"
        self.seq = 0
        self.changed = asyncio.Event()
        self.speaks = asyncio.Event()
        self.speaks.set()

    def show(self, state):
        self.state = state
        self.changed.set()

    async def next_frame_json(self, after_seq):
        await self.speaks.wait()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.changed.wait(), 0.02 if after_seq >= 0 else 0.0)
        self.changed.clear()
        self.seq += 1
        frame = idle(state=self.state, model=self.model.model_id, pools=[pool(active=24)])
        return self.seq, msgspec.json.encode(frame)


def asked(token_ids=(5, 6, 7), **stop) -> dict:
    return {"token_ids": list(token_ids), "stop_conditions": {"max_tokens": 6, **stop}}


async def outputs(adapter, request, asker=None):
    return [one async for one in adapter.generate(request, asker or Asker())]


@pytest.fixture
def daemon(tiny_llama):
    return Daemon(tiny_llama)


@pytest.fixture
async def running(daemon, tmp_path, monkeypatch):
    """An adapter that has joined."""
    monkeypatch.setattr(worker, "RETRY_S", 0.01)
    monkeypatch.setattr(worker, "LEAVE_S", 0.0)
    async with serving(daemon, tmp_path / "p.sock"):
        plane = Plane()
        adapter = Adapter(tmp_path / "p.sock", plane)
        task = asyncio.create_task(adapter.run())
        await until(lambda: plane.is_joined or task.done())
        yield adapter, plane, task
        adapter.end()
        with contextlib.suppress(PenstockError):
            await task


async def test_it_tells_what_is_served_and_how_full_it_is(running, daemon, tiny_llama):
    _, plane, _ = running
    (served,) = plane.registered
    assert (served.model_id, served.folder) == (daemon.model.model_id, tiny_llama)
    assert served.max_model_len == daemon.model.max_model_len
    await until(lambda: plane.loads)
    assert plane.loads[0] == 24


async def test_tokens_go_out_as_they_come_with_an_end_and_the_usage(running):
    adapter, plane, _ = running
    told = await outputs(adapter, asked())
    assert [token for one in told for token in one["token_ids"]] == [5, 6, 7, 5, 6, 7]
    assert [one.get("finish_reason") for one in told] == [None] * (len(told) - 1) + ["length"]
    assert told[-1]["completion_usage"]["completion_tokens"] == 6
    assert plane.peers == [("r1", 3)]


async def test_no_token_goes_out_before_the_peers_know_the_prompt(running):
    adapter, plane, _ = running
    plane.peers_answer.clear()
    stream = adapter.generate(asked(), Asker())
    first = asyncio.ensure_future(anext(stream))
    done, _ = await asyncio.wait({first}, timeout=0.2)
    assert not done
    plane.peers_answer.set()
    assert (await first)["token_ids"]
    await stream.aclose()


async def test_what_another_has_begun_goes_on_where_it_was(running, daemon):
    adapter, plane, _ = running
    adapter.peer_told("r1", 3)
    await outputs(adapter, asked((5, 6, 7, 5, 6), max_tokens=4, min_tokens=1))
    (request,) = daemon.submitted
    sampling = request.sequences[0].sampling
    assert (sampling.output_offset, sampling.max_tokens, sampling.min_tokens) == (2, 4, 3)
    assert plane.peers == []


async def test_who_does_not_want_it_any_more_frees_the_daemon(running, daemon):
    adapter, _, _ = running
    daemon.interval_s = 0.01
    asker = Asker()
    stream = adapter.generate(asked(max_tokens=200), asker)
    await anext(stream)
    asker.stop()
    with pytest.raises(LostError):
        async for _ in stream:
            pass
    await until(lambda: not daemon.live)


async def test_refusals_are_the_clients_and_a_full_daemon_is_not(running, daemon):
    adapter, _, _ = running
    with pytest.raises(UnsupportedRequest, match="min_tokens"):
        await outputs(adapter, asked(min_tokens=50))
    daemon.unavailable = Unavailable("draining", code="draining")
    with pytest.raises(LostError, match="draining"):
        await outputs(adapter, asked())


async def test_it_leaves_while_the_daemon_drains_and_comes_back(running, daemon):
    _, plane, _ = running
    daemon.show("draining")
    await until(lambda: not plane.is_joined)
    daemon.show("ready")
    await until(lambda: plane.is_joined)
    assert len(plane.registered) == 1


async def test_told_to_end_it_leaves_first_and_waits_for_what_is_under_way(running, daemon):
    adapter, plane, task = running
    daemon.interval_s = 0.01
    reply = asyncio.create_task(outputs(adapter, asked(max_tokens=30)))
    await until(lambda: daemon.live)
    adapter.end()
    await task
    assert plane.calls == ["join", "leave"]
    assert await adapter.drained(30)
    assert (await reply)[-1]["finish_reason"] == "length"


async def test_a_daemon_that_dies_breaks_off_its_replies_and_may_come_back(
    daemon, tmp_path, monkeypatch, tiny_llama
):
    monkeypatch.setattr(worker, "RETRY_S", 0.01)
    plane = Plane()
    adapter = Adapter(tmp_path / "p.sock", plane)
    task = asyncio.create_task(adapter.run())
    daemon.gate.clear()
    async with serving(daemon, tmp_path / "p.sock", grace_s=0.1):
        await until(lambda: plane.is_joined)
        reply = asyncio.create_task(outputs(adapter, asked()))
        await until(lambda: daemon.live)
    with pytest.raises(LostError):
        await reply
    await until(lambda: not plane.is_joined)
    async with serving(Daemon(tiny_llama), tmp_path / "p.sock"):
        await until(lambda: plane.is_joined)
        assert (await outputs(adapter, asked()))[-1]["finish_reason"] == "length"
        assert len(plane.registered) == 1
        adapter.end()
        await task


async def test_a_daemon_that_is_silent_counts_as_gone_until_it_speaks(
    daemon, tmp_path, monkeypatch
):
    monkeypatch.setattr(worker, "RETRY_S", 0.01)
    monkeypatch.setattr(worker, "SILENCE_S", 0.3)
    plane = Plane()
    adapter = Adapter(tmp_path / "p.sock", plane)
    task = asyncio.create_task(adapter.run())
    daemon.gate.clear()
    async with serving(daemon, tmp_path / "p.sock"):
        await until(lambda: plane.is_joined)
        reply = asyncio.create_task(outputs(adapter, asked()))
        await until(lambda: daemon.live or reply.done())
        daemon.speaks.clear()
        await until(lambda: not plane.is_joined)
        with pytest.raises(LostError):
            await reply
        daemon.speaks.set()
        await until(lambda: plane.is_joined)
        adapter.end()
        await task


async def test_another_model_ends_it(running, daemon):
    _, _, task = running
    daemon.show("draining")
    daemon.model = dataclasses.replace(daemon.model, model_id="another")
    daemon.show("ready")
    with pytest.raises(PenstockError, match="another"):
        await task
