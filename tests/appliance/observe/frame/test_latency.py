"""Stages add up, whatever was reached; quantiles and windows are exact."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.observe.frame.latency import Stages, Window, in_order, quantile, stages
from engine.scheduler.sequences.sequence import Stamps

MS = 1_000_000
PARTS = (
    *("tokenize_ms", "queue_ms", "restore_ms", "prefill_ms", "handoff_ms"),
    *("decode_wait_ms", "decode_ms", "paused_ms"),
)
STAMPS = (
    "tokenized_ns",
    "started_ns",
    "first_token_ns",
    "attached_ns",
    "decode_started_ns",
)


def stamps_at(**at_ms: float) -> Stamps:
    return Stamps(0, **{f"{name}_ns": int(ms * MS) for name, ms in at_ms.items()})


@st.composite
def finished_stamps(draw: st.DrawFn) -> Stamps:
    """Any stamps of a finished sequence, also out of order and with holes."""
    instants = st.integers(1_000, 10_000_000)
    stamps = {name: draw(st.none() | instants) for name in STAMPS}
    paused_ns = draw(st.none() | st.integers(0, 10_000_000))
    stamps["restored_ns"] = draw(st.none() | st.integers(0, 10_000_000))
    return Stamps(1_000, **stamps, finished_ns=draw(instants), paused_ns=paused_ns)


def total_ms(cut: Stages) -> float:
    return sum(getattr(cut, part) or 0.0 for part in PARTS)


@given(finished_stamps())
def test_stages_add_up_to_e2e_whatever_was_reached(stamps: Stamps) -> None:
    cut = stages(stamps, 1)
    assert cut.e2e_ms is not None
    assert total_ms(cut) == pytest.approx(cut.e2e_ms)
    assert all((getattr(cut, part) or 0.0) >= 0.0 for part in PARTS)


@given(finished_stamps())
def test_ttft_is_tokenize_and_queue_and_restore_and_prefill(stamps: Stamps) -> None:
    cut = stages(stamps, 1)
    if cut.ttft_ms is None:
        assert stamps.first_token_ns is None
    else:
        first_parts = (cut.tokenize_ms, cut.queue_ms, cut.restore_ms, cut.prefill_ms)
        assert cut.ttft_ms == pytest.approx(sum(part or 0.0 for part in first_parts))


@given(finished_stamps())
def test_putting_in_order_twice_changes_nothing(stamps: Stamps) -> None:
    assert in_order(in_order(stamps)) == in_order(stamps)


def test_a_pause_lasts_until_the_next_token_and_is_no_time_of_decoding() -> None:
    stamps = stamps_at(tokenized=1, started=3, first_token=10, decode_started=12)
    stamps.pause(20 * MS)
    stamps.pause(21 * MS)  # its blocks were taken again before it had got further
    stamps.token(25 * MS)
    stamps.token(26 * MS)
    assert stages(stamps, 3).paused_ms == 5.0
    stamps.pause(28 * MS)
    stamps.finish(31 * MS)
    cut = stages(stamps, 3)
    assert (cut.decode_ms, cut.paused_ms, cut.e2e_ms) == (11.0, 8.0, 31.0)


def test_a_pause_before_the_first_token_is_time_in_the_queue() -> None:
    stamps = stamps_at(tokenized=1, started=3)
    stamps.pause(5 * MS)
    stamps.started_ns = 9 * MS
    stamps.token(12 * MS)
    stamps.finish(12 * MS)
    cut = stages(stamps, 1)
    assert (cut.queue_ms, cut.prefill_ms, cut.paused_ms) == (8.0, 3.0, None)


def test_the_wait_for_the_disk_is_no_time_in_the_queue() -> None:
    stamps = stamps_at(tokenized=1, started=9, first_token=10, finished=12)
    stamps.restored_ns = None
    assert (stages(stamps, 1).queue_ms, stages(stamps, 1).restore_ms) == (8.0, None)
    restoring = stamps_at(tokenized=1)
    restoring.restored(2 * MS)
    restoring.restored(3 * MS)
    restoring.finish(9 * MS)  # a client that gave up
    cut = stages(restoring, 0)
    assert (cut.queue_ms, cut.restore_ms, cut.e2e_ms) == (3.0, 5.0, 9.0)


def test_what_comes_from_disk_after_the_first_token_is_a_part_of_the_pause() -> None:
    stamps = stamps_at(tokenized=1, started=3, first_token=10, decode_started=12)
    stamps.pause(20 * MS)
    stamps.restored(4 * MS)
    stamps.token(26 * MS)
    stamps.finish(27 * MS)
    cut = stages(stamps, 2)
    assert (cut.restore_ms, cut.paused_ms) == (None, 6.0)


def test_a_pause_ends_the_wait_for_decode() -> None:
    stamps = stamps_at(tokenized=1, started=3, first_token=10)
    stamps.pause(14 * MS)
    stamps.token(20 * MS)
    stamps.finish(21 * MS)
    cut = stages(stamps, 2)
    assert (cut.decode_wait_ms, cut.paused_ms, cut.decode_ms) == (4.0, 6.0, 1.0)


def test_a_handed_over_request_has_every_stage() -> None:
    stamps = stamps_at(
        tokenized=1, started=3, first_token=10, attached=11, decode_started=12.5, finished=30
    )
    stamps.second_token_ns, stamps.last_token_ns = 15 * MS, 29 * MS
    assert stages(stamps, 20) == Stages(
        tokenize_ms=1.0,
        queue_ms=2.0,
        prefill_ms=7.0,
        handoff_ms=1.0,
        decode_wait_ms=1.5,
        decode_ms=17.5,
        ttft_ms=10.0,
        first_itl_ms=5.0,
        tpot_ms=1.0,
        e2e_ms=30.0,
    )


def test_a_colocated_request_has_no_handoff() -> None:
    cut = stages(
        stamps_at(tokenized=1, started=3, first_token=10, decode_started=9, finished=30), 5
    )
    assert cut.handoff_ms is None
    # The worker began the next step before the daemon read token 1.
    assert cut.decode_wait_ms == 0.0
    assert cut.decode_ms == 20.0


def test_a_cancel_closes_the_stage_that_was_open() -> None:
    in_queue = stages(stamps_at(tokenized=1, finished=5), 0)
    assert (in_queue.queue_ms, in_queue.prefill_ms, in_queue.ttft_ms) == (4.0, None, None)
    in_prefill = stages(stamps_at(tokenized=1, started=3, finished=5), 0)
    assert (in_prefill.queue_ms, in_prefill.prefill_ms, in_prefill.ttft_ms) == (2.0, 2.0, None)
    in_handoff = stages(stamps_at(tokenized=1, started=3, first_token=4, attached=6, finished=9), 1)
    assert (in_handoff.handoff_ms, in_handoff.decode_wait_ms) == (2.0, 3.0)
    assert in_handoff.decode_ms is None


def test_a_live_request_has_only_what_it_has_passed() -> None:
    cut = stages(stamps_at(tokenized=1, started=3), 0)
    assert (cut.tokenize_ms, cut.queue_ms) == (1.0, 2.0)
    assert (cut.prefill_ms, cut.e2e_ms, cut.tpot_ms) == (None, None, None)


def test_tpot_needs_two_tokens() -> None:
    stamps = stamps_at(started=1, first_token=2, last_token=2, finished=2)
    assert stages(stamps, 1).tpot_ms is None


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0, 1))
def test_a_quantile_was_seen_and_bounds_its_share(values: list[float], q: float) -> None:
    found = quantile(values, q)
    assert found in values
    assert sum(value <= found for value in values) >= q * len(values)


def test_quantiles_of_known_values() -> None:
    assert quantile([], 0.5) is None
    assert [quantile(range(1, 101), q) for q in (0.0, 0.5, 0.95, 1.0)] == [1, 50, 95, 100]


def test_a_window_forgets_what_is_too_old() -> None:
    window = Window(1.0)
    window.add(0, 1.0)
    window.add(600 * MS, 2.0)
    assert window.values(900 * MS) == [1.0, 2.0]
    assert window.values(1_000 * MS) == [2.0]
    assert window.values(5_000 * MS) == []


def test_a_window_keeps_the_newest_when_full() -> None:
    window = Window(60.0, max_values=2)
    for value in (1.0, 2.0, 3.0):
        window.add(0, value)
    assert window.values(1) == [2.0, 3.0]
