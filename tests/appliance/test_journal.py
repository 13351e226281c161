"""Lines on stderr have a priority where the journal reads them, and only there."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance.process import is_journal, lines, notify


def test_the_journal_is_known_by_its_stream(tmp_path):
    with (tmp_path / "stream").open("w") as stream:
        found = os.fstat(stream.fileno())
        environ = {"JOURNAL_STREAM": f"{found.st_dev}:{found.st_ino}"}
        assert is_journal(stream.fileno(), environ)
        assert not is_journal(stream.fileno(), {})
        with (tmp_path / "redirected").open("w") as other:
            assert not is_journal(other.fileno(), environ)


def test_every_line_of_a_message_has_its_priority_in_the_journal():
    assert lines("a\nb", logging.ERROR, to_journal=True) == "<3>a\n<3>b"
    assert lines("a", logging.WARNING, to_journal=True) == "<4>a"
    assert lines("a", logging.INFO, to_journal=True) == "<6>a"
    assert lines("a", logging.DEBUG, to_journal=True) == "<7>a"


def test_people_read_whose_line_it_is():
    assert lines("a\nb", logging.ERROR, to_journal=False) == "penstock: a\nb"


# --------------------------------------------------------------------------------------------------
# Notifications reach systemd's socket in both forms, and nothing happens without one.


@pytest.fixture(params=["path", "abstract"])
def manager(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[socket.socket]:
    """What systemd would be listening on."""
    name = str(tmp_path / "notify") if request.param == "path" else f"@penstock-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(name.replace("@", "\0", 1))
        listening.settimeout(60)
        monkeypatch.setenv("NOTIFY_SOCKET", name)
        yield listening


def test_fields_arrive_one_a_line(manager: socket.socket) -> None:
    assert notify(READY=1, STATUS="serving")
    assert manager.recv(1_000) == b"READY=1\nSTATUS=serving"
    assert notify(STOPPING=1)
    assert manager.recv(1_000) == b"STOPPING=1"


def test_a_status_cannot_smuggle_in_another_field(manager: socket.socket) -> None:
    assert notify(STATUS="a\nMAINPID=1")
    assert manager.recv(1_000) == b"STATUS=a MAINPID=1"


def test_without_systemd_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    assert not notify(READY=1)


def test_a_socket_that_is_gone_is_survived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "gone"))
    assert not notify(READY=1)
    assert "cannot notify systemd" in caplog.text
