"""What the interpreter runs, the compiler takes too, for devices that are not here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.slow
def test_every_kernel_compiles_for_ampere_and_hopper_and_fits(tmp_path):
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)
    run = subprocess.run(
        [sys.executable, "-m", "tests.engine.compile_kernels"],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    rows = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(rows) == 11
    assert all(row["shared_bytes"] <= row["shared_limit_bytes"] for row in rows)
    fast = {row["name"] for row in rows if row["has_wgmma"]}
    assert fast == {"_several_queries_kernel"}  # the others are bound by memory
