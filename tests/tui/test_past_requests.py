"""Requests of a past second are rebuilt from their rows."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.daemon.requests.row import LogRow
from appliance.observe.frame.latency import stages
from appliance.observe.frame.logged_requests import ended_frame
from engine.scheduler.sequences.sequence import Stamps
from tests.appliance.logs import US, request, sequence
from tests.recordings import request_row, write_log
from tests.tui import frames
from tui.past_requests import ended, request_at

STAMPS = (
    "t_tokenized_us", "t_started_us", "t_first_token_us", "t_attached_us", "t_decode_started_us",
    "t_second_token_us", "t_last_token_us",
)  # fmt: skip
MEASURED = (
    "tokenize_ms", "queue_ms", "prefill_ms", "ttft_ms", "handoff_ms", "decode_wait_ms",
    "decode_ms", "paused_ms", "restore_ms", "first_itl_ms", "tpot_ms", "e2e_ms", "output_tokens",
    "computed_tokens", "preemptions", "restored_tokens",
)  # fmt: skip
STAGES = (
    "tokenize_ms", "queue_ms", "restore_ms", "prefill_ms", "handoff_ms", "decode_wait_ms",
    "ttft_ms",
)  # fmt: skip


def row(**columns: Any) -> dict[str, Any]:
    made = msgspec.to_builtins(request_row("cmpl-1", 0, **columns))
    return {**made, "user": "ann"}


@pytest.mark.parametrize(
    ("age_ms", "phase", "worker", "computed", "output"),
    [
        (0, "queued", None, 0, 0),
        (999, "queued", None, 0, 0),
        (1_000, "prefilling", "prefill", 0, 0),
        (2_000, "prefilling", "prefill", 200, 0),
        (3_000, "handing_off", "prefill", 400, 1),
        (3_500, "decoding", "decode", 400, 1),
        (3_700, "decoding", "decode", 401, 2),
        (6_800, "decoding", "decode", 450, 51),
        (9_950, "decoding", "decode", 500, 101),
    ],
)
def test_a_request_goes_through_its_phases(
    age_ms: float, phase: str, worker: str | None, computed: int, output: int
) -> None:
    past = request_at(row(), age_ms, frames.busy())
    assert (past.phase, past.worker) == (phase, worker)
    assert (past.computed_tokens, past.output_tokens) == (computed, output)
    assert (past.age_ms, past.is_estimated) == (age_ms, phase != "queued")
    assert past.finish_reason is past.e2e_ms is past.decode_ms is None


def test_what_comes_later_is_not_shown_before() -> None:
    early = request_at(row(), 2_000, frames.busy())
    assert (early.queue_ms, early.prefill_ms, early.ttft_ms) == (999.0, None, None)
    assert (early.transport, early.handoff_bytes) == (None, None)
    late = request_at(row(), 5_000, frames.busy())
    assert (late.prefill_ms, late.ttft_ms, late.handoff_ms) == (2_000.0, 3_000.0, 500.0)
    assert (late.decode_wait_ms, late.first_itl_ms, late.transport) == (100.0, 700.0, "alias")
    assert request_at(row(), 500, frames.busy()).route is None
    assert late.route == "move"


def test_a_request_that_one_worker_runs_is_never_handed_off() -> None:
    stays = {"route": "decode", "t_attached_us": None, "transport": None}
    past = request_at(row(**stays), 3_200, frames.busy())
    assert (past.phase, past.worker) == ("decoding", "decode")
    assert request_at(row(**stays), 3_200, frames.colocated()).worker == "colocated"


def test_blocks_are_those_of_its_tokens_at_that_moment() -> None:
    assert request_at(row(), 500, frames.busy()).num_blocks == 0
    # of 64 tokens, for 400 of the prompt and those of the output by then
    assert request_at(row(), 5_000, frames.busy()).num_blocks == 7
    assert request_at(row(num_sequences=2), 5_000, frames.busy()).num_blocks == 8
    assert request_at(row(), 5_000, frames.loading()).num_blocks == 0


def test_a_request_for_vectors_has_neither_output_nor_blocks() -> None:
    columns = {"max_tokens": None, "completion_tokens": None, **dict.fromkeys(STAMPS[2:])}
    past = request_at(row(**columns), 2_000, frames.busy())
    assert (past.phase, past.output_tokens, past.max_tokens) == ("prefilling", None, None)
    assert past.num_blocks == 0
    over = ended(row(**columns))
    assert (over.output_tokens, over.max_tokens) == (None, None)


OFFSETS_US = st.none() | st.integers(0, 5_000_000)


@given(
    st.tuples(*[OFFSETS_US] * 7),
    st.integers(0, 5_000_000),
    OFFSETS_US,
    st.floats(0, 1),
    st.integers(0, 40),
    st.integers(1, 4),
)
def test_any_stamps_make_a_request_that_adds_up(
    offsets_us: tuple[int | None, ...],
    finished_us: int,
    paused_us: int | None,
    share: float,
    num_tokens: int,
    num_sequences: int,
) -> None:
    one = sequence()
    at_ns = [None if offset is None else 7_000 + offset * US for offset in offsets_us]
    one.stamps = Stamps(7_000, *at_ns, finished_ns=7_000 + finished_us * US)
    one.stamps.restored_ns = None if paused_us is None else paused_us // 2 * US
    one.stamps.paused_ns = None if paused_us is None else paused_us * US
    one.output_token_ids = [4] * num_tokens
    logged = msgspec.to_builtins(LogRow.from_request(request("cmpl-1", *[one] * num_sequences)))
    age_ms = share * finished_us / 1000
    past = request_at({**logged, "user": None, "route": "move"}, age_ms, frames.busy())
    assert 0 <= past.output_tokens <= num_tokens * num_sequences
    assert 0 <= past.computed_tokens <= past.prompt_tokens + past.output_tokens
    assert (past.phase == "queued") == (past.worker is None)
    final = stages(one.stamps, num_tokens)
    for name in STAGES:
        if getattr(past, name) is not None:
            assert getattr(past, name) == pytest.approx(getattr(final, name)), name
    shown = [getattr(past, name) for name in STAGES[:-1]]
    assert sum(value or 0 for value in shown) <= age_ms + 1e-6


def test_a_request_that_is_over_has_the_stages_that_the_log_gives_it(tmp_path: Path) -> None:
    cuts = (
        {},
        {"t_attached_us": None},
        dict.fromkeys(("t_attached_us", "t_decode_started_us", "t_second_token_us")),
        dict.fromkeys(STAMPS[2:]),
        dict.fromkeys(STAMPS[1:]),
        dict.fromkeys(STAMPS),
    )
    rows = [request_row(f"cmpl-{n}", 0, num_timed_tokens=1, **cut) for n, cut in enumerate(cuts)]
    rows.append(request_row("cmpl-all", 0))
    rows.append(request_row("cmpl-paused", 0, paused_us=3_000, preemptions=2))
    restored = {"restored_us": 40_000, "restored_tokens": 64, "cached_tokens": 128}
    rows.append(request_row("cmpl-restored", 0, **restored))
    rows.append(request_row("cmpl-given-up", 0, **restored, **dict.fromkeys(STAMPS[1:])))
    unknown = dict.fromkeys((*STAMPS, "t_finished_us", "completion_tokens"))
    rows.append(request_row("cmpl-killed", 0, **unknown))
    assert request_at(row(**unknown), 500, frames.busy()).output_tokens == 0
    log = write_log(tmp_path / "requests.db", [], rows)
    with closing(sqlite3.connect(log.path)) as db:
        db.row_factory = sqlite3.Row
        for one in rows:
            told = dict(db.execute("SELECT * FROM v_requests WHERE rid = ?", (one.rid,)).fetchone())
            told["id"] = told.pop("rid")
            stored = db.execute("SELECT * FROM requests WHERE rid = ?", (one.rid,)).fetchone()
            shown = msgspec.to_builtins(ended(stored))
            wanted = msgspec.to_builtins(ended_frame(told))
            assert {name: shown[name] for name in MEASURED} == pytest.approx(
                {name: wanted[name] for name in MEASURED}
            )
            assert (shown["phase"], shown["finish_reason"]) == ("finished", wanted["finish_reason"])
    log.close()
