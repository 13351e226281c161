"""penstock bench kernels, steps and transports run on whatever is here."""

from __future__ import annotations

import json

import pytest

from appliance.cli import bench, bench_device
from appliance.cli.tables import Format
from appliance.hub.names import STARTER_FOLDER
from tests.appliance.cli_process import penstock, user_environ


@pytest.mark.parametrize(
    ("kind", "whats"),
    [
        ("kernels", {"norm after residual", "attention", "product down", "sample drawn"}),
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


@pytest.mark.parametrize(
    ("kind", "share", "is_told"),
    [("kernels", 2.56, True), ("steps", 1, False), ("transports", 2.56, False)],
)
def test_more_than_a_ceiling_is_shown_and_said_to_be_a_disturbed_one(
    kind, share, is_told, monkeypatch, capsys
):
    row = {"what": "x", "shape": "y", "ms": 1.0, "rate": 2e9, "unit": "B/s", "share": share}
    found = {"device": "cpu", "torch": "2", "dtype": "float32", "attention": "compiled"}
    found |= {"copy_bytes_per_s": 1e9, "matmul_flop_per_s": 1e9, "data": [row]}
    monkeypatch.setattr("appliance.bench.device_parts.measure_device", lambda *_, **__: found)
    bench_device._measure(kind, None, True, Format.TABLE)
    said = capsys.readouterr()
    titles, shown = (line.split() for line in said.out.splitlines())
    assert titles[:4] == ["WHAT", "SHAPE", "P50", "RATE"]
    assert shown[-2:] == ["GiB/s", f"{share:.0%}"]
    assert ("disturbed" in said.err) == is_told


def test_what_went_wrong_is_said_without_a_traceback(tmp_path):
    ended = penstock(user_environ(tmp_path), "bench", "steps", str(tmp_path), "--small")
    assert ended.returncode == 1
    assert "config.json" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_comparison_has_units_for_people_and_plain_numbers_for_programs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    figures = {"median": 412.4321, "low": 9.05, "high": 4_200.0}
    over = {"ratio": 1.02367, "ratio_low": 0.5, "ratio_high": 12.34}
    row = {"arm": "a", "metric": "ttft_ms_p50", **figures, **over, "verdict": "more"}
    bench._show([row], [], None, Format.TABLE)
    shown = capsys.readouterr().out.splitlines()[1].split()
    assert shown[1:3] == ["ttft_p50", "412ms"]
    assert shown[3:] == ["9.05ms", "4.20s", "1.024x", "0.500x", "12.3x", "more"]
    bench._show([row], [], None, Format.CSV)
    assert "ttft_ms_p50,412.4321,9.05,4200.0,1.02367" in capsys.readouterr().out
