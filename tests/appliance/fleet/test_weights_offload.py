"""How weights and KV divide the memory, and what is refused before anything is made."""

from dataclasses import replace

import pytest

from appliance.configuration.settings import ServeConfig
from appliance.devices.inventory import Node
from appliance.fleet import weights_file
from appliance.fleet.placement import place
from appliance.fleet.weights_offload import UNITS_AHEAD, WORKER_BYTES, share_memory
from appliance.fleet.weights_plan import plan_weights
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.layer_units import names_by_unit, weight_bytes
from engine.errors import ConfigError
from tests.appliance.fleet.test_placer import placed as placed_by
from tests.appliance.inventories import machines
from tests.appliance.large_model import make_large

GIB = 1 << 30


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """8 billion parameters in bfloat16, 15 GiB, of which the disk has only the headers."""
    return Checkpoint.open(make_large(tmp_path_factory.mktemp("models") / "8b"))


@pytest.fixture
def shared(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(weights_file, "RESERVE_BYTES", 0)
    monkeypatch.setattr(weights_file.shutil, "disk_usage", lambda _: Disk)

    def share(memory_bytes, *, dtype="bfloat16", **settings):
        config = ServeConfig(socket=tmp_path / "socket", state_dir=tmp_path / "state", **settings)
        placement = place(
            checkpoint,
            kv_dtype=dtype,
            roles=config.roles,
            transport="auto",
            wanted=config.place,
            kv_memory_bytes=config.kv_memory_bytes,
            max_model_len=None,
            nodes=(Node(0, (0, 1)),),
            memory_bytes=memory_bytes,
        )
        weights = plan_weights(checkpoint, dtype, config, placement)
        found = share_memory(config, checkpoint, dtype, placement, weights, memory_bytes)
        kv = sum(pool.num_blocks for pool in placement.topology.pools) * placement.block_bytes
        held = sum(weight_bytes(checkpoint, dtype, weights.layout).values())
        if found.offload is not None:
            held = found.offload.held_bytes
        used = held + (found.kv_bytes or kv) + len(placement.workers) * WORKER_BYTES
        return found, used

    return share


class Disk:
    free = 100 * GIB


def test_weights_that_fit_stay_in_memory(shared):
    found, used = shared(24 * GIB)
    assert found.offload is None
    assert found.notes == ()
    assert used <= 24 * GIB


@pytest.mark.parametrize("memory_gib", [17, 18, 19])
def test_beside_weights_that_just_fit_the_pools_get_what_is_left(shared, memory_gib):
    found, used = shared(memory_gib * GIB)
    assert found.offload is None
    assert used <= memory_gib * GIB


@pytest.mark.parametrize("memory_gib", [6, 8, 12, 15])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_does_not_fit_stays_on_disk_and_all_that_is_held_fits(shared, memory_gib, dtype):
    found, used = shared(memory_gib * GIB, dtype=dtype)
    assert found.offload.disk_bytes > 0
    assert used <= memory_gib * GIB
    assert len(found.notes) == 1


def test_more_memory_leaves_less_on_disk(shared):
    on_disk = [shared(gib * GIB)[0].offload.disk_bytes for gib in (6, 9, 12)]
    assert on_disk == sorted(on_disk, reverse=True)


def test_bytes_that_are_named_stay_on_disk_however_much_memory_there_is(shared, checkpoint):
    found, _ = shared(64 * GIB, offload_weights=4 * GIB)
    sizes = weight_bytes(checkpoint, "bfloat16", None)
    layers = names_by_unit(sizes, checkpoint.config)
    largest = max(sum(sizes[name] for name in names) for names in layers)
    assert 4 * GIB <= found.offload.disk_bytes < 4 * GIB + largest
    ahead = UNITS_AHEAD * 2 * largest
    assert found.offload.held_bytes <= found.offload.weights_bytes - 4 * GIB + ahead


@pytest.mark.parametrize(
    ("memory_gib", "settings"),
    [
        (64, {"offload_weights": 20 * GIB}),  # more than there is
        (8, {"offload_weights": 1 * GIB}),  # too little
        (2, {}),  # not even two layers
        (8, {"kv_memory_bytes": 7 * GIB}),
    ],
)
def test_what_cannot_be_held_is_refused_and_said_of_the_setting(shared, memory_gib, settings):
    with pytest.raises(ConfigError) as refused:
        shared(memory_gib * GIB, **settings)
    assert refused.value.where == "offload_weights"
    assert refused.value.hint


def test_a_disk_without_room_is_refused_if_weights_must_be_packed(shared, monkeypatch):
    monkeypatch.setattr(Disk, "free", GIB)
    with pytest.raises(ConfigError) as refused:
        shared(8 * GIB, weights="q8", offload_weights=4 * GIB)
    assert refused.value.where == "offload_weights"


def test_mapped_weights_need_no_second_file(shared, monkeypatch):
    monkeypatch.setattr(Disk, "free", 0)
    found, _ = shared(12 * GIB, dtype="float32")  # bfloat16 is widened as it is read
    assert found.offload.identity is None


def test_on_gpus_the_setting_is_refused_and_auto_changes_nothing(checkpoint, tmp_path):
    config = ServeConfig(socket=tmp_path / "socket", state_dir=tmp_path / "state")
    inventory = machines()["2xh100-nvlink"].read(tmp_path / "machine")
    placement = placed_by(checkpoint, inventory).placement
    weights = plan_weights(checkpoint, "bfloat16", config, placement)
    about = checkpoint, "bfloat16", placement, weights, GIB
    assert share_memory(config, *about) == (None, None, ())
    with pytest.raises(ConfigError) as refused:
        share_memory(replace(config, offload_weights=GIB), *about)
    assert refused.value.where == "offload_weights"
