"""Whatever a worker serves, its warm-up has compiled: no step waits for a compiler."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoints import make_checkpoint

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("family", "how", "most_of_layers"),
    [("llama", "eager", 8), ("gemma2", "eager", 10), ("qwen3", "graphs", 9)],
)
def test_no_step_asks_for_a_kernel_that_the_warm_up_has_not(family, how, most_of_layers, tmp_path):
    folder = make_checkpoint(tmp_path / "m", family, num_hidden_layers=2)
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tests.engine.launch_steps", folder, how]
    run = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False, timeout=200
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["warm"] > 4
    assert found["late"] == []
    decoding = [count for is_decoding, count in found["counts"] if is_decoding]
    if how == "graphs":
        assert set(decoding) == {0}  # the graph is all that is launched
    # of two layers and the ends: the last norm, and the sampler
    assert 0 < max(count for _, count in found["counts"]) <= 2 * most_of_layers + 2
