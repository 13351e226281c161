"""Groups and weights on disk are proposed where a model needs them, and nowhere else."""

from dataclasses import replace

import pytest

from appliance.configuration.wanted_workers import parse_place
from appliance.fleet.proposals import check_copies, propose
from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.weights_layout import arena_layout
from engine.errors import ConfigError
from tests.appliance.fleet.test_placer import placed
from tests.appliance.inventories import machines
from tests.appliance.large_model import make_large

GIB = 1 << 30


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """15 GiB in bfloat16."""
    return Checkpoint.open(make_large(tmp_path_factory.mktemp("models") / "8b"))


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """About 260 GiB in bfloat16."""
    shape = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 160}
    shape |= {"num_attention_heads": 64}
    return Checkpoint.open(make_large(tmp_path_factory.mktemp("models") / "140b", **shape))


@pytest.fixture
def inventory(tmp_path):
    return lambda name: machines()[name].read(tmp_path / name)


def test_a_model_with_room_gets_no_proposal(checkpoint, inventory):
    for name in ("two-socket-xeon", "2xh100-nvlink", "laptop"):
        machine = replace(inventory(name), memory_bytes=100 * GIB)
        assert propose(checkpoint, machine) is None


def test_one_larger_than_memory_is_read_from_disk_or_has_fewer_bits(checkpoint, inventory):
    machine = inventory("none")  # 14 GiB
    proposed = propose(checkpoint, machine)
    assert "--offload-weights auto" in proposed
    assert "--weights q8" in proposed
    assert propose(checkpoint, replace(machine, memory_bytes=24 * GIB)) is None


def test_one_that_memory_holds_once_is_divided_between_the_nodes(large, inventory):
    machine = inventory("two-socket-xeon")
    proposed = propose(large, machine)
    setting = "colocated=0-27+28-55"
    assert f"--roles colocated --place {setting} " in proposed
    assert parse_place(setting).width == 2
    assert "disk" not in proposed


def test_copies_that_do_not_fit_are_refused_with_what_is_proposed(large, checkpoint, inventory):
    machine = inventory("two-socket-xeon")
    for model, is_refused in ((checkpoint, False), (large, True)):
        placement = placed(model, machine).placement
        assert {plan.node for plan in placement.workers} == {0, 1}
        layout = arena_layout(model, "bfloat16")
        if not is_refused:
            check_copies(model, layout, placement, machine)
            continue
        with pytest.raises(ConfigError) as error:
            check_copies(model, layout, placement, machine)
        assert error.value.where == "place"
        assert "--roles colocated --place" in error.value.hint
