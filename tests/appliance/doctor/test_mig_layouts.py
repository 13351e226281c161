"""MIG layouts for a model: names as the driver has them, and which are of use."""

from __future__ import annotations

import pytest

from appliance.devices.gpu_list import Gpu
from appliance.doctor.gpu_checks import (
    PROFILES,
    layouts,
    memory_to_divide,
)

MIB = 1 << 20
LLAMA_8B = (16_060_522_496, 131_072)


@pytest.mark.parametrize(
    ("memory_mib", "names"),
    [
        (81559, ["3g.40gb", "2g.20gb", "1g.20gb", "1g.10gb"]),
        (40960, ["3g.20gb", "2g.10gb", "1g.10gb", "1g.5gb"]),
        (143771, ["3g.71gb", "2g.35gb", "1g.35gb", "1g.18gb"]),
        (183359, ["3g.90gb", "2g.45gb", "1g.45gb", "1g.23gb"]),
    ],
)
def test_profiles_have_the_drivers_names(memory_mib: int, names: list[str]) -> None:
    assert [profile.named(memory_mib * MIB) for profile in PROFILES] == names


def test_layouts_say_what_each_instance_would_hold() -> None:
    found = {name: (about, is_of_use) for name, about, is_of_use in layouts(81559 * MIB, *LLAMA_8B)}
    assert [name for name, (_, is_of_use) in found.items() if is_of_use] == [
        "2 x 3g.40gb", "3 x 2g.20gb", "4 x 1g.20gb"
    ]  # fmt: skip
    assert "2 workers" in found["2 x 3g.40gb"][0]
    assert "GiB short each" in found["7 x 1g.10gb"][0]


@pytest.mark.parametrize(
    ("model", "memory_mib", "whole_gib"),
    [
        ("NVIDIA H100 80GB HBM3", 81559, 79.6),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", 40448, 79.0),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 9984, 78.0),
        ("NVIDIA GeForce RTX 4090", 24564, None),
    ],
)
def test_a_gpu_that_can_be_divided_is_known_by_its_name(
    model: str, memory_mib: int, whole_gib: float | None
) -> None:
    memory = memory_to_divide([Gpu("gpu0", model, "GPU-0", memory_mib * MIB)])
    assert (None if memory is None else round(memory / 2**30, 1)) == whole_gib
