"""Who used which joules: whatever happens, the account adds up."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.configuration.config import ServeConfig
from appliance.devices.machine import MIN_INTERVAL_NS, Devices, find_packages
from appliance.fleet.boot import make_plan
from appliance.frame.protocol import DeviceFrame
from appliance.log.query import RowQuery, UsageQuery
from appliance.log.writer import RequestLog
from appliance.request import Peer, Request
from appliance.service import Service
from appliance.telemetry.energy import MAX_INTERVALS, WINDOW_S, Energy
from engine.cache.blocks import Ledger
from engine.schedule.queue import FairQueue
from engine.schedule.router import Router
from engine.schedule.sequence import Sequence, Stamps
from engine.text.tokenizer import Tokenizer
from engine.wire.messages import Admit, SequenceStep, Stepped
from engine.wire.run_spec import RunSpec
from engine.wire.sampling import SamplingParams
from tests.appliance.logs import request

S = 1_000_000_000
STARTED_NS = 5_000 * S
NUM_CORES = 4
GPUS = {"a": "gpu0", "b": "gpu0"}


def asked(*seq_ids: int) -> Request:
    """A request of some sequences, each of 100 prompt tokens."""
    sampling = SamplingParams(max_tokens=1000, seed=0)
    rid = f"cmpl-{seq_ids[0]}"
    return request(
        rid, *(Sequence(i, rid, 0, [1] * 100, RunSpec(sampling), Stamps(0)) for i in seq_ids)
    )


class Account:
    """An account, its requests and devices that have used so much."""

    def __init__(self, *requests: Request, gpus: dict[str, str] | None = None) -> None:
        self.energy = Energy(NUM_CORES, gpus)
        self.used = {"prefill": 2, "decode": 1}
        for one in requests:
            self.energy.opened(one)

    def read(self, seconds: float, **energy_j: float | None) -> None:
        """Every device has used so many joules after so many seconds."""
        frames = [
            DeviceFrame(
                name=name,
                kind="gpu" if name.startswith("gpu") else "cpu",
                energy_j=value,
                power_source=None if value is None else "rapl",
            )
            for name, value in energy_j.items()
        ]
        self.energy.settle(frames, STARTED_NS + int(seconds * S))

    def step(self, worker: str, began_s: float, ended_s: float, *entries: SequenceStep) -> None:
        began_ns, ended_ns = (STARTED_NS + int(seconds * S) for seconds in (began_s, ended_s))
        step = Stepped(began_ns, ended_ns, 0, 0, list(entries))
        self.energy.stepped(worker, step, self.used.get(worker, 1))


def entry(
    one: Request | int, num_tokens: int, num_computed: int, token: int | None = None
) -> SequenceStep:
    seq_id = one if isinstance(one, int) else one.sequences[0].seq_id
    return SequenceStep(
        seq_id, 0, num_computed, [] if token is None else [token], [], None, None, num_tokens, 0
    )


def test_a_step_takes_its_share_of_the_machines_core_seconds() -> None:
    one = asked(1)
    account = Account(one)
    account.read(0, package=0.0)
    account.step("prefill", 0.25, 0.75, entry(one, 50, 50))  # two cores of four for half the time
    account.read(1, package=40.0)
    frame = account.energy.frame()
    assert (one.prefill_j, one.decode_j) == (10.0, 0.0)
    assert (frame.total_j, frame.prefill_j, frame.decode_j) == (40.0, 10.0, 0.0)
    assert (frame.unattributed_j, frame.power_w) == (30.0, 40.0)
    assert (frame.prefill_j_per_token, frame.decode_j_per_token) == (0.2, None)


def test_a_steps_joules_are_divided_by_tokens_and_prompts_are_prefill() -> None:
    prompt, output, both = asked(1), asked(2), asked(3)
    account = Account(prompt, output, both)
    account.read(0, package=0.0)
    account.step(
        "prefill",
        0.0,
        1.0,
        entry(prompt, 6, 6),
        entry(output, 1, 101, token=7),
        entry(both, 3, 102, token=7),  # a recovery: its last prompt token, and two that it had said
    )
    account.read(1, package=20.0)
    assert (prompt.prefill_j, prompt.decode_j) == (6.0, 0.0)
    assert (output.prefill_j, output.decode_j) == (0.0, 1.0)
    assert (both.prefill_j, both.decode_j) == (1.0, 2.0)
    frame = account.energy.frame()
    assert (frame.prefill_j_per_token, frame.decode_j_per_token) == (1.0, 1.5)


def test_two_workers_on_one_gpu_share_it_by_their_time_and_no_more_than_it_used() -> None:
    one, other = asked(1), asked(2)
    account = Account(one, other, gpus=GPUS)
    account.read(0, gpu0=0.0, gpu1=0.0)
    account.step("a", 0.0, 1.0, entry(one, 1, 101))
    account.step("b", 0.5, 1.0, entry(other, 1, 101))
    account.read(1, gpu0=300.0, gpu1=50.0)
    assert (one.decode_j, other.decode_j) == (200.0, 100.0)
    assert account.energy.frame().unattributed_j == 50.0  # of the GPU that nobody runs on


def test_a_step_of_several_readings_takes_its_part_of_each() -> None:
    one = asked(1)
    account = Account(one)
    account.used["prefill"] = NUM_CORES
    for second in range(4):
        account.read(second, package=10.0 * second)
    account.step("prefill", 0.5, 3.25, entry(one, 100, 100, token=7))
    assert one.prefill_j is None
    account.read(4, package=40.0)
    assert one.prefill_j == pytest.approx(27.5)


def test_a_late_report_takes_of_what_is_left_only() -> None:
    one, late = asked(1), asked(2)
    account = Account(one, late, gpus=GPUS)
    account.read(0, gpu0=0.0)
    account.step("a", 0.0, 0.75, entry(one, 1, 101))
    account.read(1, gpu0=100.0)
    account.step("b", 0.0, 1.0, entry(late, 1, 101))
    account.read(2, gpu0=100.0)
    assert (one.decode_j, late.decode_j) == (75.0, 25.0)
    assert account.energy.frame().unattributed_j == pytest.approx(0.0)


def test_a_late_report_costs_what_it_would_have_in_time() -> None:
    one, late = asked(1), asked(2)
    account = Account(one, late, gpus=GPUS)
    account.read(0, gpu0=0.0)
    account.step("a", 0.0, 0.5, entry(one, 1, 101))
    account.read(1, gpu0=100.0)
    account.step("b", 0.5, 0.75, entry(late, 1, 101))
    account.read(2, gpu0=100.0)
    assert (one.decode_j, late.decode_j) == (50.0, 25.0)


def test_what_a_request_that_nobody_knows_any_more_still_cost_is_nobodys() -> None:
    one = asked(1)
    account = Account(one)
    account.read(0, package=0.0)
    account.step("prefill", 0.0, 1.0, entry(one, 1, 1), entry(99, 9, 9, token=7))
    account.step("prefill", 0.0, 1.0, entry(98, 9, 9))
    account.read(1, package=40.0)
    assert one.prefill_j == 2.0
    frame = account.energy.frame()
    assert (frame.prefill_j, frame.unattributed_j) == (2.0, 38.0)


def test_no_reading_no_figures_and_nothing_kept() -> None:
    one = asked(1)
    account = Account(one)
    for second in range(3):
        account.step("prefill", second, second + 1, entry(one, 1, 1))
        account.energy.closed(asked(second + 2))
        account.read(second + 1, package=None)
    frame = account.energy.frame()
    assert frame.method == "not reported"
    figures = set(frame.__struct_fields__) - {"method", "window_s"}
    assert {getattr(frame, name) for name in figures} == {None}
    assert (one.prefill_j, one.decode_j) == (None, None)
    assert account.energy.take_complete() == []


def test_workers_on_what_is_not_metered_are_not_charged() -> None:
    one = asked(1)
    account = Account(one)
    account.read(0, package=None, gpu0=0.0)
    account.step("prefill", 0.0, 1.0, entry(one, 1, 1))
    account.read(1, package=None, gpu0=60.0)
    assert one.prefill_j is None
    frame = account.energy.frame()
    assert (frame.total_j, frame.prefill_j, frame.unattributed_j) == (60.0, 0.0, 60.0)


def test_a_device_that_stops_reporting_keeps_what_it_has_used() -> None:
    account = Account()
    account.read(0, package=0.0, gpu0=0.0)
    account.read(1, package=10.0, gpu0=100.0)
    account.read(2, package=20.0, gpu0=None)
    assert account.energy.frame().total_j == 120.0
    account.read(3, package=30.0, gpu0=350.0)
    assert account.energy.frame().total_j == 380.0


def test_rates_are_those_of_the_window() -> None:
    account = Account()
    account.read(0, package=0.0)
    account.read(1, package=1000.0)
    for second in range(2, 100):
        account.read(second, package=1000.0 + 5 * second)
    frame = account.energy.frame()
    assert frame.window_s == WINDOW_S
    assert frame.power_w == pytest.approx(5.0)


def test_a_closed_request_is_complete_with_the_next_reading() -> None:
    one = asked(1)
    account = Account(one)
    account.read(0, package=0.0)
    account.step("prefill", 0.0, 0.5, entry(one, 1, 1))
    account.energy.closed(one)
    assert account.energy.take_complete() == []
    account.read(0, package=0.0)  # the same reading again
    assert account.energy.take_complete() == []
    account.read(1, package=40.0)
    assert account.energy.take_complete() == [one]
    assert one.prefill_j == 10.0
    account.step("prefill", 1.0, 2.0, entry(one, 1, 1))
    account.read(2, package=80.0)
    assert account.energy.take_complete() == []
    assert one.prefill_j == 10.0


def test_a_request_has_the_joules_of_all_its_sequences() -> None:
    both = asked(1, 2)
    account = Account(both)
    account.read(0, package=0.0)
    account.step("prefill", 0.0, 0.5, entry(1, 1, 1))
    account.step("prefill", 0.5, 1.0, entry(2, 1, 101))
    account.read(1, package=40.0)
    assert (both.prefill_j, both.decode_j) == (10.0, 10.0)


WORKERS = ("prefill", "decode", "a", "b")
TIMES = st.floats(0.0, 3.0)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(WORKERS),
        TIMES,
        st.floats(0.0, 70.0),
        st.lists(st.tuples(st.integers(0, 4), st.integers(1, 150)), min_size=1, max_size=4),
    ),
    max_size=6,
)
READINGS = st.tuples(
    st.floats(0.001, 30.0),
    st.none() | st.floats(0.0, 1e4),
    st.none() | st.floats(0.0, 1e4),
)


@given(st.lists(st.tuples(STEPS, READINGS), min_size=1, max_size=MAX_INTERVALS // 4))
def test_prefill_decode_and_the_rest_are_the_total_whatever_comes(
    rounds: list[tuple[Any, tuple[float, float | None, float | None]]],
) -> None:
    requests = [asked(seq_id) for seq_id in range(4)]  # and 4, which nobody knows
    account, now_s, cpu_j, gpu_j = Account(*requests, gpus=GPUS), 0.0, 0.0, 0.0
    account.read(0, package=0.0, gpu0=0.0)
    for steps, (elapsed_s, more_cpu_j, more_gpu_j) in rounds:
        for worker, before_s, lasted_s, parts in steps:
            ended_s = now_s + elapsed_s - min(before_s, elapsed_s)
            entries = [entry(seq_id, n, n + 60, token=1) for seq_id, n in parts]
            account.step(worker, max(0.0, ended_s - lasted_s), ended_s, *entries)
        now_s += elapsed_s
        cpu_j += more_cpu_j or 0.0
        gpu_j += more_gpu_j or 0.0
        account.read(
            now_s,
            package=None if more_cpu_j is None else cpu_j,
            gpu0=None if more_gpu_j is None else gpu_j,
        )
        frame = account.energy.frame()
        total_j = frame.total_j
        prefill_j = sum(one.prefill_j or 0.0 for one in requests)
        decode_j = sum(one.decode_j or 0.0 for one in requests)
        assert frame.prefill_j == pytest.approx(prefill_j)
        assert frame.decode_j == pytest.approx(decode_j)
        assert prefill_j + decode_j + frame.unattributed_j == pytest.approx(total_j)
        assert prefill_j + decode_j <= total_j * (1 + 1e-9)


# --------------------------------------------------------------------------------------------------
# From a growing counter to requests, rows, users and frames: the same joules everywhere.

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
