"""SIGHUP: what a running daemon takes over, and what it says of the rest."""

from __future__ import annotations

import fcntl
import os
import signal
import termios

import httpx
import pytest

from appliance.http.api_keys import new_key
from engine.errors import ConfigError
from tests.appliance.cli_process import penstock
from tests.daemons import ALONE


def start(start_daemon, tiny_llama, tmp_path, text, preexec_fn=None, **env):
    settings = tmp_path / "penstock.toml"
    settings.write_text(text)
    env = {"PENSTOCK_CONFIG": str(settings), **env}
    daemon = start_daemon(*ALONE, model=tiny_llama, env=env, preexec_fn=preexec_fn)
    return daemon.wait_ready(), settings


class Window:
    """A terminal for a daemon that is to be started."""

    def __init__(self) -> None:
        self._ends = os.openpty()

    def take(self) -> None:
        """Called in the daemon's process, before it starts."""
        os.setsid()
        fcntl.ioctl(self._ends[1], termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup

    def take_under_nohup(self) -> None:
        self.take()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def close(self) -> None:
        """Close it: the kernel sends SIGHUP."""
        for fd in self._ends:
            os.close(fd)


def events(daemon, code):
    rows = daemon.http.get("/v1/penstock/events?limit=100").json()["data"]
    return [row["message"] for row in rows if row["code"] == code]


def test_a_reload_takes_over_what_it_can_and_names_what_it_cannot(
    start_daemon, tiny_llama, tmp_path
):
    keys = tmp_path / "keys"
    keys.touch(mode=0o600)
    doors = f'listen = "127.0.0.1:0"\napi_keys = "{keys}"\n'
    daemon, settings = start(start_daemon, tiny_llama, tmp_path, f"max_queued = 100\n{doors}")
    assert daemon.state()["queue"]["max_queued"] == 100
    key, line = new_key("laptop", "viewer")
    url = f"{daemon.tcp_url}/v1/models"

    def status():
        return httpx.get(url, headers={"authorization": f"Bearer {key}"}).status_code

    assert status() == 401
    keys.write_text(line + "\n")
    assert status() == 401
    daemon.process.send_signal(signal.SIGHUP)
    daemon.wait_for(lambda: status() == 200)
    wanted = "max_queued = 7\nlog_text = true\nslo_itl_ms = 40\nmax_model_len = 64\n"
    settings.write_text(wanted + doors)
    daemon.process.send_signal(signal.SIGHUP)
    daemon.wait_for(lambda: daemon.state()["queue"]["max_queued"] == 7)
    told = daemon.wait_for(lambda: len(found := events(daemon, "config.reloaded")) == 2 and found)
    assert told[1] == "configuration reloaded (keys)"
    assert "max_queued" in told[0]
    assert "log_text" in told[0]
    assert daemon.state()["slo_itl_ms"] == 40
    (fixed,) = daemon.wait_for(lambda: events(daemon, "config.needs_restart"))
    assert fixed.startswith("max_model_len:")
    daemon.process.send_signal(signal.SIGHUP)
    told = daemon.wait_for(lambda: len(found := events(daemon, "config.reloaded")) == 3 and found)
    assert "(nothing changed)" in told[0]
    assert daemon.complete("Hello", max_tokens=4)["usage"]["completion_tokens"] == 4


def test_a_wrong_file_changes_nothing_and_is_named_to_the_line_also_under_nohup(
    start_daemon, tiny_llama, tmp_path
):
    """Under nohup the daemon outlives its terminal, whose end is a SIGHUP like another."""
    window, text = Window(), "max_queued = 100\n"
    daemon, settings = start(start_daemon, tiny_llama, tmp_path, text, window.take_under_nohup)
    settings.write_text('# twice\nmax_queued = "many"\n')
    window.close()
    (refused,) = daemon.wait_for(lambda: events(daemon, "config.refused"))
    assert f"{settings}:2: max_queued" in refused
    assert "'many'" in refused
    assert daemon.fresh_state()["queue"]["max_queued"] == 100


@pytest.mark.parametrize("is_loading", [True, False])
def test_a_daemon_in_a_terminal_ends_with_it(start_daemon, tiny_llama, is_loading):
    window = Window()
    daemon = start_daemon(*ALONE, model=tiny_llama, preexec_fn=window.take)
    daemon.wait_for(daemon.is_listening)
    if not is_loading:
        daemon.wait_ready()
    window.close()
    assert daemon.process.wait(120) == 0
    assert "Stopping (SIGHUP)" in daemon.stderr


def test_a_restart_on_purpose_is_refused_with_wrong_settings_and_else_is_no_crash(
    start_daemon, tiny_llama, tmp_path
):
    daemon, settings = start(start_daemon, tiny_llama, tmp_path, "max_queued = 100\n")
    first, environ = daemon.pid, daemon.env | {"PENSTOCK_HOST": str(daemon.socket)}
    settings.write_text("max_quued = 7\n")
    refused = penstock(environ, "restart")
    assert refused.returncode == ConfigError.exit_code
    assert "max_quued" in refused.stderr
    assert daemon.pid == first
    settings.write_text("max_queued = 7\n")
    restarted = penstock(environ, "restart")
    assert (restarted.returncode, restarted.stderr) == (0, "")
    assert daemon.pid != first
    daemon.wait_for(daemon.is_ready)
    assert daemon.state()["queue"]["max_queued"] == 7
    assert len(events(daemon, "restart")) == len(events(daemon, "restart.refused")) == 1
    assert not events(daemon, "daemon.died")
    assert daemon.stop() == 0
