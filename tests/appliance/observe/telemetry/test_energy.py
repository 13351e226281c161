"""Who used which joules: whatever happens, the account adds up."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.daemon.requests.request import Request
from appliance.observe.frame.protocol import DeviceFrame
from appliance.observe.telemetry.energy import MAX_INTERVALS, WINDOW_S, Energy
from engine.scheduler.sequences.sequence import Sequence, Stamps
from engine.wire.messages import SequenceStep, Stepped
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
        self.energy.divide(frames, STARTED_NS + int(seconds * S))

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
