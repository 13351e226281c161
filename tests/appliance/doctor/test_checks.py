"""What doctor finds on a machine, with the machine's answers in its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from appliance.configuration.settings import ServeConfig
from appliance.doctor import checks, ports


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
    found = ServeConfig(socket=Path("s"), state_dir=Path("s"), speculate=speculate, devices=devices)
    assert bool(checks._no_speculation(found, has_gpus=has_gpus)) == is_off


ROW = "   0: {address}:{port:04X} 00000000:0000 {state} 00000000:00000000 00:00000000 0 {uid} 0 1 1"


@pytest.mark.parametrize(
    ("listening", "uids"),
    [
        ([(0, 8000, "0A", 1000), (1, 8000, "0A", 1000)], [1000]),
        ([(0, 8000, "0A", 1000), (1, 8000, "0A", 65534)], [1000, 65534]),
        ([(0, 8000, "0A", 1000), (1, 8001, "0A", 65534)], [1000]),
        ([(0, 8000, "0A", 1000), (1, 8000, "01", 65534)], [1000]),
        ([], []),
    ],
)
def test_who_listens_on_a_port_is_found_in_both_families(tmp_path: Path, listening, uids) -> None:
    tables = tmp_path / "tcp", tmp_path / "tcp6"
    addresses = "0100007F", "00000000000000000000000001000000"
    for family, table in enumerate(tables):
        rows = [
            ROW.format(address=addresses[family], port=port, state=state, uid=uid)
            for each, port, state, uid in listening
            if each == family
        ]
        table.write_text("\n".join(["  sl  local_address ...", *rows, ""]))
    assert ports.listening_uids(8000, (*tables, tmp_path / "missing")) == uids


def test_another_users_program_on_our_port_is_bad(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(checks, "listening_uids", lambda _: [1000, 65534])
    found = ServeConfig(
        socket=Path("s"),
        state_dir=Path("s"),
        model=Path("s"),
        listen=("127.0.0.1", 8000),
        auth=False,
    )
    assert checks._network(found, {}).verdict == "bad"
