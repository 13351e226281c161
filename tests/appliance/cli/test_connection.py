"""The daemon that run and chat use, when one starts at the same moment."""

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import pytest

from appliance.cli import connection, terminal
from appliance.cli.connection import ChosenModel, Connection
from appliance.client.calls import DaemonAbsent
from engine.errors import AlreadyRunning
from tests.worlds.fake_daemon import FakeDaemon


class Racing(Connection):
    """Finds no daemon at first; another one may hold the lock when its own is started."""

    _may_start = True

    def __init__(self, *, is_starting):
        self.lists = [None, [{"id": "m"}]]
        self.answers = [False, is_starting]
        super().__init__(None)

    def _listed(self):
        if (models := self.lists.pop(0)) is None:
            raise DaemonAbsent("no daemon runs")
        return models

    def _is_starting(self):
        return self.answers.pop(0)


@pytest.fixture(autouse=True)
def slower_daemon(monkeypatch, tmp_path):
    @contextmanager
    def started(*_):
        raise AlreadyRunning("a daemon runs already")
        yield

    monkeypatch.setattr(connection, "users_daemon", started)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("PENSTOCK_HOST", raising=False)


def test_a_daemon_that_serve_starts_at_the_same_moment_is_used():
    with Racing(is_starting=True).with_model(None) as chosen:
        assert chosen == ChosenModel(None, {"id": "m"})


def test_a_daemon_on_another_socket_is_reported():
    with pytest.raises(AlreadyRunning), Racing(is_starting=False).with_model(None):
        pass


def test_a_daemon_that_restarts_is_waited_for_with_one_note(monkeypatch, tmp_path):
    daemon = FakeDaemon(tmp_path / "p.sock")  # it takes connections, and answers in the `with`
    notes = []
    monkeypatch.setattr(terminal, "note", notes.append)
    monkeypatch.setattr(terminal, "client", partial(terminal.client, timeout_s=0.02))
    with ThreadPoolExecutor() as pool:
        command = pool.submit(Connection, str(daemon.socket_path))
        while not (notes or command.done()):
            time.sleep(0.01)
        time.sleep(0.1)
        with daemon:
            assert command.result(60).names_model("m")
    (note,) = notes
    assert note.startswith("penstock: no answer from ")
