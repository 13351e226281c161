"""SIGHUP: what a running daemon takes over, and what it says of the rest."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import termios

import httpx

from appliance.http.api_keys import new_key
from tests.daemons import ALONE


def start(start_daemon, tiny_llama, tmp_path, text, **env):
    settings = tmp_path / "penstock.toml"
    settings.write_text(text)
    daemon = start_daemon(*ALONE, model=tiny_llama, env={"PENSTOCK_CONFIG": str(settings), **env})
    return daemon.wait_ready(), settings


def events(daemon, code):
    rows = daemon.http.get("/v1/penstock/events?limit=100").json()["data"]
    return [row["message"] for row in rows if row["code"] == code]


def test_a_reload_takes_over_what_it_can_and_names_what_it_cannot(
    start_daemon, tiny_llama, tmp_path
):
    daemon, settings = start(start_daemon, tiny_llama, tmp_path, "max_queued = 100\n")
    assert daemon.state()["queue"]["max_queued"] == 100
    settings.write_text("max_queued = 7\nlog_text = true\nslo_itl_ms = 40\nmax_model_len = 64\n")
    daemon.process.send_signal(signal.SIGHUP)
    daemon.wait_for(lambda: daemon.state()["queue"]["max_queued"] == 7)
    (reloaded,) = daemon.wait_for(lambda: events(daemon, "config.reloaded"))
    assert "max_queued" in reloaded
    assert daemon.state()["slo_itl_ms"] == 40
    assert "log_text" in reloaded
    (fixed,) = daemon.wait_for(lambda: events(daemon, "config.needs_restart"))
    assert fixed.startswith("max_model_len:")
    assert daemon.complete("Hello", max_tokens=4)["usage"]["completion_tokens"] == 4


def test_a_wrong_file_changes_nothing_and_is_named_to_the_line(start_daemon, tiny_llama, tmp_path):
    daemon, settings = start(start_daemon, tiny_llama, tmp_path, "max_queued = 100\n")
    settings.write_text('# twice\nmax_queued = "many"\n')
    daemon.process.send_signal(signal.SIGHUP)
    (refused,) = daemon.wait_for(lambda: events(daemon, "config.refused"))
    assert f"{settings}:2: max_queued" in refused
    assert "'many'" in refused
    assert daemon.fresh_state()["queue"]["max_queued"] == 100


def test_a_new_key_opens_the_door_after_a_reload(start_daemon, tiny_llama, tmp_path):
    keys = tmp_path / "keys"
    keys.touch(mode=0o600)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    text = f'listen = "127.0.0.1:{port}"\napi_keys = "{keys}"\n'
    daemon, _ = start(start_daemon, tiny_llama, tmp_path, text)
    key, line = new_key("laptop", "viewer")
    url = f"http://127.0.0.1:{port}/v1/models"

    def status():
        return httpx.get(url, headers={"authorization": f"Bearer {key}"}).status_code

    assert status() == 401
    keys.write_text(line + "\n")
    assert status() == 401
    daemon.process.send_signal(signal.SIGHUP)
    daemon.wait_for(lambda: status() == 200)
    daemon.process.send_signal(signal.SIGHUP)
    told = daemon.wait_for(lambda: len(found := events(daemon, "config.reloaded")) == 2 and found)
    assert told == [f"configuration reloaded ({what})" for what in ("nothing changed", "keys")]


def test_systemd_is_told_when_a_reload_begins_and_ends(start_daemon, tiny_llama, tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(120)
        env = {"NOTIFY_SOCKET": str(tmp_path / "notify")}
        daemon, _ = start(start_daemon, tiny_llama, tmp_path, "", **env)
        told = []
        while not told or "READY=1" not in told[-1]:
            told.append(systemd.recv(4096).decode())
        daemon.process.send_signal(signal.SIGHUP)
        begun, ended = systemd.recv(4096).decode(), systemd.recv(4096).decode()
        assert begun.startswith("RELOADING=1\nMONOTONIC_USEC=")
        assert ended.startswith("READY=1")


def test_a_daemon_in_a_terminal_ends_with_it(start_daemon, tiny_llama):
    leader, terminal = os.openpty()

    def take_terminal():
        os.setsid()
        fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)

    daemon = start_daemon(*ALONE, model=tiny_llama, preexec_fn=take_terminal).wait_ready()
    os.close(terminal)
    os.close(leader)  # the window is closed: the kernel sends SIGHUP
    assert daemon.process.wait(120) == 0
