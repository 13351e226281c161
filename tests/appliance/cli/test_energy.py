"""Joules as people read them."""

from __future__ import annotations

import time

import pytest

from appliance.cli import devices, fact_pages, listings, status_page
from appliance.cli.tables import Format, Listing
from appliance.devices.machine import MIN_INTERVAL_NS, Devices, find_gpus
from appliance.devices.nvml import Nvml
from appliance.observe.frame.figures import joules
from tests.appliance.cli_data import FINISHED, FRAME
from tests.appliance.fake_nvml import FakeNvml, a100_divided, h100

ENERGY = {
    "total_j": 12_000.0,
    "prefill_j": 2_100.0,
    "decode_j": 3_900.0,
    "unattributed_j": 6_000.0,
    "window_s": 60.0,
    "power_w": 41.0,
    "prefill_j_per_token": 0.0213,
    "decode_j_per_token": None,
    "method": "rapl, by time in steps, then by tokens",
}


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "-"),
        (0.0, "0 J"),
        (0.41234, "0.412 J"),
        (999.4, "999 J"),
        (999.6, "1 kJ"),
        (1_244.5, "1.24 kJ"),
        (3.6e6, "3.6 MJ"),
        (2.5e10, "25 GJ"),
    ],
)
def test_an_energy_has_three_digits_and_a_unit(value: float | None, shown: str) -> None:
    assert joules(value) == shown


def energy_line(frame: dict[str, object]) -> str:
    text = status_page.page(frame, colour=False)
    (line,) = [line for line in text.splitlines() if line.startswith("energy")]
    return line


def test_status_shows_the_account_with_its_rest_and_its_method() -> None:
    line = energy_line({**FRAME, "energy": ENERGY})
    assert "12 kJ = prefill 2.1 kJ + decode 3.9 kJ + unattributed 6 kJ" in line
    assert "prefill 0.0213 J, decode -," in line
    assert ENERGY["method"] in line


def test_status_says_that_nothing_is_reported() -> None:
    unknown = {**dict.fromkeys(ENERGY), "method": "not reported"}
    assert energy_line({**FRAME, "energy": unknown}) == "energy   not reported"


def test_half_a_reading_is_shown_as_far_as_it_is_known() -> None:
    def line(**fields: float | None) -> str:
        page = fact_pages.request_page({**FINISHED, **fields}, width=60, bar="#")
        return next((line for line in page.splitlines() if line.startswith("energy")), "")

    assert line(prefill_j=1.0, decode_j=2.0).endswith("3 J = prefill 1 J + decode 2 J")
    assert line(prefill_j=1.0, decode_j=None).endswith("1 J = prefill 1 J + decode -")
    assert line(prefill_j=None, decode_j=None) == ""


def test_joules_are_in_wide_lists_only() -> None:
    for columns in (listings.REQUESTS, listings.LOG):
        for form, is_shown in ((Format.TABLE, False), (Format.WIDE, True)):
            header = Listing("ps", columns, form).render([])
            assert ("PREFILL J" in header) == ("DECODE J" in header) == is_shown


def test_devices_are_listed_with_all_that_they_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    throttled = h100()
    throttled.readings["CurrentClocksEventReasons"] = 0x4
    machine = Devices([], find_gpus(Nvml(FakeNvml(throttled, a100_divided()))))
    monkeypatch.setattr(Devices, "of_machine", lambda: machine)
    machine.read(time.monotonic_ns() - MIN_INTERVAL_NS)
    devices.devices(Format.WIDE)
    header, *lines = capsys.readouterr().out.splitlines()
    assert {"THROTTLED", "SM", "NVLINK IN", "MODEL"} <= set(header.replace("  ", "|").split("|"))
    assert [line.split()[0] for line in lines[:4]] == ["gpu0", "gpu1", "gpu1/mig0", "gpu1/mig2"]
    assert "power cap" in lines[0]
    assert "3.0 MiB/s" in lines[0]
    assert "75 %" in lines[0]
    assert "MIG-2-5" in lines[3]
    assert lines[4].startswith("cores ")
    assert any(line.startswith("node 0: cpu ") for line in lines[5:])
