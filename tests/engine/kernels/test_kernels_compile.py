"""What the interpreter runs, the compiler takes too, for devices that are not here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
ATTENTION = {"several", "chunk", "parts"}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Each variant of the suite with what came of it."""
    environment = os.environ | {
        "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("cache")),
        "PYTHONPATH": str(ROOT),
    }
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
    assert len(rows) == 20
    return rows


KNOWN = {name: ["128 programs for 132 processors"] for name in ("q4_1 few", "q5_k few")}
"""Products of few tokens do not divide the sum of a row between programs yet."""


@pytest.mark.slow
def test_every_kernel_fits_spills_nothing_and_occupies_the_device(compiled):
    for row in compiled:
        assert row["faults"] == KNOWN.get(row["kernel"], []), row


@pytest.mark.slow
def test_attention_computes_on_tensor_cores_while_keys_and_values_are_on_their_way(compiled):
    attention = [row for row in compiled if row["kernel"] in ATTENTION]
    assert {row["capability"] for row in attention} == {80, 86, 89, 90, 100, 120}
    for row in attention:
        assert row["tensor_instructions"] > 0
        assert row["copy_instructions"] > 0
        # a wait for all copies ends each loop; within it the next tile's keys and values go on
        assert max(row["waits"]) >= 3
