"""CPU packages, from a powercap tree of our own."""

from __future__ import annotations

from pathlib import Path

from appliance.devices.machine import find_packages

S = 1_000_000_000


def zone(root: Path, number: str, name: str, energy_uj: int, **more: int) -> None:
    folder = root / f"intel-rapl:{number}"
    folder.mkdir(exist_ok=True)
    (folder / "name").write_text(f"{name}\n")
    files = {"energy_uj": energy_uj, "max_energy_range_uj": 1_000_000_000, **more}
    for file, value in files.items():
        (folder / file).write_text(f"{value}\n")


def test_power_and_energy_are_the_counters_difference(tmp_path: Path) -> None:
    zone(tmp_path, "0", "package-0", 5_000_000, constraint_0_power_limit_uw=125_000_000)
    (package,) = find_packages(tmp_path)
    first = package.read(0)
    assert (first.energy_j, first.power_w, first.power_source) == (0.0, None, "rapl")
    zone(tmp_path, "0", "package-0", 65_000_000)
    second = package.read(2 * S)
    assert (second.name, second.kind) == ("package-0", "cpu")
    assert (second.energy_j, second.power_w, second.power_limit_w) == (60.0, 30.0, 125.0)


def test_a_counter_that_wraps_is_followed(tmp_path: Path) -> None:
    zone(tmp_path, "0", "package-0", 999_000_000)
    (package,) = find_packages(tmp_path)
    package.read(0)
    zone(tmp_path, "0", "package-0", 9_000_000)
    assert package.read(S).power_w == 10.0


def test_packages_are_counted_once(tmp_path: Path) -> None:
    zone(tmp_path, "0", "package-0", 0)
    zone(tmp_path, "0:0", "core", 0)
    zone(tmp_path, "1", "package-1", 0)
    zone(tmp_path, "2", "psys", 0)
    assert [package.name for package in find_packages(tmp_path)] == ["package-0", "package-1"]


def test_an_unreadable_counter_is_not_reported_rather_than_zero(tmp_path: Path) -> None:
    (tmp_path / "intel-rapl:0").mkdir()
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("garbage")
    (package,) = find_packages(tmp_path)
    frame = package.read(0)
    assert frame.name == "intel-rapl:0"
    assert (frame.energy_j, frame.power_w, frame.power_source) == (None, None, None)


def test_no_tree_is_no_problem(tmp_path: Path) -> None:
    assert find_packages(tmp_path / "none") == []
