"""A daemon that falls silent amid a reply is told of, and that it is back."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance.cli import silence
from appliance.cli.silence import SilenceWatch
from appliance.client.address import UnixAddress
from appliance.client.calls import Client
from tests.waiting import wait_until
from tests.worlds.fake_daemon import FakeDaemon


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(silence, "SILENT_S", 0.05)
    monkeypatch.setattr(silence, "LOOK_S", 0.2)


@pytest.fixture
def kept_socket(tmp_path: Path) -> Iterator[Path]:
    """A dead daemon's socket as its keeper holds it: it takes connections, and nothing answers."""
    with socket.socket(socket.AF_UNIX) as kept:
        kept.bind(str(tmp_path / "kept.sock"))
        kept.listen(64)
        yield tmp_path / "kept.sock"


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    told: list[str] = []
    monkeypatch.setattr(silence.terminal, "note", told.append)
    return told


def watch_of(path: Path, *, is_amid_line: bool = False) -> SilenceWatch:
    return SilenceWatch(Client(UnixAddress(path)), lambda: is_amid_line)


def test_a_dead_daemon_is_told_of_once_and_that_it_is_back_once(
    kept_socket: Path, notes: list[str]
) -> None:
    with watch_of(kept_socket, is_amid_line=True) as watch:
        wait_until(lambda: notes, 30)
        time.sleep(0.3)
        assert len(notes) == 1
        assert notes[0].startswith("\npenstock: ")
        watch.heard()
        watch.heard()
        assert len(notes) == 2


def test_a_daemon_that_answers_may_take_its_time(tmp_path: Path, notes: list[str]) -> None:
    with FakeDaemon(tmp_path / "p.sock") as daemon, watch_of(daemon.socket_path):
        wait_until(lambda: len(daemon.script.asked_for("GET /health")) > 2, 30)
    assert notes == []


def test_an_ended_reply_is_watched_no_more(kept_socket: Path, notes: list[str]) -> None:
    with watch_of(kept_socket) as watch:
        pass
    watch._thread.join(10)
    assert not watch._thread.is_alive()
    assert notes == []
