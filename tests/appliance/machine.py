"""A service with all its parts but workers, for tests."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec

from appliance.configuration.settings import ServeConfig
from appliance.daemon.requests.request import Peer, Request
from appliance.daemon.serving.service import Service
from appliance.fleet.boot import make_plan
from appliance.fleet.worker_state import WorkerState
from appliance.observe.log.query import RowQuery
from appliance.observe.log.writer import RequestLog
from engine.scheduler.cache.ledger import Ledger
from engine.scheduler.queue.queue import FairQueue
from engine.scheduler.router import Router
from engine.scheduler.sequences.sequence import Sequence, Stamps
from engine.text.tokenizer import Tokenizer
from engine.wire.run_spec import RunSpec
from engine.wire.sampling import SamplingParams
from tests.worlds.fake_workers import FakeWorker

BLOCK_SIZE = 64
"""Tokens in a block of the daemon."""


class Machine:
    """A service with all its parts but workers: nothing that it accepts ever runs."""

    def __init__(self, plan, request_log, folder):
        self.plan = plan
        self.send = lambda worker, command: None
        """What becomes of a command to a worker."""
        self.router = Router(
            plan.placement.topology,
            Ledger(plan.placement.pools()),
            FairQueue(8, 100),
            send=lambda worker, command: self.send(worker, command),
            emit=lambda *tokens: self.service.emit(*tokens),
            max_num_batched_tokens=64,
        )
        self.supervisor = SimpleNamespace(
            is_started=True, is_lost=False, workers={}, waits_for_others=lambda name: False
        )
        self.service = Service(
            plan,
            self.router,
            self.supervisor,
            Tokenizer.from_folder(folder),
            request_log,
            keeps_text=False,
        )

    def request(self, *args, **fields):
        return a_request(self.service, *args, **fields)

    def run(self):
        """Let workers that compute nothing follow the router until nothing is left to do."""
        memory, now_ns = {}, time.monotonic_ns()
        pool_of = self.router.topology.pool_of
        names = [plan.name for plan, _ in self.plan.workers]
        workers = {
            name: FakeWorker(name, pool_of(name), memory, block_size=BLOCK_SIZE) for name in names
        }
        self.send = lambda name, command: workers[name].inbox.append(command)
        self.start_workers()
        while any(one.inbox or one.outbox or one.running for one in workers.values()):
            for name, worker in workers.items():
                while worker.inbox:
                    worker.receive(now_ns)
                worker.step(now_ns)
                while worker.outbox:
                    self.service.worker_reported(name, worker.outbox.popleft())
                    self.router.check_invariants()

    def submit(self, *args, **fields):
        request = self.request(*args, **fields)
        self.service.submit(request)
        self.router.check_invariants()
        return request

    @property
    def frame(self):
        return msgspec.json.decode(self.service.frame_json())

    def events(self):
        return [(event["code"], event["message"]) for event in self.frame["events"]]

    def log_rows(self):
        return self.service.log_rows(RowQuery())

    def start_workers(self):
        """Take in that they are ready; what they are sent is lost."""
        for plan, setup in self.plan.workers:
            self.supervisor.workers[plan.name] = WorkerState(plan, setup, "ready", os.getpid())
        for plan, _ in self.plan.workers:
            self.service.worker_ready(plan.name)


def a_request(service, peer="her", num_sequences=1, num_prompt_tokens=3, max_tokens=4):
    """A request for any appliance, of its own ids."""
    request_id = f"cmpl-{service.next_seq_id()}"
    peer = Peer(uid=1, user=peer)
    sequences = [
        Sequence(
            seq_id=service.next_seq_id(),
            request_id=request_id,
            index=index,
            prompt_token_ids=[1] * num_prompt_tokens,
            spec=RunSpec(SamplingParams(max_tokens=max_tokens, seed=0), owner=peer.name),
            stamps=Stamps(time.monotonic_ns()),
        )
        for index in range(num_sequences)
    ]
    return Request(
        request_id=request_id,
        endpoint="/v1/completions",
        model="m",
        peer=peer,
        is_stream=False,
        received_at="2026-01-01T00:00:00.000Z",
        sequences=sequences,
    )


def make_machine(model: Path, folder: Path) -> Iterator[Machine]:
    """A machine, and its end."""
    folders = {name: folder / name for name in ("socket", "state_dir")}
    plan = make_plan(ServeConfig(model=model, roles="static", **folders))
    request_log = RequestLog(folder / "log.db")
    request_log.start_run(version="0", model="m", dtype="float32", roles="static", transport=None)
    yield Machine(plan, request_log, model)
    request_log.close()
    for fd in plan.inherited_fds:
        os.close(fd)
