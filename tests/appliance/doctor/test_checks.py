"""What doctor finds on a machine, with the machine's answers in its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from appliance.configuration.config import ServeConfig
from appliance.doctor import checks


@pytest.mark.parametrize(("hard", "verdict"), [(200, "note"), (1 << 20, "ok")])
def test_connections_are_held_against_the_hard_limit_of_open_files(
    monkeypatch: pytest.MonkeyPatch, hard: int, verdict: str
) -> None:
    monkeypatch.setattr(checks.resource, "getrlimit", lambda _: (64, hard))
    assert checks._open_files(1000).verdict == verdict


@pytest.mark.parametrize(
    ("speculate", "has_kernels", "has_gpus", "devices", "is_off"),
    [
        ("auto", True, False, "auto", False),
        (3, True, False, "auto", False),
        ("off", True, True, "auto", True),
        ("auto", False, False, "auto", True),
        ("auto", False, True, "auto", False),
        ("auto", False, True, "cpu", True),
    ],
)
def test_speculation_is_told_where_it_is_off(
    monkeypatch: pytest.MonkeyPatch,
    speculate: int | str,
    has_kernels: bool,
    has_gpus: bool,
    devices: str,
    is_off: bool,
) -> None:
    monkeypatch.setattr(checks, "has_kernels", lambda: has_kernels)
    found = ServeConfig(Path("s"), Path("s"), speculate=speculate, devices=devices)
    assert bool(checks._no_speculation(found, has_gpus=has_gpus)) == is_off
