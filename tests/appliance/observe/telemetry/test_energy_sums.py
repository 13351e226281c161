"""From a growing counter to requests, rows, users and frames: the joules are equal everywhere."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from appliance.configuration.settings import ServeConfig
from appliance.daemon.requests.request import Peer, Request
from appliance.daemon.serving.service import Service
from appliance.devices.machine import MIN_INTERVAL_NS, Devices, find_packages
from appliance.fleet.boot import make_plan
from appliance.observe.log.query import RowQuery, UsageQuery
from appliance.observe.log.writer import RequestLog
from engine.scheduler.cache.ledger import Ledger
from engine.scheduler.queue.queue import FairQueue
from engine.scheduler.router import Router
from engine.scheduler.sequences.sequence import Sequence, Stamps
from engine.text.tokenizer import Tokenizer
from engine.wire.messages import Admit, SequenceStep, Stepped
from engine.wire.run_spec import RunSpec
from engine.wire.sampling import SamplingParams

MS = 1_000_000
STEP_NS = 5 * MS


class Counter:
    """A CPU package as the kernel shows it."""

    def __init__(self, root: Path) -> None:
        self._folder = root / "intel-rapl:0"
        self._folder.mkdir(parents=True)
        (self._folder / "name").write_text("package-0")
        (self._folder / "max_energy_range_uj").write_text(str(10**12))
        self._used_uj = 0
        self.use(0.0)

    def use(self, joules: float) -> None:
        self._used_uj += int(joules * 1e6)
        (self._folder / "energy_uj").write_text(str(self._used_uj))


class Machine:
    """A service, its log, and two workers whose every step takes as long as the last."""

    def __init__(self, model: Path, folder: Path, devices: Devices) -> None:
        folders = {name: folder / name for name in ("socket", "state_dir")}
        self.plan = make_plan(ServeConfig(model=model, **folders))
        self.log = RequestLog(folder / "log.db")
        self.log.start_run(
            version="0", model="m", dtype="float32", roles="static", transport="alias"
        )
        self.admitted: dict[str, dict[int, Admit]] = {"prefill": {}, "decode": {}}
        self.router = Router(
            self.plan.placement.topology,
            Ledger(self.plan.placement.pools()),
            FairQueue(8, 1000),
            send=self._send,
            emit=lambda *tokens: self.service.emit(*tokens),
            max_num_batched_tokens=64,
            cores={"prefill": (0,), "decode": (1,)},
        )
        self.service = Service(
            self.plan,
            self.router,
            SimpleNamespace(is_started=True, is_lost=False, workers={}),
            Tokenizer.from_folder(model),
            self.log,
            keeps_text=False,
            devices=devices,
        )
        for worker in self.admitted:
            self.router.worker_ready(worker, time.monotonic_ns())

    def _send(self, worker: str, command: Any) -> None:
        if isinstance(command, Admit):
            self.admitted[worker][command.seq_id] = command

    def submit(self, user: str, num_prompt_tokens: int, num_output_tokens: int) -> Request:
        number = self.service.next_seq_id()
        peer = Peer(uid=1, user=user)
        one = Sequence(
            seq_id=number,
            request_id=f"cmpl-{number}",
            index=0,
            prompt_token_ids=[1] * num_prompt_tokens,
            spec=RunSpec(SamplingParams(max_tokens=num_output_tokens, seed=0), owner=user),
            stamps=Stamps(time.monotonic_ns()),
        )
        request = Request(
            request_id=f"cmpl-{number}",
            endpoint="/v1/completions",
            model="m",
            peer=peer,
            is_stream=False,
            received_at="2026-01-01T00:00:00.000Z",
            sequences=[one],
        )
        self.service.submit(request)
        return request

    def step(self, worker: str) -> None:
        """One step of all that the worker has: a prompt whole, or one more token."""
        admitted = self.admitted[worker]
        entries = []
        for admit in list(admitted.values()):
            one = self.router.at.running[admit.seq_id]
            num_tokens = one.num_tokens - one.num_computed_tokens
            num_output_tokens = one.num_output_tokens + 1
            is_last = num_output_tokens == one.sampling.max_tokens
            is_released = num_output_tokens == admit.until_output
            if is_released:
                del admitted[admit.seq_id]
            entries.append(
                SequenceStep(
                    admit.seq_id,
                    admit.generation,
                    one.num_tokens,
                    [7],
                    [],
                    "length" if is_last else None,
                    ("ended" if is_last else "moved") if is_released else None,
                    num_tokens,
                    admitted_ns=0,
                )
            )
        ended_ns = time.monotonic_ns()
        self.service.worker_reported(worker, Stepped(ended_ns - STEP_NS, ended_ns, 0, 0, entries))

    def read(self) -> dict[str, Any]:
        """The next frame, with a new reading of the devices."""
        time.sleep(MIN_INTERVAL_NS / 1e9)
        self.service.make_frame()
        return msgspec.json.decode(self.service.frame_json())

    def close(self) -> None:
        self.log.close()
        for fd in self.plan.inherited_fds:
            os.close(fd)


@pytest.fixture
def counter(tmp_path: Path) -> Counter:
    return Counter(tmp_path / "powercap")


@pytest.fixture
def machine(tiny_llama: Path, tmp_path: Path, counter: Counter) -> Iterator[Machine]:
    devices = Devices(find_packages(tmp_path / "powercap"), [])
    machine = Machine(tiny_llama, tmp_path, devices)
    yield machine
    machine.close()


def run_to_the_end(machine: Machine) -> list[Request]:
    """Two of ann's requests and one of bob's, closed; nothing is read meanwhile."""
    requests = [machine.submit("ann", 20, 4), machine.submit("ann", 8, 2)]
    requests.append(machine.submit("bob", 30, 3))
    machine.step("prefill")
    while machine.admitted["decode"]:
        machine.step("decode")
    for each in requests:
        assert each.is_finished
        machine.service.close(each, 200)
    return requests


def test_requests_rows_users_and_the_frame_add_up_to_the_counter(
    machine: Machine, counter: Counter
) -> None:
    requests = run_to_the_end(machine)
    assert [row["prefill_j"] for row in machine.log.rows(RowQuery())] == [None] * 3
    counter.use(30.0)
    energy = machine.read()["energy"]
    assert energy["total_j"] == pytest.approx(30.0)
    parts = [energy[f"{part}_j"] for part in ("prefill", "decode", "unattributed")]
    assert sum(parts) == pytest.approx(30.0)
    assert min(parts) > 0
    rows = machine.log.rows(RowQuery())
    frames = machine.service.request_frames()
    users = machine.log.usage(UsageQuery())
    for phase in ("prefill_j", "decode_j"):
        for things in (rows, frames):
            assert len(things) == len(requests)
            assert sum(one[phase] for one in things) == pytest.approx(energy[phase])
        assert sum(user[phase] for user in users) == pytest.approx(energy[phase], abs=1e-3)
    shown = machine.service.logged_frame(requests[0].request_id)
    assert shown["prefill_j"] == frames[-1]["prefill_j"] > 0
    by_user = {user["user"]: user["prefill_j"] for user in users}
    assert by_user["bob"] == pytest.approx(by_user["ann"] * 30 / 28, abs=1e-3)


def test_a_live_request_shows_what_it_has_used_so_far(machine: Machine, counter: Counter) -> None:
    request = machine.submit("ann", 20, 3)
    machine.step("prefill")
    counter.use(10.0)
    (frame,) = machine.read()["requests"]
    assert frame["prefill_j"] > 0
    assert frame["decode_j"] == 0
    machine.step("decode")
    counter.use(10.0)
    (later,) = machine.read()["requests"]
    assert later["decode_j"] > 0
    assert later["prefill_j"] == frame["prefill_j"]
    machine.step("decode")
    machine.service.close(request, 200)
    (row,) = machine.log.rows(RowQuery())
    assert row["decode_j"] == later["decode_j"]
    counter.use(10.0)
    energy = machine.read()["energy"]
    (row,) = machine.log.rows(RowQuery())
    assert row["decode_j"] > later["decode_j"]
    assert row["decode_j"] == pytest.approx(energy["decode_j"])


def test_without_a_power_reading_everything_says_so(tiny_llama: Path, tmp_path: Path) -> None:
    machine = Machine(tiny_llama, tmp_path, Devices([], []))
    run_to_the_end(machine)
    energy = machine.read()["energy"]
    assert energy["method"] == "not reported"
    assert energy["total_j"] is None
    rows = [*machine.log.rows(RowQuery()), *machine.service.request_frames()]
    assert {(row["prefill_j"], row["decode_j"]) for row in rows} == {(None, None)}
    assert {user["energy_j"] for user in machine.log.usage(UsageQuery())} == {None}
    machine.close()
