"""penstock on a machine with GPUs that is made up: real processes on the tests' accelerator.

How many there are, and whether they reach each other's memory, is in the environment.
"""

import itertools
import os
import sys

from appliance.cli.main import main
from appliance.devices.gpu_list import Gpu
from appliance.devices.inventory import GpuLink, Inventory, read_nodes
from appliance.fleet import boot, placed_model, placer, spread, supervisor
from appliance.fleet.placement import available_cores, available_memory_bytes
from engine.scheduler.routing import links
from tests.daemons import Daemon

NUM_GPUS, REACH, FAULTS = "ACCELERATED_GPUS", "ACCELERATED_REACH", "ACCELERATED_FAULTS"
POOL_BYTES = "ACCELERATED_POOL_BYTES"


def inventory():
    """Of the machine that is made up, with the cores and the memory of this one."""
    gpus = tuple(
        Gpu(f"gpu{i}", "Accelerator", f"GPU-{i}", 24 << 30, (9, 0), cuda_index=i, node=0)
        for i in range(int(os.environ[NUM_GPUS]))
    )
    reach = os.environ[REACH] == "1"
    links = tuple(
        GpuLink(a.name, b.name, 18 * reach, level=40, can_reach=reach)
        for a, b in itertools.combinations(gpus, 2)
    )
    return Inventory(gpus, links, read_nodes(available_cores()), available_memory_bytes())


class AcceleratedDaemon(Daemon):
    """Of so many GPUs."""

    program = ("-m", "tests.worlds.accelerated")
    python_path = ""  # the accelerator's tensors are of the device "meta"
    ready_s = 240.0
    """Its workers compute on cores what GPUs would, and there may be eight."""

    def __init__(self, folder, num_gpus, *args, reach=True, pool_bytes=4 << 20, **options):
        self.faults = folder / "faults"
        """What is wrong with the links, as tests.worlds.accelerated_worker reads it."""
        self.faults.mkdir(parents=True, exist_ok=True)
        env = {NUM_GPUS: str(num_gpus), REACH: str(int(reach)), FAULTS: str(self.faults)}
        env[POOL_BYTES] = str(pool_bytes)
        args = (*args, "--kv-memory", str(pool_bytes * num_gpus))
        super().__init__(folder, *args, env=env, **options)


if __name__ == "__main__":
    for file in (boot, placed_model, placer):
        file.this_inventory = inventory
    placed_model.installed_torch = lambda: "2.11.0+cu130"
    links.SLOW_RATIO = 0.0  # what shares this machine's cores says nothing of a link
    spread.GPU_STEP_TOKENS = 512  # of which each start runs some
    # as a worker imports torch: without looking for garbage
    load = "import gc; gc.disable(); from tests.worlds.accelerated_worker import main; main()"
    worker = (sys.executable, "-c", load)
    supervisor.Supervisor.__init__.__kwdefaults__["program"] = worker
    main()
