"""What a real daemon showed, and what a recording of it shows."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest

from appliance.observe.frame.protocol import PHASES, Frame
from appliance.observe.log.query import Span
from appliance.observe.log.recording_copy import write_recording
from tests.appliance.cli_process import penstock
from tests.daemons import Daemon
from tests.recordings import assert_same
from tui.replay import Replay

NUM_STREAMED = 6
MOMENT_MS = 50
"""A busy machine takes so long to make a frame."""


class Incident:
    """A daemon under load, killed in the end, and the frames that it streamed until then."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.daemon = Daemon(folder, "--roles", "static", model=model).wait_ready()
        self.streamed: list[Frame] = []
        self.is_over = threading.Event()
        load = [threading.Thread(target=self._load, args=(number,)) for number in range(3)]
        for asker in load:
            asker.start()
        with self.daemon.http.stream("GET", "/v1/penstock/stream") as reply:
            for line in reply.iter_lines():
                self.streamed.append(msgspec.json.decode(line, type=Frame))
                if len(self.streamed) == NUM_STREAMED:
                    break
        self.is_over.set()
        for asker in load:
            asker.join()
        self.tokenize_ms = {row["id"]: row["tokenize_ms"] for row in self.daemon.log_rows()}
        """Of the requests that have ended."""
        self.recorded = folder / "live.penstock"
        environ = {**self.daemon.env, "PENSTOCK_SOCKET": str(self.daemon.socket)}
        self.record = penstock(environ, "record", "-o", str(self.recorded), "--since", "1h")
        self._kill_with_work_in_hand(folder)

    def _load(self, number: int) -> None:
        """Longer and shorter replies, one after the other."""
        while not self.is_over.is_set():
            self.daemon.complete("one two three " * 20, max_tokens=100 + 100 * number, seed=1)

    def _kill_with_work_in_hand(self, folder: Path) -> None:
        """A long reply is under way, has been recorded, and gets no row."""
        body = {"prompt": "on and on", "max_tokens": 1900, "stream": True, "ignore_eos": True}
        with (
            httpx.Client(
                transport=httpx.HTTPTransport(uds=str(self.daemon.socket)),
                base_url="http://localhost",
            ) as client,
            client.stream("POST", "/v1/completions", json=body) as reply,
        ):
            next(reply.iter_lines())
            self.last_id = reply.headers["x-request-id"]
            os.kill(self.daemon.worker_pid("decode"), signal.SIGSTOP)  # so that it stays under way
            live = self.daemon.fresh_state()
            self.is_cut = self.last_id in {one["id"] for one in live["requests"]}
            self.daemon.http.get("/v1/penstock/recording?since=1h").read()  # what waits is written
            self.daemon.kill()
        self.left_behind = folder / "killed.penstock"
        self.left_behind.touch()
        write_recording(folder / "state" / "requests.db", self.left_behind, Span())


@pytest.fixture(scope="module")
def incident(tiny_llama, tmp_path_factory) -> Incident:
    return Incident(tmp_path_factory.mktemp("incident"), tiny_llama)


@pytest.fixture
def replay(incident: Incident) -> Iterator[Replay]:
    replay = Replay(incident.recorded)
    yield replay
    replay.close()


def by_seq(replay: Replay) -> dict[int, Frame]:
    return {view.frame.seq: view.frame for view in replay.views()}


def test_the_numbers_are_those_that_were_streamed(incident: Incident, replay: Replay) -> None:
    assert incident.record.returncode == 0, incident.record.stderr
    shown = by_seq(replay)
    for told in incident.streamed:
        assert_same(shown[told.seq], told)
        assert shown[told.seq].events == told.events


def test_requests_that_had_ended_are_listed_as_they_were(
    incident: Incident, replay: Replay
) -> None:
    shown = by_seq(replay)
    num_compared = 0
    for told in incident.streamed:
        was = {one.id: one for one in told.requests if one.phase != "finished"}
        now = {one.id: one for one in shown[told.seq].requests}
        for request_id, past in now.items():
            if request_id not in was:  # it was tokenized, or it ended or came in that moment
                since_ms = incident.tokenize_ms[request_id] + MOMENT_MS
                assert past.age_ms < since_ms or past.phase == "decoding"
                continue
            assert abs(past.age_ms - was[request_id].age_ms) < MOMENT_MS
            # What waits in a worker is not told from what waits in the queue, nor the moment of a
            # handoff from that of the first step after it.
            ways = [phase for phase in PHASES if phase != "paused"]  # nobody is preempted here
            ranks = [ways.index(one.phase) for one in (past, was[request_id])]
            assert ranks[0] <= ranks[1] <= ranks[0] + 1
            num_compared += 1
        for request_id in (was.keys() & incident.tokenize_ms.keys()) - now.keys():
            assert was[request_id].age_ms < MOMENT_MS or was[request_id].phase == "decoding"
    assert num_compared >= NUM_STREAMED


def test_a_killed_daemon_leaves_all_but_the_last_seconds(incident: Incident) -> None:
    replay = Replay(incident.left_behind)
    assert replay.num_damaged == 0
    views = list(replay.views())
    newest = views[-1].frame
    assert newest.seq > incident.streamed[-1].seq
    assert newest.num_requests == incident.is_cut
    assert replay.num_unlogged(views[-1]) == incident.is_cut
    assert incident.last_id not in {one.id for one in newest.requests}
    replay.close()
