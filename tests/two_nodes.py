"""penstock on a machine that is said to have two NUMA nodes, each with some of its cores."""

from appliance.cli.main import main
from appliance.devices.inventory import Inventory, Node
from appliance.fleet import boot, placed_model
from appliance.fleet.placement import available_cores, available_memory_bytes
from tests.daemons import Daemon


def inventory():
    """Node 1 has no memory where it does not exist, and workers say so."""
    cores = available_cores()
    half = len(cores) // 2
    nodes = Node(0, tuple(cores[: half or 1])), Node(1, tuple(cores[half:]))
    return Inventory(nodes=nodes, memory_bytes=available_memory_bytes())


class TwoNodes(Daemon):
    """Of two nodes."""

    program = ("-m", "tests.two_nodes")


if __name__ == "__main__":
    boot.this_inventory = placed_model.this_inventory = inventory
    main()
