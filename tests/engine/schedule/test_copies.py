"""Links as they are now: what takes one down, and what comes of it."""

import pytest

from engine.cache.places import make_places
from engine.schedule.copies import MAX_STRIKES, Links
from engine.schedule.sequence import Leg
from engine.wire.messages import Copied

ROLES = (["p0", "p1"], ["decode"])
FAST, SLOW = 1000, 3000
"""Nanoseconds that a copy of 1000 bytes takes: a gigabyte a second, and a third of it."""


@pytest.fixture
def places():
    return make_places(*ROLES, "peer", in_workers=("p0", "p1", "decode"))


@pytest.fixture
def links(places):
    links = Links(places)
    links.probed("p0", {"decode": 1e9, "ring": 1e8})
    return links


def copied(elapsed_ns=FAST, error=None, num_bytes=1000, waited_ns=0):
    num_bytes = 0 if error else num_bytes
    return Copied(1, 1, num_bytes, 0, elapsed_ns, True, error, waited_ns)


def make(links, places, count, **report):
    hop = places.link("p0", "decode").hops[0]
    for _ in range(count):
        links.copied(hop, copied(**report))


def test_between_devices_there_is_a_way_through_the_host(places):
    link = places.link("p0", "decode")
    assert (link.transport, link.detour.transport) == ("peer", "shm")
    assert [hop.worker for hop in link.detour.hops] == ["p0", "decode"]
    assert places.copied_by("p0") == ["decode", "ring"]
    assert places.copied_by("decode") == ["ring"]
    assert places.transport == "peer"
    on_cores = make_places(*ROLES, "peer")
    assert on_cores.link("p0", "decode").detour is None
    assert on_cores.passing_pools() == set()


@pytest.mark.parametrize("report", [{"error": "lost"}, {"elapsed_ns": SLOW}])
def test_a_link_that_fails_again_and_again_is_taken_down_and_others_are_not(links, places, report):
    make(links, places, MAX_STRIKES - 1, **report)
    assert links.between("p0", "decode").transport == "peer"
    make(links, places, 1)
    make(links, places, MAX_STRIKES - 1, **report)
    assert links.between("p0", "decode").transport == "peer"  # not in a row
    make(links, places, 1, **report)
    assert links.between("p0", "decode").transport == "shm"
    assert links.between("p1", "decode").transport == "peer"
    assert str(MAX_STRIKES) in links.states["p0", "decode"].down
    make(links, places, 3)  # what is under way ends as it began
    assert links.between("p0", "decode").transport == "shm"
    links.probed("decode", {"ring": 1e8})
    assert links.between("p0", "decode").transport == "shm"
    links.probed("p0", {"decode": 1e9, "ring": 1e8})
    assert links.between("p0", "decode").transport == "peer"


@pytest.mark.parametrize("waited_ns", [1400, 2000, SLOW])
def test_a_link_is_not_slow_because_its_host_is_busy(links, places, waited_ns):
    make(links, places, 1)
    make(links, places, 3 * MAX_STRIKES, elapsed_ns=SLOW, waited_ns=waited_ns)
    state = links.states["p0", "decode"]
    assert (state.down, state.num_strikes) == (None, 0)
    assert state.copy_bytes_per_s > 0.6e9
    assert state.num_bytes == 1000 * (1 + 3 * MAX_STRIKES)
    make(links, places, MAX_STRIKES, elapsed_ns=3 * SLOW, waited_ns=SLOW)
    assert state.down  # it is slow, too


def test_a_try_that_fails_at_start_is_enough(places):
    links = Links(places)
    links.probed("p1", {"decode": 0.0, "ring": 1e8})
    assert links.between("p1", "decode").transport == "shm"
    assert links.states["p1", "decode"].down
    assert links.states["p0", "decode"].probe_bytes_per_s is None


def test_a_link_without_another_way_is_never_down():
    places = make_places(["p0"], ["decode"], "peer")
    links = Links(places)
    links.probed("p0", {"decode": 1e9})
    make(links, places, 3 * MAX_STRIKES, error="lost")
    make(links, places, 3 * MAX_STRIKES, elapsed_ns=SLOW)
    assert links.between("p0", "decode").transport == "peer"
    assert links.states["p0", "decode"].down is None


def test_rates_and_bytes_are_those_of_copies_that_were_made(links, places):
    state = links.states["p0", "decode"]
    assert (state.copy_bytes_per_s, state.num_bytes) == (None, 0)
    make(links, places, 1, elapsed_ns=SLOW)
    assert state.copy_bytes_per_s == pytest.approx(1e9 / 3)
    make(links, places, 100)
    assert state.copy_bytes_per_s == pytest.approx(1e9, rel=0.01)
    make(links, places, 1, error="lost")
    assert state.num_bytes == 101_000
    assert state.copy_bytes_per_s == pytest.approx(1e9, rel=0.01)


def test_legs_are_named_where_there_are_several_workers_of_a_role(links):
    legs = (Leg("p0", 1), Leg("decode", 9))
    assert links.named(legs) == "; p0 to decode by peer"
    assert links.named(legs[1:]) == "; at decode"
    links.probed("p0", {"decode": 0.0})
    assert links.named(legs) == "; p0 to decode by shm"
    assert Links(make_places(["p0"], ["decode"], "peer")).named(legs) == ""
