"""Refusals are counted by caller and reason, whatever a client sends."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from appliance.daemon.requests.request import Peer
from appliance.observe.telemetry.refusals import MAX_FRAMES, MAX_KINDS, OTHERS, Refusals
from engine.errors import QueueFull, RequestError

SPINNER = Peer(uid=1, user="ana", pid=9495, program="python")
WRONG_MODEL = RequestError("the model `x` does not exist", code="model_not_found", status=404)


def test_a_client_that_spins_is_named_with_its_rate_and_its_last_reason():
    refusals = Refusals()
    for tick in range(4500):
        refusals.count(SPINNER, WRONG_MODEL, 100 + tick / 450)
    (frame,) = refusals.frames(110)
    assert (frame.user, frame.client, frame.status) == ("ana", "python 9495", 404)
    assert (frame.number, frame.last_minute) == (4500, 4500)
    assert frame.per_s >= 400
    assert refusals.num_client_errors == 4500
    (later,) = refusals.frames(175)
    assert (later.number, later.last_minute, later.per_s) == (4500, 0, 0.0)


def test_new_processes_of_one_program_and_new_ports_of_one_host_are_one_caller():
    refusals = Refusals()
    for number in range(20):
        refusals.count(Peer(user="ana", pid=100 + number, program="curl"), WRONG_MODEL, 1.0)
        refusals.count(Peer(key="k", address=f"10.0.0.7:{4000 + number}"), WRONG_MODEL, 1.0)
    clients = {(each.client, each.number) for each in refusals.frames(1.0)}
    assert clients == {("curl 119", 20), ("10.0.0.7:4019", 20)}


def test_want_of_room_is_no_error_of_the_client():
    refusals = Refusals()
    refusals.count(SPINNER, QueueFull("full", retry_after_ms=1), 1.0)
    assert refusals.num_client_errors == 0
    assert [each.code for each in refusals.frames(1.0)] == ["queue_full"]


@given(st.lists(st.tuples(st.integers(0, 300), st.sampled_from([400, 404, 429])), max_size=400))
def test_memory_is_bounded_and_the_counts_add_up(seen):
    refusals = Refusals()
    for number, (caller, status) in enumerate(seen):
        peer = Peer(user=f"user{caller}", pid=caller + 1, program="p")
        refusals.count(peer, RequestError("x" * 999, code="c", status=status), float(number))
    kinds = refusals._kinds.values()
    assert sum(each.number for each in kinds) == len(seen)
    assert sum(each.user != OTHERS for each in kinds) <= MAX_KINDS
    assert len(refusals.frames(500.0)) <= MAX_FRAMES
    assert all(len(each.message) <= 200 for each in kinds)
