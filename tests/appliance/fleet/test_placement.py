"""Cores to workers, memory to pools, within what control groups allow."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.configuration.setting_kinds import parse_bytes
from appliance.configuration.wanted_workers import ONE_OF_EACH, parse_place
from appliance.devices.inventory import Node
from appliance.fleet.placement import (
    BLOCK_SIZE,
    available_cores,
    available_memory_bytes,
    cpu_names,
    decode_cpus,
    place,
    split_cores,
)
from engine.checkpoint.checkpoint import Checkpoint
from engine.errors import ConfigError
from engine.scheduler.cache.block_pool import MIN_RECORDS
from tests.checkpoints import make_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tiny_llama):
    return Checkpoint.open(tiny_llama)


def plan(checkpoint, cores=(0, 1, 2), nodes=(), **changes):
    options = {
        "kv_dtype": "float32",
        "roles": "static",
        "transport": "alias",
        "wanted": ONE_OF_EACH,
        "kv_memory_bytes": None,
        "max_model_len": None,
        "nodes": nodes or (Node(0, cores),),
        "memory_bytes": 8 << 30,
    }
    return place(checkpoint, **options | changes)


def test_static_workers_have_cores_of_their_own_and_share_a_pool(checkpoint):
    placement = plan(checkpoint)
    prefill, decode = placement.workers
    assert (prefill.cpus, decode.cpus) == ((0, 1), (2,))
    assert prefill.pool == decode.pool == "kv"
    assert placement.topology.passing_pools() == set()
    assert placement.max_model_len == 2048


def test_with_one_core_both_workers_share_it(checkpoint):
    assert [w.cpus for w in plan(checkpoint, cores=(5,)).workers] == [(5,), (5,)]


def test_colocated_is_one_worker_with_all_cores(checkpoint):
    placement = plan(checkpoint, roles="colocated")
    assert [(w.name, w.cpus) for w in placement.workers] == [("colocated", (0, 1, 2))]
    assert placement.topology.transport is None


def test_shm_divides_the_kv_memory_and_no_more(checkpoint):
    placement = plan(checkpoint, transport="shm", kv_memory_bytes=10 << 20)
    counts = {pool.name: pool.num_blocks for pool in placement.topology.pools}
    assert set(counts) == {"prefill", "decode", "ring"}
    assert sum(counts.values()) * placement.block_bytes <= 10 << 20
    assert counts["decode"] > counts["prefill"] > counts["ring"] // 2


@pytest.mark.parametrize("transport", ["alias", "peer", "shm"])
def test_several_workers_of_a_role_share_what_one_would_have(checkpoint, transport):
    options = {"transport": transport, "kv_memory_bytes": 20 << 20, "cores": (0, 1, 2, 3)}
    placement = plan(checkpoint, wanted=parse_place("2x2"), **options)
    assert [w.name for w in placement.workers] == ["prefill0", "prefill1", "decode0", "decode1"]
    assert [w.cpus for w in placement.workers] == [(0,), (1,), (2,), (3,)]
    counts = {pool.name: pool.num_blocks for pool in placement.topology.pools}
    assert sum(counts.values()) * placement.block_bytes <= 20 << 20
    assert {w.pool for w in placement.workers} == counts.keys() - {"ring"}
    copied_by = placement.topology.copied_by
    if transport == "peer":  # the one that has the blocks writes them where they go
        assert copied_by("prefill0") == ["decode0", "decode1"]
        assert copied_by("decode0") == ["prefill0", "prefill1"]
    if transport == "shm":
        assert copied_by("prefill1") == copied_by("decode1") == ["ring"]


def test_the_model_length_is_lowered_to_what_the_pools_hold(checkpoint):
    block_bytes = checkpoint.config.kv_block_bytes(BLOCK_SIZE, "float32")
    placement = plan(checkpoint, kv_memory_bytes=4 * block_bytes)
    assert placement.max_model_len == 3 * BLOCK_SIZE


def test_twice_the_tokens_fit_the_same_memory_as_codes_of_a_byte(checkpoint):
    wide, narrow = (
        plan(checkpoint, kv_dtype=dtype, kv_memory_bytes=20 << 20) for dtype in ("bfloat16", "int8")
    )
    head_dim = checkpoint.config.head_dim
    ratio = 2 * head_dim / (head_dim + 4)
    assert wide.block_bytes == pytest.approx(ratio * narrow.block_bytes)
    of_wide, of_narrow = (sum(p.num_blocks for p in each.topology.pools) for each in (wide, narrow))
    assert of_narrow == pytest.approx(ratio * of_wide, rel=0.05)


def test_a_model_length_can_be_asked_for(checkpoint):
    assert plan(checkpoint, max_model_len=100).max_model_len == 100
    assert plan(checkpoint, max_model_len=10**9).max_model_len == 2048


@pytest.mark.parametrize("transport", ["alias", "shm"])
def test_too_little_kv_memory_is_a_config_error_that_says_how_much_is_enough(checkpoint, transport):
    with pytest.raises(ConfigError) as refused:
        plan(checkpoint, transport=transport, kv_memory_bytes=1)
    enough = parse_bytes(refused.value.hint.split()[3])
    assert plan(checkpoint, transport=transport, kv_memory_bytes=enough).max_model_len >= BLOCK_SIZE


@pytest.mark.parametrize("transport", ["alias", "shm"])
def test_memory_for_less_than_a_sequences_states_is_refused_before_anything_loads(
    tmp_path, transport
):
    hybrid = Checkpoint.open(make_checkpoint(tmp_path, "qwen3_5_text", linear_key_head_dim=256))
    placement = plan(hybrid)
    states = MIN_RECORDS * placement.record_blocks * placement.block_bytes
    assert placement.record_blocks > 1
    with pytest.raises(ConfigError, match="recurrent states") as refused:
        plan(hybrid, transport=transport, kv_memory_bytes=states)
    enough = parse_bytes(refused.value.hint.split()[3])
    assert plan(hybrid, transport=transport, kv_memory_bytes=enough).max_model_len >= BLOCK_SIZE


def test_more_kv_memory_than_there_is_is_refused(checkpoint):
    with pytest.raises(ConfigError, match="available"):
        plan(checkpoint, kv_memory_bytes=100 << 40)


@pytest.fixture
def two_by_two(tmp_path):
    """Two physical cores of two logical CPUs each."""
    for cpu, siblings in enumerate(["0,2", "1,3", "0,2", "1,3"]):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(siblings + "\n")
    return tmp_path


def test_one_thread_of_each_physical_core_is_used(two_by_two):
    assert available_cores({0, 1, 2, 3}, two_by_two, quota_cpus=9) == [0, 1]
    assert available_cores({2, 3}, two_by_two, quota_cpus=9) == [2, 3]


def test_cores_that_only_decode_uses_are_found_with_both_of_their_cpus(checkpoint, two_by_two):
    placement = plan(checkpoint, cores=(0, 1))
    assert decode_cpus(placement, {0, 1, 2, 3}, two_by_two) == {1, 3}
    assert decode_cpus(placement, {0, 1}, two_by_two) == {1}


@pytest.mark.parametrize("changes", [{"cores": (0,)}, {"roles": "colocated"}])
def test_no_core_is_decodes_alone_where_one_worker_or_core_does_both(
    checkpoint, two_by_two, changes
):
    assert not decode_cpus(plan(checkpoint, **changes), {0, 1, 2, 3}, two_by_two)


def test_a_cpu_quota_limits_the_cores():
    assert available_cores({0, 1, 2, 3}, Path("/nonexistent"), quota_cpus=2.5) == [0, 1]
    assert available_cores({0, 1}, Path("/nonexistent"), quota_cpus=0.5) == [0]


def test_this_machine_has_cores_and_memory():
    assert set(available_cores()) <= os.sched_getaffinity(0)
    assert available_memory_bytes() > 0


@given(st.sets(st.integers(0, 63), min_size=2))
def test_split_cores_loses_none_and_gives_both_some(cores):
    prefill, decode = split_cores(sorted(cores))
    assert sorted(prefill + decode) == sorted(cores)
    assert len(decode) <= len(prefill) <= len(decode) + 1


def test_cpu_names_are_short():
    assert cpu_names((0,)) == "cpu 0"
    assert cpu_names((3, 0, 1, 2, 5)) == "cpu 0-3,5"


NODES = (Node(0, (0, 1, 2), 8 << 30), Node(1, (4, 5, 6), 8 << 30))


def test_two_numa_nodes_are_two_places_with_weights_and_pool_of_their_own(checkpoint):
    placement = plan(checkpoint, nodes=NODES, transport="auto")
    prefill, decode = placement.workers
    assert (prefill.cpus, decode.cpus) == ((0, 1, 2), (4, 5, 6))
    assert (prefill.node, decode.node) == (0, 1)
    assert (prefill.pool, decode.pool) == ("prefill", "decode")
    assert placement.topology.transport == "peer"
    assert not placement.topology.shares_memory_bus
    assert "2 NUMA nodes" in placement.reasons[0]


def test_cores_that_are_named_decide_whether_nodes_are_places(checkpoint):
    apart = plan(
        checkpoint, nodes=NODES, transport="auto", wanted=parse_place("prefill=0,4 decode=5-6")
    )
    assert [worker.node for worker in apart.workers] == [0, 1, 1]
    assert apart.topology.transport == "peer"
    one = plan(
        checkpoint, nodes=NODES, transport="auto", wanted=parse_place("prefill=0 decode=1-2")
    )
    assert [worker.node for worker in one.workers] == [None, None]
    assert one.topology.transport == "alias"
    asked = plan(checkpoint, nodes=NODES, transport="alias")
    assert [worker.node for worker in asked.workers] == [None, None]
    assert "fewer workers" in asked.reasons[0]


def test_four_nodes_are_four_workers(checkpoint):
    nodes = tuple(Node(i, (2 * i, 2 * i + 1)) for i in range(4))
    placement = plan(checkpoint, nodes=nodes, transport="auto")
    assert [worker.name for worker in placement.workers] == [
        "prefill0", "prefill1", "decode0", "decode1"
    ]  # fmt: skip
    assert [worker.node for worker in placement.workers] == [0, 1, 2, 3]
