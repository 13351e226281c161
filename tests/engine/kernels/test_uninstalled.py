"""tests/gpu starts workers on a Python that has the dependencies and not the project."""

import os
import site
import subprocess
import sys
import venv
from pathlib import Path

from tests.checkpoints import make_checkpoint

ROOT = Path(__file__).parents[3]
PROGRAM = """
import asyncio, sys
import tests.gpu.conftest
from appliance.devices.inventory import Gpu
from appliance.fleet.placement import WorkerPlan
from appliance.fleet.supervisor import Supervisor
from engine.errors import WorkerFailed
from engine.wire.messages import GpuSpec, PoolSpec, Setup

plan = WorkerPlan("colocated", (0,), "kv", Gpu("gpu0", "GPU", "GPU-nobodys", 0))
pool, gpu = PoolSpec("kv", None, 8), GpuSpec("GPU-nobodys")
setup = Setup(worker="colocated", model_dir=sys.argv[1], dtype="float32", block_size=4, pool=pool,
              weights=None, cpus=[0], max_num_batched_tokens=8, max_model_len=8, gpu=gpu)
nothing = lambda *_: None
supervisor = Supervisor([(plan, setup)], [], on_report=nothing, on_ready=nothing, on_died=nothing,
                        on_lost=nothing)

async def main():
    supervisor.spawn_all()
    try:
        await supervisor.run()
    except WorkerFailed as error:
        print("said:", error)
    await supervisor.stop()

asyncio.run(main())
"""


def test_a_worker_comes_as_far_as_its_first_message_without_an_install(tmp_path):
    venv.create(tmp_path / "bare", symlinks=True)
    folder = make_checkpoint(tmp_path / "model", num_hidden_layers=1)
    # folders on this path are searched, and no link that an install in place has left is followed
    packages = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    run = subprocess.run(
        [tmp_path / "bare" / "bin" / "python", "-c", PROGRAM, folder],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([*packages, *site.getsitepackages()])},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert "said: GPU-nobodys: torch" in run.stdout, run.stdout + run.stderr
