"""penstock bench kernels, steps and transports, as their user runs them, on whatever is here."""

import json

import pytest

from appliance.fleet.boot import STARTER_FOLDER
from tests.appliance.cli_process import penstock, user_environ


@pytest.mark.parametrize(
    ("kind", "whats"),
    [
        ("kernels", {"norm after residual", "attention", "product up", "sample drawn"}),
        ("steps", {"decode step", "prefill chunk"}),
        ("transports", {"blocks to the host", "blocks from the host"}),
    ],
)
def test_every_figure_is_beside_a_ceiling_of_the_same_run(tmp_path, kind, whats):
    options = [str(STARTER_FOLDER), "--small", "-o", "json"]
    ended = penstock(user_environ(tmp_path), "bench", kind, *options)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert whats <= {row["what"] for row in found["data"]}
    assert found["copy_bytes_per_s"] > 0
    assert found["matmul_flop_per_s"] > 0
    ceilings = {"B/s": found["copy_bytes_per_s"], "FLOP/s": found["matmul_flop_per_s"]}
    for row in found["data"]:
        assert row["ms"] > 0
        if kind != "transports":  # those are held against one large copy
            assert row["share"] == pytest.approx(row["rate"] / ceilings[row["unit"]])


def test_what_went_wrong_is_said_without_a_traceback(tmp_path):
    ended = penstock(user_environ(tmp_path), "bench", "steps", str(tmp_path), "--small")
    assert ended.returncode == 1
    assert "config.json: the file is missing" in ended.stderr
    assert "Traceback" not in ended.stderr
