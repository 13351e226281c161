"""Links as they are now: what takes one down, and what comes of it."""

import pytest

from engine.scheduler.cache.topology import make_topology
from engine.scheduler.routing.links import JUDGED_BYTES, MAX_STRIKES, Links
from engine.scheduler.sequences.sequence import RouteStage
from engine.wire.messages import Copied

ROLES = (["p0", "p1"], ["decode"])
NUM_BYTES = JUDGED_BYTES
FAST, SLOW = NUM_BYTES, 3 * NUM_BYTES
"""Nanoseconds that a copy takes: a gigabyte a second, and a third of it."""


@pytest.fixture
def topology():
    return make_topology(*ROLES, "peer", in_workers=("p0", "p1", "decode"))


@pytest.fixture
def links(topology):
    links = Links(topology)
    links.probed("p0", {"decode": 1e9, "ring": 1e8})
    return links


def copied(link_ns=FAST, error=None, num_bytes=NUM_BYTES):
    if error:
        return Copied(1, 0, 0, 0, FAST, True, error)
    return Copied(1, 1, num_bytes, 0, 5 * SLOW, True, link_ns=link_ns)


def make(links, topology, count, **report):
    hop = topology.link("p0", "decode").hops[0]
    for _ in range(count):
        links.copied(hop, copied(**report))


def test_between_devices_there_is_a_way_through_the_host(topology):
    link = topology.link("p0", "decode")
    assert (link.transport, link.fallback.transport) == ("peer", "shm")
    assert [hop.worker for hop in link.fallback.hops] == ["p0", "decode"]
    assert topology.copied_by("p0") == ["decode", "ring"]
    assert topology.copied_by("decode") == ["ring"]
    assert topology.transport == "peer"
    on_cores = make_topology(*ROLES, "peer")
    assert on_cores.link("p0", "decode").fallback is None
    assert on_cores.passing_pools() == set()


@pytest.mark.parametrize("report", [{"error": "lost"}, {"link_ns": SLOW}])
def test_a_link_that_fails_again_and_again_is_taken_down_and_others_are_not(
    links, topology, report
):
    make(links, topology, MAX_STRIKES - 1, **report)
    assert links.between("p0", "decode").transport == "peer"
    make(links, topology, 1)
    make(links, topology, MAX_STRIKES - 1, **report)
    assert links.between("p0", "decode").transport == "peer"  # not in a row
    make(links, topology, 1, **report)
    assert links.between("p0", "decode").transport == "shm"
    assert links.between("p1", "decode").transport == "peer"
    assert str(MAX_STRIKES) in links.states["p0", "decode"].down
    make(links, topology, 3)  # what is under way ends as it began
    assert links.between("p0", "decode").transport == "shm"
    links.probed("decode", {"ring": 1e8})
    assert links.between("p0", "decode").transport == "shm"
    links.probed("p0", {"decode": 1e9, "ring": 1e8})
    assert links.between("p0", "decode").transport == "peer"


def test_a_link_is_not_slow_because_its_host_is_busy(links, topology):
    make(links, topology, 1)
    make(links, topology, 3 * MAX_STRIKES, link_ns=None)
    state = links.states["p0", "decode"]
    assert (state.down, state.num_strikes) == (None, 0)
    assert state.copy_bytes_per_s == pytest.approx(1e9)
    assert state.num_bytes == NUM_BYTES * (1 + 3 * MAX_STRIKES)


def test_few_bytes_at_a_time_are_judged_together(links, topology):
    state = links.states["p0", "decode"]
    make(links, topology, 16 * MAX_STRIKES - 1, num_bytes=NUM_BYTES // 16, link_ns=SLOW // 16)
    assert (state.down, state.num_strikes) == (None, MAX_STRIKES - 1)
    make(links, topology, 1, num_bytes=NUM_BYTES // 16, link_ns=SLOW // 16)
    assert state.down


def test_a_try_that_fails_at_start_is_enough(topology):
    links = Links(topology)
    links.probed("p1", {"decode": 0.0, "ring": 1e8})
    assert links.between("p1", "decode").transport == "shm"
    assert links.states["p1", "decode"].down
    assert links.states["p0", "decode"].probe_bytes_per_s is None


def test_a_link_without_another_way_is_never_down():
    topology = make_topology(["p0"], ["decode"], "peer")
    links = Links(topology)
    links.probed("p0", {"decode": 1e9})
    make(links, topology, 3 * MAX_STRIKES, error="lost")
    make(links, topology, 3 * MAX_STRIKES, link_ns=SLOW)
    assert links.between("p0", "decode").transport == "peer"
    assert links.states["p0", "decode"].down is None


def test_rates_and_bytes_are_those_of_copies_that_were_made(links, topology):
    state = links.states["p0", "decode"]
    assert (state.copy_bytes_per_s, state.num_bytes) == (None, 0)
    make(links, topology, 1, link_ns=SLOW)
    assert state.copy_bytes_per_s == pytest.approx(1e9 / 3)
    make(links, topology, 100)
    assert state.copy_bytes_per_s == pytest.approx(1e9, rel=0.01)
    make(links, topology, 1, error="lost")
    assert state.num_bytes == 101 * NUM_BYTES
    assert state.copy_bytes_per_s == pytest.approx(1e9, rel=0.01)


def test_legs_are_named_where_there_are_several_workers_of_a_role(links):
    stages = (RouteStage("p0", 1), RouteStage("decode", 9))
    assert links.named(stages) == "; p0 to decode by peer"
    assert links.named(stages[1:]) == "; at decode"
    links.probed("p0", {"decode": 0.0})
    assert links.named(stages) == "; p0 to decode by shm"
    assert Links(make_topology(["p0"], ["decode"], "peer")).named(stages) == ""
