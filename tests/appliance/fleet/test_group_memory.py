"""Workers of several processes that memory has no room for, and what would fit."""

import pytest

from appliance.configuration.settings import ServeConfig
from appliance.configuration.wanted_workers import parse_place
from appliance.devices.inventory import Node
from appliance.fleet import weights_file
from appliance.fleet.group_memory import share_group_memory
from appliance.fleet.placement import place
from appliance.fleet.weights_plan import plan_weights
from engine.checkpoint.checkpoint import Checkpoint
from engine.errors import ConfigError
from tests.appliance.large_model import make_large

GIB = 1 << 30
PAIR = "prefill=0+1 decode=2+3"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """8 billion parameters in bfloat16, 15 GiB, of which the disk has only the headers."""
    return Checkpoint.open(make_large(tmp_path_factory.mktemp("models") / "8b"))


@pytest.fixture
def shared(checkpoint, tmp_path, monkeypatch):
    """Served in float32: no matrix is packed, on whatever CPU this runs."""
    monkeypatch.setattr(weights_file, "RESERVE_BYTES", 0)

    def share(memory_gib, place_text=PAIR, **settings):
        settings = {"roles": "static", **settings}
        config = ServeConfig(
            socket=tmp_path / "socket",
            state_dir=tmp_path / "state",
            place=parse_place(place_text),
            **settings,
        )
        placement = place(
            checkpoint,
            kv_dtype="float32",
            roles=config.roles,
            transport="auto",
            wanted=config.place,
            kv_memory_bytes=config.kv_memory_bytes,
            max_model_len=None,
            nodes=(Node(0, (0, 1, 2, 3)),),
            memory_bytes=memory_gib * GIB,
        )
        weights = plan_weights(checkpoint, "float32", config, placement)
        memory = memory_gib * GIB
        return share_group_memory(config, checkpoint, "float32", placement, weights, memory)

    return share


def refused(shared, *args, **settings):
    with pytest.raises(ConfigError) as error:
        shared(*args, **settings)
    assert error.value.where == "place"
    return error.value.hint


def test_a_group_that_fits_leaves_the_pools_what_weights_leave(shared):
    assert shared(40).kv_bytes is None
    tight = shared(24)
    assert 1 << 30 <= tight.kv_bytes < 4 << 30


def test_each_process_counts_and_so_does_each_worker(shared):
    """15 GiB of files, of which 5 are copied by each worker, and 320 MiB a process."""
    hint = refused(shared, 20)
    assert "--roles colocated" in hint
    assert "leave + out" in hint
    shared(20, "colocated=0+1", roles="colocated")


def test_what_would_fit_is_named(shared):
    assert "kv-memory" in refused(shared, 26, kv_memory_bytes=8 * GIB)
    assert "--weights q8" in refused(shared, 13)
    assert "--weights q4" in refused(shared, 8)
    assert "from disk" in refused(shared, 13)
    assert "2 processes" not in refused(shared, 13, "colocated=0+1+2+3", roles="colocated")


def test_of_a_model_that_nothing_helps_the_hint_is_another_model(shared):
    assert "smaller model" in refused(shared, 1, kv_memory_bytes=GIB)
